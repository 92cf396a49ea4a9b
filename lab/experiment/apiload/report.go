package apiload

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/page"
	"spillway.dev/spillway/lab/experiment"
)

// Report holds the results of a run.
type Report struct {
	Machine   experiment.Machine `json:"machine"`
	Agents    int                `json:"agents"`
	AtOnce    int                `json:"at_once"`
	Services  int                `json:"services"`
	Endpoints int                `json:"endpoints_per_service"`
	Nodes     int                `json:"nodes"`
	Pods      int                `json:"pods_per_agent"`
	Idle      Row                `json:"no_clients"`
	Rows      []Row              `json:"rows"`
}

// Row is one kind of client.
type Row struct {
	Name    string         `json:"name"`
	Watches map[string]int `json:"watches"` // open ones of all clients, by resource
	Start   Phase          `json:"start"`
	Changes Phase          `json:"changes"`
	Beats   Phase          `json:"node_status_updates"`
	Restart Phase          `json:"restart"`
	// RSS and Peak are the API server's resident memory before and since the start of the
	// clients, in MiB.
	RSS  float64 `json:"rss_mib"`
	Peak float64 `json:"peak_rss_mib"`
}

// Phase is what one client received, and what all of them cost.
type Phase struct {
	Wire        float64   `json:"wire_bytes"` // at the client's connections
	Connections float64   `json:"connections"`
	Requests    []Traffic `json:"requests"`
	CPU         float64   `json:"cpu_seconds"` // of the API server, for all clients
	Seconds     float64   `json:"seconds,omitempty"`
}

// Traffic is one kind of request of one client.
type Traffic struct {
	Request
	Count float64 `json:"count"`
	Bytes float64 `json:"bytes"` // of the answers' bodies, decompressed
}

// Write prints the report as text.
func (r *Report) Write(w io.Writer) error {
	fmt.Fprintln(w, page.Of(w).Wrap(r.Machine.String(), ""))
	fmt.Fprintf(w, "%d clients, %d at once; %d Services of %d endpoints, %d Nodes\n\n", r.Agents, r.AtOnce, r.Services, r.Endpoints, r.Nodes)
	wide := func(name string) page.Column { return page.Number(name).OnlyWide() }
	t := page.NewTable(page.Text("CLIENT"), page.Number("WATCHES"), page.Number("START KB"), page.Number("CHANGES KB"),
		page.Number("NODES KB"), page.Number("RESTART KB"),
		wide("PEAK MiB"), wide("START CPU s"), wide("CHANGES CPU s"), wide("NODES CPU s"), wide("RESTART CPU s"))
	for _, row := range append([]Row{r.Idle}, r.Rows...) {
		watches := 0
		for _, n := range row.Watches {
			watches += n
		}
		kb := func(p Phase) string { return fmt.Sprintf("%.1f", p.Wire/1e3) }
		s := func(p Phase) string { return fmt.Sprintf("%.1f", p.CPU) }
		t.Row(row.Name, fmt.Sprintf("%.1f", float64(watches)/float64(r.Agents)), kb(row.Start), kb(row.Changes), kb(row.Beats), kb(row.Restart),
			fmt.Sprintf("%.0f", row.Peak), s(row.Start), s(row.Changes), s(row.Beats), s(row.Restart))
	}
	if err := t.Write(w); err != nil {
		return err
	}
	for _, row := range r.Rows {
		fmt.Fprintf(w, "\n%s, one client\n", row.Name)
		if err := row.write(w); err != nil {
			return err
		}
	}
	_, err := fmt.Fprint(w, page.Of(w).Reflow(`
KB: bytes that one client receives at its connections, with TLS; below, the bodies of the answers, decompressed.
START: until it has all objects. CHANGES: of endpoints. NODES: status updates of Nodes, and one other change of a
Node. RESTART: until all clients watch the API server again, and one more round of changes. PEAK, CPU: of the API server, for all
clients; CPU of RESTART includes its start. -o wide shows all columns.
`))
	return err
}

func (row Row) write(w io.Writer) error {
	t := page.NewTable(page.Text("PHASE"), page.Text("REQUEST"), page.Text("SELECTOR").OnlyWide(), page.Text("ANSWER"),
		page.Number("COUNT"), page.Number("KB"))
	for _, p := range []struct {
		name string
		Phase
	}{{"start", row.Start}, {"changes", row.Changes}, {"nodes", row.Beats}, {"restart", row.Restart}} {
		for _, r := range p.Requests {
			answer := fmt.Sprint(r.Status, " ", r.Type)
			if r.Gzip {
				answer += ", gzip"
			}
			t.Row(p.name, r.Verb+" "+r.Resource, r.Selector, answer, fmt.Sprintf("%.2f", r.Count), fmt.Sprintf("%.1f", r.Bytes/1e3))
		}
	}
	if err := t.Write(w); err != nil {
		return err
	}
	var watches []string
	for _, resource := range slices.Sorted(maps.Keys(row.Watches)) {
		watches = append(watches, fmt.Sprintf("%s %d", resource, row.Watches[resource]))
	}
	_, err := fmt.Fprintln(w, page.Of(w).Wrap("watches of all clients: "+strings.Join(watches, ", "), ""))
	return err
}
