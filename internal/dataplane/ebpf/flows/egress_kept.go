package flows

import (
	"net/netip"

	"go4.org/netipx"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// keptFlows are flows of egress to destinations that are left to netfilter by now.
type keptFlows struct {
	to   *netipx.IPSet
	none func()
}

// WatchEgressTo calls none after a whole sweep that found no flow of egress to these destinations. A later
// call replaces it.
func (t *Table) WatchEgressTo(to []netip.Prefix, none func()) {
	var b netipx.IPSetBuilder
	for _, p := range to {
		b.AddPrefix(p)
	}
	set, _ := b.IPSet() // fails only for an invalid prefix
	t.kept.Store(&keptFlows{set, none})
}

// has reports whether a flow is one of them, by its entry for the pod's packets.
func (k *keptFlows) has(key *objects.TCTuple, f *objects.TCFlow) bool {
	return k != nil && f.Service == objects.ServiceEgress && k.to.Contains(objects.FromAddr(key.Daddr, key.Family))
}
