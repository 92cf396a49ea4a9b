package flows

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

var _ dataplane.ServiceCounter = (*Table)(nil)

// activeFlows has the number of flows by Service id at the last sweep.
type activeFlows struct {
	counts atomic.Pointer[map[uint32]uint64]
}

// ServiceCounters implements dataplane.ServiceCounter. It reads the kernel's counters.
func (t *Table) ServiceCounters() (map[intent.PortID]*dataplane.ServiceCounters, error) {
	if !t.cfg.ServiceMetrics {
		return nil, nil
	}
	r := countersReading{verdicts: t.objects.Verdicts, connectionsOnly: t.cfg.ServiceConnectionsOnly, port: t.services.Port,
		of: map[intent.PortID]*dataplane.ServiceCounters{}}
	if err := objects.EachPerCPU(t.m(objects.TCMapServiceCounters), r.addCounters); err != nil {
		return nil, err
	}
	if err := objects.EachPerCPU(t.m(objects.TCMapServiceRefusals), r.addRefusals); err != nil {
		return nil, err
	}
	if active := t.active.counts.Load(); active != nil {
		for service, n := range *active {
			r.addActive(service, n)
		}
	}
	return r.of, nil
}

// ServiceCountersOf implements dataplane.ServiceCounter. It looks up the counters of these
// ports. It looks at all refusals: only Services that refused or dropped have some.
func (t *Table) ServiceCountersOf(ports []intent.PortID) (map[intent.PortID]*dataplane.ServiceCounters, error) {
	if !t.cfg.ServiceMetrics {
		return nil, nil
	}
	services := t.services.IDsOf(ports)
	r := countersReading{verdicts: t.objects.Verdicts, connectionsOnly: t.cfg.ServiceConnectionsOnly,
		of: map[intent.PortID]*dataplane.ServiceCounters{}, port: func(service uint32) (intent.PortID, bool) {
			id, wanted := services[service]
			return id, wanted
		}}
	counters := t.m(objects.TCMapServiceCounters)
	for service := range services {
		var perCPU []objects.TCServiceCounts
		switch err := counters.Lookup(service, &perCPU); {
		case err == nil:
			r.addCounters(service, perCPU)
		case !errors.Is(err, ebpf.ErrKeyNotExist):
			return nil, fmt.Errorf("read eBPF map %s: %w", counters, err)
		}
	}
	if err := objects.EachPerCPU(t.m(objects.TCMapServiceRefusals), r.addRefusals); err != nil {
		return nil, err
	}
	if active := t.active.counts.Load(); active != nil {
		for service := range services {
			if n := (*active)[service]; n > 0 {
				r.addActive(service, n)
			}
		}
	}
	return r.of, nil
}

// countersReading adds up the counters of Service ports.
type countersReading struct {
	verdicts        []string // names of the counters
	connectionsOnly bool
	// port returns the port of a Service id; false: it is unknown and soon deleted, or not
	// wanted.
	port func(service uint32) (intent.PortID, bool)
	of   map[intent.PortID]*dataplane.ServiceCounters
}

// service returns the counters of a Service id; nil if its port is not counted.
func (r *countersReading) service(service uint32) *dataplane.ServiceCounters {
	id, ok := r.port(service)
	if !ok {
		return nil
	}
	c := r.of[id]
	if c == nil {
		c = &dataplane.ServiceCounters{Refused: map[string]uint64{}, Dropped: map[string]uint64{}, ConnectionsOnly: r.connectionsOnly}
		r.of[id] = c
	}
	return c
}

func (r *countersReading) addCounters(service uint32, perCPU []objects.TCServiceCounts) {
	if c := r.service(service); c != nil {
		for i := range perCPU {
			addCounts(c, &perCPU[i])
		}
	}
}

func (r *countersReading) addRefusals(key objects.TCRefusalKey, perCPU []uint64) {
	c := r.service(key.Service)
	if c == nil || int(key.Verdict) >= len(r.verdicts) {
		return
	}
	n := uint64(0)
	for _, v := range perCPU {
		n += v
	}
	name := r.verdicts[key.Verdict]
	if verdict, _ := objects.VerdictOf(name); verdict.Effect == objects.Refused {
		c.Refused[name] += n
	} else {
		c.Dropped[name] += n
	}
}

func (r *countersReading) addActive(service uint32, n uint64) {
	if c := r.service(service); c != nil {
		c.Active += n
	}
}

func addCounts(c *dataplane.ServiceCounters, n *objects.TCServiceCounts) {
	c.Connections += n.Connections
	if !c.ConnectionsOnly { // else they are of an earlier run
		c.PacketsToEndpoint += n.Packets[0]
		c.PacketsToClient += n.Packets[1]
		c.BytesToEndpoint += n.Bytes[0]
		c.BytesToClient += n.Bytes[1]
	}
	for i, v := range n.Handshakes {
		c.Handshakes[i] += uint64(v)
	}
	c.HandshakeSum += time.Duration(n.HandshakeSum) * time.Microsecond
}

// forgetServices deletes the counters of Services that were deleted a while ago.
func (t *Table) forgetServices() error {
	if !t.cfg.ServiceMetrics {
		return nil
	}
	unknown := func(service uint32) bool { _, known := t.services.Port(service); return !known }
	var services []uint32
	var refusals []objects.TCRefusalKey
	err := errors.Join(
		objects.EachPerCPU(t.m(objects.TCMapServiceCounters), func(service uint32, _ []objects.TCServiceCounts) {
			if unknown(service) {
				services = append(services, service)
			}
		}),
		objects.EachPerCPU(t.m(objects.TCMapServiceRefusals), func(key objects.TCRefusalKey, _ []uint64) {
			if unknown(key.Service) {
				refusals = append(refusals, key)
			}
		}),
	)
	for _, service := range services {
		err = errors.Join(err, objects.Remove(t.m(objects.TCMapServiceCounters), service))
	}
	for _, key := range refusals {
		err = errors.Join(err, objects.Remove(t.m(objects.TCMapServiceRefusals), key))
	}
	return err
}

// topServices returns at most n ports, 0 for all: namespaces take turns, each with its ports with
// the most connections and refusals first.
func topServices(all map[intent.PortID]*dataplane.ServiceCounters, n int) []intent.PortID {
	weight := func(id intent.PortID) uint64 {
		sum := all[id].Connections
		for _, v := range all[id].Refused {
			sum += v
		}
		for _, v := range all[id].Dropped {
			sum += v
		}
		return sum
	}
	ids := slices.SortedFunc(maps.Keys(all), func(x, y intent.PortID) int {
		return cmp.Or(cmp.Compare(weight(y), weight(x)), x.Compare(y))
	})
	if n > 0 && len(ids) > n {
		ids = model.RoundRobin(ids, func(id intent.PortID) string { return id.Service.Namespace })[:n]
	}
	return ids
}
