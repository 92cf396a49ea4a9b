// Package path measures the cost of the path through a Service. It compares each path
// with the same server reached without a Service, in pairs, on a cluster of two nodes.
//
//	client ── LAN ──┬── node0: nginx on the node itself ("metal"), pod0: nginx, pod1: load
//	                └── node1: pod0: nginx
package path

import (
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// Config sets the extent of a measurement.
type Config struct {
	Name             string // of the cluster
	Mode             string // --proxy-mode of the agents
	Rounds           int    // of each pair
	Duration, Warmup time.Duration
	Connections      int
	// Untracked builds nodes without any netfilter rule. By default conntrack is on, as
	// with flannel's masquerading. An entry for a Service connection would be visible
	// there, and metal has entries too.
	Untracked bool
	// Files lists the Proxies to measure with files instead of HTTP; Mode does not apply.
	// The files have 5 KB, read by TFTP 512 bytes at a time.
	Files []string
	// Designs compares ways to translate a NodePort by nftables. Mode is that of the agent
	// beside them.
	Designs bool
	// Only selects comparisons by "NAME, LOAD". A comparison that finds the rate of a
	// selected open loop runs in any case. Nil selects all.
	Only     *regexp.Regexp
	Progress *experiment.Progress
}

// Modes are the dataplanes that can be measured.
var Modes = []string{"ebpf", "nftables", "iptables"}

// Validate returns an error of one line for an invalid Config.
func (c Config) Validate() error {
	switch {
	case c.Files == nil && !slices.Contains(Modes, c.Mode):
		return fmt.Errorf("mode %q: not a mode: use %s", c.Mode, strings.Join(Modes, ", "))
	case c.Rounds < 1:
		return fmt.Errorf("rounds is %d: use 1 or more", c.Rounds)
	case c.Duration < 100*time.Millisecond || c.Warmup < 0:
		return fmt.Errorf("duration is %v: use 100ms or more", c.Duration)
	case c.Connections < 1 || c.Connections > 10000:
		return fmt.Errorf("connections is %d: use 1 to 10000", c.Connections)
	}
	return c.validateFiles()
}

// tailFactor multiplies the duration and the number of measurements of a latency's tail,
// which varies more than a rate.
const tailFactor = 2

const (
	metalPort = 8080
	podPort   = 80
)

// bench is one run.
type bench struct {
	cfg     Config
	harness *harness.Harness
	// saturation holds, for each kind of load, the rate that both metal and
	// NodePort reach: half of it is the rate of the open loop.
	saturation map[load.Kind]float64
	report     *Report
}

// Run builds the cluster, measures everything and removes the cluster. When ctx ends or a
// step fails, the report holds the complete results, beside the error.
func Run(ctx context.Context, cfg Config) (report *Report, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	machine, err := harness.Begin()
	if err != nil {
		return nil, err
	}
	report = newReport(cfg, machine)
	if cfg.Files != nil {
		return report, runFiles(ctx, cfg, report)
	}
	if cfg.Designs {
		return report, runDesigns(ctx, cfg, report)
	}
	b := &bench{cfg: cfg, saturation: map[load.Kind]float64{}, report: report}
	spec := topology.DefaultSpec(cfg.Name)
	spec.Masquerade, spec.Conntrack = !cfg.Untracked, !cfg.Untracked
	return report, b.run(ctx, spec, func(c *topology.Cluster) []plan { return plans(c, cfg.Mode == "ebpf") })
}

// noneError reports that there is nothing to measure.
type noneError struct{ error }

// run measures everything on a cluster of its own.
func (b *bench) run(ctx context.Context, spec topology.Spec, plans func(*topology.Cluster) []plan) (err error) {
	b.cfg.Progress.Step("building a cluster of two nodes")
	if b.harness, err = harness.Up(ctx, spec); err != nil {
		return err
	}
	defer func() { err = harness.End(ctx, err, b.cfg.Progress, b.harness) }()
	all := plans(b.harness.Cluster)
	todo := wanted(all, b.cfg.Only)
	if len(todo) == 0 {
		return noneError{fmt.Errorf("only %q: no comparison has this in its \"NAME, LOAD\", such as %q",
			b.cfg.Only, all[0].name+", "+loadName(all[0]))}
	}
	if err := b.setUp(ctx, all); err != nil {
		return err
	}
	for _, p := range todo {
		if err := b.compare(ctx, p); err != nil {
			return err
		}
	}
	return nil
}

// setUp starts servers and the proxies, and waits until every target answers.
func (b *bench) setUp(ctx context.Context, plans []plan) error {
	if b.cfg.Designs {
		return b.setUpDesigns(ctx, plans)
	}
	c := b.harness.Cluster
	kind, metalPort, podPort := workload.HTTP, uint16(metalPort), uint16(podPort)
	if b.cfg.Files != nil {
		kind, metalPort, podPort = workload.Blocks, metalTFTPPort, tftpPort
	}
	b.cfg.Progress.Step("starting servers on node0 and in a pod of each node")
	for _, s := range []struct {
		host *topology.Host
		port uint16
	}{{c.Node(0), metalPort}, {c.Pod(0, 0), podPort}, {c.Pod(1, 0), podPort}, {c.Pod(1, 1), podPort}} {
		if err := b.harness.Serve(ctx, s.host, kind, s.port); err != nil {
			return err
		}
	}
	if err := b.harness.RoutePods(c.Client(0)); err != nil {
		return err
	}
	if err := b.harness.RoutePodBy(c.Client(0), c.Pod(1, 1), c.Node(0)); err != nil {
		return err
	}
	if err := b.serveServices(ctx); err != nil {
		return err
	}
	for _, p := range plans {
		for _, way := range []way{p.base, p.service} {
			if err := b.waitAnswerOf(ctx, p.kind, way); err != nil {
				return err
			}
		}
	}
	return nil
}

// serveServices starts an agent on each node.
func (b *bench) serveServices(ctx context.Context) error {
	if b.cfg.Mode == KubeProxy {
		return b.serveByKubeProxy(ctx)
	}
	dir, err := writeManifests(b.harness, b.cfg.Files != nil, b.cfg.Mode == "ebpf" && b.cfg.Files == nil)
	if err != nil {
		return err
	}
	var flags []string
	if b.cfg.Mode == "ebpf" {
		secret, err := b.harness.WriteFile("secret", []byte("secret of the benchmark"))
		if err != nil {
			return err
		}
		flags = []string{"--dsr-key-file", secret}
	}
	b.cfg.Progress.Step("starting an agent on each node")
	c := b.harness.Cluster
	for i := range c.Spec.Nodes {
		if err := b.harness.Agent(ctx, c.Node(i), dir, b.cfg.Mode, flags...); err != nil {
			return err
		}
	}
	return nil
}

// way is the source and the destination of a load.
type way struct {
	from *topology.Host
	to   netip.AddrPort
}

// plan is one comparison to make.
type plan struct {
	name          string
	kind          load.Kind
	base, service way
	tail          bool // compare the open loop's p99.9 instead of the closed loop's rate
	saturates     bool // the rate is what "half of saturation" refers to
	control       bool
	target        *experiment.Target
	// The servers of files, and whether the node's conntrack table is full while
	// they go through the Service.
	baseServer, server *topology.Host
	full               bool
	rules              string // of nft, loaded on node0 while the Service is measured
}

// plans lists the comparisons. Open loops come after the closed loops that find their
// rate.
func plans(c *topology.Cluster, ebpf bool) []plan {
	client, node, pod := c.Client(0), c.Node(0), c.Pod(0, 1)
	metal := way{client, netip.AddrPortFrom(node.IPv4, metalPort)}
	here := way{client, netip.AddrPortFrom(node.IPv4, hereNodePort)}
	there := way{client, netip.AddrPortFrom(node.IPv4, thereNodePort)}
	podThere := way{client, netip.AddrPortFrom(c.Pod(1, 0).IPv4, podPort)}
	podHere := way{pod, netip.AddrPortFrom(c.Pod(0, 0).IPv4, podPort)}
	clusterIP := way{pod, netip.AddrPortFrom(hereClusterIP, podPort)}
	least := func(v float64) *experiment.Target { return &experiment.Target{Limit: v} }
	most := func(v float64) *experiment.Target { return &experiment.Target{Limit: v, AtMost: true} }
	direct := way{client, netip.AddrPortFrom(node.IPv4, directNodePort)}
	detour := way{client, netip.AddrPortFrom(c.Pod(1, 1).IPv4, podPort)} // what the kernel's own forwarding takes
	all := []plan{
		{name: "NodePort, pod on this node ÷ metal", kind: load.HTTP, base: metal, service: here,
			saturates: true, control: true, target: least(0.97)},
		{name: "NodePort, pod on this node ÷ metal", kind: load.Conn, base: metal, service: here,
			saturates: true, control: true, target: least(0.95)},
		{name: "ClusterIP from a pod ÷ pod address", kind: load.HTTP, base: podHere, service: clusterIP,
			control: true, target: least(0.99)},
		{name: "ClusterIP from a pod ÷ pod address", kind: load.Conn, base: podHere, service: clusterIP,
			target: least(0.99)},
		{name: "NodePort, pod on other node ÷ pod address", kind: load.HTTP, base: podThere, service: there},
		{name: "NodePort, pod on other node ÷ pod address", kind: load.Conn, base: podThere, service: there},
		{name: "NodePort, pod on this node ÷ metal", kind: load.HTTP, base: metal, service: here,
			tail: true, control: true, target: most(1.10)},
		{name: "NodePort, pod on this node ÷ metal", kind: load.Conn, base: metal, service: here,
			tail: true, control: true, target: most(1.10)},
	}
	if !ebpf {
		return all
	}
	return append(all,
		plan{name: "DSR replies ÷ pod address", kind: load.HTTP, base: podThere, service: direct, target: least(0.97)},
		plan{name: "DSR replies ÷ pod address", kind: load.Conn, base: podThere, service: direct, target: least(0.97)},
		plan{name: "DSR replies ÷ SNAT", kind: load.HTTP, base: there, service: direct},
		plan{name: "DSR replies ÷ SNAT", kind: load.Conn, base: there, service: direct},
		plan{name: "pod address by way of node0 ÷ pod address", kind: load.HTTP, base: podThere, service: detour},
		plan{name: "pod address by way of node0 ÷ pod address", kind: load.Conn, base: podThere, service: detour})
}

// wanted returns the plans that only matches, in their order, and with an open
// loop the closed loop that finds its rate.
func wanted(all []plan, only *regexp.Regexp) []plan {
	if only == nil {
		return all
	}
	matches := func(p plan) bool { return only.MatchString(p.name + ", " + loadName(p)) }
	rates := map[load.Kind]bool{}
	for _, p := range all {
		rates[p.kind] = rates[p.kind] || p.tail && matches(p)
	}
	return slices.DeleteFunc(slices.Clone(all), func(p plan) bool { return !matches(p) && !(p.saturates && rates[p.kind]) })
}

// compare runs one comparison, and its control, and adds it to the report.
func (b *bench) compare(ctx context.Context, p plan) error {
	var rate float64
	if p.tail {
		rate = b.saturation[p.kind] / 2
		if rate < 1 {
			return fmt.Errorf("compare %s: no rate to send at: nothing was answered in the closed loop", p.name)
		}
	}
	duration, rounds := b.cfg.Duration, b.cfg.Rounds
	if p.tail {
		duration, rounds = duration*tailFactor, rounds*tailFactor
	}
	if b.cfg.Designs && p.full {
		rounds = min(rounds, designFullRounds)
	}
	arm := func(w way) experiment.Arm[harness.Sample] {
		if p.baseServer != nil {
			return b.filesArm(p, w)
		}
		return func(ctx context.Context) (harness.Sample, error) {
			return b.harness.Measure(ctx, w.from, load.Config{Kind: p.kind, Target: w.to, Rate: rate,
				Connections: b.cfg.Connections, Duration: duration, Warmup: b.cfg.Warmup})
		}
	}
	pair := experiment.Pair[harness.Sample]{Name: p.name, A: arm(p.base), B: arm(p.service),
		Rounds: rounds, Progress: b.cfg.Progress.Part}
	b.cfg.Progress.Step("%s, %s", p.name, loadName(p))
	trial, err := pair.Run(ctx)
	if err != nil {
		return err
	}
	var control experiment.Trial[harness.Sample]
	if p.control {
		pair = pair.Control()
		b.cfg.Progress.Step("%s, %s: A/A control", p.name, loadName(p))
		if control, err = pair.Run(ctx); err != nil {
			return err
		}
	}
	if p.saturates {
		b.saturation[p.kind] = min(median(trial.A, rateOf), median(trial.B, rateOf))
	}
	b.report.add(p, rate, trial, control)
	return nil
}
