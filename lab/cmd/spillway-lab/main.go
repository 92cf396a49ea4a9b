// Command spillway-lab creates clusters of network namespaces on one machine, and
// measures Spillway in them. Each command is a package below lab/cli.
package main

import (
	"io"
	"os"

	"spillway.dev/spillway/lab/cli/program"
	"spillway.dev/spillway/lab/soak"
	"spillway.dev/spillway/test/testbed/workload"
)

func main() {
	workload.RunIfAsked() // servers of the lab are this program again
	soak.RunIfAsked()     // and so are the clients of a soak
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// run executes a command line and returns its exit code.
func run(args []string, stdout, stderr io.Writer) int {
	return program.New().Run(args, stdout, stderr)
}
