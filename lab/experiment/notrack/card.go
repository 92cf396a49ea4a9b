package notrack

import (
	"fmt"

	"spillway.dev/spillway/lab/experiment"
)

// card compares connections through a full table with and without conntrack.
func card(res *experiment.Result) *experiment.Card {
	const full = "do-not-track policy, table full"
	c := &experiment.Card{
		Question:  "How many connections a second does a node accept when its conntrack table is full?",
		Unit:      "connections/s with a do-not-track policy",
		Published: "4,369 connections/s, and more than 60,000 with a do-not-track policy",
		Caption:   "connections/s to memcached in a pod",
	}
	c.Add(res, subjects[0].name, "max", "no conntrack, empty table")
	tracked, ok := c.Add(res, subjects[4].name, "max", fmt.Sprintf("conntrack, %s entries left", experiment.FormatNumber(slots)))
	own, has := c.Add(res, full, "max", "Spillway, do-not-track")
	if !has {
		return nil
	}
	c.Number = experiment.FormatNumber(own)
	c.Verdict = "conntrack full: " + c.Number + " conn./s with do-not-track"
	if ok {
		c.Verdict += "; " + experiment.FormatNumber(tracked) + " without"
	}
	return c
}
