package doctor

import "fmt"

// chainCheck compares entries with buckets.
type chainCheck struct{}

func (chainCheck) Name() string { return "hash buckets" }
func (chainCheck) About() string {
	return "entries for each bucket, chains too long"
}

// perBucket is up to how many entries a bucket may hold when the table is full.
// The kernel's own choice is 1 (since 5.15; 4 before, the namespaces' entries
// together).
const perBucket = 4

func (chainCheck) Find(n *Node) []Finding {
	var out []Finding
	for i := range n.Namespaces {
		ns := &n.Namespaces[i]
		few := ns.Namespace.Own && ns.Limits.Buckets > 0 && ns.Limits.Max > perBucket*ns.Limits.Buckets
		if !few && ns.Grown.ChainTooLong == 0 {
			continue
		}
		f := Finding{
			ID: "conntrack-buckets-few", Severity: Info, Namespace: ns.Namespace.String(),
			Title: "the conntrack table has few hash buckets for its size",
			Evidence: []string{
				fmt.Sprintf("nf_conntrack_max %d, nf_conntrack_buckets %d: %.1f entries a bucket when full", ns.Limits.Max, ns.Limits.Buckets, float64(ns.Limits.Max)/float64(max(ns.Limits.Buckets, 1))),
				grew("chaintoolong", ns.Counters.ChainTooLong, ns.Grown.ChainTooLong, n),
			},
			Numbers: map[string]float64{"max": float64(ns.Limits.Max), "buckets": float64(ns.Limits.Buckets), "chaintoolong": float64(ns.Counters.ChainTooLong)},
			Packets: "Every packet of a tracked connection walks through a bucket; a new connection whose bucket is too long is dropped (insert_failed, chaintoolong).",
			Mend:    "Give it as many buckets as entries; 8 bytes each. To keep it: options nf_conntrack hashsize=... in /etc/modprobe.d, or /etc/sysctl.d.",
		}
		if ns.Grown.ChainTooLong > 0 {
			f.Severity = Warning
		}
		if few {
			f.Commands = []string{shared(conntrackBuckets, ns.Limits.Max)}
			f = f.with(raiseShared(conntrackBuckets, ns.Limits.Max))
		} else {
			f.Mend = "The buckets are as many as they should be: many entries that differ only in what the hash does not see. Serve the busiest Service without conntrack (spillway agent)."
		}
		out = append(out, f)
	}
	return out
}
