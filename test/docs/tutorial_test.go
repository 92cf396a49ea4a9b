package docs

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

const tutorial = "docs/tutorials/first-fault.md"

// fence matches a block of code of a page: its language and its text.
var fence = regexp.MustCompile("(?ms)^```(\\w*)\n(.*?)^```$")

// step is a block of commands of a tutorial, and the lines of its output that the page shows.
type step struct{ commands, shown string }

func readTutorial(t *testing.T) (steps []step) {
	t.Helper()
	for _, m := range fence.FindAllStringSubmatch(documents(t)[tutorial], -1) {
		if m[1] == "bash" {
			steps = append(steps, step{commands: m[2]})
		} else {
			steps[len(steps)-1].shown = m[2]
		}
	}
	if len(steps) < 12 {
		t.Fatalf("%s: %d blocks of commands: are they still found?", tutorial, len(steps))
	}
	return steps
}

// TestTheTutorialFindsItsFault runs every command of the page in one shell, except for make.
// Each line of output that the page shows must come, with other numbers.
func TestTheTutorialFindsItsFault(t *testing.T) {
	if testing.Short() || os.Geteuid() != 0 {
		t.Skip("makes network namespaces, as root")
	}
	programs, err := build()
	if err != nil {
		t.Fatal(err)
	}
	steps := readTutorial(t)
	var script strings.Builder
	for i, s := range steps {
		fmt.Fprintf(&script, "echo '@@@ %d'\n", i)
		if s.commands != "make build\n" {
			script.WriteString(strings.ReplaceAll(s.commands, "$PWD/bin", programs))
		}
	}
	out := runScript(t, programs, script.String())
	wantCapture(t, maskedLines(out))
	parts := strings.Split(out, "@@@ ")[1:]
	if len(parts) != len(steps) {
		t.Fatalf("%d of %d blocks ran", len(parts), len(steps))
	}
	for i, s := range steps {
		got, shown := maskedLines(parts[i])[1:], maskedLines(s.shown)
		for _, line := range shown {
			if !slices.Contains(got, line) {
				t.Errorf("%s shows %q, which does not come from:\n%s\nThe output is:\n%s", tutorial, line, s.commands, parts[i])
			}
		}
		if strings.HasSuffix(s.commands, "\nask\n") && !slices.Equal(got[len(got)-len(shown):], shown) {
			t.Errorf("%s shows other answers than:\n%s", tutorial, parts[i])
		}
	}
	if out, err := exec.Command("ip", "netns", "list").Output(); err != nil || strings.Contains(string(out), "spw-first-") {
		t.Errorf("namespaces are left: %v: %s", err, out)
	}
}

// wantCapture finds the lines of the README's terminal in the output of the tutorial.
func wantCapture(t *testing.T, output []string) {
	t.Helper()
	_, rest, _ := strings.Cut(documents(t)["README.md"], "<!-- capture -->\n```\n")
	capture, _, found := strings.Cut(rest, "```\n<!-- /capture -->")
	if !found || strings.Count(capture, "\n") < 5 {
		t.Fatalf("README.md has no terminal between its markers: %q", capture)
	}
	for _, line := range maskedLines(capture) {
		if !strings.HasPrefix(line, "$ ") && !slices.Contains(output, line) {
			t.Errorf("README.md shows %q, which the commands of %s do not print", line, tutorial)
		}
	}
}

// runScript runs bash with everything that it starts in a process group of its own, and returns its output.
func runScript(t *testing.T, programs, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", script)
	cmd.Dir, cmd.Env = root, append(os.Environ(), "COLUMNS=100")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	t.Cleanup(func() {
		if cmd.Process != nil {
			_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // what an interrupted script leaves
		}
		_ = exec.Command(filepath.Join(programs, "spillway"), "agent", "--cleanup", "--bpffs", "/sys/fs/bpf/first").Run()
		_ = exec.Command(filepath.Join(programs, "spillway-lab"), "lab", "down", "--name", "first").Run()
	})
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("run the commands of %s: %v:\n%s", tutorial, err, out)
	}
	return string(out)
}

// maskedLines returns the lines of a text with one space between words. Numbers become #, except in names such as
// cart-0, and so does the key of the page.
func maskedLines(text string) (lines []string) {
	for line := range strings.Lines(text) {
		line = numberOrName.ReplaceAllStringFunc(strings.Join(strings.Fields(line), " "), func(s string) string {
			switch {
			case strings.HasPrefix(s, "token="):
				return "token=#"
			case s[0] >= '0' && s[0] <= '9':
				return "#"
			}
			return s
		})
		if line != "" {
			lines = append(lines, line)
		}
	}
	return lines
}

var numberOrName = regexp.MustCompile(`token=\w+|[a-z]+-?[0-9]+|[0-9][0-9.:]*`)
