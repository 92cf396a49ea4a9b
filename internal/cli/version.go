package cli

import (
	"encoding/json"
	"fmt"
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

func newVersionCommand(program string) *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			b := Build()
			switch output {
			case "":
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s %s (commit %s, %s, %s)\n",
					program, b.Version, b.Commit, b.GoVersion, b.Platform)
				return err
			case "json":
				return json.NewEncoder(cmd.OutOrStdout()).Encode(b)
			}
			return UsageErrorf("--output %q: not a format: use json, or omit the flag", output)
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "Output format: json (default: a line of text).")
	return cmd
}
