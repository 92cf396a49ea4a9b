// Command spillway-lab creates clusters of network namespaces on one machine, and
// measures Spillway in them. Each command is a package below lab/cli.
package main

import (
	"io"
	"os"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/lab/cli/bench"
	"spillway.dev/spillway/lab/cli/demo"
	"spillway.dev/spillway/lab/cli/lab"
	"spillway.dev/spillway/lab/cli/load"
	"spillway.dev/spillway/lab/workload"
)

func main() {
	workload.RunIfAsked() // servers of the lab are this program again
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// run executes a command line and returns its exit code.
func run(args []string, stdout, stderr io.Writer) int {
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
	}.Run(args, stdout, stderr)
}
