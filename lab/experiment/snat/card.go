package snat

import (
	"spillway.dev/spillway/lab/experiment"
)

// form is what a card shows of a table: its published case, and the case in which races are
// frequent.
type form struct {
	usual, few string // rows, without the method
	unit       string
	name       string // of few, in the verdict
	caption    string
}

var forms = []form{
	{"8 pods, 80 threads each: ", "4 pods of 32 ports, 10 threads each, delay: ", "packets lost of 100 connections, 640 threads",
		"32 ports", "packets lost of 100 connections, from pods with the same 32 ports"},
	{"TCP, 80 threads: ", "TCP, 40 threads, 64 ports: ", "packets lost of 100 connections, 80 threads",
		"64 ports", "packets lost of 100 connections, with only 64 source ports"},
}

// card compares lost packets in the first form that was measured with Spillway.
func card(res *experiment.Result) *experiment.Card {
	for _, f := range forms {
		if c := f.card(res); c != nil {
			return c
		}
	}
	return nil
}

func (f form) card(res *experiment.Result) *experiment.Card {
	const by, own = "MASQUERADE", "Spillway, eBPF"
	c := &experiment.Card{
		Question:  "How many packets do 100 new connections lose when they compete for source ports?",
		Unit:      f.unit,
		Published: "2 to 4 packets of 100 connections, and none with fully random ports",
		Caption:   f.caption,
	}
	var in experiment.Card // the published case
	theirs, known := in.Add(res, f.usual+by, "lost", by)
	ours, ok := in.Add(res, f.usual+own, "lost", own)
	if !ok {
		return nil
	}
	c.Number = experiment.FormatNumber(ours)
	c.Verdict = "lost per 100: " + c.Number
	if known {
		c.Verdict += ", MASQUERADE " + experiment.FormatNumber(theirs)
	}
	for _, m := range methods {
		c.Add(res, f.few+m.name, "lost", m.name)
	}
	first, last := res.Row(f.few+own), res.Row(f.few+by)
	if first == nil || last == nil {
		c.Bars, c.Caption = in.Bars, c.Unit
		return c
	}
	a, hasA := first.Value("lost")
	b, hasB := last.Value("lost")
	if hasA && hasB {
		c.Verdict += "; " + f.name + ": " + experiment.FormatNumber(a.Median) + ", " + experiment.FormatNumber(b.Median)
	}
	return c
}
