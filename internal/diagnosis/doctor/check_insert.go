package doctor

import (
	"fmt"
	"strings"
)

// insertCheck looks for the cause of insert_failed.
type insertCheck struct{}

func (insertCheck) Name() string  { return "lost insertion races" }
func (insertCheck) About() string { return "insert_failed and who may be its cause" }

func (insertCheck) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		// Chains that are too long count here too and have a check of their own.
		failed := minus(ns.Counters.InsertFailed, ns.Counters.ChainTooLong)
		if failed == 0 {
			continue
		}
		growing := minus(ns.Grown.InsertFailed, ns.Grown.ChainTooLong) > 0
		cause, mend, present := causeOf(ns)
		severity := Info
		if growing || present {
			severity = Warning
		}
		out = append(out, Finding{
			ID: "insert-failed", Severity: severity, Namespace: ns.Namespace.String(),
			Title: "new connections lost a race for their conntrack entry",
			Evidence: []string{
				grew("insert_failed", ns.Counters.InsertFailed, ns.Grown.InsertFailed, n),
				fmt.Sprintf("of them chains too long: %d; races that cost no packet (clash_resolve): %d", ns.Counters.ChainTooLong, ns.Counters.ClashResolve),
				fmt.Sprintf("ports found in use while translating (found): %d", ns.Counters.Found),
				"likely cause: " + cause,
			},
			Numbers: map[string]float64{"insert_failed": float64(ns.Counters.InsertFailed), "insert_failed_grown": float64(ns.Grown.InsertFailed),
				"chaintoolong": float64(ns.Counters.ChainTooLong), "clash_resolve": float64(ns.Counters.ClashResolve), "found": float64(ns.Counters.Found)},
			Packets: "The first packet of such a connection is dropped: TCP tries again after 1 s, then 3 s; a DNS client after 5 s.",
			Mend:    mend,
		})
	}
	return out
}

// causeOf tells what makes entries clash, from the rules that there are. present
// says that it can be seen to be there still.
func causeOf(ns *Namespace) (cause, mend string, present bool) {
	var fixed []string
	for _, r := range ns.Rules.Rules {
		if translates, random := r.SourceNAT(); translates && !random {
			fixed = append(fixed, r.Where())
		}
	}
	switch {
	case len(fixed) > 0:
		return "the SNAT race: two connections are given one port at once by " + names(fixed),
			"Have every masquerade rule choose ports at random: see masquerade-not-random.", true
	case destNAT(ns) && ns.Counters.ClashResolve > 0:
		return "the DNAT race: one UDP socket sends two first packets at once (A and AAAA) and they are given different endpoints",
			"Have clients ask one after the other (resolv.conf: options single-request-reopen), use a DNS cache on the node, or serve UDP Services without conntrack (spillway agent).", false
	case destNAT(ns):
		return "two first packets of one connection at once, such as SYNs sent again, or one UDP socket that sends two before the first is answered",
			"It is rare, or over. If it grows, serve Services without conntrack (spillway agent).", false
	}
	return "nothing here translates: two equal first packets at once, or entries taken away while they were made",
		"If it does not grow, nothing.", false
}

func destNAT(ns *Namespace) bool {
	for _, r := range ns.Rules.Rules {
		if r.DestNAT() || r.Element() && strings.Contains(r.Text, " : ") {
			return true
		}
	}
	return false
}

func minus(a, b uint64) uint64 { return a - min(a, b) }
