// Package docs holds the test that the documents do not promise what is not
// there: files, flags of the agent, commands of both programs, make's verbs.
package docs

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
)

const root = "../.."

var (
	link = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	// named are paths in backquotes whose first part is a folder of the tree.
	named    = regexp.MustCompile("`((?:bpf|cmd|deploy|docs|examples|hack|internal|lab|test)/[-\\w./]+)`")
	makeVerb = regexp.MustCompile("(?m)(?:^|`)make ([a-z]+)")
	// commandLine is a program and its command.
	commandLine = regexp.MustCompile("(?m)(?:^|`)(?:sudo )?(?:bin/)?(spillway(?:-lab)?) ([a-z]+)")
	flag        = regexp.MustCompile(`--[a-z][-a-z0-9]+`)
	dflt        = regexp.MustCompile(`\(default "?([^"()]+?)"?\)$`)
)

// documents gives the documents of the root and everything below docs, by path from the
// root.
func documents(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	add := func(path string) {
		text, err := os.ReadFile(filepath.Join(root, path))
		if err != nil {
			t.Fatal(err)
		}
		found[path] = string(text)
	}
	for _, path := range []string{"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "deploy/ansible/README.md"} {
		add(path)
	}
	err := fs.WalkDir(os.DirFS(root), "docs", func(path string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".md") {
			add(path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func TestLinksAndFilesExist(t *testing.T) {
	for doc, text := range documents(t) {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			target, anchor, _ := strings.Cut(m[1], "#")
			if target == "" {
				if !hasHeading(text, anchor) {
					t.Errorf("%s: no heading for the link #%s", doc, anchor)
				}
				continue
			}
			mustExist(t, doc, filepath.Join(filepath.Dir(doc), target))
		}
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			mustExist(t, doc, strings.TrimSuffix(strings.TrimSuffix(m[1], "..."), "/"))
		}
	}
}

func mustExist(t *testing.T, doc, path string) {
	t.Helper()
	if _, err := os.Stat(filepath.Join(root, path)); err != nil {
		t.Errorf("%s names a file that is not there: %v", doc, err)
	}
}

// hasHeading knows GitHub's way from a heading to its anchor.
func hasHeading(text, anchor string) bool {
	drop := regexp.MustCompile(`[^-\w ]`)
	for line := range strings.Lines(text) {
		title := strings.TrimSpace(strings.TrimLeft(line, "#"))
		if strings.HasPrefix(line, "#") &&
			strings.ReplaceAll(strings.ToLower(drop.ReplaceAllString(title, "")), " ", "-") == anchor {
			return true
		}
	}
	return false
}

func TestMakeVerbsExist(t *testing.T) {
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	if err != nil {
		t.Fatal(err)
	}
	for doc, text := range documents(t) {
		for _, m := range makeVerb.FindAllStringSubmatch(text, -1) {
			if !regexp.MustCompile(`(?m)^` + m[1] + `:`).Match(makefile) {
				t.Errorf("%s names make %s, which the Makefile does not have", doc, m[1])
			}
		}
	}
}

// programs are the programs that cmd builds.
var programs = []string{"spillway", "spillway-lab"}

// build builds the programs once, into a directory that TestMain removes.
var build = sync.OnceValues(func() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "spillway-docs"); err != nil {
		return "", err
	}
	built = dir
	cmd := exec.Command("go", "build", "-o", dir+"/", "./cmd/...")
	cmd.Dir = root
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build: %w: %s", err, out)
	}
	return dir, nil
})

var built string

func TestMain(m *testing.M) {
	code := m.Run()
	if built != "" {
		os.RemoveAll(built)
	}
	os.Exit(code)
}

// help returns what a program prints for --help.
func help(t *testing.T, program string, command ...string) string {
	t.Helper()
	dir, err := build()
	if err != nil {
		t.Fatal(err)
	}
	text, err := exec.Command(filepath.Join(dir, program), append(command, "--help")...).Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestCommandsExist looks at command lines in code: at the start of a line, or in
// backquotes.
func TestCommandsExist(t *testing.T) {
	verbs := map[string]string{}
	for _, program := range programs {
		_, list, _ := strings.Cut(help(t, program), "Available Commands:")
		list, _, _ = strings.Cut(list, "Flags:")
		for _, m := range regexp.MustCompile(`(?m)^ +([a-z]+) `).FindAllStringSubmatch(list, -1) {
			verbs[program+" "+m[1]] = program
		}
	}
	if verbs["spillway agent"] == "" || verbs["spillway-lab lab"] == "" {
		t.Fatalf("the commands are %v: is the help still understood?", verbs)
	}
	for doc, text := range documents(t) {
		if strings.HasPrefix(doc, "docs/adr/") {
			continue // a decision names the commands of its time
		}
		for _, m := range commandLine.FindAllStringSubmatch(text, -1) {
			if verbs[m[1]+" "+m[2]] == "" {
				t.Errorf("%s names %s %s, which is no command", doc, m[1], m[2])
			}
		}
	}
}

// TestFlagTableIsTheAgents compares the README's table with the agent's help,
// both ways, and the defaults that the help tells.
func TestFlagTableIsTheAgents(t *testing.T) {
	help := help(t, "spillway", "agent")
	rows := map[string]string{}
	for line := range strings.Lines(documents(t)["README.md"]) {
		if first, _, _ := strings.Cut(strings.TrimPrefix(line, "|"), "|"); strings.HasPrefix(line, "| `-") {
			rows[flag.FindString(first)] = line
		}
	}
	if len(rows) < 10 {
		t.Fatalf("the README's table of flags has %d rows: is it still found?", len(rows))
	}
	real := map[string]bool{"--help": true}
	for line := range strings.Lines(help) {
		line = strings.TrimSpace(line)
		name := flag.FindString(line)
		if !strings.HasPrefix(line, "-") || name == "--help" {
			continue
		}
		real[name] = true
		if rows[name] == "" && name != "--v" {
			t.Errorf("the README's table lacks %s", name)
		}
		if m := dflt.FindStringSubmatch(line); m != nil && !strings.Contains(rows[name], "`"+m[1]+"`") {
			t.Errorf("the default of %s is %s, which the README does not say", name, m[1])
		}
	}
	for name := range rows {
		if !real[name] {
			t.Errorf("the README's table has %s, which the agent does not", name)
		}
	}
}

// TestTheChartGivesFlagsThatTheAgentHas reads what the chart renders.
func TestTheChartGivesFlagsThatTheAgentHas(t *testing.T) {
	help := help(t, "spillway", "agent")
	rendered, err := filepath.Glob(filepath.Join(root, "test/deploy/testdata/*.yaml"))
	if err != nil || len(rendered) == 0 {
		t.Fatalf("no manifests: %v", err)
	}
	argument := regexp.MustCompile(`(?m)^ +- "?(--[-a-z]+)`)
	for _, path := range rendered {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range argument.FindAllStringSubmatch(string(text), -1) {
			if !strings.Contains(help, " "+m[1]+" ") {
				t.Errorf("%s: the agent has no %s", path, m[1])
			}
		}
	}
}
