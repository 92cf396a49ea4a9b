package snat

import (
	"spillway.dev/spillway/lab/experiment"
)

// card compares lost packets in the published case, and with few ports.
func card(res *experiment.Result) *experiment.Card {
	const (
		usual, few = "TCP, 80 threads: ", "TCP, 40 threads, 64 ports: "
		by, own    = "MASQUERADE", "Spillway, eBPF"
	)
	c := &experiment.Card{
		Question:  "How many packets do 100 new connections lose when they compete for source ports?",
		Unit:      "packets lost of 100 connections, 80 threads",
		Published: "2 to 4 packets of 100 connections, and none with fully random ports",
		Caption:   "packets lost of 100 connections, with only 64 source ports",
	}
	var in experiment.Card // the published case
	theirs, known := in.Add(res, usual+by, "lost", by)
	ours, ok := in.Add(res, usual+own, "lost", own)
	if !ok {
		return nil
	}
	c.Number = experiment.FormatNumber(ours)
	c.Verdict = "lost per 100: " + c.Number
	if known {
		c.Verdict += ", MASQUERADE " + experiment.FormatNumber(theirs)
	}
	for _, m := range methods {
		c.Add(res, few+m.name, "lost", m.name)
	}
	first, last := res.Row(few+own), res.Row(few+by)
	if first == nil || last == nil {
		c.Bars, c.Caption = in.Bars, c.Unit
		return c
	}
	a, hasA := first.Value("lost")
	b, hasB := last.Value("lost")
	if hasA && hasB {
		c.Verdict += "; 64 ports: " + experiment.FormatNumber(a.Median) + ", " + experiment.FormatNumber(b.Median)
	}
	return c
}
