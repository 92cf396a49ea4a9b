package connectivity

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/escape"
	"spillway.dev/spillway/internal/page"
)

// Report is the result of a test.
type Report struct {
	Namespace string   `json:"namespace"`
	Image     string   `json:"image"`
	Nodes     []string `json:"nodes"`
	// Checks and Failed count the questions of all rows.
	Checks int   `json:"checks"`
	Failed int   `json:"failed"`
	Rows   []Row `json:"cases"`
	// HostSkipped is the reason why there were no clients on the host network; "" if there
	// were.
	HostSkipped string `json:"hostNetworkSkipped,omitempty"`
	// Kept is the namespace that was left on request.
	Kept string `json:"kept,omitempty"`

	skipped map[string]string // reasons, by case
}

// Row is the result of one case.
type Row struct {
	Case    string `json:"case"`
	Checks  int    `json:"checks"`
	Failed  int    `json:"failed"`
	Skipped string `json:"skipped,omitempty"` // the reason
	// Common describes what all failures have in common and other checks have not.
	Common   string    `json:"common,omitempty"`
	Failures []Failure `json:"failures,omitempty"`

	all []Failure // of all checks, to find the common
}

// Failure is a question with another outcome than expected.
type Failure struct {
	Node        string `json:"node"` // of the client
	HostNetwork bool   `json:"hostNetwork"`
	Question    string `json:"question"`
	Want        string `json:"want"`
	Got         string `json:"got"`

	proto, to string
	v6        bool
}

func (r *Report) skip(name, reason string) {
	if r.skipped == nil {
		r.skipped = map[string]string{}
	}
	r.skipped[name] = reason
}

// row returns the row of a case.
func (r *Report) row(name string) *Row {
	if r.Rows == nil {
		for _, c := range Cases {
			r.Rows = append(r.Rows, Row{Case: c})
		}
	}
	return &r.Rows[slices.Index(Cases, name)]
}

// add adds the outcome of one question; got is "" for the expected one.
func (r *Report) add(node string, c client, ask Ask, got string) {
	row := r.row(ask.Case)
	f := Failure{
		Node: node, HostNetwork: c.hostNetwork, Question: ask.String(), Want: ask.want(), Got: got,
		proto: ask.Proto, to: ask.To.String(), v6: ask.To.Addr().Is6(),
	}
	row.all = append(row.all, f)
	row.Checks++
	r.Checks++
	if got != "" {
		row.Failed++
		r.Failed++
		row.Failures = append(row.Failures, f)
	}
}

// finish completes the rows.
func (r *Report) finish(nodes int) {
	for _, name := range Cases {
		row := r.row(name)
		row.Common = common(row.all, row.Failures)
		switch {
		case row.Checks > 0:
		case r.skipped[name] != "":
			row.Skipped = r.skipped[name]
		case nodes == 1:
			row.Skipped = "one node only"
		default:
			row.Skipped = "no client has an address of the family"
		}
	}
}

// common describes the properties that all failures share, and other checks do not have. One
// that follows from those before it is left out.
func common(all, failures []Failure) string {
	if len(failures) == 0 || len(failures) == len(all) {
		return ""
	}
	var parts []string
	scope := all // the checks with the properties so far
	for _, property := range []struct {
		of   func(Failure) string
		text string
	}{
		{func(f Failure) string { return f.Node }, "from %s"},
		{func(f Failure) string {
			if f.HostNetwork {
				return "the host network"
			}
			return "Pods"
		}, "from %s"},
		{func(f Failure) string { return strings.ToUpper(f.proto) }, "%s"},
		{func(f Failure) string {
			if f.v6 {
				return "IPv6"
			}
			return "IPv4"
		}, "%s"},
		{func(f Failure) string { return f.to }, "to %s"},
	} {
		value := property.of(failures[0])
		differs := func(f Failure) bool { return property.of(f) != value }
		if !slices.ContainsFunc(failures, differs) && slices.ContainsFunc(scope, differs) {
			scope = slices.DeleteFunc(slices.Clone(scope), differs)
			parts = append(parts, fmt.Sprintf(property.text, value))
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return "only " + strings.Join(parts, ", ")
}

// shownFailures is the most failures of a case that the table shows without -o wide.
const shownFailures = 2

// Write prints the report.
func (r *Report) Write(w io.Writer) error {
	p := page.Of(w)
	t := page.NewTable(page.Text("CASE"), page.Number("CHECKS"), page.Text("RESULT"), page.Text("DETAIL").Shrinks(16))
	for _, row := range r.Rows {
		switch {
		case row.Skipped != "":
			t.Row(row.Case, row.Checks, "skipped", row.Skipped)
		case row.Failed > 0:
			t.Row(row.Case, row.Checks, fmt.Sprintf("%d failed", row.Failed), row.Common)
		default:
			t.Row(row.Case, row.Checks, "ok")
		}
	}
	r.failures(t, p)
	if r.HostSkipped != "" {
		t.Foot("")
		t.Foot("Clients on the host network: skipped: %s", escape.Text(r.HostSkipped))
	}
	for _, hint := range r.hints() {
		t.Foot("")
		t.Foot("%s", hint)
	}
	if r.Kept != "" {
		t.Foot("")
		t.Foot("Namespace %s was kept: remove it with 'kubectl delete namespace %[1]s'", r.Kept)
	}
	t.Foot("")
	if r.Failed > 0 {
		t.Verdict(page.Bad, "failed", "%d of %d checks, %s", r.Failed, r.Checks, r.nodes())
	} else {
		t.Verdict(page.Good, "ok", "%d checks, %s", r.Checks, r.nodes())
	}
	return t.Write(p)
}

func (r *Report) nodes() string {
	if len(r.Nodes) == 1 {
		return "on 1 node"
	}
	return fmt.Sprintf("on %d nodes", len(r.Nodes))
}

// failures adds the failures below the table.
func (r *Report) failures(t *page.Table, p *page.Page) {
	for _, row := range r.Rows {
		if len(row.Failures) == 0 {
			continue
		}
		t.Foot("")
		t.Foot("%s:", row.Case)
		for i, f := range row.Failures {
			if i == shownFailures && !p.Wide {
				t.Foot("  … and %d more, with -o wide", len(row.Failures)-i)
				break
			}
			from := f.Node
			if f.HostNetwork {
				from += " (host network)"
			}
			line := fmt.Sprintf("%s to %s: %s; want: %s", from, f.Question, escape.Text(f.Got), f.Want)
			if line = "  " + line; p.Width > 0 && !p.Wide {
				line = p.Wrap(line[2:], "    ")[2:]
			}
			t.Foot("%s", line)
		}
	}
}

// hints tell where to look.
func (r *Report) hints() (list []string) {
	if r.Failed == 0 {
		return nil
	}
	if r.Rows[0].Failed > 0 {
		list = append(list, "Pods are not reached without a Service either: look at the pod network (CNI) and at NetworkPolicies first.")
	}
	nodes := map[string]bool{}
	for _, row := range r.Rows {
		for _, f := range row.Failures {
			nodes[f.Node] = true
		}
	}
	if len(nodes) == 1 && len(r.Nodes) > 1 {
		for node := range nodes {
			list = append(list, fmt.Sprintf("All failures are of clients on %s: look at its agent, and run 'spillway doctor' and 'spillway "+
				"drops' there.", node))
		}
	}
	return list
}
