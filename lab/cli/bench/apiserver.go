package bench

import (
	"strings"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/progress"
	"spillway.dev/spillway/lab/experiment/apiload"
)

func newBenchAPIServerCommand() *cobra.Command {
	var cfg apiload.Config
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "apiserver",
		Short: "Measure what the agents of many nodes cost an API server",
		Long: `Starts a real kube-apiserver with thousands of Services and Nodes. In this process it
runs, for many nodes, the part of the agent that reads facts, and then kube-proxy's
informers. Reports watches, requests and bytes of one client, and CPU time and memory of
the API server for all: at the start, for changes of endpoints, for status updates of
Nodes, and after a restart of the API server. Needs etcd and the programs that hack/peers
builds. With the defaults it takes half an hour and 10 GiB of memory.`,
		Example: `  spillway-lab bench apiserver
  spillway-lab bench apiserver --kinds ebpf,kube-proxy --agents 20 --nodes 500`,
		Args: cli.Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Validate(); err != nil {
				return err
			}
			cfg.Progress = progress.New(cmd.ErrOrStderr())
			return measure(cmd, output, cfg, apiload.Run, func(r *apiload.Report) int { return len(r.Rows) })
		},
	}
	f := cmd.Flags()
	f.StringSliceVar(&cfg.Kinds, "kinds", apiload.KindNames()[:3],
		"Kinds of clients to measure, one after the other, of "+strings.Join(apiload.KindNames(), ", ")+".")
	f.IntVar(&cfg.Agents, "agents", 200, "Number of clients.")
	f.IntVar(&cfg.AtOnce, "at-once", 20, "Clients that start at the same time.")
	f.IntVar(&cfg.Services, "services", 2000, "Number of Services, with one EndpointSlice each.")
	f.IntVar(&cfg.Endpoints, "endpoints", 10, "Endpoints of each Service.")
	f.IntVar(&cfg.Nodes, "nodes", 5000, "Number of Nodes.")
	f.IntVar(&cfg.Pods, "pods", 10, "Pods on the node of each client.")
	f.IntVar(&cfg.Changes, "changes", 1000, "Changes of endpoints.")
	f.IntVar(&cfg.Beats, "node-updates", 500, "Status updates of Nodes.")
	f.BoolVar(&cfg.Restart, "restart", true, "Restart the API server at the end of each kind.")
	output.AddFlag(cmd)
	cli.Choices(cmd, "kinds", apiload.KindNames()...)
	return cmd
}
