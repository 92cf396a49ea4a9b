package cli

import (
	"fmt"
	"io"
	"runtime"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/telemetry"
)

// Set by the linker: the content of the file VERSION, and git's commit.
var (
	version = "unknown"
	commit  = "unknown"
)

// Build returns the version of the running program.
func Build() telemetry.Build {
	return telemetry.Build{
		Version:   version,
		Commit:    commit,
		GoVersion: runtime.Version(),
		Platform:  runtime.GOOS + "/" + runtime.GOARCH,
	}
}

// UserAgent is the name that Spillway gives itself in requests to the API server.
func UserAgent() string { return "spillway/" + version }

// versionLine is the version of a program for people.
func versionLine(program string) string {
	b := Build()
	return fmt.Sprintf("%s %s (commit %s, %s, %s)", program, b.Version, b.Commit, b.GoVersion, b.Platform)
}

// versionResult is the result of the command version.
type versionResult struct {
	telemetry.Build
	program string
}

// Write prints the version as text.
func (v versionResult) Write(w io.Writer) error {
	_, err := fmt.Fprintln(w, versionLine(v.program))
	return err
}

func newVersionCommand(program string) *cobra.Command {
	var output Output
	cmd := &cobra.Command{
		Use:     "version",
		Short:   "Print the version",
		Example: fmt.Sprintf("  %[1]s version\n  %[1]s version -o json", program),
		Args:    Arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Validate(); err != nil {
				return err
			}
			return output.Print(cmd.OutOrStdout(), versionResult{Build(), program})
		},
	}
	output.AddFlag(cmd)
	return cmd
}
