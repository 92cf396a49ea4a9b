package doctor

import "fmt"

// serviceSNATPortsExhausted reports packets for which the eBPF programs found no source port.
type serviceSNATPortsExhausted struct{}

func (serviceSNATPortsExhausted) Name() string { return "SNAT ports of Services" }
func (serviceSNATPortsExhausted) About() string {
	return "packets without a source port towards an endpoint"
}

func (serviceSNATPortsExhausted) Find(n *Node) (out []Finding) {
	for _, r := range n.refusals(ReasonSNATPorts) {
		towards := "one of its endpoints"
		if r.Endpoint != "" {
			towards = r.Endpoint
		}
		out = append(out, Finding{
			ID: "service-snat-ports-exhausted", Severity: Critical, Object: serviceObject(r.Service, ""),
			Title:    fmt.Sprintf("new connections to Service %s fail: this node has no free SNAT port towards %s", r.Service, towards),
			Evidence: []string{r.packets(), "the last client asked " + r.Address.String()},
			Numbers:  map[string]float64{"packets": float64(r.Packets), "clients": float64(len(r.Clients))},
			Packets: "A connection to an endpoint on another node needs a source port of this node that no other connection to this endpoint " +
				"has. Without one, its packets are dropped. Open connections continue.",
			Remedy: "Add endpoints: each has ports of its own. Or set externalTrafficPolicy: Local, which needs no port. Or have the clients " +
				"keep connections open and reuse them.",
		})
	}
	return out
}
