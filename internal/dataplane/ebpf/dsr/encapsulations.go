// Package dsr finds out how packets tell other nodes that an endpoint there answers the client
// directly (direct server return).
package dsr

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/dsrprobe"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

const (
	// probeInterval is the time from one probe of an endpoint to the next, unless it fails.
	probeInterval = 10 * time.Second
	// retryInterval is the time from a failed probe to the next, until failedProbes in a row.
	retryInterval = time.Second
	failedProbes  = 3
	// optionLostProbes in a row without an answer to the option, and with one to datagrams, change the
	// way: routers may forward few packets with options at a time.
	optionLostProbes = 2
	// probesAtOnce bounds what probes cost, in a cluster of any size. Each takes up to 2 s.
	probesAtOnce = 64
	// encapsulationKept is the time for which flows may go on to an endpoint that is gone.
	encapsulationKept = 10 * time.Minute
)

// leastCarried is the length of packets that must arrive, with the headers around the packet
// inside: that one may have the length that each network must forward (RFC 791, RFC 8200).
func leastCarried(is4 bool) int {
	if is4 {
		return 576 + dsrprobe.Room(true)
	}
	return 1280 + dsrprobe.Room(false)
}

// Encapsulations has what probes have found out about endpoints on other nodes. It is the only writer of
// the map dsr_encapsulations.
type Encapsulations struct {
	m     objects.Map
	probe func(context.Context, netip.Addr) (dsrprobe.Result, error)
	log   *slog.Logger

	mu sync.Mutex // of the fields below but the last
	// known has an entry for each endpoint that is or was probed.
	known   map[netip.Addr]*encapsulationState
	probing int       // probes that run
	last    time.Time // the last round
	running sync.WaitGroup
}

// encapsulationState is what is known about one endpoint.
type encapsulationState struct {
	value      objects.TCDsrEncapsulation
	written    bool // value is in the map
	probing    bool
	failures   int // probes in a row without any answer
	optionLost int // probes in a row whose option did not arrive, while value says that it does
	next       time.Time
	wanted     time.Time // the last time that a Service had this endpoint
}

// New reads what an earlier run has found out. It returns nil if there are no probes.
func New(m *ebpf.Map, cfg *objects.Config) (*Encapsulations, error) {
	if len(cfg.DSRKeys) == 0 || cfg.DSRPort == 0 {
		return nil, forgetEncapsulations(m)
	}
	p := dsrprobe.Prober{Key: cfg.DSRKeys[0], Port: cfg.DSRPort}
	c := &Encapsulations{m: m, probe: p.Probe, log: cfg.Log, known: map[netip.Addr]*encapsulationState{}}
	err := objects.Each(m, func(k objects.TCAddrKey, v objects.TCDsrEncapsulation) {
		c.known[objects.FromAddr(k.Addr, uint8(k.Family))] = &encapsulationState{value: v, written: true, wanted: time.Now()}
	})
	return c, err
}

// forgetEncapsulations removes what an earlier run has found out.
func forgetEncapsulations(m *ebpf.Map) error {
	var old []objects.TCAddrKey
	err := objects.Each(m, func(k objects.TCAddrKey, _ objects.TCDsrEncapsulation) { old = append(old, k) })
	for _, k := range old {
		err = errors.Join(err, m.Delete(k))
	}
	if err != nil {
		return fmt.Errorf("empty eBPF map %s: %w", objects.TCMapDsrEncapsulations, err)
	}
	return nil
}

// Run keeps the map dsr_encapsulations true, for the addresses that endpoints lists. A nil *encapsulations does
// nothing.
func (c *Encapsulations) Run(ctx context.Context, endpoints func() []netip.Addr) {
	if c == nil {
		return
	}
	for {
		c.round(ctx, endpoints(), time.Now)
		select {
		case <-ctx.Done():
			c.running.Wait()
			return
		case <-time.After(retryInterval):
		}
	}
}

// round starts to probe the endpoints that are due. One that answers nothing delays no other.
func (c *Encapsulations) round(ctx context.Context, endpoints []netip.Addr, now func() time.Time) {
	for _, addr := range c.due(endpoints, now()) {
		c.running.Go(func() {
			r, err := c.probe(ctx, addr)
			if ctx.Err() == nil {
				c.found(addr, r, err, now())
			}
		})
	}
}

// found stores what a probe says. An error is one of this node, and says nothing about the network.
func (c *Encapsulations) found(addr netip.Addr, r dsrprobe.Result, failed error, now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.known[addr] // due forgets none that is being probed
	c.probing--
	s.probing = false
	s.next = now.Add(probeInterval)
	if failed != nil {
		c.log.Debug("Probe an endpoint", "err", failed)
		return
	}
	s.learn(r, addr.Is4(), now)
	if !s.known() || s.written {
		return
	}
	if err := c.m.Put(objects.AddrKey(addr), s.value); err != nil {
		c.log.Error("Store how packets tell other nodes about Services", "err", err)
		return
	}
	s.written = true
	s.report(c.log, addr)
}

