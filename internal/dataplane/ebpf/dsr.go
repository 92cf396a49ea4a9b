package ebpf

import (
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/decisions/intent"
)

var _ dataplane.DSRReporter = (*Backend)(nil)

// DSRCounts implements dataplane.DSRReporter.
func (b *Backend) DSRCounts() (announced, unanswered uint64) {
	if len(b.cfg.DSRKeys) == 0 {
		return 0, 0
	}
	verdicts := b.Verdicts()
	return verdicts["dsr_announced"], verdicts["dsr_unanswered"]
}

// DSREncapsulations implements dataplane.DSRReporter.
func (b *Backend) DSREncapsulations() []dataplane.DSREncapsulation { return b.encapsulations.List() }

// DSRReplies implements dataplane.DSRReporter.
func (b *Backend) DSRReplies() (out dataplane.DSRReplies, err error) {
	if len(b.cfg.DSRKeys) == 0 {
		return out, nil
	}
	if out.Paths, err = inspect.DSRPaths(b.objects.Maps); err != nil {
		return out, err
	}
	out.ThroughStack, err = inspect.ThroughStack(b.objects.Maps, b.dsrPods())
	return out, err
}

// dsrPods lists the Pods of this node, without those that have its addresses, behind Services
// with DSR.
func (b *Backend) dsrPods() (list []netip.AddrPort) {
	b.services.EachDSREndpoint(func(e *intent.Endpoint) {
		if e.OnThisNode && !e.HostNetwork {
			list = append(list, e.Addr)
		}
	})
	slices.SortFunc(list, netip.AddrPort.Compare)
	return slices.Compact(list)
}

// dsrElsewhere lists the addresses of endpoints on other nodes behind Services with direct
// replies.
func (b *Backend) dsrElsewhere() (list []netip.Addr) {
	b.services.EachDSREndpoint(func(e *intent.Endpoint) {
		if !e.OnThisNode {
			list = append(list, e.Addr.Addr())
		}
	})
	slices.SortFunc(list, netip.Addr.Compare)
	return slices.Compact(list)
}
