package lint

import (
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// subjectsSince is the last commit whose subject no rule has checked.
const subjectsSince = "f2ad909ed0"

// subjectLength is the longest subject that `git log --oneline` shows whole in 80 columns.
const subjectLength = 72

var (
	subject = regexp.MustCompile(`^[a-z0-9][a-z0-9/._-]*(, [a-z0-9][a-z0-9/._-]*)*: ([a-zA-Z0-9-]+)( .*)?[^.;]$`)
	// notImperative matches verbs in other forms: "added", "adding", "adds".
	notImperative = regexp.MustCompile(`^[a-z]+(ed|ing|[^aious]s)$`)
	// These are imperative, or no verbs, all the same.
	imperative = regexp.MustCompile(`^(bring|embed|feed|need|proceed|seed|shed|speed|string)$`)
)

// TestSubjectsOfCommits checks what docs/contributing/style.md says of the subject of a commit.
func TestSubjectsOfCommits(t *testing.T) {
	if exec.Command("git", "-C", root, "cat-file", "-e", subjectsSince).Run() != nil {
		t.Log("no history here: an archive, or a shallow clone")
		return
	}
	out, err := exec.Command("git", "-C", root, "log", "--no-merges", "--format=%h %s", subjectsSince+"..").Output()
	if err != nil {
		t.Fatalf("read commits: %v", err)
	}
	for line := range strings.Lines(string(out)) {
		commit, text, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		if wrong := wrongSubject(text); wrong != "" {
			t.Errorf("commit %s: %q: %s", commit, text, wrong)
		}
	}
}

func TestWrongSubjects(t *testing.T) {
	for text, right := range map[string]bool{
		"ebpf: look up a next hop once":                     true,
		"trace, flows: name the Service":                    true,
		"test/e2e: pass the address":                        true,
		"Merge branch w-x":                                  false,
		"ebpf: added a map":                                 false,
		"ebpf: adds a map":                                  false,
		"ebpf: adding a map":                                false,
		"ebpf: add a map.":                                  false,
		"ebpf: add a map; remove another":                   false,
		"ebpf: " + strings.Repeat("long ", 14):              false,
		"add a map to the dataplane without saying an area": false,
	} {
		if wrong := wrongSubject(text); (wrong == "") != right {
			t.Errorf("%q: %q, want right: %v", text, wrong, right)
		}
	}
}

// wrongSubject says what is wrong with the subject of a commit; "" is nothing.
func wrongSubject(text string) string {
	parts := subject.FindStringSubmatch(text)
	switch {
	case len(text) > subjectLength:
		return fmt.Sprintf("%d characters, at most %d are allowed", len(text), subjectLength)
	case parts == nil:
		return `write "area: imperative summary"`
	case strings.Contains(text, ";"):
		return "two changes: make two commits"
	case notImperative.MatchString(parts[2]) && !imperative.MatchString(parts[2]):
		return fmt.Sprintf("%q: write the imperative", parts[2])
	}
	return ""
}
