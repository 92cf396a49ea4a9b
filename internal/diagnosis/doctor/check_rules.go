package doctor

import "fmt"

// rulesCheck counts the rules that a first packet goes by.
type rulesCheck struct{}

func (rulesCheck) Name() string  { return "length of the rules" }
func (rulesCheck) About() string { return "rules that the first packet of a connection goes by" }

// manyRules and tooManyRules are how many rules one after the other make a first
// packet slow: each is a comparison, and the rules do not stay in the cache.
const (
	manyRules    = 1000
	tooManyRules = 5000
)

func (rulesCheck) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		for _, w := range ns.Rules.FirstPacket() {
			if w.Rules < manyRules {
				continue
			}
			f := Finding{
				ID: "rules-many", Severity: Info, Namespace: ns.Namespace.String(),
				Title:    fmt.Sprintf("a new connection goes by %d rules in %s %s", w.Rules, w.Chain.Table, w.Chain.Name),
				Evidence: []string{fmt.Sprintf("%s: up to %d rules one after the other from %s %s on %s", w.Chain.Command, w.Rules, w.Chain.Table, w.Chain.Name, ownersOf(ns, w.Chain.Command))},
				Numbers:  map[string]float64{"rules": float64(w.Rules)},
				Packets:  "The first packet of each connection is compared with them one by one, before it is sent anywhere; a chain of table filter or mangle is gone through by every packet.",
				Mend:     "Use a proxy that looks Services up in a map: spillway agent (ebpf or nftables), or kube-proxy --proxy-mode=nftables; and clean up after the old one (kube-proxy --cleanup).",
			}
			if w.Rules >= tooManyRules {
				f.Severity = Warning
			}
			out = append(out, f)
		}
	}
	return out
}
