package lab

import (
	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

func newExecCommand() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use: "exec [--name CLUSTER] HOST [--] COMMAND [ARGUMENT...]",
		// Flags after the host are the command's.
		DisableFlagsInUseLine: true,
		Short:                 "Run a command in the network namespace and cgroup of a node, pod or client",
		Long: `Runs a command in the network namespace and cgroup of a node, pod or client. The exit
code is the command's.`,
		Example: `  spillway-lab lab exec node0-pod1 -- ip -brief address
  spillway-lab lab exec --name big client0 -- bash`,
		ValidArgsFunction: func(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			var hosts []string
			if c, err := topology.Load(name); err == nil && len(args) == 0 {
				for _, h := range c.Hosts() {
					hosts = append(hosts, h.Name)
				}
			}
			return hosts, cobra.ShellCompDirectiveDefault // a command follows the host
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			host, argv, err := execArgs(&name, cmd.Flags().Changed("name"), args, isLabCluster)
			if err != nil {
				return err
			}
			if err := topology.RequireRoot(); err != nil {
				return err
			}
			c, err := topology.Load(name)
			if err != nil {
				return err
			}
			h, err := c.Find(host)
			if err != nil {
				return err
			}
			return h.Exec(argv)
		},
	}
	harness.NameFlag(cmd.Flags(), &name, "lab", "Name of the cluster.")
	completeClusters(cmd)
	// Arguments after the command's name belong to the command.
	cmd.Flags().SetInterspersed(false)
	return cmd
}

// execArgs splits "HOST [--] COMMAND". Without --name the cluster may come first, for
// compatibility.
func execArgs(name *string, named bool, args []string, isCluster func(string) bool) (host string, argv []string, err error) {
	if !named && len(args) > 2 && args[1] != "--" && isCluster(args[0]) {
		*name, args = args[0], args[1:]
	}
	if len(args) > 0 {
		host, argv = args[0], args[1:]
	}
	if len(argv) > 0 && argv[0] == "--" {
		argv = argv[1:]
	}
	switch {
	case host == "":
		err = cli.UsageErrorf("lab exec: no host and no command given: write lab exec --name CLUSTER HOST -- COMMAND; 'spillway-lab lab " +
			"status' lists the hosts")
	case len(argv) == 0:
		err = cli.UsageErrorf("lab exec: no command given to run on %s: write lab exec --name %s %s -- COMMAND", host, *name, host)
	}
	return host, argv, err
}

func isLabCluster(name string) bool {
	_, err := topology.Load(name)
	return err == nil
}
