// Command spillway is a Kubernetes Service proxy for one node, and the tools
// that explain what happens there. Each command is a package below internal/cli.
package main

import (
	"io"
	"os"
	"syscall"

	"spillway.dev/spillway/internal/cli/program"
	"spillway.dev/spillway/internal/cli/reach"
)

func main() {
	args := os.Args[1:]
	if len(args) > 0 && args[0] == reach.ForClient {
		args = args[1:]
		go endWith(os.Stdin)
	}
	os.Exit(run(args, os.Stdout, os.Stderr))
}

// endWith ends the process as SIGTERM does when the client has closed its end.
func endWith(stdin io.Reader) {
	_, _ = io.Copy(io.Discard, stdin)
	_ = syscall.Kill(os.Getpid(), syscall.SIGTERM)
}

// run executes a command line and returns its exit code.
func run(args []string, stdout, stderr io.Writer) int {
	return program.Called(os.Args[0]).Run(args, stdout, stderr)
}
