// Package tftp is the experiment tftp-nodeport: files of 5 KB by TFTP from three places.
// These are the machine itself, a NodePort of Spillway, and a NodePort with the kernel's
// tables and timeouts as they were tuned round by round.
//
//	client0 ── LAN ── node0: NodePort ─┬─ pod0: TFTP server
//	             (metal: server here)  ├─ pod1
//	                                   └─ pod2
//
// Sizes and timeouts are all divided by one number, so that tables that took minutes to
// fill take seconds. Their maximum rate, entries ÷ timeout, stays the same.
package tftp

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"time"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/sysctl"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

const (
	nodePort    = 30069
	tftpPort    = 69
	metalPort   = 8069
	connections = 64
	replicas    = 3
)

// kernel holds the published settings of the kernel's conntrack; 0 keeps the machine's
// own size.
type kernel struct {
	max, expectMax int
	timeout        int // s, of UDP that was answered once
	stream         int // s, of UDP that was answered again
	podTimeout     int // s, in the pods' namespaces; 0 does not track there
}

var (
	then       = kernel{131072, 1024, 30, 180, 30}
	thenNoPods = kernel{131072, 1024, 30, 180, 0}
	larger     = kernel{512 << 10, 8 << 10, 30, 180, 30}
	twice      = kernel{1 << 20, 8 << 10, 30, 180, 30}
	onNode     = kernel{1 << 20, 8 << 10, 10, 20, 30}
	onBoth     = kernel{1 << 20, 8 << 10, 10, 20, 10}
)

// step is one row.
type step struct {
	name      string
	kernel    kernel
	replicas  int
	peer      string // mode of kube-proxy
	mode      string // of Spillway's agent
	autopilot bool
	published float64
}

var steps = []step{
	{name: "metal", published: 8500},
	{name: "kube-proxy: kernel defaults of the time", kernel: then, replicas: 1, peer: "iptables", published: 1000},
	{name: "kube-proxy: 3 replicas", kernel: then, replicas: 3, peer: "iptables", published: 1000},
	{name: "kube-proxy: tables of 512k and 8k", kernel: larger, replicas: 3, peer: "iptables", published: 4000},
	{name: "kube-proxy: a table of 1M", kernel: twice, replicas: 3, peer: "iptables", published: 4100},
	{name: "kube-proxy: shorter timeouts on the node", kernel: onNode, replicas: 3, peer: "iptables", published: 4600},
	{name: "kube-proxy: shorter timeouts on node and pods", kernel: onBoth, replicas: 3, peer: "iptables", published: 5100},
	{name: "kube-proxy: 2 replicas", kernel: onBoth, replicas: 2, peer: "iptables", published: 5800},
	{name: "Spillway, eBPF: defaults of the time", kernel: then, replicas: 3, mode: "ebpf"},
	{name: "Spillway, nftables: defaults of the time", kernel: then, replicas: 3, mode: "nftables"},
	{name: "Spillway, iptables: defaults of the time", kernel: then, replicas: 3, mode: "iptables"},
	{name: "kube-proxy: defaults of the time, pods that do not track", kernel: thenNoPods, replicas: 3, peer: "iptables"},
	{name: "Spillway, eBPF: defaults of the time, pods that do not track", kernel: thenNoPods, replicas: 3, mode: "ebpf"},
	{name: "Spillway, nftables: defaults of the time, pods that do not track", kernel: thenNoPods, replicas: 3, mode: "nftables"},
	{name: "Spillway, eBPF, autopilot: defaults of the time", kernel: then, replicas: 3, mode: "ebpf", autopilot: true},
	{name: "Spillway, nftables, autopilot: defaults of the time", kernel: then, replicas: 3, mode: "nftables", autopilot: true},
	{name: "Spillway, iptables, autopilot: defaults of the time", kernel: then, replicas: 3, mode: "iptables", autopilot: true},
}

// quick are the rows of the quick form.
var quick = map[int]bool{0: true, 1: true, 5: true, 7: true, 8: true, 9: true, 12: true}

