package cli

import (
	"strings"

	"github.com/spf13/cobra"

	"spillway.dev/spillway/internal/node/conntrack"
)

// Choices makes a shell complete the values of a flag.
func Choices(cmd *cobra.Command, flag string, values ...string) {
	Complete(cmd, flag, func() []string { return values })
}

// Complete makes a shell complete the values of a flag, also after a comma in a list of
// them. The flag must exist.
func Complete(cmd *cobra.Command, flag string, values func() []string) {
	err := cmd.RegisterFlagCompletionFunc(flag, func(_ *cobra.Command, _ []string, typed string) ([]cobra.Completion,
		cobra.ShellCompDirective) {
		before := ""
		if f := cmd.Flags().Lookup(flag); strings.HasSuffix(f.Value.Type(), "Slice") {
			before = typed[:strings.LastIndex(typed, ",")+1]
		}
		var out []cobra.Completion
		for _, v := range values() {
			out = append(out, before+v)
		}
		return out, cobra.ShellCompDirectiveNoFileComp
	})
	if err != nil {
		panic(err) // a flag that does not exist: a mistake in the source
	}
}

// CompleteNamespaces makes a shell complete the network namespaces of this machine.
func CompleteNamespaces(cmd *cobra.Command, flag string) {
	Complete(cmd, flag, func() []string {
		names := []string{"here"}
		list, _ := conntrack.Namespaces() // a user without rights sees less
		for _, n := range list {
			if !n.Own {
				names = append(names, n.String())
			}
		}
		return names
	})
}
