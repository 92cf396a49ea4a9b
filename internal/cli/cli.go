// Package cli holds the common parts of the programs: exit codes, errors on one line,
// checks of flags, forms of output, and the version. Each command of spillway is a package
// below it:
//
//	agent     serves the Services of this node
//	  kubeproxyconfig  reads kube-proxy's configuration file
//	chart     steps of the Helm chart's other containers
//	connectivity  tests the Services of a cluster
//	donottrack  shows what do-not-track policies mean for a flow
//	doctor    shows what is wrong with conntrack and NAT on this node
//	drops     shows packets that the kernel drops
//	flows     shows flows of a node, and their events on all nodes (observe)
//	maps      prints the maps of the eBPF dataplane
//	nodeclient  is the client of the agent's API
//	  nodeclienttest  stubs of agents
//	plan      calculates sizes of conntrack tables
//	reach     connects commands to the agents of other nodes, through the API server
//	services  shows the Services that the agent serves
//	status    shows the state of the agent
//	sysdump   writes an archive for a bug report
//	top       shows the use of conntrack, by network namespace
//	trace     shows what happens to a new connection
//	ui        serves a page about the agents of nodes
//	program   assembles spillway from its commands
//	cluster   connects commands to the API server
//	progress  prints the progress of a command
//	clitest   tests that the commands share
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
	ExitDone   = 0
	ExitFailed = 1
	ExitUsage  = 2
)

// ExitCodes describes the exit codes, for documents.
var ExitCodes = []struct {
	Code    int
	Meaning string
}{
	{ExitDone, "The command did what it was asked to do."},
	{ExitFailed, "The command failed; the last line on stderr says what, where, and what to do."},
	{ExitUsage, "The command line is wrong, such as an unknown flag or a bad value; nothing was done."},
}

// Program is a command line program of several commands.
type Program struct {
	Name     string
	Plugin   string // the way users call it as a plugin, such as "kubectl spillway"; "": by its name
	Short    string // one line that describes the program
	Example  string // command lines that work
	Commands []*cobra.Command
}

// Run executes a command line and returns its exit code. An error is one line
// on stderr. If the output cannot be written, the command has failed.
func (p Program) Run(args []string, out, stderr io.Writer) int {
	started := false
	root := p.root(&started)
	kept := &stdout{Writer: out}
	root.SetArgs(args)
	root.SetOut(kept.writer())
	root.SetErr(stderr)
	cmd, err := root.ExecuteC()
	if kept.err != nil && (err == nil || !started) {
		err, started = kept.err, true
	}
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
	return root
}

// root builds the command tree. started becomes true after flags and arguments were
// parsed: an earlier error is wrong usage.
func (p Program) root(started *bool) *cobra.Command {
	root := &cobra.Command{
		Use:               p.Name,
		Short:             p.Short,
		Example:           p.Example,
		Version:           versionLine(p.Name),
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		PersistentPreRun:  func(*cobra.Command, []string) { *started = true },
	}
	// A subcommand may have a PersistentPreRun of its own.
	cobra.EnableTraverseRunHooks = true
	if p.Plugin != "" {
		root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: p.Plugin}
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(flagError)
	root.SetHelpFunc(help)
	root.SetHelpCommand(newHelpCommand(p.Name))
	root.AddCommand(p.Commands...)
	root.AddCommand(newVersionCommand(p.Name))
	if p.Plugin == "" { // a plugin's words are completed by the program that runs it
		root.AddCommand(newCompletionCommand(p.Name))
	}
	Group(root)
	root.InitDefaultVersionFlag()
	root.Flags().Lookup("version").Usage = "Print the version."
	describeHelp(root)
	return root
}

// Group completes a command that only has subcommands. Without one it prints its help.
func Group(cmd *cobra.Command) *cobra.Command {
	cmd.SuggestionsMinimumDistance = 2
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return unknownCommand(cmd, args[0])
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	return cmd
}

// unknownCommand is the error of a name that no command of a group has.
func unknownCommand(group *cobra.Command, name string) error {
	return fmt.Errorf("unknown command %q%s", name, didYouMean(group.SuggestionsFor(name)))
}

// didYouMean is such as " (did you mean agent?)"; "" without suggestions.
func didYouMean(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return " (did you mean " + strings.Join(names, " or ") + "?)"
}

// DidYouMean suggests the known names that are similar to an unknown one; "" if none is.
func DidYouMean(name string, known []string) string { return didYouMean(Similar(name, known)) }

// Similar returns the known names that are similar to another one.
func Similar(name string, known []string) []string {
	// cobra compares names of commands.
	parent := &cobra.Command{SuggestionsMinimumDistance: 2}
	for _, k := range known {
		parent.AddCommand(&cobra.Command{Use: k, Run: func(*cobra.Command, []string) {}})
	}
	return parent.SuggestionsFor(name)
}

// flagError reports the kind of value that a flag expects, instead of the parser's text,
// and flags that are similar to an unknown one.
func flagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) && len(unknown.GetSpecifiedName()) > 1 {
		var known []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden {
				known = append(known, "--"+f.Name)
			}
		})
		return fmt.Errorf("%w%s", err, DidYouMean("--"+unknown.GetSpecifiedName(), known))
	}
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
	case "intSlice":
		want = "a list of whole numbers such as 1,20"
	default:
		return fmt.Errorf("--%s %q: %w", f.Name, invalid.GetValue(), invalid.Unwrap())
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

// Arguments returns the check for a command with exactly these arguments. The last ones may
// be optional: "[NAME]".
func Arguments(names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names) && names[len(args)][0] != '[':
			return fmt.Errorf("no %s given", names[len(args)])
		case len(args) > len(names):
			return fmt.Errorf("one argument too many: %q", args[len(names)])
		}
		return nil
	}
}
