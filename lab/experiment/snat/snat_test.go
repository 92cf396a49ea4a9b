package snat

import (
	"strings"
	"testing"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/fixture"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
)

func TestRules(t *testing.T) {
	got := natRules("tcp", "172.30.0.10", "10.244.1.2", "--random-fully", 64)
	want := `*nat
-A PREROUTING -p tcp -d 172.30.0.10 --dport 30080 -j DNAT --to-destination 10.244.1.2:8080
-A POSTROUTING -p tcp -d 10.244.1.2 --dport 8080 -j MASQUERADE --to-ports 61000-61063 --random-fully
COMMIT
`
	if got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
}

func TestRowsOfOneKindAreTogetherAndEachHasAName(t *testing.T) {
	for _, quick := range []bool{true, false} {
		seen := map[string]bool{}
		list := rows(experiment.Options{Name: "x", Quick: quick})
		for _, r := range list {
			if seen[r.Name] || r.Group == "" || r.Takes <= 0 || r.Run == nil {
				t.Errorf("row %+v: no name of its own, or something is missing", r)
			}
			seen[r.Name] = true
			if few := strings.Contains(r.Name, "ports"); few != (r.Group == "TCP, few ports") {
				t.Errorf("%s is in group %s", r.Name, r.Group)
			}
			if r.Table != nodePortTable {
				t.Errorf("%s is in table %q", r.Name, r.Table)
			}
		}
		if len(list) < 10 {
			t.Errorf("%d rows", len(list))
		}
	}
}

// An agent must accept the Services without a problem.
func TestServicesAreWhatAnAgentReads(t *testing.T) {
	for _, kind := range []load.Kind{load.Conn, load.DNS} {
		t.Run(string(kind), func(t *testing.T) { // each with a cluster of its own
			_, delta := fixture.Manifests(t, "snattest", func(r *harness.Harness) (string, error) { return writeManifests(r, kind) })
			if len(delta.Services) != 1 || len(delta.Slices) != 1 {
				t.Errorf("%d Services, %d EndpointSlices", len(delta.Services), len(delta.Slices))
			}
		})
	}
}

func TestConcludeSaysTheWorstOfEachMethodAndTable(t *testing.T) {
	res := &experiment.Result{Rows: []experiment.RowResult{lostRow("a: MASQUERADE", nodePortTable, 0.1),
		lostRow("b: MASQUERADE", nodePortTable, 2.5), lostRow("a: Spillway, eBPF", nodePortTable, 0), lostRow("c: MASQUERADE", outsideTable, 7)}}
	got := conclude(res)
	if len(got) != 3 || !strings.Contains(got[0], "to the outside: MASQUERADE 7 packets lost") ||
		!strings.Contains(got[1], "to a NodePort: MASQUERADE 2.50; Spillway, eBPF 0 packets lost") {
		t.Errorf("concludes %q", got)
	}
}

func lostRow(name, table string, lost float64) experiment.RowResult {
	return experiment.RowResult{Name: name, Table: table, Status: experiment.OK,
		Values: map[string]experiment.Summary{"lost": experiment.Summarize([]float64{lost})}}
}
