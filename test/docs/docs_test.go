// Package docs holds the tests that the documents do not promise what is not there: files,
// headings, flags of the agent, commands of both programs, make's verbs. Each alert and each
// finding has its runbook.
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
)

// documents gives the documents of the repository, by path from the root.
func documents(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := fs.WalkDir(os.DirFS(root), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (d.Name() == "testdata" || path != "." && strings.HasPrefix(d.Name(), ".") || path == "site" || path == "report" ||
			path == "dist" || d.Name() == "node_modules") {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".md") {
			return nil
		}
		text, err := os.ReadFile(filepath.Join(root, path))
		found[path] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(found) < 80 {
		t.Fatalf("%d documents: are they still found?", len(found))
	}
	return found
}

func TestLinksAndFilesExist(t *testing.T) {
	docs := documents(t)
	for doc, text := range docs {
		for _, m := range link.FindAllStringSubmatch(withoutCode(text), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			target, anchor, _ := strings.Cut(m[1], "#")
			path := doc
			if target != "" {
				path = filepath.Join(filepath.Dir(doc), target)
				mustExist(t, doc, path)
			}
			if to, isDoc := docs[path]; anchor != "" && isDoc && !hasHeading(to, anchor) {
				t.Errorf("%s: %s has no heading for the link to #%s", doc, path, anchor)
			}
		}
		for _, m := range named.FindAllStringSubmatch(text, -1) {
			mustExist(t, doc, strings.TrimSuffix(strings.TrimSuffix(m[1], "..."), "/"))
		}
	}
}

// TestEveryPageIsLinked: readers do not find a page that no other document links.
func TestEveryPageIsLinked(t *testing.T) {
	docs := documents(t)
	linked := map[string]bool{"docs/index.md": true}
	for doc, text := range docs {
		for _, m := range link.FindAllStringSubmatch(text, -1) {
			target, _, _ := strings.Cut(m[1], "#")
			if path := filepath.Join(filepath.Dir(doc), target); path != doc {
				linked[path] = true
			}
		}
	}
	for doc := range docs {
		if strings.HasPrefix(doc, "docs/") && !linked[doc] {
			t.Errorf("no document links %s", doc)
		}
	}
}

// TestNamesOfDocumentsInCode: comments, error texts and manifests name pages that exist.
func TestNamesOfDocumentsInCode(t *testing.T) {
	page := regexp.MustCompile(`(?:^|[^-\w./])(docs/[-\w./]+\.md)`)
	found := 0
	err := fs.WalkDir(os.DirFS(root), ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && (name == ".git" || name == "bin" || name == "site" || name == "node_modules") {
			return fs.SkipDir
		}
		switch filepath.Ext(path) {
		case ".go", ".yaml", ".txt", ".tpl", ".h", ".c", ".sh", ".py", ".ini":
		default:
			return nil
		}
		text, err := os.ReadFile(filepath.Join(root, path))
		for _, m := range page.FindAllStringSubmatch(string(text), -1) {
			found++
			mustExist(t, path, m[1])
		}
		return err
	})
	if err != nil || found < 10 {
		t.Errorf("%d names of documents found: %v", found, err)
	}
}

// TestTheReadmeIsShort: the README is the first screen, and the documents hold the rest.
func TestTheReadmeIsShort(t *testing.T) {
	readme := documents(t)["README.md"]
	if lines := strings.Count(readme, "\n"); lines > 150 {
		t.Errorf("README.md has %d lines, 150 at most: move something to docs", lines)
	}
	if !regexp.MustCompile(`(?s)<!-- headline -->.+<!-- /headline -->`).MatchString(readme) {
		t.Error("README.md has no headline between its markers")
	}
}

// withoutCode removes blocks of code, in which brackets are no links.
func withoutCode(text string) string {
	return regexp.MustCompile("(?ms)^```.*?^```").ReplaceAllString(text, "")
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

// programs are the programs that build builds.
var programs = []string{"spillway", "spillway-lab"}

// build builds the programs once, into a directory that TestMain removes.
var build = sync.OnceValues(func() (dir string, err error) {
	if dir, err = os.MkdirTemp("", "spillway-docs"); err != nil {
		return "", err
	}
	built = dir
	for _, module := range []string{root, filepath.Join(root, "lab")} {
		cmd := exec.Command("go", "build", "-o", dir+"/", "./cmd/...")
		cmd.Dir = module
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return "", fmt.Errorf("build: %w: %s", err, out)
		}
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

// TestFlagsInTheReferenceExist: the flags that the notes on the agent name are the agent's.
func TestFlagsInTheReferenceExist(t *testing.T) {
	help, rows := help(t, "spillway", "agent"), 0
	for line := range strings.Lines(documents(t)["docs/reference/agent.md"]) {
		first, _, _ := strings.Cut(strings.TrimPrefix(line, "|"), "|")
		name := flag.FindString(first)
		if !strings.HasPrefix(line, "| `-") {
			continue
		}
		rows++
		if !strings.Contains(help, " "+name+" ") {
			t.Errorf("docs/reference/agent.md has %s, which the agent does not", name)
		}
	}
	if rows < 10 {
		t.Fatalf("%d rows of flags: are they still found?", rows)
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
