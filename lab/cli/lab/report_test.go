package lab

import (
	"testing"
	"unicode/utf8"

	"spillway.dev/spillway/lab/experiment"
)

// Every experiment, in full and in quick form, has a card with both sides, whose verdict
// fits its line. Cards name rows by their names.
func TestEveryExperimentHasACard(t *testing.T) {
	for _, quick := range []bool{false, true} {
		for _, e := range labExperiments() {
			res := &experiment.Result{Name: e.Name}
			for _, row := range e.Rows(experiment.Options{Name: "x", Quick: quick}) {
				r := experiment.RowResult{Name: row.Name, Group: row.Group, X: row.X, Side: row.Side, Status: experiment.OK,
					Values: map[string]experiment.Summary{}}
				for _, f := range e.Figures {
					r.Values[f.Key] = experiment.Summarize([]float64{12345})
				}
				res.Rows = append(res.Rows, r)
			}
			c := e.Card(res)
			if c == nil {
				t.Errorf("%s, quick: %v: no card", e.Name, quick)
				continue
			}
			sides := map[experiment.Side]bool{}
			for _, b := range c.Bars {
				sides[b.Side] = true
			}
			if !sides[experiment.Spillway] || !sides[experiment.Other] || len(c.Bars) < 3 {
				t.Errorf("%s, quick: %v: the bars are %+v", e.Name, quick, c.Bars)
			}
			if n := utf8.RuneCountInString(c.Verdict); n > experiment.VerdictWidth || n == 0 {
				t.Errorf("%s, quick: %v: the verdict has %d characters: %s", e.Name, quick, n, c.Verdict)
			}
			if c.Question == "" || c.Number == "" || c.Unit == "" || c.Published == "" || c.Caption == "" {
				t.Errorf("%s, quick: %v: a text is missing: %+v", e.Name, quick, c)
			}
			if c := e.Card(&experiment.Result{}); c != nil {
				t.Errorf("%s, quick: %v: a run without rows has the card %+v", e.Name, quick, c)
			}
		}
	}
}
