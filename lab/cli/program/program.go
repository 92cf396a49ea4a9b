// Package program assembles spillway-lab from its commands.
package program

import (
	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/lab/cli/bench"
	"spillway.dev/spillway/lab/cli/demo"
	"spillway.dev/spillway/lab/cli/lab"
	"spillway.dev/spillway/lab/cli/load"
	"spillway.dev/spillway/lab/cli/soak"
)

// New returns spillway-lab.
func New() cli.Program {
	return cli.Program{
		Name:  "spillway-lab",
		Short: "Clusters of network namespaces on one machine, and measurements of Spillway there",
		Example: `  spillway-lab demo
  spillway-lab lab run all --quick
  spillway-lab bench path`,
		Commands: []*cobra.Command{
			bench.NewCommand(),
			demo.NewCommand(),
			lab.NewCommand(),
			load.NewCommand(),
			soak.NewCommand(),
		},
	}
}
