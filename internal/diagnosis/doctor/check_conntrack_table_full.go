package doctor

import (
	"fmt"
	"slices"
	"time"

	"spillway.dev/spillway/internal/node/capacity"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/page"
)

const (
	conntrackMax     = conntrack.SysctlPrefix + conntrack.SysctlMax
	conntrackBuckets = conntrack.SysctlPrefix + conntrack.SysctlBuckets
	expectMax        = conntrack.SysctlPrefix + conntrack.SysctlExpectMax
	beLiberal        = conntrack.SysctlPrefix + conntrack.SysctlLiberal
)

// recent is the age up to which a line of the kernel's log counts.
const recent = time.Hour

// conntrackTableFull compares entries with nf_conntrack_max.
type conntrackTableFull struct{}

func (conntrackTableFull) Name() string  { return "conntrack table" }
func (conntrackTableFull) About() string { return "entries of each namespace, drops and evictions" }

func (conntrackTableFull) Find(n *Node) []Finding {
	var out []Finding
	found := false
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		severity := fullness(ns.Entries, ns.Limits.Max)
		dropped := ns.Grown.Drop > ns.Grown.InsertFailed
		switch {
		case dropped && severity != "":
			severity = Critical
		case ns.Grown.EarlyDrop > 0 && severity == "":
			severity = Warning
		}
		if severity == "" {
			continue
		}
		found = true
		state := "at risk"
		if dropped {
			state = "dropped"
		}
		// Kept at the same rate of new connections, with a quarter free.
		want := max(2*ns.Limits.Max, ns.Entries*4/3)
		f := Finding{
			ID: "conntrack-table-full", Severity: severity, Namespace: ns.Namespace.String(),
			Title: fmt.Sprintf("new connections are %s: the conntrack table is %s full", state, percent(ns.Entries, ns.Limits.Max)),
			Evidence: []string{
				fmt.Sprintf("%d entries of %d (nf_conntrack_max)", ns.Entries, ns.Limits.Max),
				grew("dropped packets", ns.Counters.Drop, ns.Grown.Drop, n),
				grew("evicted entries", ns.Counters.EarlyDrop, ns.Grown.EarlyDrop, n),
			},
			Numbers: map[string]float64{"entries": float64(ns.Entries), "max": float64(ns.Limits.Max),
				"drop": float64(ns.Counters.Drop), "early_drop": float64(ns.Counters.EarlyDrop)},
			Packets: "A full table drops the first packet of every new connection. Before that, the kernel evicts unreplied and closing " +
				"connections.",
			Remedy: fmt.Sprintf("Raise the limit and the buckets (a full table then takes %d MiB); add both to /etc/sysctl.d to keep them. "+
				"`spillway plan --live --netns %s` shows the load that fits.",
				capacity.Memory(want, want, 0)>>20, ns.Namespace),
			Commands: []string{shared(conntrackMax, want)},
		}
		fixes := []fix{raiseShared(conntrackMax, want)}
		if ns.Limits.Buckets < want {
			f.Commands = append(f.Commands, shared(conntrackBuckets, want))
			fixes = append(fixes, raiseShared(conntrackBuckets, want))
		}
		out = append(out, f.with(fixes...))
	}
	if !found {
		out = append(out, wasFull(n, conntrack.TableFull, "conntrack-table-was-full", hasDropped,
			"new connections were dropped: the conntrack table was full", "The kernel dropped the first packet of new connections.",
			"Raise nf_conntrack_max before the next peak; `spillway plan` calculates the value.")...)
	}
	return out
}

// fullness returns the severity of n entries of a limit, "" if there is no problem.
func fullness(n, limit int) Severity {
	switch part := float64(n) / float64(max(limit, 1)); {
	case limit == 0:
		return ""
	case part >= capacity.Full:
		return Critical
	case part >= capacity.CloseToFull:
		return Warning
	}
	return ""
}

// hasDropped reports whether a namespace may have dropped packets for lack of entries.
func hasDropped(ns *Namespace) bool {
	return ns.Limits.Max == 0 || ns.Counters.Drop > ns.Counters.InsertFailed
}

// namespacesThat returns the read namespaces for which has is true, and whether it may be true
// for one that could not be read: a deleted one, such as a pod's or the lab's, or one of a Problem.
func (n *Node) namespacesThat(has func(*Namespace) bool) (names []string, unread bool) {
	read := map[string]bool{}
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		if has(ns) {
			names = append(names, ns.Namespace.String())
		}
		read[ns.Namespace.String()] = true
	}
	for _, p := range n.Problems {
		unread = unread || len(p.Namespaces) == 0 || slices.ContainsFunc(p.Namespaces, func(name string) bool { return !read[name] })
	}
	return names, unread || len(n.Namespaces) == 0
}

// wasFull reports from the kernel's log a table that was full and is not full now. A line that
// names a namespace is that one's alone. Others may be of any for which has is true.
func wasFull(n *Node, kind conntrack.LogKind, id string, has func(*Namespace) bool, title, packets, remedy string) (out []Finding) {
	add := func(c conntrack.LogCount, namespace string, evidence ...string) {
		if c.Lines == 0 || n.Up-c.Last > recent {
			return
		}
		out = append(out, Finding{
			ID: id, Severity: Info, Title: title, Namespace: namespace,
			Evidence: append([]string{fmt.Sprintf("%s in the kernel's log (it writes at most 10 in 5 s), the last %v ago",
				page.Counted(c.Lines, "line"), (n.Up - c.Last).Round(time.Second))}, evidence...),
			Numbers: map[string]float64{"log_lines": float64(c.Lines), "seconds_ago": (n.Up - c.Last).Seconds()},
			Packets: packets, Remedy: remedy,
		})
	}
	c := n.Log[kind]
	for i := range n.Namespaces {
		ns := &n.Namespaces[i].Namespace
		if of, named := c.ByNetns[ns.Inode]; named && ns.Inode != 0 {
			add(of, ns.String())
		}
	}
	switch list, unread := n.namespacesThat(has); {
	case len(list) == 1 && !unread:
		add(c.ByNetns[0], list[0])
	case len(list) > 1:
		add(c.ByNetns[0], "", "the log does not name the network namespace; it may be one of "+names(list))
	case len(list) == 1 || unread:
		add(c.ByNetns[0], "", "the log does not name the network namespace")
	}
	return out
}

// shared returns the command that sets a sysctl of the whole machine.
func shared(name string, value int) string { return fmt.Sprintf("sysctl -w %s=%d", name, value) }
