// Package program assembles spillway from its commands.
package program

import (
	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/agent"
	"spillway.dev/spillway/internal/cli/chart"
	"spillway.dev/spillway/internal/cli/doctor"
	"spillway.dev/spillway/internal/cli/drops"
	"spillway.dev/spillway/internal/cli/maps"
	"spillway.dev/spillway/internal/cli/plan"
	"spillway.dev/spillway/internal/cli/policy"
	"spillway.dev/spillway/internal/cli/top"
)

// New returns spillway.
func New() cli.Program {
	return cli.Program{
		Name:  "spillway",
		Short: "A Kubernetes Service proxy that keeps conntrack out of the way",
		Example: `  spillway agent --manifests /etc/spillway
  spillway doctor
  spillway completion bash > /etc/bash_completion.d/spillway`,
		Commands: []*cobra.Command{
			agent.NewCommand(),
			chart.NewCommand(),
			doctor.NewCommand(),
			drops.NewCommand(),
			maps.NewCommand(),
			plan.NewCommand(),
			policy.NewCommand(),
			top.NewCommand(),
		},
	}
}
