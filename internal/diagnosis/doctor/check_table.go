package doctor

import (
	"fmt"
	"time"

	"spillway.dev/spillway/internal/node/capacity"
	"spillway.dev/spillway/internal/node/conntrack"
)

const (
	conntrackMax     = "net.netfilter.nf_conntrack_max"
	conntrackBuckets = "net.netfilter.nf_conntrack_buckets"
	expectMax        = "net.netfilter.nf_conntrack_expect_max"
	beLiberal        = "net.netfilter.nf_conntrack_tcp_be_liberal"
)

// Parts of a table from which on it is close to full, and as good as full.
const (
	closeToFull = 0.80
	full        = 0.95
)

// recent is how long a line of the kernel's log counts.
const recent = time.Hour

// tableCheck compares entries with nf_conntrack_max.
type tableCheck struct{}

func (tableCheck) Name() string  { return "conntrack table" }
func (tableCheck) About() string { return "entries of each namespace, drops and evictions" }

func (tableCheck) Find(n *Node) []Finding {
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
		// Kept at the same rate of new connections, with a quarter free.
		want := max(2*ns.Limits.Max, ns.Entries*4/3)
		f := Finding{
			ID: "conntrack-table-full", Severity: severity, Namespace: ns.Namespace.String(),
			Title: fmt.Sprintf("the conntrack table is %s full", percent(ns.Entries, ns.Limits.Max)),
			Evidence: []string{
				fmt.Sprintf("%d entries of %d (nf_conntrack_max)", ns.Entries, ns.Limits.Max),
				grew("dropped packets", ns.Counters.Drop, ns.Grown.Drop, n),
				grew("evicted entries", ns.Counters.EarlyDrop, ns.Grown.EarlyDrop, n),
			},
			Numbers: map[string]float64{"entries": float64(ns.Entries), "max": float64(ns.Limits.Max),
				"drop": float64(ns.Counters.Drop), "early_drop": float64(ns.Counters.EarlyDrop)},
			Packets: "When it is full the kernel throws out unanswered and closing connections first; when there are none, it drops the first packet of every new connection.",
			Mend: fmt.Sprintf("Raise the limit, and the buckets with it (a table full to it takes %d MiB); put both into /etc/sysctl.d to keep them. `spillway plan --live` says what load fits.",
				capacity.Memory(want, want, 0)>>20),
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
		out = append(out, wasFull(n, conntrack.TableFull, "conntrack-table-was-full", "the conntrack table was full", "New connections were refused then.", "Raise nf_conntrack_max before the next peak; `spillway plan` works out to what.")...)
	}
	return out
}

// fullness is how bad so many of a limit are; "" for not at all.
func fullness(n, limit int) Severity {
	switch part := float64(n) / float64(max(limit, 1)); {
	case limit == 0:
		return ""
	case part >= full:
		return Critical
	case part >= closeToFull:
		return Warning
	}
	return ""
}

// wasFull reads of a table that is not full now in the kernel's log.
func wasFull(n *Node, kind conntrack.LogKind, id, title, packets, mend string) []Finding {
	c := n.Log[kind]
	if c.Lines == 0 || n.Up-c.Last > recent {
		return nil
	}
	return []Finding{{
		ID: id, Severity: Info, Title: title,
		Evidence: []string{fmt.Sprintf("%d lines in the kernel's log (it writes 10 in 5 s at most), the last %v ago", c.Lines, (n.Up - c.Last).Round(time.Second))},
		Numbers:  map[string]float64{"log_lines": float64(c.Lines), "seconds_ago": (n.Up - c.Last).Seconds()},
		Packets:  packets, Mend: mend,
	}}
}

// shared is the command that sets a sysctl of the whole machine.
func shared(name string, value int) string { return fmt.Sprintf("sysctl -w %s=%d", name, value) }
