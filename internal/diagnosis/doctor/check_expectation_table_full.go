package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/ruleset"
)

// expectationTableFull compares expectations with nf_conntrack_expect_max.
type expectationTableFull struct{}

func (expectationTableFull) Name() string  { return "expectation table" }
func (expectationTableFull) About() string { return "connections that helpers (TFTP, FTP) expect" }

func (expectationTableFull) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		total := 0
		var by []string
		for _, helper := range slices.Sorted(maps.Keys(ns.Expectations)) {
			total += ns.Expectations[helper]
			by = append(by, fmt.Sprintf("%d of %s", ns.Expectations[helper], helper))
		}
		severity := fullness(total, ns.Limits.ExpectMax)
		if severity == "" {
			continue
		}
		want := 2 * ns.Limits.ExpectMax
		out = append(out, Finding{
			ID: "expectation-table-full", Severity: severity, Namespace: ns.Namespace.String(),
			Title: fmt.Sprintf("TFTP and FTP transfers may fail: the expectation table is %s full", percent(total, ns.Limits.ExpectMax)),
			Evidence: []string{fmt.Sprintf("%d expectations of %d (nf_conntrack_expect_max): %s", total, ns.Limits.ExpectMax,
				strings.Join(by, ", "))},
			Numbers: map[string]float64{"expectations": float64(total), "max": float64(ns.Limits.ExpectMax)},
			Packets: "When the table is full, the kernel drops the packet that requests a second connection: a TFTP request, FTP's PORT or " +
				"PASV. An unused TFTP expectation stays for 300 s.",
			Remedy: "Raise the limit; add it to /etc/sysctl.d to keep it. Many unused expectations mean that replies take another path, or " +
				"that clients repeat requests.",
			Commands: []string{shared(expectMax, want)},
		}.with(raiseShared(expectMax, want)))
	}
	if len(out) == 0 {
		out = wasFull(n, conntrack.ExpectTableFull, "expectation-table-was-full", hasHelper,
			"TFTP and FTP transfers failed: the expectation table was full",
			"The kernel dropped requests for a second connection (TFTP, FTP).", "Raise nf_conntrack_expect_max before the next peak.")
	}
	return out
}

// hasHelper reports whether a namespace may create expectations.
func hasHelper(ns *Namespace) bool {
	if !ns.AllRulesRead || ns.AutoHelper || len(ns.Expectations) > 0 {
		return true
	}
	return slices.ContainsFunc(ns.Rules.Rules, func(r *ruleset.Rule) bool {
		for _, h := range helperProtocols {
			if r.AssignsHelper(h.helper) {
				return true
			}
		}
		return false
	})
}
