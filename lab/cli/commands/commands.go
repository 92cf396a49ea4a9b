// Package commands lists the commands of spillway-lab.
package commands

import (
	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/lab/cli/bench"
	"spillway.dev/spillway/lab/cli/demo"
	"spillway.dev/spillway/lab/cli/lab"
	"spillway.dev/spillway/lab/cli/load"
)

// Lab returns the program spillway-lab. Each call makes new commands.
func Lab() cli.Program {
	return cli.Program{
		Name:    "spillway-lab",
		Short:   "Clusters of network namespaces on one machine, and measurements of Spillway there",
		Example: "spillway-lab demo",
		Commands: []*cobra.Command{
			bench.NewCommand(),
			demo.NewCommand(),
			lab.NewCommand(),
			load.NewCommand(),
		},
	}
}
