package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func printed(t *testing.T, r *Report) string {
	t.Helper()
	var b strings.Builder
	if err := r.Write(&b); err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(b.String()) {
		if len([]rune(line)) > columns+1 {
			t.Errorf("%d columns: %q", len([]rune(line))-1, line)
		}
	}
	return b.String()
}

func TestAPageHasTheWorstFirstAndEndsWithASummary(t *testing.T) {
	n := &Node{Problems: []Problem{{What: "cannot " + strings.Repeat("see ", 40), Namespaces: []string{"a", "b", "c", "d", "e", "f"}}}}
	long := "nsenter --net=/run/netns/x sysctl -w " + strings.Repeat("net.netfilter.nf_conntrack_udp_timeout=10 ", 5)
	r := NewReport(n, []Finding{
		{ID: "bad", Severity: Critical, Title: strings.Repeat("word ", 40), Evidence: []string{strings.Repeat("1 of 2 ", 30)}, Packets: "p",
			Remedy: "m", Commands: []string{long}, Fixable: true},
		{ID: "odd", Severity: Info, Settings: "# Pod\nspec:\n"},
		{ID: "odd", Severity: Info, Namespace: "n2"}, {ID: "odd", Severity: Info, Namespace: "n3"}, {ID: "odd", Severity: Info, Namespace: "n4"},
		{ID: "odd", Severity: Info, Namespace: "n5"},
	})
	got := printed(t, r)
	critical, info := strings.Index(got, "CRITICAL"), strings.Index(got, "INFO")
	if critical < 0 || info < critical || strings.Contains(got, "No problem found on this node") {
		t.Errorf("order:\n%s", got)
	}
	for _, want := range []string{"odd: 2 more, in n4, n5", "(in a, b, c, d and 2 more)", " \\\n", "      # Pod\n      spec:\n"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if !strings.HasSuffix(got, "\n6 findings: 1 critical, 5 info; --fix can fix 1; 1 thing not examined\n") {
		t.Errorf("summary:\n%s", got)
	}
	// Text that is broken over lines is still one command.
	begin := strings.Index(got, "nsenter")
	joined := strings.Join(strings.Fields(strings.ReplaceAll(got[begin:strings.Index(got, "    --fix does")], "\\\n", " ")), " ")
	if joined != strings.TrimSpace(long) {
		t.Errorf("the command reads %q", joined)
	}
}

func TestAPageWithoutFindingsSaysWhatWasLookedAt(t *testing.T) {
	node := &Node{Traffic: &Traffic{}}
	got := printed(t, NewReport(node, Examine(node)))
	if !strings.HasPrefix(got, "No problem found on this node") || !strings.HasSuffix(got, "\n0 findings\n") {
		t.Errorf("page:\n%s", got)
	}
	for _, c := range Checks {
		if !strings.Contains(got, c.Name()) || !strings.Contains(got, c.About()) {
			t.Errorf("%s is not on the page", c.Name())
		}
	}
	got = printed(t, NewReport(&Node{}, Examine(&Node{})))
	for _, c := range agentChecks {
		if strings.Contains(got, c.About()) {
			t.Errorf("%s is on the page without an agent", c.Name())
		}
	}
	got = printed(t, NewReport(&Node{Problems: []Problem{{What: "x"}}}, nil))
	if strings.Contains(got, "No problem found on this node") || !strings.Contains(got, "No problem found in the parts that could be read") {
		t.Errorf("page:\n%s", got)
	}
}

func TestFixesAreOnThePage(t *testing.T) {
	r := NewReport(&Node{}, []Finding{{ID: "a", Severity: Warning, Fixable: true}})
	r.Fixed = []Fixed{{Does: "raise x", Done: true, Note: "left alone"}, {Does: "raise y", Error: "refused"}}
	got := printed(t, r)
	if !strings.Contains(got, "done: raise x (left alone)") || !strings.Contains(got, "failed: raise y: refused") ||
		!strings.Contains(got, "1 of 2 fixes applied") {
		t.Errorf("page:\n%s", got)
	}
}

func TestSeveritiesAreOrdered(t *testing.T) {
	if !Critical.AtLeast(Warning) || Info.AtLeast(Warning) || !Info.AtLeast(Info) {
		t.Error("order of severities")
	}
	if s := NewReport(&Node{}, []Finding{{Severity: Info}, {Severity: Warning}}).Worst(); s != Warning {
		t.Errorf("worst is %s", s)
	}
	if s := names(strings.Fields("a b c d e f")); s != "a, b, c, d and 2 more" {
		t.Error(s)
	}
	if fmt.Sprint(percent(1, 0), percent(1, 8)) != "-12.5 %" {
		t.Error(percent(1, 0), percent(1, 8))
	}
}

// TestEveryIDHasAKind reads the ids from the code of the checks.
func TestEveryIDHasAKind(t *testing.T) {
	id := regexp.MustCompile(`(?:ID: |f\.ID, f\.Severity = |wasFull\(n, [A-Za-z.]+, )"([-a-z]+)"`)
	var used, listed []string
	files, _ := filepath.Glob("check_*.go")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range id.FindAllStringSubmatch(string(text), -1) {
			if !strings.HasSuffix(file, "_test.go") {
				used = append(used, m[1])
			}
		}
	}
	for _, k := range Kinds {
		listed = append(listed, k.ID)
	}
	slices.Sort(used)
	slices.Sort(listed)
	if len(used) < 15 || !slices.Equal(listed, used) {
		t.Errorf("listed in Kinds %q\nused by checks %q", listed, used)
	}
}

// TestDocumentationExists compares addresses of runbooks with the documents and their site.
func TestDocumentationExists(t *testing.T) {
	config, err := os.ReadFile("../../../mkdocs.yml")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(config), "\nsite_url: "+site+"\n") {
		t.Errorf("site_url of mkdocs.yml is not %s", site)
	}
	for _, k := range Kinds {
		text, err := os.ReadFile(filepath.Join("../../../docs", k.Document()))
		if err != nil || !strings.HasPrefix(string(text), "# ") {
			t.Errorf("the runbook of %s: %v", k.ID, err)
		}
	}
	if got := documentation("rules-many"); got != "https://spillway.dev/docs/runbooks/rules-many/" {
		t.Errorf("documentation is at %s", got)
	}
}
