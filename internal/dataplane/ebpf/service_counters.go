package ebpf

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
)

var _ dataplane.ServiceCounter = (*Backend)(nil)

// serviceFlows has the number of flows by Service id at the last sweep.
type serviceFlows struct {
	counts atomic.Pointer[map[uint32]uint64]
}

// ServiceCounters implements dataplane.ServiceCounter. It reads the kernel's counters.
func (b *Backend) ServiceCounters() (map[intent.PortID]*dataplane.ServiceCounters, error) {
	if !b.cfg.ServiceMetrics {
		return nil, nil
	}
	out := map[intent.PortID]*dataplane.ServiceCounters{}
	of := func(service uint32) *dataplane.ServiceCounters {
		id, known := b.services.port(service)
		if !known {
			return &dataplane.ServiceCounters{} // the sweep deletes it
		}
		if out[id] == nil {
			out[id] = &dataplane.ServiceCounters{Refused: map[string]uint64{}, Dropped: map[string]uint64{}}
		}
		return out[id]
	}
	err := eachPerCPU(b.m(tcMapServiceCounters), func(service uint32, perCPU []tcServiceCounts) {
		c := of(service)
		for i := range perCPU {
			addCounts(c, &perCPU[i])
		}
	})
	if err != nil {
		return nil, err
	}
	err = eachPerCPU(b.m(tcMapServiceRefusals), func(key tcRefusalKey, perCPU []uint64) {
		c, n := of(key.Service), uint64(0)
		for _, v := range perCPU {
			n += v
		}
		if int(key.Verdict) >= len(b.objects.verdicts) || c.Refused == nil {
			return
		}
		name := b.objects.verdicts[key.Verdict]
		if verdictRefuses(tcVerdict(key.Verdict)) {
			c.Refused[name] += n
		} else {
			c.Dropped[name] += n
		}
	})
	if err != nil {
		return nil, err
	}
	if active := b.active.counts.Load(); active != nil {
		for service, n := range *active {
			of(service).Active += n
		}
	}
	return out, nil
}

func addCounts(c *dataplane.ServiceCounters, n *tcServiceCounts) {
	c.Connections += n.Connections
	c.PacketsToEndpoint += n.Packets[0]
	c.PacketsToClient += n.Packets[1]
	c.BytesToEndpoint += n.Bytes[0]
	c.BytesToClient += n.Bytes[1]
	for i, v := range n.Handshakes {
		c.Handshakes[i] += uint64(v)
	}
	c.HandshakeSum += time.Duration(n.HandshakeSum) * time.Microsecond
}

// verdictRefuses is verdict_refuses of bpf/lib/events.h.
func verdictRefuses(v tcVerdict) bool {
	switch v {
	case tcVerdictREJECTED_RST, tcVerdictREJECTED_ICMP, tcVerdictDROP_POLICY_LOCAL, tcVerdictDROP_SOURCE_RANGE,
		tcVerdictSOCKET_REFUSED, tcVerdictSOCKET_TIMED_OUT:
		return true
	}
	return false
}

// eachPerCPU calls f for every entry of a per-CPU hash. Programs may add entries meanwhile.
func eachPerCPU[K, V any](m *ebpf.Map, f func(K, []V)) error {
	var key K
	var values []V
	entries := m.Iterate()
	for entries.Next(&key, &values) {
		f(key, values)
	}
	if err := entries.Err(); err != nil && !errors.Is(err, ebpf.ErrIterationAborted) {
		return fmt.Errorf("read eBPF map %s: %w", m, err)
	}
	return nil
}

// forgetServices deletes the counters of Services that were deleted a while ago.
func (b *Backend) forgetServices() error {
	if !b.cfg.ServiceMetrics {
		return nil
	}
	unknown := func(service uint32) bool { _, known := b.services.port(service); return !known }
	var services []uint32
	var refusals []tcRefusalKey
	err := errors.Join(
		eachPerCPU(b.m(tcMapServiceCounters), func(service uint32, _ []tcServiceCounts) {
			if unknown(service) {
				services = append(services, service)
			}
		}),
		eachPerCPU(b.m(tcMapServiceRefusals), func(key tcRefusalKey, _ []uint64) {
			if unknown(key.Service) {
				refusals = append(refusals, key)
			}
		}),
	)
	for _, service := range services {
		err = errors.Join(err, remove(b.m(tcMapServiceCounters), service))
	}
	for _, key := range refusals {
		err = errors.Join(err, remove(b.m(tcMapServiceRefusals), key))
	}
	return err
}

// topServices returns at most n ports, those with the most connections and refusals first;
// 0 returns all.
func topServices(all map[intent.PortID]*dataplane.ServiceCounters, n int) []intent.PortID {
	weight := func(c *dataplane.ServiceCounters) uint64 {
		sum := c.Connections
		for _, v := range c.Refused {
			sum += v
		}
		for _, v := range c.Dropped {
			sum += v
		}
		return sum
	}
	ids := slices.SortedFunc(maps.Keys(all), func(x, y intent.PortID) int {
		if wx, wy := weight(all[x]), weight(all[y]); wx != wy {
			if wx > wy {
				return -1
			}
			return 1
		}
		return x.Compare(y)
	})
	if n > 0 && len(ids) > n {
		ids = ids[:n]
	}
	return ids
}
