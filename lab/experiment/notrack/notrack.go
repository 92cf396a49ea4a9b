// Package notrack compares short connections to a real memcached, as the published
// figures do. It measures them without a policy, with a policy that tracks, and with a
// do-not-track policy. It also compares them with the same server on a node without
// conntrack.
//
//	client0 ─┐          node0 (agent, conntrack)  ── pod0 with memcached, and one on the node
//	client1 ─┘
//	client0 ─┐          node0 (nothing)           ── the same
//	client1 ─┘
package notrack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"time"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// Config configures a measurement.
type Config struct {
	Name   string // of the two lab clusters, with -t and -m behind it
	Mode   string // --proxy-mode of the agent
	Rounds int
	// Duration of one measurement; half of it before is not counted.
	Duration    time.Duration
	Connections int            // concurrent, of both clients
	Rate        float64        // connections/s at which CPU is compared
	Only        *regexp.Regexp // what is measured, by "NAME, FIGURE"; nil: all
	Progress    *experiment.Progress
}

// Validate returns an error for a Config that cannot be measured.
func (c Config) Validate() error {
	switch {
	case c.Rounds < 1:
		return fmt.Errorf("--rounds %d: at least 1 is needed", c.Rounds)
	case c.Duration < 100*time.Millisecond:
		return errors.New("--duration: at least 100ms")
	case c.Connections < clients:
		return fmt.Errorf("--connections %d: at least %d", c.Connections, clients)
	case c.Rate <= 0:
		return errors.New("--rate: more than 0")
	}
	return nil
}

const (
	clients = 2
	podPort = 11211
	// nodePort is another port, so that one policy never selects both.
	nodePort = 11311
)

// packages are the programs that are needed besides nft.
var packages = map[string]string{"memcached": "memcached", "nft": "nftables", "conntrack": "conntrack"}

type bench struct {
	cfg           Config
	tracked, bare *harness.Harness
	manifests     string
	table         *table
	policy        Case   // as last written
	rules         string // of the node without an agent
	report        *Report
}

// Run builds both clusters, measures and removes them. If a step fails, the report holds
// the complete results, beside the error.
func Run(ctx context.Context, cfg Config) (report *Report, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if err := harness.NeedPrograms(packages); err != nil {
		return nil, err
	}
	machine, err := experiment.ReadMachine()
	if err != nil {
		return nil, err
	}
	b := &bench{cfg: cfg, report: &Report{Machine: machine, Mode: cfg.Mode, Rounds: cfg.Rounds,
		Seconds: cfg.Duration.Seconds(), Rate: cfg.Rate}}
	defer func() {
		err = harness.End(ctx, err, cfg.Progress, b.tracked, b.bare)
	}()
	if err := b.setUp(ctx); err != nil {
		return nil, err
	}
	return b.report, b.measureAll(ctx)
}

func (b *bench) setUp(ctx context.Context) (err error) {
	b.cfg.Progress.Step("building a cluster with conntrack and an agent, and one without")
	spec := topology.DefaultSpec(b.cfg.Name + "-t")
	spec.Nodes, spec.PodsPerNode, spec.Clients, spec.Conntrack = 1, 1, clients, true
	if b.tracked, err = harness.Up(ctx, spec); err != nil {
		return err
	}
	spec.Name, spec.Conntrack = b.cfg.Name+"-m", false
	if b.bare, err = harness.Up(ctx, spec); err != nil {
		return err
	}
	for _, r := range []*harness.Harness{b.tracked, b.bare} {
		for host, port := range map[*topology.Host]uint16{r.Cluster.Pod(0, 0): podPort, r.Cluster.Node(0): nodePort} {
			if err := r.Serve(ctx, host, workload.Memcached, port); err != nil {
				return err
			}
		}
		for i := range clients {
			if err := r.RoutePods(r.Cluster.Client(i)); err != nil {
				return err
			}
			if err := r.Cluster.Client(i).Do(widenPorts); err != nil {
				return err
			}
		}
	}
	if err := b.writeManifests(); err != nil {
		return err
	}
	b.table = &table{node: b.tracked.Cluster.Node(0)}
	return b.tracked.Agent(ctx, b.tracked.Cluster.Node(0), b.manifests, b.cfg.Mode)
}

// side is a destination and the state of the cluster.
type side struct {
	harness *harness.Harness
	policy  Case
	node    bool   // the server on the node, not that in the pod
	full    bool   // the table is full of flows that are not given up
	lived   bool   // the table is as large as that of a node that has tracked for a while
	rules   string // of nft, on the node without an agent
}

// room is the number of free entries in a table in use. The measured flows fit. The other
// entries prolong searches, as they do where every connection leaves an entry for 120 s.
const room = 100_000

func (s side) free() int {
	if s.lived {
		return room
	}
	return 0
}

func (s side) target() netip.AddrPort {
	if s.node {
		return netip.AddrPortFrom(s.harness.Cluster.Node(0).IPv4, nodePort)
	}
	return netip.AddrPortFrom(s.harness.Cluster.Pod(0, 0).IPv4, podPort)
}

// arm sets the state of a side and measures it.
func (b *bench) arm(s side, rate float64) experiment.Arm[Sample] {
	return func(ctx context.Context) (Sample, error) {
		if s.harness == b.tracked {
			if err := b.setPolicy(ctx, s.policy); err != nil {
				return Sample{}, err
			}
			if err := b.table.fill(ctx, s.full || s.lived, s.free()); err != nil {
				return Sample{}, err
			}
		} else if err := b.setRules(ctx, s.rules); err != nil {
			return Sample{}, err
		}
		return b.measure(ctx, s, rate, b.cfg.Duration)
	}
}

// measure makes all clients send requests at once. A rate of 0 is as fast as they can.
func (b *bench) measure(ctx context.Context, s side, rate float64, duration time.Duration) (Sample, error) {
	cfg := load.Config{
		Kind: load.Memcached, Target: s.target(), Connections: b.cfg.Connections / clients, Rate: rate / clients,
		Duration: duration, Warmup: duration / 2, Timeout: 3 * time.Second,
	}
	before, err := s.harness.Cluster.Node(0).ConntrackCount()
	if err != nil {
		return Sample{}, err
	}
	busy, err := s.harness.RanFor()
	if err != nil {
		return Sample{}, err
	}
	results, errs := make([]*load.Result, clients), make(chan error, clients)
	for i := range clients {
		go func() {
			var err error
			results[i], err = s.harness.Load(ctx, s.harness.Cluster.Client(i), cfg)
			errs <- err
		}()
	}
	for range clients {
		err = errors.Join(err, <-errs)
	}
	if err != nil {
		return Sample{}, err
	}
	after, err := s.harness.RanFor()
	if err != nil {
		return Sample{}, err
	}
	left, err := s.harness.Cluster.Node(0).ConntrackCount()
	if err != nil {
		return Sample{}, err
	}
	out := Sample{Entries: left - before}
	for _, r := range results {
		out.Rate += r.Rate
		out.Answered += r.Requests
		out.Failed += r.Failed()
		for kind, n := range r.Errors {
			if out.Errors == nil {
				out.Errors = map[string]int64{}
			}
			out.Errors[kind] += n
		}
	}
	if out.Answered > 0 { // includes the time before the measurement
		out.CPU = (after - busy) * 1e6 / (float64(out.Answered) * 1.5)
	}
	return out, nil
}
