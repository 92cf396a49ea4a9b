// Package maps is the command that prints the maps of the eBPF dataplane.
package maps

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/page"
)

// NewCommand returns the command maps.
func NewCommand() *cobra.Command {
	var pins cli.Pins
	var output cli.Output
	cmd := &cobra.Command{
		Use:   "maps MAP",
		Short: "Print a map of the eBPF dataplane, with its addresses and ports decoded",
		Long: `Prints the entries of a pinned map of the eBPF dataplane, one in each line: the fields of
the key, and after an arrow those of the value. 'bpftool map dump' shows addresses and
ports as they are in packets. The agent may run or not. With -o json, each line is an
object. Needs root.`,
		Example: `  spillway maps frontends
  spillway maps flows -o json
  spillway maps backends | grep 10.244.1.7`,
		Args:              cli.Arguments("MAP"),
		ValidArgsFunction: complete,
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := output.Validate(); err != nil {
				return err
			}
			known, err := inspect.PinnedMaps()
			if err != nil {
				return err
			}
			if !slices.Contains(known, args[0]) {
				return cli.UsageErrorf("map %q: unknown%s: use one of %s", args[0], cli.DidYouMean(args[0], known), strings.Join(known, ", "))
			}
			if err := cli.NeedRoot("read maps"); err != nil {
				return err
			}
			err = inspect.Dump(pins.Dir(), args[0], func(key, value []inspect.Field) error {
				return write(cmd.OutOrStdout(), output, key, value)
			})
			if errors.Is(err, os.ErrNotExist) {
				return fmt.Errorf("%w: no eBPF dataplane is pinned there: start 'spillway agent', or give its --bpffs", err)
			}
			return err
		},
	}
	pins.AddFlag(cmd.Flags(), "Directory of the agent's pins.")
	output.AddFlag(cmd)
	return cmd
}

func complete(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	known, _ := inspect.PinnedMaps() // the objects are part of the program
	return known, cobra.ShellCompDirectiveNoFileComp
}

// write prints one entry.
func write(w io.Writer, output cli.Output, key, value []inspect.Field) error {
	if output.ForPrograms() {
		return output.Encode(w, map[string]any{"key": object(key), "value": object(value)}, "")
	}
	line := text(key) + " -> " + text(value)
	if p := page.Of(w); p.Width > 0 && output != cli.Wide {
		// On a terminal, lines break between fields. A program gets one line.
		const indent = 2
		line = strings.ReplaceAll((&page.Page{Width: p.Width - indent}).Wrap(line, ""), "\n", "\n"+strings.Repeat(" ", indent))
	}
	_, err := fmt.Fprintln(w, line)
	return err
}

// unnamed is the name of a key or value that is no struct.
const unnamed = "value"

func object(fields []inspect.Field) map[string]any {
	out := map[string]any{}
	for _, f := range fields {
		name := f.Name
		if name == "" {
			name = unnamed
		}
		out[name] = f.Value
	}
	return out
}

func text(fields []inspect.Field) string {
	var parts []string
	for _, f := range fields {
		part := fmt.Sprint(f.Value)
		if f.Name != "" {
			part = f.Name + "=" + part
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, " ")
}
