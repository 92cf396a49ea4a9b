package ebpf

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
)

var _ dataplane.DirectReplier = (*Backend)(nil)

// directOf reports whether the endpoint's node answers the client of a flow itself, and whether
// this is the node that received the flow: dsr_one_way of bpf/lib/flow/unconfirmed.h.
func directOf(f *tcFlow) (direct, oneWay bool) {
	const toPods = tcFlowFlagsFLOW_TO_POD | tcFlowFlagsFLOW_REVERSE_TO_POD
	flags := tcFlowFlags(f.Flags)
	direct = flags&tcFlowFlagsFLOW_DSR != 0
	return direct, direct && flags&toPods == 0
}

// state reports whether replies fail, and whether the programs send packets along the path in
// spite of that: dsr_path_works of bpf/lib/lookup/dsr_option.h.
func (p *tcDsrPath) state(now uint32) (broken, trusted bool) {
	broken = p.Failures >= uint32(tcDsrPathLimitDSR_FAILURES)
	return broken, !broken || now-p.Failed > uint32(tcDsrPathLimitDSR_RETRY_SECONDS)
}

func (p *tcDsrPath) describe(of tcBackend, now uint32) dataplane.DirectPath {
	clock := time.Now()
	at := func(seconds uint32) (t time.Time) {
		if seconds != 0 {
			t = clock.Add(-time.Duration(int32(now-seconds)) * time.Second)
		}
		return t
	}
	out := dataplane.DirectPath{Endpoint: endpointOf(of), Failures: p.Failures, Failed: at(p.Failed), Answered: at(p.Answered)}
	out.Broken, out.Trusted = p.state(now)
	return out
}

// DirectCounts implements dataplane.DirectReplier.
func (b *Backend) DirectCounts() (announced, unanswered uint64) {
	if len(b.cfg.DSRKeys) == 0 {
		return 0, 0
	}
	verdicts := b.Verdicts()
	return verdicts["dsr_announced"], verdicts["dsr_unanswered"]
}

// DirectCarriers implements dataplane.DirectReplier.
func (b *Backend) DirectCarriers() []dataplane.DirectCarrier { return b.carriers.list() }

// DirectReplies implements dataplane.DirectReplier.
func (b *Backend) DirectReplies() (out dataplane.DirectReplies, err error) {
	if len(b.cfg.DSRKeys) == 0 {
		return out, nil
	}
	if out.Paths, err = b.directPaths(); err != nil {
		return out, err
	}
	out.ThroughStack, err = b.directThroughStack()
	return out, err
}

// directPaths reads the paths to endpoints that their Services still have.
func (b *Backend) directPaths() (list []dataplane.DirectPath, err error) {
	now := bootSeconds()
	err = each(b.m(tcMapDsrPaths), func(id uint32, p tcDsrPath) {
		var of tcBackend
		if b.m(tcMapBackends).Lookup(id, &of) == nil {
			list = append(list, p.describe(of, now))
		}
	})
	return list, err
}

// directThroughStack lists the Pods of this node behind Services with direct replies whose
// packets traverse the stack: needs_stack of bpf/lib/flow/plan.h, as serve_dsr calls it.
func (b *Backend) directThroughStack() ([]netip.AddrPort, error) {
	const bypasses = tcPodFlagsPOD_REACHABLE
	var s tcSettings
	if err := b.m(tcMapNodeSettings).Lookup(uint32(0), &s); err != nil {
		return nil, fmt.Errorf("read eBPF map %s: %w", tcMapNodeSettings, err)
	}
	never := tcSettingsFlags(s.Flags)&tcSettingsFlagsSETTING_BYPASS_NEVER != 0
	return slices.DeleteFunc(b.directPods(), func(at netip.AddrPort) bool {
		var pod tcPod
		_ = b.m(tcMapPods).Lookup(addrKey(at.Addr()), &pod) // without an entry, the stack finds the Pod
		return !never && tcPodFlags(pod.Flags)&(bypasses|tcPodFlagsPOD_TRAVERSES_NETFILTER) == bypasses
	}), nil
}

// directPods lists the Pods of this node, without those that have its addresses, behind Services
// with direct replies.
func (b *Backend) directPods() (list []netip.AddrPort) {
	b.eachDirectEndpoint(func(e *intent.Endpoint) {
		if e.OnThisNode && !e.HostNetwork {
			list = append(list, e.Addr)
		}
	})
	slices.SortFunc(list, netip.AddrPort.Compare)
	return slices.Compact(list)
}

// eachDirectEndpoint calls f with each endpoint of Service ports with direct replies.
func (b *Backend) eachDirectEndpoint(f func(*intent.Endpoint)) {
	b.portsMu.Lock()
	defer b.portsMu.Unlock()
	for _, p := range b.ports.byID {
		if p.source == nil || !p.source.Direct { // nil: a write of it has failed
			continue
		}
		for i := range p.source.Endpoints {
			f(&p.source.Endpoints[i])
		}
	}
}

// Direct reports whether endpoints of a Service on other nodes answer TCP clients directly.
func (v *View) Direct(service uint32) bool {
	s, _ := lookup[uint32, tcService](v, tcMapServices, service)
	return v.takesPart() && tcServiceFlags(s.Flags)&tcServiceFlagsSERVICE_DSR != 0
}

// takesPart reports whether the instance has keys for direct replies.
func (v *View) takesPart() bool { return v.maps[tcMapDsrPaths].MaxEntries() == maxDSRPaths }

// DirectPath is dataplane.DirectPath, for readers of a View.
type DirectPath = dataplane.DirectPath

// DirectPath reads what the programs know about the replies of an endpoint on another node; nil
// if they know nothing.
func (v *View) DirectPath(backend uint32) *DirectPath {
	p, found := lookup[uint32, tcDsrPath](v, tcMapDsrPaths, backend)
	if !found {
		return nil
	}
	of, _ := lookup[uint32, tcBackend](v, tcMapBackends, backend)
	path := p.describe(of, bootSeconds())
	return &path
}

// CarrierGUE and CarrierNone are those of dataplane, for readers of a View.
const (
	CarrierGUE  = dataplane.CarrierGUE
	CarrierNone = dataplane.CarrierNone
)

// DirectCarrier reads how packets tell the node of an endpoint about the Service: one of
// dataplane.Carriers.
func (v *View) DirectCarrier(endpoint netip.Addr) string {
	c, found := lookup[tcAddrKey, tcDsrCarrier](v, tcMapDsrCarriers, addrKey(endpoint))
	if !found {
		return dataplane.CarrierUnknown
	}
	return carrierName(c)
}

// DirectRetry is the time after the last repeated SYN for which a path is not trusted.
const DirectRetry = time.Duration(tcDsrPathLimitDSR_RETRY_SECONDS) * time.Second
