// Command spillway is a Kubernetes Service proxy for one node, and the tools
// that explain what happens there. Each command is a package below internal/cli.
package main

import (
	"io"
	"os"

	"spillway.dev/spillway/internal/cli/program"
)

func main() {
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// run executes a command line and returns its exit code.
func run(args []string, stdout, stderr io.Writer) int {
	return program.Called(os.Args[0]).Run(args, stdout, stderr)
}