// New returns the experiment. keeper is the command line of a process that restores the
// machine's values: see package sysctl.
func New(keeper []string) experiment.Experiment {
	return experiment.Experiment{
		Name:  "tftp-nodeport",
		Title: "Small files by TFTP through a NodePort",
		Question: "Every file is a new flow, and the server's first answer comes from a port to which the client sent no packet: netfilter " +
			"needs a helper and an expectation for it. " +
			"How many files a second are left, and what does it take to get them back?",
		Published: "8,500 transfers/s of 5 KB from the host; 1,000 from a NodePort, with three replicas still 1,000; nine rounds of tuning " +
			"tables and timeouts, " +
			"on the node and in the pods, ended at 5,800.",
		Sources: []experiment.Source{
			{Title: "Exposing TFTP Server as Kubernetes Service, Part 6",
				URL: "https://medium.com/@darpanmalhotra/exposing-tftp-server-as-kubernetes-service-part-6-ccee20610eaf"},
		},
		Packages:    map[string]string{"iptables": "iptables", "nft": "nftables"},
		MachineWide: true,
		Figures: []experiment.Figure{
			{Key: "rate", Name: "transfers", Unit: "per s", Better: "higher"},
			{Key: "failed", Name: "failed", Unit: "%", Better: "lower"},
			{Key: "over1s", Name: "over 1 s", Unit: "%", Better: "lower"},
			{Key: "p50", Name: "p50", Unit: "ms", Better: "lower"},
			{Key: "p99", Name: "p99", Unit: "ms", Better: "lower"},
			{Key: "entries", Name: "most entries", Better: "lower"},
			{Key: "pod_entries", Name: "in a pod", Better: "lower"},
			{Key: "expectations", Name: "most expectations", Better: "lower"},
			{Key: "insert_failed", Name: "insert_failed", Better: "lower"},
			{Key: "drop", Name: "drop", Better: "lower"},
			{Key: "early_drop", Name: "early_drop", Better: "lower"},
			{Key: "log", Name: "kernel log lines", Better: "lower"},
		},
		Charts: []experiment.Chart{
			{Kind: experiment.Bars, Title: "Transfers/s", Figure: "rate"},
			{Kind: experiment.Latency, Title: "How long a transfer takes"},
			{Kind: experiment.Over, Title: "Conntrack entries on the node", Series: "entries"},
			{Kind: experiment.Over, Title: "Expectations on the node", Series: "expectations"},
		},
		Scale:    describe,
		Rows:     func(o experiment.Options) []experiment.Row { return rows(o, keeper) },
		Conclude: conclude,
		Card:     card,
	}
}

// shape returns the scale of a run: the divisor of sizes and timeouts, and the
// duration of each load.
func shape(o experiment.Options) (divisor int, each time.Duration) {
	if o.Quick {
		return 16, 4 * time.Second // twice the shortest timeout
	}
	return 12, 15 * time.Second
}

func describe(o experiment.Options) string {
	divisor, each := shape(o)
	return fmt.Sprintf("Sizes and timeouts are those published divided by %d (131072 entries are %d here, 1024 expectations %d, 30 s %d "+
		"s, 180 s %d s), and each row is loaded for %v, "+
		"so that tables fill as often as they did. %d transfers under way at once from one client. \"Shorter timeouts\" are 10 s and 20 s "+
		"divided alike. "+
		"Helpers are assigned by a rule, since kernels no longer do it themselves. Pods track, as those that were published did, unless a "+
		"row says otherwise: "+
		"a kernel of today tracks in a pod only if rules in it ask for that.",
		divisor, then.max/divisor, then.expectMax/divisor, seconds(then.timeout, divisor), seconds(then.stream, divisor), each, connections)
}

func rows(o experiment.Options, keeper []string) []experiment.Row {
	_, each := shape(o)
	var out []experiment.Row
	for i, s := range steps {
		if o.Quick && !quick[i] {
			continue
		}
		row := experiment.Row{Name: s.name, Takes: each + 3*time.Second, MachineWide: s.kernel.max > 0,
			Run: func(ctx context.Context, m *experiment.Measurement) error { return run(ctx, o, keeper, s, m) }}
		switch {
		case s.mode != "":
			row.Side = experiment.Spillway
		case s.peer == "":
			row.Side = experiment.Metal
		}
		if s.peer != "" {
			row.Needs = harness.NeedKubeProxy
			row.Takes += 2 * time.Second
		}
		if s.published > 0 {
			row.Published = map[string]float64{"rate": s.published}
		}
		out = append(out, row)
	}
	return out
}

