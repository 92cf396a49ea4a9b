package doctor

import (
	"fmt"
	"strings"
)

// egressPortsExhausted compares pods' connections to one destination outside with the node's ports.
type egressPortsExhausted struct{}

func (egressPortsExhausted) Name() string  { return "ports of egress" }
func (egressPortsExhausted) About() string { return "pods' connections to one destination outside" }

func (egressPortsExhausted) Find(n *Node) (found []Finding) {
	if n.Traffic == nil {
		return nil
	}
	e := &n.Traffic.Egress
	for i := range e.Busiest {
		d := &e.Busiest[i]
		severity := fullness(d.Connections, e.Ports)
		if i == 0 && e.Window > 0 {
			severity = Critical // the busiest one, as far as is known
		}
		if severity == "" {
			continue
		}
		evidence := []string{
			fmt.Sprintf("%d of %d ports of %s are in use to %s %s at the last sweep", d.Connections, e.Ports, d.Source, d.to(), d.Protocol),
		}
		if len(d.Pods) > 0 {
			evidence = append(evidence, strings.Join(d.Pods, ", "))
		}
		if i == 0 && e.Window > 0 {
			evidence = append(evidence, fmt.Sprintf("%d packets without a port were dropped in the last %.0f s", e.Refused, e.Window.Seconds()))
		}
		title := "pods' new connections to %s will fail: %s of this node's ports to it are in use"
		if severity == Critical {
			title = "pods' new connections to %s fail, or soon will: %s of this node's ports to it are in use"
		}
		found = append(found, Finding{
			ID: "egress-ports-exhausted", Severity: severity,
			Object:   nodeObject(fmt.Sprintf("%s to %s %s", d.Source, d.to(), d.Protocol)),
			Title:    fmt.Sprintf(title, d.to(), percent(d.Connections, e.Ports)),
			Evidence: evidence,
			Numbers:  map[string]float64{"connections": float64(d.Connections), "ports": float64(e.Ports), "packets": float64(e.Refused)},
			Packets: "Each connection to one address and port outside needs a port of this node that no other connection to it has. Without " +
				"one, its first packet is dropped. Open connections, and those to other destinations, go on.",
			Remedy: "Have the pods keep connections open and reuse them, or close those that they do not use. Or give the node more addresses " +
				"(--egress-addresses), use more of the destination, or spread the pods over more nodes: each has ports of its own.",
			Commands: []string{"spillway flows"},
		})
	}
	return found
}
