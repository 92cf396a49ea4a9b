package flows

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/outlier"
)

var (
	_ dataplane.HandshakeWatcher = (*Table)(nil)
	_ dataplane.SocketWatcher    = (*Table)(nil)
)

// Outcomes implements dataplane.HandshakeWatcher. Its cost follows the number of watched
// endpoints that had a connection.
func (t *Table) Outcomes() ([]outlier.Outcome, error) {
	m, backends := t.m(objects.TCMapOutcomes), t.m(objects.TCMapBackends)
	var out []outlier.Outcome
	var gone []uint32
	var id uint32
	var o objects.TCOutcome
	clock := newEventClock()
	entries := m.Iterate()
	for entries.Next(&id, &o) {
		var of objects.TCBackend
		switch err := backends.Lookup(id, &of); {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			gone = append(gone, id)
			continue
		case err != nil:
			return nil, fmt.Errorf("read eBPF map %s: %w", backends, err)
		}
		port, known := t.services.Port(of.Service)
		if !known || objects.TCBackendFlags(of.Flags)&objects.TCBackendFlagsBACKEND_WATCHED == 0 {
			continue
		}
		out = append(out, outlier.Outcome{
			ID: id, Port: port, Endpoint: objects.EndpointOf(of), Failed: o.Unanswered, Refused: o.Refused,
			Since: clock.wallOf(o.Since), Accepted: clock.wallOf(o.Answered),
		})
	}
	if err := entries.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return nil, fmt.Errorf("read eBPF map %s: %w", m, err)
	}
	for _, id := range gone {
		if err := objects.Remove(m, id); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// FailedSockets implements dataplane.SocketWatcher. Its cost follows the number of endpoints whose
// handshakes have failed.
func (t *Table) FailedSockets() (list []dataplane.FailedSockets, err error) {
	m, backends, clock := t.m(objects.TCMapOutcomes), t.m(objects.TCMapBackends), newEventClock()
	failed := map[uint32]objects.TCOutcome{}
	err = objects.Each(m, func(id uint32, o objects.TCOutcome) {
		if o.Failures[objects.SockHandshakeFailureHANDSHAKE_REFUSED].Segments > 0 ||
			o.Failures[objects.SockHandshakeFailureHANDSHAKE_UNANSWERED].Segments > 0 {
			failed[id] = o
		}
	})
	if err != nil {
		return nil, err
	}
	for id, o := range failed {
		var of objects.TCBackend
		switch err := backends.Lookup(id, &of); {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			if err := objects.Remove(m, id); err != nil {
				return nil, err
			}
			continue
		case err != nil:
			return nil, fmt.Errorf("read eBPF map %s: %w", backends, err)
		}
		if port, known := t.services.Port(of.Service); known {
			list = append(list, dataplane.FailedSockets{
				Port: port, Endpoint: objects.EndpointOf(of), Client: objects.FromAddr(o.Client, of.Family), Accepted: clock.wallOf(o.Answered),
				Refused:    clock.failures(&o.Failures[objects.SockHandshakeFailureHANDSHAKE_REFUSED]),
				Unanswered: clock.failures(&o.Failures[objects.SockHandshakeFailureHANDSHAKE_UNANSWERED]),
			})
		}
	}
	return list, nil
}

func (c eventClock) failures(f *objects.TCHandshakeFailures) dataplane.Failures {
	if f.Segments == 0 { // the endpoint has answered since
		return dataplane.Failures{}
	}
	return dataplane.Failures{Connections: f.Connections, Segments: f.Segments, First: c.wallOf(f.First), Last: c.wallOf(f.Last)}
}

// wallOf is wall, with the zero time for 0.
func (c eventClock) wallOf(ns uint64) time.Time {
	if ns == 0 {
		return time.Time{}
	}
	return c.wall(int64(ns))
}