// run measures one row on a cluster of its own, with changed values of the machine
// meanwhile.
func run(ctx context.Context, o experiment.Options, keeper []string, s step, m *experiment.Measurement) (err error) {
	divisor, each := shape(o)
	spec := topology.DefaultSpec(o.Name + "-tftp")
	spec.Nodes, spec.PodsPerNode, spec.Clients, spec.Masquerade, spec.Conntrack = 1, replicas, 2, true, true
	r, err := harness.Up(ctx, spec)
	if err != nil {
		return err
	}
	defer r.EndRow(m, &err)
	target, err := setUp(ctx, r, s)
	if err != nil {
		return err
	}
	guard, err := setKernel(r, keeper, s, divisor)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, guard.End()) }()
	watch := startWatch(ctx, r)
	got, err := r.Load(ctx, r.Cluster.Client(0), load.Config{Kind: load.TFTP, Target: target, Connections: connections,
		Duration: each, Timeout: time.Second})
	if watched := watch.end(ctx, m); err == nil {
		err = watched
	}
	if err != nil {
		return err
	}
	m.Add("rate", got.Rate)
	if all := got.Requests + got.Failed(); all > 0 {
		m.Add("failed", 100*float64(got.Failed())/float64(all))
		m.Add("over1s", 100*float64(got.Over1s)/float64(all+got.UnderWay))
	}
	if got.Requests > 0 {
		m.Add("p50", got.Latency.P50/1000)
		m.Add("p99", got.Latency.P99/1000)
	}
	for _, p := range got.Distribution() {
		m.Distribution = append(m.Distribution, experiment.Point{X: p.Percentile, Y: p.Micros})
	}
	if got.ClientLimited {
		m.Note("The client was busy all the time: the server may be able to do more.")
	}
	return nil
}

// setUp starts the servers and the proxy of the NodePort, and waits for a file.
func setUp(ctx context.Context, r *harness.Harness, s step) (netip.AddrPort, error) {
	c := r.Cluster
	target := netip.AddrPortFrom(c.Node(0).IPv4, nodePort)
	if s.replicas == 0 {
		target = netip.AddrPortFrom(c.Node(0).IPv4, metalPort)
		if err := r.Serve(ctx, c.Node(0), workload.Blocks, metalPort); err != nil {
			return target, err
		}
		return target, waitFile(ctx, r, target)
	}
	for i := range s.replicas {
		if err := r.Serve(ctx, c.Pod(0, i), workload.Blocks, tftpPort); err != nil {
			return target, err
		}
	}
	if err := serveNodePort(ctx, r, s); err != nil {
		return target, err
	}
	return target, waitFile(ctx, r, target)
}

// waitFile reads until a file has arrived.
func waitFile(ctx context.Context, r *harness.Harness, target netip.AddrPort) error {
	const tries = 20
	var failed map[string]int64
	for range tries {
		got, err := r.Load(ctx, r.Cluster.Client(0), load.Config{Kind: load.TFTP, Target: target, Connections: 1,
			Duration: 100 * time.Millisecond, Timeout: 80 * time.Millisecond})
		if err != nil {
			return err
		}
		if got.Requests > 0 {
			return nil
		}
		failed = got.Errors
	}
	return fmt.Errorf("wait for a file from %s: none after %d tries: %v", target, tries, failed)
}

// seconds divides a timeout; the kernel accepts only whole seconds.
func seconds(v, divisor int) int { return max((v+divisor/2)/divisor, 1) }

// setKernel sets sizes of the machine and timeouts of the cluster's namespaces.
// Rows without a table leave the machine alone, and so does metal.
func setKernel(r *harness.Harness, keeper []string, s step, divisor int) (*sysctl.Guard, error) {
	if s.kernel.max == 0 {
		return nil, nil
	}
	guard, err := sysctl.Begin(keeper)
	if err != nil {
		return nil, err
	}
	set := func() error {
		for key, v := range map[string]int{"nf_conntrack_max": s.kernel.max, "nf_conntrack_expect_max": s.kernel.expectMax} {
			if err := guard.Set("net.netfilter."+key, strconv.Itoa(v/divisor)); err != nil {
				return err
			}
		}
		if err := setTimeouts(r.Cluster.Node(0), seconds(s.kernel.timeout, divisor), seconds(s.kernel.stream, divisor)); err != nil {
			return err
		}
		for i := range s.replicas {
			if s.kernel.podTimeout == 0 {
				break
			}
			t := seconds(s.kernel.podTimeout, divisor)
			if err := setTimeouts(r.Cluster.Pod(0, i), t, max(t, seconds(2*s.kernel.podTimeout, divisor))); err != nil {
				return err
			}
		}
		return nil
	}
	if err := set(); err != nil {
		return nil, errors.Join(err, guard.End())
	}
	return guard, nil
}

// setTimeouts sets the UDP timeouts in a host's namespace.
func setTimeouts(host *topology.Host, timeout, stream int) error {
	return host.Do(func() error {
		for name, v := range map[string]int{"udp_timeout": timeout, "udp_timeout_stream": stream} {
			path := "/proc/sys/net/netfilter/nf_conntrack_" + name
			if err := os.WriteFile(path, []byte(strconv.Itoa(v)), 0o644); err != nil {
				return fmt.Errorf("set %s on %s: %w", name, host.Name, err)
			}
		}
		return nil
	})
}
