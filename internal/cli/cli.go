// Package cli holds the common parts of the programs: exit codes, errors on one line,
// checks of flags, forms of output, and the version. Each command of spillway is a package
// below it:
//
//	agent     serves the Services of this node
//	  kubeproxyconfig  reads kube-proxy's configuration file
//	chart     steps of the Helm chart's other containers
//	doctor    shows what is wrong with conntrack and NAT on this node
//	drops     shows packets that the kernel drops
//	plan      calculates sizes of conntrack tables
//	policy    shows what do-not-track policies mean for a flow
//	top       shows the use of conntrack, by network namespace
//	program   assembles spillway from its commands
//	progress  prints the progress of a command
package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"spillway.dev/spillway/internal/escape"
)

// Exit codes of every command.
const (
	ExitDone   = 0 // The command did what it was asked to do.
	ExitFailed = 1 // The command failed; the last line on stderr says what, where, and what to do.
	ExitUsage  = 2 // The command line is wrong, such as an unknown flag or a bad value; nothing was done.
)

// Program is a command line program of several commands.
type Program struct {
	Name     string
	Short    string // one line that describes the program
	Example  string // a command line that works
	Commands []*cobra.Command
}

// Run executes a command line and returns its exit code. An error is one line
// on stderr.
func (p Program) Run(args []string, stdout, stderr io.Writer) int {
	started := false
	root := p.root(&started)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteC()
	if err == nil {
		return ExitDone
	}
	line := escape.OneLine(err)
	var usage *UsageError
	switch {
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "%s: %s\n", p.Name, line)
	case !started || strings.HasPrefix(err.Error(), "required flag(s)"):
		fmt.Fprintf(stderr, "%s: %s: see '%s --help'\n", p.Name, line, cmd.CommandPath())
	default:
		fmt.Fprintf(stderr, "%s: %s\n", p.Name, line)
		return ExitFailed
	}
	return ExitUsage
}

// Root returns the tree of all commands, for manual pages and references.
func (p Program) Root() *cobra.Command {
	root := p.root(new(bool))
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	return root
}

// root builds the command tree. started becomes true after flags and arguments were
// parsed: an earlier error is wrong usage.
func (p Program) root(started *bool) *cobra.Command {
	root := &cobra.Command{
		Use:           p.Name,
		Short:         p.Short,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return UsageErrorf("no command given: use one, such as '%s'", p.Example)
		},
		PersistentPreRun: func(*cobra.Command, []string) { *started = true },
	}
	// A subcommand may have a PersistentPreRun of its own.
	cobra.EnableTraverseRunHooks = true
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return flagError(err) })
	root.AddCommand(p.Commands...)
	root.AddCommand(newVersionCommand(p.Name))
	return root
}

// flagError reports the kind of value that a flag expects, instead of the parser's text.
func flagError(err error) error {
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return err
	}
	f, want := invalid.GetFlag(), ""
	switch f.Value.Type() {
	case "int", "int8", "int16", "int32", "int64":
		want = "a whole number"
	case "uint", "uint8", "uint16", "uint32", "uint64":
		want = "a whole number, not negative,"
	case "float64", "float32":
		want = "a number"
	case "bool":
		want = "true or false"
	case "duration":
		want = "a duration such as 30s or 2m"
	default:
		return err
	}
	if errors.Is(err, strconv.ErrRange) {
		want += " in range"
	}
	return fmt.Errorf("--%s %q: %s is expected", f.Name, invalid.GetValue(), want)
}

// NeedRoot returns an error unless the process runs as root. does names the operation
// that needs root, such as "read conntrack".
func NeedRoot(does string) error {
	if os.Geteuid() == 0 {
		return nil
	}
	return fmt.Errorf("%s: not root: run it as root", does)
}
