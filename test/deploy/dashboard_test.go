package deploy

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

var dashboardFile = filepath.Join(root, "deploy", "grafana", "spillway.json")

// TestGrafanaKnowsEveryFieldOfTheDashboard stands in for a Grafana, which no registry has.
func TestGrafanaKnowsEveryFieldOfTheDashboard(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: needs Grafana's model from PyPI")
	}
	check := filepath.Join(root, "hack", "grafana", "check")
	if out, err := exec.CommandContext(t.Context(), check, dashboardFile).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	text, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	// The check finds a misspelled field.
	path := filepath.Join(t.TempDir(), "dashboard.json")
	if err := os.WriteFile(path, []byte(strings.Replace(string(text), `"colorMode"`, `"colourMode"`, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), check, path).CombinedOutput()
	if err == nil || !strings.Contains(string(out), ".options.colourMode") {
		t.Errorf("a misspelled field: %v\n%s", err, out)
	}
}

type panel struct {
	Type, Title, Description string
	GridPos                  struct{ H, W, X, Y int }
	FieldConfig              struct {
		Defaults struct{ Unit string }
	}
	Links  []struct{ URL string }
	Panels []panel
}

// readDashboard returns the rows and the other panels of the dashboard, and the value of
// its variable docs.
func readDashboard(t *testing.T) (rows, panels []panel, docs string) {
	t.Helper()
	text, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Panels     []panel
		Templating struct {
			List []struct {
				Name  string
				Query any
			}
		}
	}
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatal(err)
	}
	for _, p := range d.Panels {
		if p.Type == "row" {
			rows = append(rows, p)
			panels = append(panels, p.Panels...)
		} else {
			panels = append(panels, p)
		}
	}
	for _, v := range d.Templating.List {
		if v.Name == "docs" {
			docs, _ = v.Query.(string)
		}
	}
	if len(panels) < 20 || docs == "" {
		t.Fatalf("%d panels, documents at %q", len(panels), docs)
	}
	return rows, panels, docs
}

func TestTheDashboardAsksQuestions(t *testing.T) {
	rows, panels, _ := readDashboard(t)
	for _, r := range rows {
		if !strings.HasSuffix(r.Title, "?") && !r.isLast(rows) {
			t.Errorf("row %q is no question", r.Title)
		}
	}
	for i, p := range panels {
		if p.Title == "" || p.Type != "text" && (p.Description == "" || p.FieldConfig.Defaults.Unit == "") {
			t.Errorf("panel %q lacks a title, a description or a unit", p.Title)
		}
		if p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("panel %q is wider than the page", p.Title)
		}
		for _, q := range panels[:i] {
			if p.covers(q) {
				t.Errorf("panels %q and %q overlap", p.Title, q.Title)
			}
		}
	}
}

func (p panel) isLast(rows []panel) bool { return p.Title == rows[len(rows)-1].Title }

func (p panel) covers(q panel) bool {
	a, b := p.GridPos, q.GridPos
	return a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H
}

// TestEachAlertHasAPanelWithALinkToItsRunbook compares the links with the alerts.
func TestEachAlertHasAPanelWithALinkToItsRunbook(t *testing.T) {
	text, err := os.ReadFile(filepath.Join(root, "deploy", "prometheus", "alerts.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Rules []struct {
				Alert       string
				Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	_, panels, docs := readDashboard(t)
	linked := map[string]bool{}
	for _, p := range panels {
		for _, l := range p.Links {
			linked[strings.Replace(l.URL, "${docs}", docs, 1)] = true
		}
	}
	for _, g := range file.Groups {
		for _, r := range g.Rules {
			url := docs + "/runbooks/" + r.Alert + "/"
			if !linked[url] {
				t.Errorf("no panel has a link to the runbook of %s", r.Alert)
			}
			delete(linked, url)
			if has := r.Annotations["runbook_url"]; has != "" && has != url {
				t.Errorf("%s has the runbook %s, the dashboard %s", r.Alert, has, url)
			}
		}
	}
	for url := range linked {
		t.Errorf("a panel has a link to %s, which is the runbook of no alert", url)
	}
}
