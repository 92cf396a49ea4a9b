package doctor

import "fmt"

// rulesMany counts the rules that a first packet traverses.
type rulesMany struct{}

func (rulesMany) Name() string  { return "length of rule lists" }
func (rulesMany) About() string { return "rules that the first packet of a connection traverses" }

// manyRules and tooManyRules are the numbers of consecutive rules that make a first
// packet slow. Each rule is a comparison, and the rules do not stay in the cache.
const (
	manyRules    = 1000
	tooManyRules = 5000
)

func (rulesMany) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		for _, w := range ns.Rules.FirstPacket() {
			if w.Rules < manyRules {
				continue
			}
			f := Finding{
				ID: "rules-many", Severity: Info, Namespace: ns.Namespace.String(),
				Object: nodeObject(w.Chain.Command + " " + w.Chain.Table + " " + w.Chain.Name),
				Title: fmt.Sprintf("new connections start slowly: their first packet traverses %d rules in %s %s", w.Rules,
					w.Chain.Table, w.Chain.Name),
				Evidence: []string{fmt.Sprintf("%s: up to %d consecutive rules from %s %s on %s", w.Chain.Command, w.Rules, w.Chain.Table, w.Chain.Name,
					ownersOf(ns, w.Chain.Command))},
				Numbers: map[string]float64{"rules": float64(w.Rules)},
				Packets: "The kernel compares the first packet of each connection with them one by one before it forwards the packet. In the " +
					"tables filter and mangle it does so for every packet.",
				Remedy: "Use a proxy that looks Services up in a map: spillway agent (ebpf or nftables), or kube-proxy --proxy-mode=nftables. " +
					"Then remove the rules of the previous one (kube-proxy --cleanup).",
			}
			if w.Rules >= tooManyRules {
				f.Severity = Warning
			}
			out = append(out, f)
		}
	}
	return out
}
