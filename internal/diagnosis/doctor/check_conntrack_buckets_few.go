package doctor

import "fmt"

// conntrackBucketsFew compares entries with buckets.
type conntrackBucketsFew struct{}

func (conntrackBucketsFew) Name() string { return "hash buckets" }
func (conntrackBucketsFew) About() string {
	return "entries per bucket, chains that are too long"
}

// perBucket is the largest acceptable number of entries per bucket in a full table.
// The kernel's default is 1 (since 5.15; 4 before, for all namespaces together).
const perBucket = 4

func (conntrackBucketsFew) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		few := ns.Namespace.Own && ns.Limits.Buckets > 0 && ns.Limits.Max > perBucket*ns.Limits.Buckets
		if !few && ns.Grown.ChainTooLong == 0 {
			continue
		}
		f := Finding{
			ID: "conntrack-buckets-few", Severity: Info, Namespace: ns.Namespace.String(),
			Title: "tracked packets are slow, and new connections may be dropped: the conntrack table has few hash buckets for its size",
			Evidence: []string{
				fmt.Sprintf("nf_conntrack_max %d, nf_conntrack_buckets %d: %.1f entries a bucket when full", ns.Limits.Max, ns.Limits.Buckets,
					float64(ns.Limits.Max)/float64(max(ns.Limits.Buckets, 1))),
				grew("chaintoolong", ns.Counters.ChainTooLong, ns.Grown.ChainTooLong, n),
			},
			Numbers: map[string]float64{"max": float64(ns.Limits.Max), "buckets": float64(ns.Limits.Buckets),
				"chaintoolong": float64(ns.Counters.ChainTooLong)},
			Packets: "The kernel searches a bucket for every packet of a tracked connection, and drops a new connection whose bucket is too " +
				"long (insert_failed, chaintoolong).",
			Remedy: "Configure as many buckets as entries (8 bytes each). To keep it: options nf_conntrack hashsize=... in /etc/modprobe.d, or " +
				"/etc/sysctl.d.",
		}
		if ns.Grown.ChainTooLong > 0 {
			f.Severity = Warning
		}
		if few {
			f.Commands = []string{shared(conntrackBuckets, ns.Limits.Max)}
			f = f.with(raiseShared(conntrackBuckets, ns.Limits.Max))
		} else {
			f.Remedy = "The number of buckets is right, but many entries have the same hash. Serve the busiest Service without conntrack " +
				"(spillway agent)."
		}
		out = append(out, f)
	}
	return out
}
