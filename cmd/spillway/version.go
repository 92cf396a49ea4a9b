package main

import (
	"encoding/json"
	"fmt"
	"runtime"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/telemetry"
)

// Set by the linker, from git describe and git rev-parse.
var (
	version = "unknown"
	commit  = "unknown"
)

// buildInfo says which Spillway this is.
func buildInfo() telemetry.Build {
	return telemetry.Build{
		Version:   version,
		Commit:    commit,
		GoVersion: runtime.Version(),
		Platform:  runtime.GOOS + "/" + runtime.GOARCH,
	}
}

func newVersionCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Say which Spillway this is",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			b := buildInfo()
			switch output {
			case "":
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "spillway %s (commit %s, %s, %s)\n",
					b.Version, b.Commit, b.GoVersion, b.Platform)
				return err
			case "json":
				return json.NewEncoder(cmd.OutOrStdout()).Encode(b)
			}
			return usageErrorf("--output %q: not a format: use json, or leave it out", output)
		},
	}
	cmd.Flags().StringVarP(&output, "output", "o", "", "json, or nothing for a line of text")
	return cmd
}
