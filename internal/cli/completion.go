package cli

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
)

// shells are the shells that have a completion script, with what writes it.
var shells = []struct {
	name  string
	write func(root *cobra.Command, w io.Writer, descriptions bool) error
}{
	{"bash", (*cobra.Command).GenBashCompletionV2},
	{"zsh", func(root *cobra.Command, w io.Writer, descriptions bool) error {
		if descriptions {
			return root.GenZshCompletion(w)
		}
		return root.GenZshCompletionNoDesc(w)
	}},
	{"fish", (*cobra.Command).GenFishCompletion},
	{"powershell", func(root *cobra.Command, w io.Writer, descriptions bool) error {
		if descriptions {
			return root.GenPowerShellCompletionWithDesc(w)
		}
		return root.GenPowerShellCompletion(w)
	}},
}

// newCompletionCommand returns the command that prints completion scripts.
func newCompletionCommand(program string) *cobra.Command {
	var names []string
	for _, s := range shells {
		names = append(names, s.name)
	}
	list := strings.Join(names, ", ")
	var plain bool
	cmd := &cobra.Command{
		Use:   "completion SHELL",
		Short: "Print the script with which a shell completes command lines",
		Long: fmt.Sprintf(`Prints a script with which a shell completes commands, flags and values of %[1]s.
SHELL is one of %[2]s. A new shell uses the script if it is in the file
that the examples name. bash also needs the package bash-completion.`, program, list),
		Example: fmt.Sprintf(`  %[1]s completion bash > /etc/bash_completion.d/%[1]s
  %[1]s completion zsh > "${fpath[1]}/_%[1]s"
  %[1]s completion fish > ~/.config/fish/completions/%[1]s.fish`, program),
		ValidArgs: names,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return UsageErrorf("no shell given: use one of %s", list)
			}
			return Arguments("SHELL")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			for _, s := range shells {
				if s.name == args[0] {
					return s.write(cmd.Root(), cmd.OutOrStdout(), !plain)
				}
			}
			return UsageErrorf("shell %q: unknown%s: use one of %s", args[0], DidYouMean(args[0], names), list)
		},
	}
	cmd.Flags().BoolVar(&plain, "no-descriptions", false, "Complete without descriptions.")
	return cmd
}
