package tftp

import (
	"fmt"

	"spillway.dev/spillway/lab/experiment"
)

// card compares files a second before and after the published tuning.
func card(res *experiment.Result) *experiment.Card {
	c := &experiment.Card{
		Question:  "How many small files a second does TFTP transfer through a NodePort?",
		Unit:      "files/s with untuned tables",
		Published: "8,500 files/s from the host, 1,000 through a NodePort, 5,800 after nine rounds of tuning",
		Caption:   "files of 5 KB a second",
	}
	metal, hasMetal := c.Add(res, "metal", "rate", "metal")
	peer, hasPeer := c.Add(res, "kube-proxy: kernel defaults of the time", "rate", "kube-proxy, untuned")
	c.Add(res, "kube-proxy: 2 replicas", "rate", "kube-proxy, nine rounds of tuning")
	own, ok := c.Add(res, "Spillway, eBPF: defaults of the time", "rate", "Spillway, eBPF, untuned")
	c.Add(res, "Spillway, eBPF: defaults of the time, pods that do not track", "rate", "the same, pods without conntrack")
	if !ok {
		return nil
	}
	c.Number = experiment.FormatNumber(own)
	c.Verdict = "untuned: " + c.Number + " files/s"
	if hasPeer {
		c.Verdict += "; kube-proxy " + experiment.FormatNumber(peer)
		c.Claim = fmt.Sprintf("transfers %s files/s by TFTP where kube-proxy transfers %s", c.Number, experiment.FormatNumber(peer))
	}
	if hasMetal {
		c.Verdict += "; metal " + experiment.FormatNumber(metal)
	}
	return c
}
