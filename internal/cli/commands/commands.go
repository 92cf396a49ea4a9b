// Package commands lists the commands of spillway.
package commands

import (
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

// Spillway returns the program spillway. Each call makes new commands.
func Spillway() cli.Program {
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
	}
}
