// Package change measures the cost of a change of a Service for each dataplane, in
// clusters of different sizes, on a real kernel:
//
//	world of N Services ── Tracker ── Backend.Replace      cold full sync
//	one endpoint's slice ── Tracker ── Backend.Apply       one change
//	client ── LAN ── node of N Services ── pod             a connection's first packet,
//	client ── LAN ── node of 10 Services ── pod            in turns with this one
//
// Each dataplane and size has a process and a node of its own.
package change

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// Modes lists the dataplanes. kube-proxy's need the programs of hack/peers. "iptables"
// lets Spillway choose the variant.
var Modes = []string{"ebpf", "nftables", "iptables", "iptables-legacy", "iptables-nft",
	kubeProxy + "nftables", kubeProxy + "iptables", kubeProxy + "iptables-legacy", kubeProxy + "iptables-nft"}

const kubeProxy = "kube-proxy-"

// dataplaneOf splits a mode: which proxy writes, to which dataplane, and with which variant of
// iptables, "" for any.
func dataplaneOf(mode string) (proxyMode, variant string, isPeer bool) {
	mode, isPeer = strings.CutPrefix(mode, kubeProxy)
	proxyMode, variant, _ = strings.Cut(mode, "-")
	return proxyMode, variant, isPeer
}

// small is the size that first packets are compared with.
const small = 10

// Config selects the measurements.
type Config struct {
	Name     string // of the clusters
	Modes    []string
	Services []int
	Changes  int // single changes, for the percentiles
	Rounds   int // of the comparison of first packets
	// ChangesOnly leaves that comparison out, and with it the small node.
	ChangesOnly bool
	Progress    *experiment.Progress
}

// Validate returns an error of one line for an invalid Config.
func (c Config) Validate() error {
	for _, m := range c.Modes {
		if !slices.Contains(Modes, m) {
			return fmt.Errorf("mode %q: not a mode: use %s", m, strings.Join(Modes, ", "))
		}
	}
	for _, n := range c.Services {
		if n < 1 || n > 100000 {
			return fmt.Errorf("services is %d: use 1 to 100000", n)
		}
	}
	switch {
	case len(c.Modes) == 0 || len(c.Services) == 0:
		return errors.New("nothing to measure: give at least one mode and one number of Services")
	case c.Changes < 1:
		return fmt.Errorf("changes is %d: use 1 or more", c.Changes)
	case c.Rounds < 1:
		return fmt.Errorf("rounds is %d: use 1 or more", c.Rounds)
	}
	return nil
}

// Run measures everything, mode by mode. When ctx ends or a step fails, the report holds
// the complete results, beside the error.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	machine, err := harness.Begin()
	if err != nil {
		return nil, err
	}
	defer cfg.Progress.Done()
	report := &Report{Machine: machine, Changes: cfg.Changes, Endpoints: Endpoints}
	for _, mode := range cfg.Modes {
		if err := measureMode(ctx, cfg, mode, report); err != nil {
			if ctx.Err() != nil {
				err = harness.EndError(ctx)
			}
			return report, err
		}
	}
	return report, nil
}

// side is a node and the proxy that writes to its kernel.
type side interface {
	cold() Cold
	// change makes single changes and returns their costs.
	change(context.Context) (Batch, error)
	host() *harness.Harness
	down() error
}

func newSide(ctx context.Context, cfg Config, mode, name string, services int) (side, error) {
	spec := topology.DefaultSpec(name)
	spec.Nodes, spec.PodsPerNode, spec.Clients, spec.Masquerade, spec.Conntrack = 1, 1, 2, true, true
	r, err := harness.Up(ctx, spec)
	if err != nil {
		return nil, err
	}
	if err := r.Serve(ctx, r.Cluster.Pod(0, 0), workload.HTTP, ProbePort); err != nil {
		return nil, errors.Join(err, r.Down())
	}
	var s side
	proxyMode, variant, isPeer := dataplaneOf(mode)
	if err := harness.UseIptables(ctx, r.Cluster.Node(0), variant); err != nil {
		return nil, errors.Join(err, r.Down())
	}
	if isPeer {
		s, err = newPeer(ctx, cfg, r, proxyMode, variant, services)
	} else {
		s, err = newOwn(ctx, cfg, r, proxyMode, services)
	}
	if err != nil {
		return nil, err
	}
	if err := r.WaitAnswer(ctx, r.Cluster.Client(0), workload.HTTP, target(r)); err != nil {
		return nil, errors.Join(err, s.down())
	}
	return s, nil
}

// target is the address of the probe for outside clients.
func target(r *harness.Harness) netip.AddrPort {
	return netip.AddrPortFrom(r.Cluster.Node(0).IPv4, ProbeNodePort)
}

// connect returns a measurement: the median time, in µs, of a request on a new
// connection, one at a time. The first packet of each looks up its Service.
func connect(s side) experiment.Arm[float64] {
	return func(ctx context.Context) (float64, error) {
		result, err := s.host().Load(ctx, s.host().Cluster.Client(0), load.Config{Kind: load.Conn, Target: target(s.host()),
			Connections: 1, Duration: 200 * time.Millisecond, Warmup: 30 * time.Millisecond})
		if err != nil {
			return 0, err
		}
		if result.Requests == 0 {
			return 0, fmt.Errorf("nothing answered at %s: %v", target(s.host()), result.Errors)
		}
		return result.Latency.P50, nil
	}
}

func measureMode(ctx context.Context, cfg Config, mode string, report *Report) (err error) {
	var base side
	if !cfg.ChangesOnly {
		cfg.Progress.Step("%s: a node of %d Services", mode, small)
		if base, err = newSide(ctx, cfg, mode, cfg.Name+"-small", small); err != nil {
			return fmt.Errorf("measure %s: %w", mode, err)
		}
		defer func() { err = errors.Join(err, base.down()) }()
	}
	for _, n := range cfg.Services {
		row, err := measureSize(ctx, cfg, mode, n, base)
		if err != nil {
			return fmt.Errorf("measure %s with %d Services: %w", mode, n, err)
		}
		report.Rows = append(report.Rows, row)
	}
	return nil
}

func measureSize(ctx context.Context, cfg Config, mode string, n int, base side) (row Row, err error) {
	cfg.Progress.Step("%s: %d Services of %d endpoints", mode, n, Endpoints)
	s, err := newSide(ctx, cfg, mode, cfg.Name+"-large", n)
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, s.down()) }()
	row = Row{Mode: mode, Services: n, Cold: s.cold()}
	cfg.Progress.Step("%s: %d Services: %d changes", mode, n, cfg.Changes)
	if row.Batch, err = s.change(ctx); err != nil {
		return row, err
	}
	if base == nil {
		return row, nil
	}
	cfg.Progress.Step("%s: %d Services: first packets", mode, n)
	pair := experiment.Pair[float64]{Name: mode, A: connect(base), B: connect(s), Rounds: cfg.Rounds, Progress: cfg.Progress.Part}
	trial, err := pair.Run(ctx)
	if err != nil {
		return row, err
	}
	itself := func(v float64) float64 { return v }
	row.Connect = experiment.Median(trial.B)
	row.FirstPacket = trial.Ratio(itself)
	return row, nil
}
