package doctor

import "fmt"

// flowTableFull compares the flow table of the eBPF dataplane with its size.
type flowTableFull struct{}

func (flowTableFull) Name() string  { return "flow table" }
func (flowTableFull) About() string { return "flows of the eBPF dataplane and their limit" }

func (flowTableFull) Find(n *Node) []Finding {
	if n.Traffic == nil {
		return nil
	}
	t := n.Traffic.Flows
	severity := fullness(t.Used, t.Size)
	if severity == "" {
		return nil
	}
	title := "the flow table is full to %s: idle connections will break"
	if severity == Critical {
		title = "the flow table is full to %s: idle connections break"
	}
	return []Finding{{
		ID: "flow-table-full", Severity: severity,
		Title:    fmt.Sprintf(title, percent(t.Used, t.Size)),
		Evidence: []string{fmt.Sprintf("%d of %d flows at the last sweep", t.Used, t.Size)},
		Numbers:  map[string]float64{"used": float64(t.Used), "size": float64(t.Size)},
		Packets: "In a full table, the kernel evicts the flows that were silent for the longest time. Their next packets are not " +
			"translated, and the connections break. Connections of pods to a cluster IP are no flows.",
		Remedy: "Give the agent a larger table (--conntrack-min or --conntrack-max-per-core): a flow takes 570 bytes, and a restart keeps " +
			"all flows. Or shorten --conntrack-tcp-timeout-established if most flows are idle.",
		Commands: []string{"spillway top --view sources"},
	}}
}
