// Package program assembles spillway from its commands.
package program

import (
	"path/filepath"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/agent"
	"spillway.dev/spillway/internal/cli/chart"
	"spillway.dev/spillway/internal/cli/connectivity"
	"spillway.dev/spillway/internal/cli/doctor"
	"spillway.dev/spillway/internal/cli/donottrack"
	"spillway.dev/spillway/internal/cli/drops"
	"spillway.dev/spillway/internal/cli/flows"
	"spillway.dev/spillway/internal/cli/maps"
	"spillway.dev/spillway/internal/cli/plan"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/cli/services"
	"spillway.dev/spillway/internal/cli/status"
	"spillway.dev/spillway/internal/cli/sysdump"
	"spillway.dev/spillway/internal/cli/top"
	"spillway.dev/spillway/internal/cli/trace"
	"spillway.dev/spillway/internal/cli/ui"
)

// plugin is the file name by which kubectl finds a plugin.
const plugin = "kubectl-spillway"

// Called returns spillway as it was called: a program named kubectl-spillway is a plugin,
// which "kubectl spillway" runs.
func Called(argv0 string) cli.Program {
	p := New()
	if filepath.Base(argv0) == plugin {
		p.Plugin = "kubectl spillway"
		p.Example = "  spillway status --all-nodes\n  spillway status --node NODE"
	}
	return p
}

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
			connectivity.NewCommand(),
			doctor.NewCommand(),
			drops.NewCommand(),
			flows.NewCommand(),
			maps.NewCommand(),
			flows.NewObserveCommand(),
			plan.NewCommand(),
			donottrack.NewCommand(),
			reach.NewPipeCommand(),
			services.NewCommand(),
			status.NewCommand(),
			sysdump.NewCommand(),
			top.NewCommand(),
			trace.NewCommand(),
			ui.NewCommand(),
		},
	}
}
