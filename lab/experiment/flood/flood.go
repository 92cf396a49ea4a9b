// Package flood measures new honest connections while a host on the LAN sends SYNs from
// forged sources to the same NodePort. It uses Spillway's dataplanes and kube-proxy, and
// endpoints on the receiving node and on the other one.
package flood

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// kubeProxy begins the name of a mode in which kube-proxy serves node0.
const kubeProxy = "kube-proxy-"

// Modes lists the modes to measure.
var Modes = []string{"ebpf", "nftables", "iptables", kubeProxy + "nftables", kubeProxy + "iptables"}

// Config selects the measurements.
type Config struct {
	Name     string // of the lab clusters
	Modes    []string
	Rate     int           // SYNs a second; 0 is as many as the machine sends
	Duration time.Duration // of each flood, and of the quiet time before it
	Clients  int           // honest clients that connect at once
	Progress *experiment.Progress
}

// Validate returns an error of one line for an invalid Config.
func (c Config) Validate() error {
	for i, m := range c.Modes {
		if !slices.Contains(Modes, m) || slices.Contains(c.Modes[:i], m) {
			return fmt.Errorf("--modes %q: not one, or twice: use some of %s", m, strings.Join(Modes, ", "))
		}
	}
	switch {
	case len(c.Modes) == 0:
		return fmt.Errorf("--modes: use some of %s", strings.Join(Modes, ", "))
	case c.Rate < 0:
		return fmt.Errorf("--rate %d: must not be negative", c.Rate)
	case c.Duration < time.Second:
		return errors.New("--duration: at least 1s")
	case c.Clients < 1:
		return fmt.Errorf("--clients %d: at least 1", c.Clients)
	}
	return nil
}

// The Services: one with its endpoint on node0, one with it on node1.
const (
	herePort      = 30080
	elsewherePort = 30081
	podPort       = 80
)

// Run measures one mode after another, each on a cluster of its own. When ctx ends or a
// step fails, the report holds the complete results, beside the error.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	machine, err := harness.Begin()
	if err != nil {
		return nil, err
	}
	report := &Report{Machine: machine, Seconds: cfg.Duration.Seconds(), Clients: cfg.Clients, Rate: cfg.Rate}
	for _, mode := range cfg.Modes {
		b := &bench{cfg: cfg, mode: mode, report: report}
		if err := b.run(ctx); err != nil {
			return report, err
		}
	}
	return report, nil
}

// bench measures one mode.
type bench struct {
	cfg     Config
	mode    string
	harness *harness.Harness
	report  *Report
}

func (b *bench) run(ctx context.Context) (err error) {
	b.cfg.Progress.Step("%s: building a cluster of two nodes", b.mode)
	spec := topology.DefaultSpec(b.cfg.Name)
	spec.Clients, spec.Conntrack = 3, true // honest, attacker, API server
	if b.harness, err = harness.Up(ctx, spec); err != nil {
		return err
	}
	defer func() { err = harness.End(ctx, err, b.cfg.Progress, b.harness) }()
	if err := b.setUp(ctx); err != nil {
		return err
	}
	for _, place := range []struct {
		name string
		port uint16
	}{{"here", herePort}, {"elsewhere", elsewherePort}} {
		if err := b.measure(ctx, place.name, netip.AddrPortFrom(b.harness.Cluster.Node(0).IPv4, place.port)); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) setUp(ctx context.Context) error {
	c := b.harness.Cluster
	b.cfg.Progress.Step("%s: starting servers and the proxy", b.mode)
	for node := range 2 {
		if err := b.harness.Serve(ctx, c.Pod(node, 0), workload.HTTP, podPort); err != nil {
			return err
		}
	}
	if err := b.serve(ctx); err != nil {
		return err
	}
	for _, port := range []uint16{herePort, elsewherePort} {
		if err := b.harness.WaitAnswer(ctx, c.Client(0), workload.HTTP, netip.AddrPortFrom(c.Node(0).IPv4, port)); err != nil {
			return err
		}
	}
	return nil
}

// serve starts kube-proxy on the receiving node, or an agent on each.
func (b *bench) serve(ctx context.Context) error {
	c := b.harness.Cluster
	if mode, ok := strings.CutPrefix(b.mode, kubeProxy); ok {
		if _, err := b.harness.API(ctx, c.Client(2), objects(c)...); err != nil {
			return err
		}
		return b.harness.KubeProxy(ctx, c.Node(0), mode, 0)
	}
	text, err := manifests(c)
	if err != nil {
		return err
	}
	if _, err := b.harness.WriteFile("manifests/flood.yaml", text); err != nil {
		return err
	}
	for i := range c.Spec.Nodes {
		if err := b.harness.Agent(ctx, c.Node(i), b.harness.Path("manifests"), b.mode); err != nil {
			return err
		}
	}
	return nil
}

// measure connects without a flood and with one.
func (b *bench) measure(ctx context.Context, place string, target netip.AddrPort) error {
	c := b.harness.Cluster
	b.cfg.Progress.Step("%s: new connections without a flood, endpoint %s", b.mode, place)
	quiet := probe(ctx, c.Client(0), target, b.cfg.Clients, b.cfg.Duration)
	b.cfg.Progress.Step("%s: new connections in a flood, endpoint %s", b.mode, place)
	attacker, err := newAttacker(c.Client(1), c.Node(0), target)
	if err != nil {
		return err
	}
	defer attacker.close()
	floodCtx, stop := context.WithCancel(ctx)
	var rate float64
	var flooding sync.WaitGroup
	flooding.Go(func() { rate, err = attacker.flood(floodCtx, b.cfg.Rate) })
	flooded := probe(ctx, c.Client(0), target, b.cfg.Clients, b.cfg.Duration)
	stop()
	flooding.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return err
	}
	entries, err := c.Node(0).ConntrackCount()
	if err != nil {
		return err
	}
	b.report.Rows = append(b.report.Rows, newRow(b.mode, place, rate, quiet, flooded, entries))
	return nil
}
