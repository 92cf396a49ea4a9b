package doctor

import (
	"slices"

	"spillway.dev/spillway/internal/node/ruleset"
)

// tcpNotLiberal reports packets that conntrack classifies as INVALID where this breaks
// connections.
type tcpNotLiberal struct{}

func (tcpNotLiberal) Name() string  { return "INVALID packets" }
func (tcpNotLiberal) About() string { return "nf_conntrack_tcp_be_liberal where rules translate" }

func (tcpNotLiberal) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		if ns.Counters.Invalid == 0 || ns.BeLiberal || !translates(ns) {
			continue
		}
		f := Finding{
			ID: "tcp-not-liberal", Severity: Info, Namespace: ns.Namespace.String(),
			Title:    "TCP connections may stall or reset: conntrack classifies some of their packets as INVALID",
			Evidence: []string{grew("INVALID packets", ns.Counters.Invalid, ns.Grown.Invalid, n), beLiberal + " is 0"},
			Numbers:  map[string]float64{"invalid": float64(ns.Counters.Invalid), "invalid_grown": float64(ns.Grown.Invalid)},
			Packets: "The client resets the connection: a segment outside the window that conntrack expects (late, or retransmitted) is " +
				"INVALID and is not translated back, so it arrives from the endpoint's own address.",
			Remedy: "Make conntrack accept segments outside its window; add the setting to /etc/sysctl.d to keep it (kube-proxy: " +
				"--conntrack-tcp-be-liberal).",
			Commands: []string{sysctl(ns.Namespace, beLiberal, 1)},
		}
		if j := slices.IndexFunc(ns.Rules.Rules, (*ruleset.Rule).DropsInvalid); j >= 0 {
			r := ns.Rules.Rules[j]
			f.Severity = Warning
			f.Evidence = append(f.Evidence, "dropped by "+r.Where()+": "+r.Text)
			f.Packets = "The connection stalls until the segment is retransmitted, or forever: a segment outside the window that conntrack " +
				"expects (late, or retransmitted) is INVALID, and a rule drops it."
		}
		out = append(out, f.with(raise(ns.Namespace, beLiberal, 1)))
	}
	return out
}

// translates reports whether rules translate addresses in the namespace.
func translates(ns *Namespace) bool {
	return destNAT(ns) || slices.ContainsFunc(ns.Rules.Rules, func(r *ruleset.Rule) bool { t, _ := r.SourceNAT(); return t })
}
