package doctor

import (
	"slices"

	"spillway.dev/spillway/internal/diagnosis/doctor/ruleset"
)

// invalidCheck looks for packets that conntrack calls INVALID where that harms.
type invalidCheck struct{}

func (invalidCheck) Name() string  { return "INVALID packets" }
func (invalidCheck) About() string { return "nf_conntrack_tcp_be_liberal where rules translate" }

func (invalidCheck) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		if ns.Counters.Invalid == 0 || ns.BeLiberal || !translates(ns) {
			continue
		}
		f := Finding{
			ID: "tcp-not-liberal", Severity: Info, Namespace: ns.Namespace.String(),
			Title:    "packets of TCP connections may be taken for INVALID",
			Evidence: []string{grew("INVALID packets", ns.Counters.Invalid, ns.Grown.Invalid, n), beLiberal + " is 0"},
			Numbers:  map[string]float64{"invalid": float64(ns.Counters.Invalid), "invalid_grown": float64(ns.Grown.Invalid)},
			Packets:  "A segment outside of the window that conntrack believes in (late, or sent again) is INVALID and is not translated back: the client sees a packet of the endpoint's own address and resets the connection.",
			Mend:     "Have conntrack be liberal in what it takes for part of a connection; put it into /etc/sysctl.d (kube-proxy: --conntrack-tcp-be-liberal).",
			Commands: []string{sysctl(ns.Namespace, beLiberal, 1)},
		}
		if j := slices.IndexFunc(ns.Rules.Rules, (*ruleset.Rule).DropsInvalid); j >= 0 {
			r := ns.Rules.Rules[j]
			f.Severity = Warning
			f.Evidence = append(f.Evidence, "dropped by "+r.Where()+": "+r.Text)
			f.Packets = "A segment outside of the window that conntrack believes in (late, or sent again) is INVALID and is dropped: the connection stalls until it is sent once more, or for good."
		}
		out = append(out, f.with(raise(ns.Namespace, beLiberal, 1)))
	}
	return out
}

// translates reports whether rules translate addresses in the namespace.
func translates(ns *Namespace) bool {
	return destNAT(ns) || slices.ContainsFunc(ns.Rules.Rules, func(r *ruleset.Rule) bool { t, _ := r.SourceNAT(); return t })
}
