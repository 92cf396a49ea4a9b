package main

import (
	"encoding/json"
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/telemetry"
)

// version is set by the linker from git describe.
var version = "unknown"

// buildInfo says which Spillway this is.
func buildInfo() telemetry.Build {
	b := telemetry.Build{
		Version:   version,
		Commit:    "unknown",
		GoVersion: runtime.Version(),
		Platform:  runtime.GOOS + "/" + runtime.GOARCH,
	}
	if bi, ok := debug.ReadBuildInfo(); ok {
		for _, s := range bi.Settings {
			if s.Key == "vcs.revision" {
				b.Commit = s.Value
			}
		}
	}
	return b
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
