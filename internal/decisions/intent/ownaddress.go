package intent

import (
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// A cluster IP may be an address of a device of this node: NodeLocal DNSCache gives the cluster IP of
// kube-dns to a device and listens there. With kube-proxy, rules of the cache keep its packets from
// conntrack, and so from translation. Here the node's own address comes first, with or without such
// rules: this node does not serve the Service at that address. The socket hooks and tc programs of
// eBPF would otherwise translate before the packets reach the cache.
//
// It goes by what the kernel reports alone, not by addresses of a Node object. Externals are served all
// the same: a virtual address of a load balancer is often that of a device too.

// leavesToNode reports whether a request is for a cluster IP of a device of this node.
func (t *Tracker) leavesToNode(c addressRequest) bool {
	_, own := slices.BinarySearchFunc(t.own.kernel, c.key.Addr, netip.Addr.Compare)
	return own && c.kind == ClusterIP
}

// leftToNode returns the Problem of a request for which leavesToNode is true.
func leftToNode(service model.Name, c addressRequest) model.Problem {
	return model.ServiceProblem(service, c.field(),
		fmt.Sprintf("%s is an address of a device of this node, and the Service is not served there: its packets get to the node's own "+
			"programs, such as NodeLocal DNSCache; "+
			"a cache that is a Service needs no such address, and loses no query when it restarts: remove the address, and annotate this "+
			"Service with %s", c.key.Addr, LocalRedirectAnnotation))
}

// markClusterIPsDirty marks the Services dirty that have one of the addresses as their cluster IP. The
// node's addresses change seldom, so there is no index of cluster IPs.
func (t *Tracker) markClusterIPsDirty(addrs []netip.Addr) {
	if len(addrs) == 0 {
		return
	}
	for _, e := range t.services {
		if e.spec != nil && slices.ContainsFunc(e.spec.ClusterIPs, func(a netip.Addr) bool { return slices.Contains(addrs, a.Unmap()) }) {
			t.markDirty(e)
		}
	}
}

// differing returns the addresses that only one of two lists has.
func differing(a, b []netip.Addr) []netip.Addr {
	without := func(from, other []netip.Addr) []netip.Addr {
		return slices.DeleteFunc(slices.Clone(from), func(x netip.Addr) bool { return slices.Contains(other, x) })
	}
	return append(without(a, b), without(b, a)...)
}
