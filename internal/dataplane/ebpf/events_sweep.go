package ebpf

import (
	"net/netip"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/facts/model"
)

// sweptEnds collects the ends of reported flows that one sweep finds: those that time out,
// and those that the kernel has evicted. Nil collects nothing.
type sweptEnds struct {
	backend *Backend
	clock   eventClock
	events  []dataplane.FlowEvent
}

// beginEnds returns nil if flows are not reported.
func (b *Backend) beginEnds() *sweptEnds {
	if b.cfg.FlowEvents != EventsAll {
		return nil
	}
	b.events.open.begin()
	return &sweptEnds{backend: b, clock: newEventClock()}
}

// isReported reports whether an entry is the forward entry of a reported flow.
func isReported(f *tcFlow) bool {
	const mask = tcFlowFlagsFLOW_REPORTED | tcFlowFlagsFLOW_REPLY
	return tcFlowFlags(f.Flags)&mask == tcFlowFlagsFLOW_REPORTED
}

// seen receives each live entry.
func (s *sweptEnds) seen(k *tcTuple, f *tcFlow) {
	if s == nil || !isReported(f) {
		return
	}
	s.backend.events.open.seen(keyOf(k), func() dataplane.EventFlow { return s.flow(k, f) })
}

// timedOut receives each forward entry that the sweep has deleted.
func (s *sweptEnds) timedOut(k *tcTuple, f *tcFlow) {
	if s == nil || !isReported(f) {
		return
	}
	flow := s.flow(k, f)
	flow.Handshake = s.backend.events.open.remove(keyOf(k), &flow)
	reason := dataplane.EndTimeout
	if tcFlowFlags(f.Flags)&tcFlowFlagsFLOW_RESET != 0 {
		reason = dataplane.EndRST // no later packet has canceled it
	}
	s.events = append(s.events, ended(flow, reason, s.clock.now))
	s.forget(k, f)
}

// finish adds the evicted flows of a complete sweep, and passes all to the reader.
func (s *sweptEnds) finish() {
	if s == nil {
		return
	}
	for _, f := range s.backend.events.open.evicted() {
		s.events = append(s.events, ended(f, dataplane.EndEvicted, s.clock.now))
	}
	s.backend.events.addSwept(s.events)
}

func keyOf(k *tcTuple) flowKey {
	return flowKey{
		protocol: model.Protocol(k.Proto),
		client:   netip.AddrPortFrom(fromAddr(k.Saddr, k.Family), toPort(k.Sport)),
		service:  netip.AddrPortFrom(fromAddr(k.Daddr, k.Family), toPort(k.Dport)),
	}
}

// flow converts a forward entry.
func (s *sweptEnds) flow(k *tcTuple, f *tcFlow) dataplane.EventFlow {
	key := keyOf(k)
	out := dataplane.EventFlow{
		Protocol: key.protocol, Client: key.client, ServiceAddress: key.service,
		Endpoint: netip.AddrPortFrom(fromAddr(f.Daddr, k.Family), toPort(f.Dport)),
		LastSeen: s.clock.coarse(f.Seen),
	}
	out.Port, _ = s.backend.services.port(f.Service)
	if f.Opened != 0 {
		out.Opened = s.clock.coarse(f.Opened)
	}
	var n tcTraffic
	counters := s.backend.m(tcMapFlowBytes)
	if counters.Lookup(k, &n) == nil {
		out.PacketsToEndpoint, out.BytesToEndpoint = n.Packets, n.Bytes
	}
	if counters.Lookup(reverseOf(k, f), &n) == nil {
		out.PacketsToClient, out.BytesToClient = n.Packets, n.Bytes
	}
	return out
}

// forget deletes the counters of a flow that has ended.
func (s *sweptEnds) forget(k *tcTuple, f *tcFlow) {
	counters := s.backend.m(tcMapFlowBytes)
	_ = counters.Delete(k)
	_ = counters.Delete(reverseOf(k, f))
}

// reverseOf returns the key of the packets in the other direction. It is not the key of the
// entry for a TFTP request, whose answers have any port.
func reverseOf(k *tcTuple, f *tcFlow) tcTuple {
	return tcTuple{Saddr: f.Daddr, Daddr: f.Saddr, Sport: f.Dport, Dport: f.Sport, Proto: k.Proto, Family: k.Family}
}
