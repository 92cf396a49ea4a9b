package agent

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"go4.org/netipx"

	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/node/masquerade"
	"spillway.dev/spillway/internal/node/ruleset"
	"spillway.dev/spillway/test/must"
)

func TestEgressFile(t *testing.T) {
	for text, want := range map[string]string{
		"nonMasqueradeCIDRs: [10.0.0.1/8]": "write 10.0.0.0/8",
		"nonMasqueradeCIDRs: [ten]":        "not a file of ip-masq-agent's format",
		"nonMasqCIDRs: []":                 "unknown field",
		"nonMasqueradeCIDRs: [":            "not a file",
		"nonMasqueradeCIDRs: ['']":         "nonMasqueradeCIDRs[0]",
	} {
		if _, err := parseEgressFile([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// TestEgressFileChanges: a bad file is one line, and the last good one stays.
func TestEgressFileChanges(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config")
	var got []egress.Facts
	f := &egressFollower{mode: egress.On, set: func(_ egress.Mode, facts egress.Facts) { got = append(got, facts) }}
	for _, step := range []struct {
		text    string // "": there is no file
		keeps   string // of the first range
		wrong   string
		reports int
	}{
		{"nonMasqueradeCIDRs: [10.0.0.0/8]", "10.0.0.0/8", "", 1},
		{"nonMasqueradeCIDRs: [10.0.0.0/8]", "10.0.0.0/8", "", 0},
		{"nonMasqueradeCIDRs: [10.0", "10.0.0.0/8", "not a file of ip-masq-agent's format", 1},
		{"nonMasqueradeCIDRs: [10.0", "10.0.0.0/8", "not a file of ip-masq-agent's format", 0},
		{"", "10.0.0.0/8", "no such file", 1},
		{"nonMasqueradeCIDRs: [172.16.0.0/12]\nresyncInterval: 60s", "172.16.0.0/12", "", 1},
	} {
		_ = os.Remove(path)
		if step.text != "" {
			must.Do(t, os.WriteFile(path, []byte(step.text), 0o600))
		}
		before := len(got)
		f.readFile(path)
		if before == 0 {
			f.onRules(masquerade.Reading{Masquerade: ruleset.Masquerade{Translated: &netipx.IPSet{}}})
		}
		if n := len(got) - before; n != step.reports {
			t.Errorf("%q: %d reports, want %d", step.text, n, step.reports)
		}
		facts := got[len(got)-1]
		if keeps := facts.File.NonMasqueradeCIDRs[0].String(); keeps != step.keeps {
			t.Errorf("%q: keeps %s, want %s", step.text, keeps, step.keeps)
		}
		if step.wrong == "" && facts.Err != "" || !strings.Contains(facts.Err, step.wrong) || strings.Contains(facts.Err, "\n") {
			t.Errorf("%q: wrong %q, want %q in one line", step.text, facts.Err, step.wrong)
		}
	}
}
