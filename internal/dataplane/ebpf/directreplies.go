package ebpf

import (
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/decisions/intent"
)

var _ dataplane.DirectReplier = (*Backend)(nil)

// DirectCounts implements dataplane.DirectReplier.
func (b *Backend) DirectCounts() (announced, unanswered uint64) {
	if len(b.cfg.DSRKeys) == 0 {
		return 0, 0
	}
	verdicts := b.Verdicts()
	return verdicts["dsr_announced"], verdicts["dsr_unanswered"]
}

// DirectCarriers implements dataplane.DirectReplier.
func (b *Backend) DirectCarriers() []dataplane.DirectCarrier { return b.carriers.List() }

// DirectReplies implements dataplane.DirectReplier.
func (b *Backend) DirectReplies() (out dataplane.DirectReplies, err error) {
	if len(b.cfg.DSRKeys) == 0 {
		return out, nil
	}
	if out.Paths, err = inspect.DirectPaths(b.objects.Maps); err != nil {
		return out, err
	}
	out.ThroughStack, err = inspect.ThroughStack(b.objects.Maps, b.directPods())
	return out, err
}

// directPods lists the Pods of this node, without those that have its addresses, behind Services
// with direct replies.
func (b *Backend) directPods() (list []netip.AddrPort) {
	b.services.EachDirectEndpoint(func(e *intent.Endpoint) {
		if e.OnThisNode && !e.HostNetwork {
			list = append(list, e.Addr)
		}
	})
	slices.SortFunc(list, netip.AddrPort.Compare)
	return slices.Compact(list)
}

// directElsewhere lists the addresses of endpoints on other nodes behind Services with direct
// replies.
func (b *Backend) directElsewhere() (list []netip.Addr) {
	b.services.EachDirectEndpoint(func(e *intent.Endpoint) {
		if !e.OnThisNode {
			list = append(list, e.Addr.Addr())
		}
	})
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list)
}
