package snat

import (
	"fmt"
	"strings"

	"spillway.dev/spillway/lab/experiment"
)

// conclude describes the results of a run, and no more.
func conclude(res *experiment.Result) []string {
	var out []string
	worst := map[string]*experiment.RowResult{}
	for i := range res.Rows {
		row := &res.Rows[i]
		_, method, _ := strings.Cut(row.Name, ": ")
		v, ok := row.Value("lost")
		if !ok {
			continue
		}
		if w := worst[method]; w == nil || v.Median > w.Values["lost"].Median {
			worst[method] = row
		}
	}
	var parts []string
	for _, m := range methods {
		if row := worst[m.name]; row != nil {
			parts = append(parts, fmt.Sprintf("%s %s", m.name, experiment.FormatNumber(row.Values["lost"].Median)))
		}
	}
	if len(parts) > 0 {
		out = append(out, "Measured, the most of any row: "+strings.Join(parts, "; ")+" packets lost for 100 connections.")
	}
	return append(out, "Why it may differ from what was published: kernels since then resolve UDP clashes instead of dropping "+
		"(clash_resolve), "+
		"MASQUERADE without flags tries other ports from a random place once its first choice is taken, and entries of closed connections give "+
		"up their ports sooner. Spillway's eBPF dataplane takes a port by one atomic write into its table, so two connections cannot get "+
		"the same: "+
		"it has no insert_failed to count, and a packet that it drops for want of a port is counted as \"no port left\", "+
		"each time it is sent again. Both give a closed connection's port away at once when there is no other; with few ports it also "+
		"matters how many of them "+
		"are tried: conntrack some 240, and of these only the last of each round among closed connections, eBPF 256. insert_failed and drop "+
		"are those of node0's conntrack. "+
		"In the rows of DNS a request is two questions from one socket.")
}
