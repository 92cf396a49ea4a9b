package flows

import (
	"net/netip"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

// sweptEnds collects the ends of reported flows that one sweep finds: those that time out,
// and those that the kernel has evicted. Nil collects nothing.
type sweptEnds struct {
	table  *Table
	clock  eventClock
	events []dataplane.FlowEvent
}

// beginEnds returns nil if flows are not reported.
func (t *Table) beginEnds() *sweptEnds {
	if t.cfg.FlowEvents != objects.EventsAll && !t.events.demand.on.Load() {
		return nil
	}
	t.events.open.begin()
	return &sweptEnds{table: t, clock: newEventClock()}
}

// isReported reports whether an entry is the forward entry of a reported flow.
func isReported(f *objects.TCFlow) bool {
	const mask = objects.TCFlowFlagsFLOW_REPORTED | objects.TCFlowFlagsFLOW_REPLY
	return objects.TCFlowFlags(f.Flags)&mask == objects.TCFlowFlagsFLOW_REPORTED
}

// seen receives each live entry.
func (s *sweptEnds) seen(k *objects.TCTuple, f *objects.TCFlow) {
	if s == nil || !isReported(f) {
		return
	}
	s.table.events.open.seen(keyOf(k), func() dataplane.EventFlow { return s.flow(k, f) })
}

// timedOut receives each forward entry that the sweep has deleted.
func (s *sweptEnds) timedOut(k *objects.TCTuple, f *objects.TCFlow) {
	if s == nil || !isReported(f) {
		return
	}
	flow := s.flow(k, f)
	flow.Handshake = s.table.events.open.remove(keyOf(k), &flow)
	reason := dataplane.EndTimeout
	if objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_RESET != 0 {
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
	for _, f := range s.table.events.open.evicted() {
		s.events = append(s.events, ended(f, dataplane.EndEvicted, s.clock.now))
	}
	s.table.events.addSwept(s.events)
}

func keyOf(k *objects.TCTuple) flowKey {
	return flowKey{
		protocol: model.Protocol(k.Proto),
		client:   netip.AddrPortFrom(objects.FromAddr(k.Saddr, k.Family), objects.ToPort(k.Sport)),
		service:  netip.AddrPortFrom(objects.FromAddr(k.Daddr, k.Family), objects.ToPort(k.Dport)),
	}
}

// flow converts a forward entry.
func (s *sweptEnds) flow(k *objects.TCTuple, f *objects.TCFlow) dataplane.EventFlow {
	key := keyOf(k)
	out := dataplane.EventFlow{
		Protocol: key.protocol, Client: key.client, ServiceAddress: key.service,
		Endpoint: netip.AddrPortFrom(objects.FromAddr(f.Daddr, k.Family), objects.ToPort(f.Dport)),
		LastSeen: s.clock.coarse(f.Seen),
	}
	out.Port, _ = s.table.services.Port(f.Service)
	if f.Opened != 0 {
		out.Opened = s.clock.coarse(f.Opened)
	}
	var n objects.TCTraffic
	counters := s.table.m(objects.TCMapFlowBytes)
	if counters.Lookup(k, &n) == nil {
		out.PacketsToEndpoint, out.BytesToEndpoint = n.Packets, n.Bytes
	}
	if counters.Lookup(objects.ReverseOf(k, f), &n) == nil {
		out.PacketsToClient, out.BytesToClient = n.Packets, n.Bytes
	}
	return out
}

// forget deletes the counters of a flow that has ended.
func (s *sweptEnds) forget(k *objects.TCTuple, f *objects.TCFlow) {
	counters := s.table.m(objects.TCMapFlowBytes)
	_ = counters.Delete(k)
	_ = counters.Delete(objects.ReverseOf(k, f))
}
