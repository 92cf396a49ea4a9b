package overlay

import (
	"fmt"

	"spillway.dev/spillway/lab/experiment"
)

// card compares shares of metal's speed over VXLAN.
func card(res *experiment.Result) *experiment.Card {
	c := &experiment.Card{
		Question:  "How much of the machine's speed is left behind a NodePort of another node, over VXLAN?",
		Unit:      "of metal's requests/s",
		Published: "24,000 requests/s on metal; 1/17 of that through flannel and kube-proxy",
		Caption:   "requests/s of the exchange, without bidders",
	}
	all, ok := c.Add(res, metal, "rate0", "metal")
	if !ok || all == 0 {
		return nil
	}
	best := 0.0 // of kube-proxy
	for _, p := range proxies {
		v, ok := c.Add(res, networks[0].name+": "+p.name, "rate0", p.name)
		switch {
		case !ok:
		case p.peer:
			best = max(best, v)
		case c.Number == "":
			c.Number = experiment.FormatNumber(v / all)
		}
	}
	if c.Number == "" {
		return nil
	}
	c.Verdict = "NodePort over VXLAN: " + c.Number + " of metal's requests/s"
	if best > 0 {
		c.Verdict += "; kube-proxy " + experiment.FormatNumber(best/all)
		c.Claim = fmt.Sprintf("keeps %s of metal's speed where kube-proxy keeps %s", c.Number, experiment.FormatNumber(best/all))
	}
	return c
}
