// Command spillway is a Kubernetes Service proxy for one node, and the tools
// that explain what happens there. Each command is a package below internal/cli.
package main

import (
	"io"
	"os"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/agent"
	"spillway.dev/spillway/internal/cli/chart"
	"spillway.dev/spillway/internal/cli/doctor"
	"spillway.dev/spillway/internal/cli/drops"
	"spillway.dev/spillway/internal/cli/plan"
	"spillway.dev/spillway/internal/cli/policy"
	"spillway.dev/spillway/internal/cli/top"
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// run executes a command line and returns its exit code.
func run(args []string, stdout, stderr io.Writer) int {
	return cli.Program{
		Name:    "spillway",
		Short:   "A Kubernetes Service proxy that keeps conntrack out of the way",
		Example: "spillway agent",
		Commands: []*cobra.Command{
			agent.NewCommand(),
			chart.NewCommand(),
			doctor.NewCommand(),
			drops.NewCommand(),
			plan.NewCommand(),
			policy.NewCommand(),
			top.NewCommand(),
		},
	}.Run(args, stdout, stderr)
}
