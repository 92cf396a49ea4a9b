// Command spillway is a Kubernetes Service proxy for one node, and the tools
// around it. Each subcommand has a file of its own.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/lab/workload"
)

// Exit codes of every subcommand.
const (
	exitDone   = 0
	exitFailed = 1
	exitUsage  = 2
)

func main() {
	workload.RunIfAsked() // servers of the lab are this program again
	os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
}

// run executes a command line and returns its exit code. An error is one line
// on stderr.
func run(args []string, stdout, stderr io.Writer) int {
	started := false
	root := newRootCommand(&started)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteC()
	if err == nil {
		return exitDone
	}
	var usage *usageError
	switch {
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "spillway: %s\n", oneLine(err))
	case !started || strings.HasPrefix(err.Error(), "required flag(s)"):
		fmt.Fprintf(stderr, "spillway: %s: see '%s --help'\n", oneLine(err), cmd.CommandPath())
	default:
		fmt.Fprintf(stderr, "spillway: %s\n", oneLine(err))
		return exitFailed
	}
	return exitUsage
}

// newRootCommand makes the command tree. started becomes true when flags and
// arguments were understood: what fails before that is wrong usage.
func newRootCommand(started *bool) *cobra.Command {
	root := &cobra.Command{
		Use:           "spillway",
		Short:         "A Kubernetes Service proxy that keeps conntrack out of the way",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usageErrorf("no command given: say which one, such as 'spillway agent'")
		},
		PersistentPreRun: func(*cobra.Command, []string) { *started = true },
	}
	// A subcommand may have a PersistentPreRun of its own.
	cobra.EnableTraverseRunHooks = true
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return flagError(err) })
	root.AddCommand(
		newAgentCommand(),
		newDemoCommand(),
		newDoctorCommand(),
		newDropsCommand(),
		newBenchCommand(),
		newPolicyCommand(),
		newLabCommand(),
		newLoadCommand(),
		newPlanCommand(),
		newTopCommand(),
		newVersionCommand(),
	)
	return root
}

// flagError says of a flag's value what is expected in its place, in words and
// not in those of the function that parsed it.
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

// usageError is an error of whoever wrote the command line.
type usageError struct{ msg string }

func (e *usageError) Error() string { return e.msg }

// usageErrorf makes an error that ends the program with exit code 2.
func usageErrorf(format string, args ...any) error {
	return &usageError{msg: fmt.Sprintf(format, args...)}
}

// oneLine puts an error on one line; joined errors have several.
func oneLine(err error) string {
	return escape.Text(strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", "; "))
}

// euid is another's in a test.
var euid = os.Geteuid

// needRoot is the error of a command that could only look at a part without root;
// does says in two words what it does.
func needRoot(does string) error {
	if euid() == 0 {
		return nil
	}
	return fmt.Errorf("%s: not root: run it as root", does)
}

// notEmpty refuses flags that are given without a value: a filter that a script
// meant to set would let everything through.
func notEmpty(flags *pflag.FlagSet, names ...string) error {
	for _, name := range names {
		f := flags.Lookup(name)
		if !f.Changed {
			continue
		}
		values := []string{f.Value.String()}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			values = list.GetSlice()
		}
		if len(values) == 0 || slices.Contains(values, "") {
			return usageErrorf("--%s: a value is empty", name)
		}
	}
	return nil
}
