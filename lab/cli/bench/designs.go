package bench

import (
	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/lab/experiment/path"
)

// newBenchDesignsCommand makes `spillway-lab bench designs`: bench path with prototypes.
func newBenchDesignsCommand() *cobra.Command {
	cfg := path.Config{Mode: "nftables", Designs: true}
	cmd := pathCommand(&cfg, func() error {
		if cfg.Untracked {
			return cli.UsageErrorf("--no-conntrack: the designs are compared on nodes with conntrack: leave it out")
		}
		return nil
	})
	cmd.Use = "designs"
	cmd.Short = "Compare the rules of --proxy-mode nftables with other ways to translate packets"
	cmd.Long = `Builds a cluster of two nodes on this machine, with an agent in mode nftables on node0.
Compares with metal, in alternating pairs (A B B A), TFTP reads and new connections:
  to the address of a pod of the node, which nothing translates
  through a NodePort that the agent's rules translate, with conntrack
  through one that a single rule translates, with conntrack
  through one that rules translate without conntrack, packet by packet
  through one that rules translate and forward at the devices' ingress
The last three are prototypes of one endpoint and one client. The agent's NodePort and those
without conntrack are measured with a full table too, in four rounds. Needs root, nginx, nft and conntrack. With the
defaults it takes about ten minutes. Do not use the machine meanwhile.`
	cmd.Example = "  spillway-lab bench designs --rounds 12\n  spillway-lab bench designs --only 'files.*KB$'"
	return cmd
}
