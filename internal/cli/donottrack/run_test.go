package donottrack

import (
	"io"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
)

// run executes a command line as the program does.
func run(args []string, stdout, stderr io.Writer) int {
	return cli.Program{Name: "spillway", Commands: []*cobra.Command{NewCommand()}}.Run(args, stdout, stderr)
}
