package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
)

// CheckOutput returns a UsageError unless PrintResult knows the output format.
func CheckOutput(output string) error {
	if !slices.Contains([]string{"table", "json"}, output) {
		return UsageErrorf("--output %q: not a format: use table or json", output)
	}
	return nil
}

// PrintResult writes a result as JSON, or as the table that its Write method prints.
func PrintResult(w io.Writer, output string, result interface{ Write(io.Writer) error }) error {
	if output != "json" {
		return result.Write(w)
	}
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	if err := enc.Encode(result); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	return nil
}
