package main

import (
	"fmt"
	"os"
	"path/filepath"

	"spillway.dev/spillway/internal/diagnosis/doctor"
)

func findingsPage(root string) ([]byte, error) {
	w := page("internal/diagnosis/doctor", "Findings of spillway doctor")
	w.WriteString("The ids are stable: `spillway doctor -o json` has them. `--fix` applies the remedies that are marked\n" +
		"so, where it is safe.\n\n")
	rows := [][]string{{"id and severity", "effect and remedy"}}
	for _, k := range doctor.Kinds {
		remedy := cell(k.Remedy)
		if k.Fixable {
			remedy += " (`--fix`)"
		}
		rows = append(rows, []string{runbook(root, k) + "<br>" + cell(k.Severity), cell(k.Effect) + "<br>" + remedy})
	}
	table(w, rows...)
	w.WriteString("## Checks\n\nEach check can report one or more findings. They run in this order.\n\n")
	rows = [][]string{{"check", "compares"}}
	for _, c := range doctor.Checks {
		rows = append(rows, []string{cell(c.Name()), cell(c.About())})
	}
	table(w, rows...)
	return end(w), nil
}

// runbook returns the id of a kind of finding as a link to its runbook, if it has one.
func runbook(root string, k doctor.Kind) string {
	if _, err := os.Stat(filepath.Join(root, "docs", k.Document())); err != nil {
		return code(k.ID)
	}
	return fmt.Sprintf("[%s](../%s)", code(k.ID), k.Document())
}
