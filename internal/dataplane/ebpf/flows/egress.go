package flows

import (
	"cmp"
	"fmt"
	"net/netip"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

const (
	// mostEgressKeys bounds the destinations that are counted, and the pods of them: of 524,288 flows, a
	// count is too small by at most 128.
	mostEgressKeys = 4096
	// shownDestinations and shownPods are how many are reported.
	shownDestinations = 10
	shownPods         = 5
)

// egressDestination is what the flows that need different ports of the node have in common, as in the map.
type egressDestination struct {
	source, destination objects.TCAddr
	port                uint16
	proto, family       uint8
}

// public returns the destination for a report.
func (d egressDestination) public() dataplane.EgressDestination {
	return dataplane.EgressDestination{
		Protocol: model.Protocol(d.proto), Source: objects.FromAddr(d.source, d.family),
		Destination: netip.AddrPortFrom(objects.FromAddr(d.destination, d.family), objects.ToPort(d.port)),
	}
}

func (d egressDestination) compare(o egressDestination) int {
	x, y := d.public(), o.public()
	return cmp.Or(cmp.Compare(x.Protocol, y.Protocol), x.Source.Compare(y.Source), x.Destination.Compare(y.Destination))
}

// egressPod is a pod that has connections to a destination.
type egressPod struct {
	to  egressDestination
	pod objects.TCAddr
}

func (p egressPod) addr() netip.Addr { return objects.FromAddr(p.pod, p.to.family) }

// egressCounts has the connections of pods to the outside that a sweep found.
type egressCounts struct {
	connections  uint64
	destinations *heavyHitters[egressDestination]
	pods         *heavyHitters[egressPod]
}

func newEgressCounts() *egressCounts {
	return &egressCounts{destinations: newHeavyHitters[egressDestination](mostEgressKeys), pods: newHeavyHitters[egressPod](mostEgressKeys)}
}

// count counts a flow by its entry for the pod's packets.
func (c *egressCounts) count(k *objects.TCTuple, f *objects.TCFlow) {
	if f.Service != objects.ServiceEgress {
		return
	}
	d := egressDestination{source: f.Saddr, destination: k.Daddr, port: k.Dport, proto: k.Proto, family: k.Family}
	c.connections++
	c.destinations.add(d)
	c.pods.add(egressPod{d, k.Saddr})
}

// EgressUse implements dataplane.EgressReporter, without what was refused.
func (t *Table) EgressUse() (*dataplane.EgressUse, error) {
	var s objects.TCSettings
	if err := t.m(objects.TCMapNodeSettings).Lookup(uint32(0), &s); err != nil {
		return nil, fmt.Errorf("read settings: %w", err)
	}
	last := t.egress.Load()
	if last == nil || last.Connections == 0 && s.Flags&uint32(objects.TCSettingsFlagsSETTING_EGRESS) == 0 {
		return nil, nil
	}
	use := *last
	use.Ports = int(s.SnatPorts)
	const flags = objects.TCSettingsFlagsSETTING_EGRESS | objects.TCSettingsFlagsSETTING_BYPASS_NEVER
	use.Bypasses = s.Flags&uint32(flags) == uint32(objects.TCSettingsFlagsSETTING_EGRESS)
	return &use, nil
}

// use returns the counts for reports.
func (c *egressCounts) use() *dataplane.EgressUse {
	out := &dataplane.EgressUse{Connections: c.connections}
	every := func(egressDestination) bool { return true }
	for _, d := range c.destinations.first(shownDestinations, every, egressDestination.compare) {
		to := d.public()
		to.Connections = c.destinations.counts[d]
		of := func(p egressPod) bool { return p.to == d }
		for _, p := range c.pods.first(shownPods, of, func(a, b egressPod) int { return a.addr().Compare(b.addr()) }) {
			to.Pods = append(to.Pods, dataplane.EgressPod{Addr: p.addr(), Connections: c.pods.counts[p]})
		}
		out.Busiest = append(out.Busiest, to)
	}
	return out
}
