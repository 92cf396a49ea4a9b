package donottrackflow

import (
	"fmt"
	"io"

	"spillway.dev/spillway/internal/page"
)

// shownProblems is the number of problems that are printed; JSON has all.
const shownProblems = 20

// Write prints the explanation as text.
func (e *Explanation) Write(w io.Writer) error {
	p := page.Of(w)
	fmt.Fprintln(w, p.Wrap(fmt.Sprintf("%s to %s, %s port %d: %s", e.From, e.To, e.Protocol, e.Port, e.Outcome), ""))
	if e.Outcome == Differs {
		t := page.NewTable(page.Text("FROM").Shrinks(15), page.Text("TO").Shrinks(15), page.Text("OUTCOME").Shrinks(12))
		for _, f := range e.Flows {
			t.Row(f.From, f.To, f.Outcome)
		}
		if err := t.Write(w); err != nil {
			return err
		}
	}
	if len(e.Decisions) > 0 {
		if e.Outcome == Differs {
			fmt.Fprintln(w)
		}
		if err := e.decisions().Write(w); err != nil {
			return err
		}
	}
	for _, n := range e.Notes {
		fmt.Fprintln(w, p.Wrap(n, ""))
	}
	for i, problem := range e.Problems {
		if i == shownProblems {
			fmt.Fprintf(w, "and %d more problems (-o json)\n", len(e.Problems)-i)
			break
		}
		fmt.Fprintln(w, p.Wrap("problem: "+problem, ""))
	}
	return nil
}

// decisions is the table of the decisions on the way.
func (e *Explanation) decisions() *page.Table {
	t := page.NewTable(page.Text("NODE").Shrinks(8), page.Text("SIDE").Shrinks(14), page.Text("POLICY").Shrinks(8),
		page.Text("RULE").Shrinks(8), page.Text("DECISION").Shrinks(8), page.Text("WHY").Shrinks(20))
	for _, d := range e.Decisions {
		side := fmt.Sprintf("%s of %s", d.Side, d.Addr)
		if d.SourcePorts != "" {
			side += ", from port " + d.SourcePorts
		}
		t.Row(d.Node, side, d.Policy, d.Field, d.Outcome, d.Why)
	}
	return t
}