// report logs what was found out about an endpoint.
func (s *encapsulationState) report(log *slog.Logger, addr netip.Addr) {
	const text = "Packets for an endpoint on another node"
	switch objects.TCDsrEncapsulationKind(s.value.Kind) {
	case objects.TCDsrEncapsulationKindDSR_BY_NOTHING:
		log.Warn("An endpoint on another node does not see clients' addresses: it answers no probe", "endpoint", addr, "encapsulation",
			objects.EncapsulationName(s.value))
	case objects.TCDsrEncapsulationKindDSR_BY_GUE:
		log.Info(text, "endpoint", addr, "encapsulation", objects.EncapsulationName(s.value), "mtu", s.value.Mtu)
	default:
		log.Info(text, "endpoint", addr, "encapsulation", objects.EncapsulationName(s.value))
	}
}

// due returns the endpoints to probe now, the longest due first, and forgets those that are gone.
func (c *Encapsulations) due(endpoints []netip.Addr, now time.Time) (due []netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.last = now
	for _, addr := range endpoints {
		s := c.known[addr]
		if s == nil {
			if len(c.known) >= objects.MaxDSRPaths {
				continue
			}
			s = &encapsulationState{}
			c.known[addr] = s
		}
		s.wanted = now
		if !s.probing && !s.next.After(now) {
			due = append(due, addr)
		}
	}
	for addr, s := range c.known {
		if now.Sub(s.wanted) > encapsulationKept && !s.probing {
			_ = c.m.Delete(objects.AddrKey(addr)) // it may not be there
			delete(c.known, addr)
		}
	}
	slices.SortStableFunc(due, func(a, b netip.Addr) int { return c.known[a].next.Compare(c.known[b].next) })
	due = due[:min(len(due), probesAtOnce-c.probing)]
	for _, addr := range due {
		c.known[addr].probing = true
	}
	c.probing += len(due)
	return due
}

// known reports whether enough probes were sent.
func (s *encapsulationState) known() bool { return s.failures == 0 || s.failures >= failedProbes }

// learn enters the result of a probe. Failures in a row make a path one that carries nothing: a node
// that is busy for a second keeps its connections.
func (s *encapsulationState) learn(r dsrprobe.Result, is4 bool, now time.Time) {
	var found objects.TCDsrEncapsulation
	switch {
	case r.Option:
		s.failures, s.optionLost = 0, 0
		found.Kind = uint8(objects.TCDsrEncapsulationKindDSR_BY_OPTION)
	case r.MTU >= leastCarried(is4):
		s.failures = 0
		if s.written && s.value.Kind == uint8(objects.TCDsrEncapsulationKindDSR_BY_OPTION) {
			if s.optionLost++; s.optionLost < optionLostProbes {
				s.next = now.Add(retryInterval)
				return
			}
		}
		s.optionLost = 0
		found.Kind, found.Mtu = uint8(objects.TCDsrEncapsulationKindDSR_BY_GUE), uint16(r.MTU)
	default:
		if s.failures++; s.failures < failedProbes {
			s.next = now.Add(retryInterval)
			return
		}
		found.Kind = uint8(objects.TCDsrEncapsulationKindDSR_BY_NOTHING)
	}
	s.written = s.written && s.value == found
	s.value = found
}

// List describes the endpoints that Services had in the last round, sorted.
func (c *Encapsulations) List() (list []dataplane.DSREncapsulation) {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for addr, s := range c.known {
		if !s.wanted.Equal(c.last) {
			continue
		}
		d := dataplane.DSREncapsulation{Endpoint: addr, Encapsulation: dataplane.EncapsulationUnknown}
		if s.written {
			d.Encapsulation, d.MTU = objects.EncapsulationName(s.value), int(s.value.Mtu)
		}
		list = append(list, d)
	}
	slices.SortFunc(list, func(a, b dataplane.DSREncapsulation) int { return a.Endpoint.Compare(b.Endpoint) })
	return list
}

// EncapsulationsDesc describes the metric of Collect.
var EncapsulationsDesc = prometheus.NewDesc("spillway_ebpf_dsr_endpoints",
	"Addresses of endpoints on other nodes behind Services with DSR, by how packets tell their node about the Service. option: by an IP "+
		"option. gue: within datagrams. none: new connections get SNAT. unknown: not probed yet.", []string{"encapsulation"}, nil)

// Collect exports the number of endpoints by how packets reach them. A nil *Encapsulations exports nothing.
func (c *Encapsulations) Collect(ch chan<- prometheus.Metric) {
	if c == nil {
		return
	}
	endpoints := map[string]int{}
	for _, d := range c.List() {
		endpoints[d.Encapsulation]++
	}
	for _, encapsulation := range dataplane.Encapsulations {
		ch <- prometheus.MustNewConstMetric(EncapsulationsDesc, prometheus.GaugeValue, float64(endpoints[encapsulation]), encapsulation)
	}
}
