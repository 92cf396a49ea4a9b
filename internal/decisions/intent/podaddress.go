package intent

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/facts/store"
)

// An address of a pod is one that a Pod object has, or that is in a range of pods: a podCIDR
// of a Node, or a range of Config.ClusterCIDRs without a Node's address. Such a range is
// wider than the pods' where it has one ("10.0.0.0/8"). An EndpointSlice proves nothing: its
// author may name any address, Pod and Node in it (docs/adr/0052-addresses-of-pods.md).

// podRanges are the ranges of pods.
type podRanges struct {
	nodes   store.Sets[netip.Prefix, string] // the Nodes that have a podCIDR
	lengths map[int]int                      // how many podCIDRs have a prefix length
	cluster []clusterRange
}

// clusterRange is one of Config.ClusterCIDRs.
type clusterRange struct {
	netip.Prefix
	nodes int // how many addresses of Nodes are in it
}

func newPodRanges(cluster []netip.Prefix) podRanges {
	r := podRanges{nodes: store.Sets[netip.Prefix, string]{}, lengths: map[int]int{}}
	for _, p := range cluster {
		r.cluster = append(r.cluster, clusterRange{Prefix: p})
	}
	return r
}

// longest returns the longest podCIDR that has an address; the zero Prefix for none.
func (r *podRanges) longest(a netip.Addr) (found netip.Prefix) {
	for bits := range r.lengths {
		p, err := a.Prefix(bits) // fails for a length of IPv6 alone
		if err == nil && len(r.nodes[p]) > 0 && (!found.IsValid() || bits > found.Bits()) {
			found = p
		}
	}
	return found
}

// ofOthers reports whether an address is in the podCIDR of another node than this one.
func (r *podRanges) ofOthers(node string, a netip.Addr) bool {
	p := r.longest(a)
	_, own := r.nodes[p][node]
	return p.IsValid() && !own
}

// find describes the range that has an address; "" for none.
func (r *podRanges) find(a netip.Addr) string {
	if p := r.longest(a); p.IsValid() {
		return fmt.Sprintf("in podCIDR %s of Node %s", p, slices.Min(slices.Collect(maps.Keys(r.nodes[p]))))
	}
	for _, c := range r.cluster {
		if c.nodes == 0 && c.Contains(a) {
			return fmt.Sprintf("in --cluster-cidr %s", c.Prefix)
		}
	}
	return ""
}

// ofPod describes what makes an address that of a pod; "" if it is none.
func (t *Tracker) ofPod(a netip.Addr) string {
	if t.own.nodeAddrs[a] > 0 {
		return ""
	}
	var first *model.Pod
	for _, name := range t.facts.PodsAt(a) {
		// A Pod without a node does not run yet.
		if p := t.facts.Pod(name); p.Node != "" && (first == nil || name.Compare(first.Name) < 0) {
			first = p
		}
	}
	if first != nil {
		return fmt.Sprintf("the address of Pod %s", first.Name)
	}
	return t.ranges.find(a)
}

// replacePodCIDRs notes the podCIDRs of a Node, and marks the Services dirty that have an
// address in one of those that change.
func (t *Tracker) replacePodCIDRs(name string, before, now []netip.Prefix) {
	before, now = canonicalPrefixes(before), canonicalPrefixes(now)
	for _, p := range before {
		if !slices.Contains(now, p) {
			t.ranges.nodes.Remove(p, name)
			t.countRange(p, -1)
		}
	}
	for _, p := range now {
		if !slices.Contains(before, p) {
			t.ranges.nodes.Add(p, name)
			t.countRange(p, 1)
		}
	}
}

func (t *Tracker) countRange(p netip.Prefix, by int) {
	if t.ranges.lengths[p.Bits()] += by; t.ranges.lengths[p.Bits()] == 0 {
		delete(t.ranges.lengths, p.Bits())
	}
	t.markRangeDirty(p)
}

// countInClusterCIDRs adds 1 or -1 to the Nodes' addresses in the ranges that have one.
func (t *Tracker) countInClusterCIDRs(a netip.Addr, by int) {
	for i := range t.ranges.cluster {
		c := &t.ranges.cluster[i]
		if !c.Contains(a) {
			continue
		}
		before := c.nodes
		if c.nodes += by; before == 0 || c.nodes == 0 {
			t.markRangeDirty(c.Prefix)
		}
	}
}

// markRangeDirty marks the Services dirty that have an address of a range as an externalIP or
// LoadBalancer IP, or as an endpoint that is also the address of a Pod of this node.
func (t *Tracker) markRangeDirty(p netip.Prefix) {
	for a := range t.own.knownPods {
		if p.Contains(a) {
			t.markEndpointDirty(a)
		}
	}
	for a := range t.conflictable {
		if p.Contains(a) {
			t.markAddressConflictsDirty(a)
		}
	}
}
