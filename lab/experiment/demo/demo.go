// Package demo shows Spillway on a cluster of two nodes on this machine. It sends a
// request to every address of two Services, and compares a Service with the same server
// without a Service.
package demo

import (
	"context"
	"fmt"
	"io/fs"
	"net/netip"
	"time"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// Limit is the maximum duration of a demo, without cleanup.
const Limit = 110 * time.Second

const (
	metalPort   = 8080
	warmup      = 100 * time.Millisecond
	patience    = time.Second // for an answer
	connections = 32
)

// Config configures a demo.
type Config struct {
	Name      string // of the cluster
	Mode      string // --proxy-mode of the agents
	Manifests fs.FS  // *.yaml, as in examples/demo
	Rounds    int
	Duration  time.Duration // of each measurement
	Progress  *experiment.Progress
}

// Validate returns an error of one line for an invalid Config.
func (c Config) Validate() error {
	if c.Rounds < 1 || c.Duration < 50*time.Millisecond {
		return fmt.Errorf("rounds is %d and duration %v: use at least 1 and 50ms", c.Rounds, c.Duration)
	}
	// Ten measurements a round, and some seconds for everything else.
	if all := 10 * time.Duration(c.Rounds) * (c.Duration + warmup + 50*time.Millisecond); all > Limit-20*time.Second {
		return fmt.Errorf("%d rounds of %v would take %v: the demo ends within %v, use fewer or shorter ones",
			c.Rounds, c.Duration, all.Round(time.Second), Limit)
	}
	return nil
}

// demo is one run.
type demo struct {
	cfg     Config
	harness *harness.Harness
	objects *objects
	report  *Report
}

// Run shows everything and always cleans up. The report holds the results until an error.
// An address without an answer is an error.
func Run(ctx context.Context, cfg Config) (report *Report, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	machine, err := harness.Begin()
	if err != nil {
		return nil, err
	}
	d := &demo{cfg: cfg, report: &Report{Mode: cfg.Mode, Machine: machine}}
	if d.objects, err = readObjects(cfg.Manifests); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, Limit, fmt.Errorf("the demo did not end within %v", Limit))
	defer cancel()
	d.step("building a cluster of two nodes")
	spec := topology.DefaultSpec(cfg.Name)
	// As on a node with flannel: conntrack is on, so that entries would be visible.
	spec.Masquerade, spec.Conntrack = true, true
	if d.harness, err = harness.Up(ctx, spec); err != nil {
		return nil, err
	}
	defer func() { err = harness.End(ctx, err, d.cfg.Progress, d.harness) }()
	for _, part := range []func(context.Context) error{d.setUp, d.probe, d.measure} {
		if err := part(ctx); err != nil {
			return d.report, err
		}
	}
	return d.report, d.report.unanswered()
}

func (d *demo) step(format string, args ...any) { d.cfg.Progress.Step(format, args...) }

// setUp starts the servers and the agents.
func (d *demo) setUp(ctx context.Context) error {
	c := d.harness.Cluster
	servers, err := d.objects.servers(c)
	if err != nil {
		return err
	}
	servers = append(servers, server{c.Node(0), workload.HTTP, metalPort})
	d.step("starting %d servers on nodes and in pods", len(servers))
	for _, s := range servers {
		if err := d.harness.Serve(ctx, s.host, s.kind, s.port); err != nil {
			return err
		}
	}
	if err := d.harness.RoutePods(c.Client(0)); err != nil {
		return err
	}
	dir, err := writeManifests(d.harness, d.cfg.Manifests)
	if err != nil {
		return err
	}
	for i := range c.Spec.Nodes {
		d.step("starting an agent on %s", c.Node(i).Name)
		if err := d.harness.Agent(ctx, c.Node(i), dir, d.cfg.Mode); err != nil {
			return err
		}
	}
	return nil
}

// probe sends requests to every Service address.
func (d *demo) probe(ctx context.Context) error {
	all := probes(d.objects, d.harness.Cluster)
	hosts := hostNames(d.harness.Cluster)
	d.step("asking %d Service addresses", len(all))
	for i, v := range all {
		d.cfg.Progress.Part(i, len(all))
		if err := v.ask(ctx, hosts); err != nil {
			return err
		}
		d.report.Visits = append(d.report.Visits, v)
	}
	return nil
}

// The names of the paths.
const (
	toMetal     = "client to a server on the node (metal)"
	toPod       = "client to the pod, no Service"
	toNodePort  = "client to NodePort"
	podToPod    = "pod to pod, no Service"
	toClusterIP = "pod to ClusterIP"
)

// path is one row of the measurements: a source and a destination.
type path struct {
	name string
	from *topology.Host
	to   netip.AddrPort
}

// paths lists the compared paths; the first is metal.
func (d *demo) paths() ([]path, error) {
	c := d.harness.Cluster
	s, err := d.objects.service("web-local")
	if err != nil {
		return nil, err
	}
	clusterIP, err := netip.ParseAddr(s.Spec.ClusterIP)
	if err != nil {
		return nil, fmt.Errorf("read Service %s: clusterIP: %w", s.Name, err)
	}
	port := uint16(s.Spec.Ports[0].Port)
	node, pod := c.Node(0), netip.AddrPortFrom(c.Pod(0, 0).IPv4, port)
	return []path{
		{toMetal, c.Client(0), netip.AddrPortFrom(node.IPv4, metalPort)},
		{toPod, c.Client(0), pod},
		{toNodePort, c.Client(0), netip.AddrPortFrom(node.IPv4, uint16(s.Spec.Ports[0].NodePort))},
		{podToPod, c.Pod(0, 2), pod},
		{toClusterIP, c.Pod(0, 2), netip.AddrPortFrom(clusterIP, port)},
	}, nil
}

// measure loads every path in each round, forwards and backwards, so that a drift of the
// machine affects all alike.
func (d *demo) measure(ctx context.Context) error {
	paths, err := d.paths()
	if err != nil {
		return err
	}
	kinds := []load.Kind{load.HTTP, load.Conn}
	n := len(paths) * len(kinds)
	samples := make([][]harness.Sample, n)
	d.step("measuring %d paths with %d kinds of load, %d rounds of %v each", len(paths), len(kinds), d.cfg.Rounds, d.cfg.Duration)
	for round := range d.cfg.Rounds {
		for i := range n {
			d.cfg.Progress.Part(round*n+i, d.cfg.Rounds*n)
			if round%2 == 1 {
				i = n - 1 - i
			}
			p := paths[i%len(paths)]
			s, err := d.harness.Measure(ctx, p.from, load.Config{Kind: kinds[i/len(paths)], Target: p.to,
				Connections: connections, Duration: d.cfg.Duration, Warmup: warmup, Timeout: patience})
			if err != nil {
				return fmt.Errorf("measure %s: %w", p.name, err)
			}
			samples[i] = append(samples[i], s)
		}
	}
	for i := range samples {
		metal := samples[i/len(paths)*len(paths)]
		d.report.Speeds = append(d.report.Speeds, newSpeed(paths[i%len(paths)].name, metal, samples[i]))
	}
	return nil
}
