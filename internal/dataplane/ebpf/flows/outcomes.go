package flows

import (
	"errors"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/decisions/outlier"
)

var (
	_ dataplane.HandshakeWatcher = (*Table)(nil)
	_ dataplane.SocketWatcher    = (*Table)(nil)
)

// Outcomes implements dataplane.HandshakeWatcher. Its cost follows the number of watched
// endpoints that had a connection.
func (t *Table) Outcomes() (out []outlier.Outcome, err error) {
	clock := newEventClock()
	all := func(*objects.TCOutcome) bool { return true }
	err = t.eachOutcome(all, func(id uint32, o *objects.TCOutcome, of *objects.TCBackend, port intent.PortID) {
		if objects.TCBackendFlags(of.Flags)&objects.TCBackendFlagsBACKEND_WATCHED == 0 {
			return
		}
		out = append(out, outlier.Outcome{
			ID: id, Port: port, Endpoint: objects.EndpointOf(*of), Failed: o.Unanswered, Refused: o.Refused,
			Since: clock.wallOf(o.Since), Accepted: clock.wallOf(o.Answered),
		})
	})
	return out, err
}

// FailedSockets implements dataplane.SocketWatcher. Its cost follows the number of endpoints whose
// handshakes have failed.
func (t *Table) FailedSockets() (list []dataplane.FailedSockets, err error) {
	const refused, unanswered = objects.SockHandshakeFailureHANDSHAKE_REFUSED, objects.SockHandshakeFailureHANDSHAKE_UNANSWERED
	clock := newEventClock()
	failed := func(o *objects.TCOutcome) bool {
		return o.Failures[refused].Segments > 0 || o.Failures[unanswered].Segments > 0
	}
	err = t.eachOutcome(failed, func(_ uint32, o *objects.TCOutcome, of *objects.TCBackend, port intent.PortID) {
		list = append(list, dataplane.FailedSockets{
			Port: port, Endpoint: objects.EndpointOf(*of), Client: objects.FromAddr(o.Client, of.Family), Accepted: clock.wallOf(o.Answered),
			Refused: clock.failures(&o.Failures[refused]), Unanswered: clock.failures(&o.Failures[unanswered]),
		})
	})
	return list, err
}

// eachOutcome calls f with the chosen outcomes of endpoints that a Service has, and removes those of
// endpoints that are gone.
func (t *Table) eachOutcome(choose func(*objects.TCOutcome) bool,
	f func(id uint32, o *objects.TCOutcome, of *objects.TCBackend, port intent.PortID)) error {
	m, backends := t.m(objects.TCMapOutcomes), t.m(objects.TCMapBackends)
	chosen := map[uint32]objects.TCOutcome{}
	err := objects.Each(m, func(id uint32, o objects.TCOutcome) {
		if choose(&o) {
			chosen[id] = o
		}
	})
	if err != nil {
		return err
	}
	for id, o := range chosen {
		var of objects.TCBackend
		switch err := backends.Lookup(id, &of); {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			if err := objects.Remove(m, id); err != nil {
				return err
			}
			continue
		case err != nil:
			return fmt.Errorf("read eBPF map %s: %w", backends, err)
		}
		if port, known := t.services.Port(of.Service); known {
			f(id, &o, &of, port)
		}
	}
	return nil
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
