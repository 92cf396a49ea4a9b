package doctor

import (
	"fmt"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/node/ruleset"
)

// insertFailed reports insert_failed and its likely cause.
type insertFailed struct{}

func (insertFailed) Name() string  { return "lost insertion races" }
func (insertFailed) About() string { return "insert_failed and its likely cause" }

func (insertFailed) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		// Chains that are too long count here too and have a check of their own.
		failed := minus(ns.Counters.InsertFailed, ns.Counters.ChainTooLong)
		if failed == 0 {
			continue
		}
		growing := minus(ns.Grown.InsertFailed, ns.Grown.ChainTooLong) > 0
		cause, remedy, present := causeOf(ns)
		severity := Info
		if growing || present {
			severity = Warning
		}
		if !growing && translatesSource(ns) && ns.exhaustedPorts() == "" {
			cause += "; or SNAT ports that were used up for a while"
			remedy += " Run doctor while connections fail: snat-ports-exhausted is a finding then if ports are used up."
		}
		out = append(out, Finding{
			ID: "insert-failed", Severity: severity, Namespace: ns.Namespace.String(),
			Title: "new connections lost their first packet: their conntrack entry could not be inserted",
			Evidence: []string{
				grew("insert_failed", ns.Counters.InsertFailed, ns.Grown.InsertFailed, n),
				fmt.Sprintf("of them chains too long: %d; races that cost no packet (clash_resolve): %d", ns.Counters.ChainTooLong,
					ns.Counters.ClashResolve),
				fmt.Sprintf("ports found in use while translating (found): %d", ns.Counters.Found),
				"likely cause: " + cause,
			},
			Numbers: map[string]float64{"insert_failed": float64(ns.Counters.InsertFailed), "insert_failed_grown": float64(ns.Grown.InsertFailed),
				"chaintoolong": float64(ns.Counters.ChainTooLong), "clash_resolve": float64(ns.Counters.ClashResolve),
				"found": float64(ns.Counters.Found)},
			Packets: "New connections stall: the kernel drops the first packet. TCP retries after 1 s, 2 s and 3 s (before Linux 6.5: 1 s and " +
				"3 s); a DNS client after 5 s.",
			Remedy: remedy,
		})
	}
	return out
}

// causeOf derives from the rules why entries clash, and the remedy. present reports
// that the cause still exists.
func causeOf(ns *Namespace) (cause, remedy string, present bool) {
	var fixed []string
	for _, r := range ns.Rules.Rules {
		if translates, random := r.SourceNAT(); translates && !random {
			fixed = append(fixed, r.Where())
		}
	}
	exhausted := ns.exhaustedPorts()
	switch {
	case exhausted != "":
		return "SNAT port exhaustion: new connections find no free port to " + exhausted,
			"See snat-ports-exhausted.", true
	case len(fixed) > 0:
		return "the SNAT race: two connections get the same port at the same time from " + names(fixed),
			"Make every masquerade rule choose random ports: see masquerade-not-random.", true
	case destNAT(ns) && ns.Counters.ClashResolve > 0:
		return "the DNAT race: one UDP socket sends two first packets at the same time (A and AAAA), and the rules choose different endpoints",
			"Make clients send one query after the other (resolv.conf: options single-request-reopen), run a DNS cache on the node, or serve " +
				"UDP Services without conntrack (spillway agent).", false
	case destNAT(ns):
		return "two first packets of one connection at the same time, such as retransmitted SYNs, or one UDP socket that sends two packets " +
				"before the first reply",
			"Nothing, while the counter does not grow. If it grows, serve Services without conntrack (spillway agent).", false
	}
	return "two equal first packets at the same time, or entries deleted during insertion",
		"Nothing, while the counter does not grow.", false
}

func translatesSource(ns *Namespace) bool {
	return slices.ContainsFunc(ns.Rules.Rules, func(r *ruleset.Rule) bool {
		translates, _ := r.SourceNAT()
		return translates
	})
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
