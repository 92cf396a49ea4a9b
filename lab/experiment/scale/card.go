package scale

import (
	"fmt"

	"spillway.dev/spillway/lab/experiment"
)

// card compares one change at the largest size that kube-proxy was measured with, or at
// the largest of all without kube-proxy.
func card(res *experiment.Result) *experiment.Card {
	const own = "Spillway, eBPF"
	size := func(group string) (most float64) {
		for _, row := range res.Rows {
			if _, ok := row.Value("change"); ok && row.Group == group {
				most = max(most, row.X)
			}
		}
		return most
	}
	n := max(size("kube-proxy, nftables"), size("kube-proxy, iptables (legacy)"))
	if n == 0 {
		n = size(own)
	}
	services := experiment.FormatNumber(n) + " Services"
	c := &experiment.Card{
		Question:  "How long does the sync of one endpoint's change take, in a cluster of " + services + "?",
		Unit:      "ms a sync",
		Published: "27 s, then 13 s, then 5 s from the API to the last of 5,000 nodes (kube-proxy, iptables)",
		Caption:   "ms a sync of one change, among " + services,
	}
	best := 0.0 // of kube-proxy
	for _, s := range sides {
		v, ok := c.Add(res, fmt.Sprintf("%s: %.0f Services", s.name, n), "change", s.name)
		switch {
		case !ok:
		case s.name == own:
			c.Number = experiment.FormatNumber(v)
		case c.Bars[len(c.Bars)-1].Side == experiment.Other && (best == 0 || v < best):
			best = v
		}
	}
	if c.Number == "" {
		return nil
	}
	c.Verdict = "sync of a change, " + services + ": " + c.Number + " ms"
	if best > 0 {
		c.Verdict += "; kube-proxy " + experiment.FormatNumber(best) + " ms"
		c.Claim = fmt.Sprintf("syncs a change in %s ms where kube-proxy takes %s ms", c.Number, experiment.FormatNumber(best))
	}
	return c
}
