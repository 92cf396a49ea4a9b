package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// notAlone are the pages in docs/runbooks of more than one alert or finding.
var notAlone = []string{"index", "stalls"}

// finding matches an id in the code of a check of doctor.
var finding = regexp.MustCompile(`(?:ID: |f\.ID, f\.Severity = |wasFull\(n, [A-Za-z.]+, )"([-a-z]+)"`)

// TestEveryAlertAndFindingHasItsRunbook, and each page has its subject.
func TestEveryAlertAndFindingHasItsRunbook(t *testing.T) {
	subjects := findings(t)
	for _, a := range alerts(t) {
		subjects = append(subjects, a.Alert)
	}
	docs := documents(t)
	index := docs["docs/runbooks/index.md"]
	for _, s := range subjects {
		page := docs["docs/runbooks/"+s+".md"]
		if !strings.HasPrefix(page, "# "+s+"\n") {
			t.Errorf("docs/runbooks/%s.md does not exist or has another title", s)
		}
		for _, part := range []string{"**Users see:**", "## Check\n", "## Fix\n", "## Background\n"} {
			if !strings.Contains(page, part) {
				t.Errorf("docs/runbooks/%s.md lacks %q", s, part)
			}
		}
		if !strings.Contains(index, "("+s+".md)") {
			t.Errorf("docs/runbooks/index.md does not list %s", s)
		}
	}
	pages, err := filepath.Glob(filepath.Join(root, "docs/runbooks/*.md"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range pages {
		name := strings.TrimSuffix(filepath.Base(p), ".md")
		if !slices.Contains(subjects, name) && !slices.Contains(notAlone, name) {
			t.Errorf("docs/runbooks/%s.md is about no alert and no finding", name)
		}
	}
}

// findings returns the ids of doctor's findings.
func findings(t *testing.T) (ids []string) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(root, "internal/diagnosis/doctor/check_*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range finding.FindAllStringSubmatch(string(text), -1) {
			ids = append(ids, m[1])
		}
	}
	slices.Sort(ids)
	if ids = slices.Compact(ids); len(ids) < 19 {
		t.Fatalf("%d findings: are they still found?", len(ids))
	}
	return ids
}

type alert struct {
	Alert       string
	Annotations map[string]string
}

// alerts returns the rules of Prometheus.
func alerts(t *testing.T) (rules []alert) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, "deploy/prometheus/alerts.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct{ Rules []alert }
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	for _, g := range file.Groups {
		rules = append(rules, g.Rules...)
	}
	if len(rules) < 10 {
		t.Fatalf("%d alerts: are they still found?", len(rules))
	}
	return rules
}

// TestAlertsNameTheirRunbook: runbook_url is the page's address on the site.
func TestAlertsNameTheirRunbook(t *testing.T) {
	config, err := os.ReadFile(filepath.Join(root, "mkdocs.yml"))
	if err != nil {
		t.Fatal(err)
	}
	site := regexp.MustCompile(`(?m)^site_url: (\S+/)$`).FindSubmatch(config)
	if site == nil {
		t.Fatal("mkdocs.yml has no site_url")
	}
	for _, a := range alerts(t) {
		if got, want := a.Annotations["runbook_url"], string(site[1])+"runbooks/"+a.Alert+"/"; got != want {
			t.Errorf("%s: runbook_url is %q, want %q", a.Alert, got, want)
		}
	}
}
