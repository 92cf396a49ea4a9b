// Package clitest has the tests that the commands of both programs share.
package clitest

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/charmbracelet/x/ansi"
	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/page"
)

var update = flag.Bool("update", false, "write the golden files anew")

// Widths are the widths of terminals that every page must fit.
var Widths = []int{80, 120}

// Golden compares a page with testdata/NAME-WIDTH.txt, and checks that it fits the width.
func Golden(t *testing.T, name string, width int, got string) {
	t.Helper()
	Fits(t, width, got)
	File(t, fmt.Sprintf("%s-%d.txt", name, width), got)
}

// File compares a text with the golden file testdata/NAME.
func File(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got; go test -update writes it anew):\n%s", path, diff)
	}
}

// Pages compares the tables of a result at each width, and with -o wide, with golden
// files.
func Pages(t *testing.T, name string, result cli.Result) {
	t.Helper()
	for _, width := range Widths {
		var out bytes.Buffer
		if err := result.Write(&page.Page{Writer: &out, Width: width}); err != nil {
			t.Fatal(err)
		}
		Golden(t, name, width, out.String())
	}
	var out bytes.Buffer
	if err := cli.Wide.Print(&out, result); err != nil {
		t.Fatal(err)
	}
	File(t, name+"-wide.txt", out.String())
}

// Fits checks that the lines of a page are not wider than a terminal.
func Fits(t *testing.T, width int, text string) {
	t.Helper()
	for line := range strings.Lines(text) {
		if line = strings.TrimSuffix(line, "\n"); ansi.StringWidth(line) > width {
			t.Errorf("%d columns of %d: %q", ansi.StringWidth(line), width, line)
		}
		if strings.TrimRight(line, " ") != line {
			t.Errorf("blanks at the end: %q", line)
		}
	}
}

// commands returns the visible commands of a tree, with the path of each.
func commands(cmd *cobra.Command, paths ...string) (list [][]string) {
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() {
			path := append(slices.Clone(paths), sub.Name())
			list = append(list, path)
			list = append(list, commands(sub, path...)...)
		}
	}
	return list
}

// Help compares the help of every command with golden files.
func Help(t *testing.T, program func() cli.Program) {
	for _, width := range Widths {
		t.Setenv("COLUMNS", fmt.Sprint(width))
		var all strings.Builder
		for _, path := range append([][]string{{}}, commands(program().Root())...) {
			args := append(slices.Clone(path), "--help")
			var out, errs bytes.Buffer
			if code := program().Run(args, &out, &errs); code != cli.ExitDone || errs.Len() > 0 {
				t.Errorf("%v: exit code %d: %s", args, code, &errs)
			}
			fmt.Fprintf(&all, "$ %s\n%s\n", strings.Join(append([]string{program().Name}, args...), " "), &out)
		}
		Golden(t, "help", width, all.String())
	}
}

// FullDevice checks that the help of every command, its completion scripts and its version,
// and further command lines, fail in one line if the output cannot be written.
func FullDevice(t *testing.T, program func() cli.Program, lines ...string) {
	t.Helper()
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	lines = append(lines, "", "--help", "--version", "version", "version -o json", "version -o yaml", "completion bash", "completion zsh",
		"completion fish", "__complete ver")
	for _, path := range commands(program().Root()) {
		lines = append(lines, strings.Join(path, " ")+" --help", "help "+strings.Join(path, " "))
	}
	for _, line := range lines {
		var errs bytes.Buffer
		code := program().Run(strings.Fields(line), full, &errs)
		// Completion reports its directive on stderr as well.
		last := errs.String()[strings.LastIndex(strings.TrimSpace(errs.String()), "\n")+1:]
		if code != cli.ExitFailed || !strings.Contains(last, "no space left on device") || last != errs.String() &&
			!strings.HasPrefix(line, "__complete") {
			t.Errorf("%s %s: exit code %d: %q", program().Name, line, code, &errs)
		}
	}
}

// checkArguments checks that wrong numbers of arguments are wrong usage, in one line that
// names the program once.
func checkArguments(t *testing.T, program func() cli.Program, path []string, cmd *cobra.Command) {
	t.Helper()
	for _, args := range [][]string{nil, {"a", "b", "c", "d"}} {
		if cmd.ValidateArgs(args) == nil {
			continue
		}
		var out, errs bytes.Buffer
		code := program().Run(slices.Concat(path, args), &out, &errs)
		line, found := strings.CutPrefix(errs.String(), program().Name+": ")
		if code != cli.ExitUsage || out.Len() > 0 || !found || strings.HasPrefix(line, program().Name) || strings.Contains(line, "arg(s)") ||
			strings.Count(line, "\n") != 1 {
			t.Errorf("%s %q: exit code %d: %q", cmd.CommandPath(), args, code, &errs)
		}
	}
}

// Tree checks the manners of every command: its examples, its arguments, the names of its
// flags' values, and that a group without a command prints its help.
func Tree(t *testing.T, program func() cli.Program) {
	root := program().Root()
	for _, path := range append([][]string{{}}, commands(root)...) {
		cmd, _, err := root.Find(path)
		if err != nil {
			t.Fatal(err)
		}
		examples := strings.Split(strings.TrimSpace(cmd.Example), "\n")
		if len(examples) < 2 {
			t.Errorf("%s has %d examples: give two or three", cmd.CommandPath(), len(examples))
		}
		for _, example := range examples {
			checkExample(t, program, example)
		}
		checkArguments(t, program, path, cmd)
		cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if name, _ := pflag.UnquoteUsage(f); strings.Contains(name, " ") {
				t.Errorf("%s: --%s takes %q: its usage has backquotes by mistake", cmd.CommandPath(), f.Name, name)
			}
		})
		if cmd.HasAvailableSubCommands() {
			var out, errs bytes.Buffer
			if code := program().Run(path, &out, &errs); code != cli.ExitDone || errs.Len() > 0 ||
				!strings.Contains(out.String(), "Available Commands:") {
				t.Errorf("%s alone: exit code %d, %q", cmd.CommandPath(), code, &errs)
			}
		}
	}
}

// checkExample checks that the flags and arguments of an example exist. Examples of the
// other program are not checked here.
func checkExample(t *testing.T, program func() cli.Program, example string) {
	t.Helper()
	for _, line := range strings.FieldsFunc(example, func(r rune) bool { return strings.ContainsRune("|>&", r) }) {
		words := strings.Fields(line)
		if len(words) == 0 || words[0] != program().Name {
			continue
		}
		cmd, args, err := program().Root().Find(words[1:])
		if err == nil {
			err = cmd.ParseFlags(args)
		}
		if err == nil {
			err = cmd.ValidateArgs(cmd.Flags().Args())
		}
		if err != nil {
			t.Errorf("example %q: %v", line, err)
		}
	}
}

// Completion returns what a shell completes after args. The last is what was typed of the
// word.
func Completion(t *testing.T, program func() cli.Program, args ...string) []string {
	t.Helper()
	var out, errs bytes.Buffer
	if code := program().Run(append([]string{cobra.ShellCompNoDescRequestCmd}, args...), &out, &errs); code != cli.ExitDone {
		t.Fatalf("exit code %d: %s", code, &errs)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	return lines[:len(lines)-1] // the last is a directive
}
