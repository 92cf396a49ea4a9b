package snat

import (
	"strings"

	"spillway.dev/spillway/lab/experiment"
)

// conclude describes the results of a run, and no more.
func conclude(res *experiment.Result) []string {
	var out []string
	for _, t := range []struct{ title, name string }{{outsideTable, "pods to the outside"}, {nodePortTable, "clients to a NodePort"}} {
		if text := worst(res, t.title); text != "" {
			out = append(out, "Measured, the most of any row, "+t.name+": "+text+" packets lost for 100 connections.")
		}
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

// worst returns the most lost packets of each method in one table, "" if none was measured.
func worst(res *experiment.Result, table string) string {
	most := map[string]float64{}
	for i := range res.Rows {
		row := &res.Rows[i]
		v, ok := row.Value("lost")
		if !ok || row.Table != table {
			continue
		}
		_, method, _ := strings.Cut(row.Name, ": ")
		before, known := most[method]
		if !known || v.Median > before {
			most[method] = v.Median
		}
	}
	var parts []string
	for _, m := range methods {
		if v, ok := most[m.name]; ok {
			parts = append(parts, m.name+" "+experiment.FormatNumber(v))
		}
	}
	return strings.Join(parts, "; ")
}
