package policyflow

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// shownProblems is the number of problems that are printed; JSON has all.
const shownProblems = 20

// Write prints the explanation as text.
func (e *Explanation) Write(w io.Writer) error {
	fmt.Fprintf(w, "%s to %s, %s port %d: %s\n", e.From, e.To, e.Protocol, e.Port, e.Outcome)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if e.Outcome == Differs {
		fmt.Fprintln(tw, "FROM\tTO\tOUTCOME")
		for _, f := range e.Flows {
			fmt.Fprintf(tw, "%s\t%s\t%s\n", f.From, f.To, f.Outcome)
		}
		tw.Flush()
	}
	if len(e.Decisions) > 0 {
		fmt.Fprintln(tw, "NODE\tSIDE\tPOLICY\tRULE\tDECISION\tWHY")
	}
	for _, d := range e.Decisions {
		side := fmt.Sprintf("%s of %s", d.Side, d.Addr)
		if d.SourcePorts != "" {
			side += ", from port " + d.SourcePorts
		}
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\t%s\t%s\n", d.Node, side, d.Policy, d.Field, d.Outcome, d.Why)
	}
	if err := tw.Flush(); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	for _, n := range e.Notes {
		fmt.Fprintln(w, n)
	}
	for i, p := range e.Problems {
		if i == shownProblems {
			fmt.Fprintf(w, "and %d more problems (-o json)\n", len(e.Problems)-i)
			break
		}
		fmt.Fprintln(w, "problem:", p)
	}
	return nil
}
