package snat

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// outside is the published case: pods of one node connect to one address outside.
//
//	pod0..7 ── node0: the CNI's masquerade rule ── LAN ── client0: server
type outside struct {
	name    string
	pods    int
	threads int // of each pod
	// own is the number of ports that each pod's sockets use; 0 is the usual range.
	own   int
	ports int // as in traffic
	held  int // as in traffic
	// delay is the number of rules that a first packet meets between the choice of its port
	// and its entry in conntrack.
	delay int
}

const (
	delayRules = 4000
	ownPorts   = 32
	// firstOwn is the start of the range of ownPorts.
	firstOwn = 40000
)

func outsides(o experiment.Options) []outside {
	list := []outside{
		{name: "8 pods, 80 threads each", pods: 8, threads: 80},
		{name: "4 pods of 32 ports, 10 threads each, delay", pods: 4, threads: 10, own: ownPorts, delay: delayRules},
	}
	if !o.Quick {
		list = append([]outside{{name: "4 pods, 10 threads each", pods: 4, threads: 10}}, list...)
		list = append(list,
			outside{name: "4 pods, 10 threads each, 64 ports, delay", pods: 4, threads: 10, ports: smallest, delay: delayRules},
			outside{name: "4 pods, 10 threads each, 95 % of 1024 ports taken", pods: 4, threads: 10, ports: crowded, held: occupied})
	}
	return list
}

// moreAddresses are addresses of the node for pods' connections, beside its own.
var moreAddresses = netip.MustParsePrefix("172.30.0.240/30")

// outsideMethods are those of pods' connections to the outside.
var outsideMethods = append(slices.Clip(methods), method{name: "Spillway, eBPF, 4 addresses", mode: "ebpf", more: true})

// measures reports whether a case is measured with a method.
func (c outside) measures(m method, quick bool) bool {
	switch {
	case m.more:
		return c.held > 0
	case m.mode == "nftables":
		// Its masquerading uses no range of ports that could be small.
		return c.ports == 0 && (c.own == 0 || !quick)
	case m.flags == "--random":
		return !quick // --random-fully differs little
	}
	return true
}

func outsideRows(o experiment.Options) []experiment.Row {
	samples, each := length(o)
	var out []experiment.Row
	for _, c := range outsides(o) {
		for _, m := range outsideMethods {
			if !c.measures(m, o.Quick) {
				continue
			}
			row := experiment.Row{
				Name: c.name + ": " + m.name, Table: outsideTable, Group: "outside", X: float64(c.pods * c.threads),
				Takes: 2*time.Second + time.Duration(samples)*(each+400*time.Millisecond),
				Run: func(ctx context.Context, result *experiment.Measurement) error {
					return c.run(ctx, o, m, result)
				},
			}
			if m.mode != "" {
				row.Side = experiment.Spillway
			}
			if c.ports > 0 {
				row.Group = "outside, few ports"
			} else if c.own == 0 && c.threads == 80 && m.flags != "--random" && m.mode == "" {
				row.Published = map[string]float64{"lost": 4}
				if m.flags == "--random-fully" {
					row.Published["lost"] = 0
				}
			}
			out = append(out, row)
		}
	}
	return out
}

// run measures one row on a cluster of its own.
func (c outside) run(ctx context.Context, o experiment.Options, m method, result *experiment.Measurement) (err error) {
	spec := topology.DefaultSpec(o.Name + "-snat")
	spec.Nodes, spec.PodsPerNode, spec.Clients = 1, c.pods, 1
	r, err := harness.Up(ctx, spec)
	if err != nil {
		return err
	}
	defer r.EndRow(result, &err)
	if err := c.setUp(ctx, r, m); err != nil {
		return err
	}
	samples, each := length(o)
	target := outsideTarget(r)
	stop, err := hold(ctx, r, c.sources(r), target, m.held(c.held), each*time.Duration(samples+2)+2*openTime)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	cfg := load.Config{Kind: load.Conn, Target: target, Connections: c.pods * c.threads, Duration: each,
		Warmup: 100 * time.Millisecond, Timeout: 5 * time.Second}
	var all []*load.Result
	for i := range samples {
		o.Progress.Part(i, samples)
		one, err := c.sample(ctx, r, m, cfg, result)
		if err != nil {
			return err
		}
		all = append(all, one)
	}
	left, err := r.Cluster.Node(0).ConntrackCount()
	if err != nil {
		return err
	}
	result.Add("entries", float64(left))
	return distribute(all, result)
}

// sources are the pods.
func (c outside) sources(r *harness.Harness) (hosts []*topology.Host) {
	for i := range c.pods {
		hosts = append(hosts, r.Cluster.Pod(0, i))
	}
	return hosts
}

// outsideTarget is the server that all pods connect to.
func outsideTarget(r *harness.Harness) netip.AddrPort {
	return netip.AddrPortFrom(r.Cluster.Client(0).IPv4, podPort)
}

// setUp starts the server and the translation. The CNI's rule is there with an agent too.
func (c outside) setUp(ctx context.Context, r *harness.Harness, m method) error {
	node, pod := r.Cluster.Node(0), r.Cluster.Pod(0, 0)
	if err := r.Serve(ctx, r.Cluster.Client(0), workload.HTTP, podPort); err != nil {
		return err
	}
	if err := fewPorts(node, m, c.ports); err != nil {
		return err
	}
	if err := c.limitPods(r); err != nil {
		return err
	}
	ports := c.ports
	if m.mode != "" {
		ports = 0 // the agent leaves a rule with a range of ports to netfilter
	}
	rules := masqueradeRules(r.Cluster.Spec.ClusterCIDR4, node.PodCIDRs[0], m.flags, ports)
	if err := restore(ctx, node, rules); err != nil {
		return err
	}
	if c.delay > 0 {
		if err := loadDelay(ctx, node, c.delay); err != nil {
			return err
		}
	}
	if m.mode != "" {
		dir, err := writeNodes(r)
		if err != nil {
			return err
		}
		flags := []string{"--egress", "auto"}
		if m.more {
			if err := addAddresses(ctx, node); err != nil {
				return err
			}
			flags = append(flags, "--egress-addresses", moreAddresses.String())
		}
		if err := r.Agent(ctx, node, dir, m.mode, flags...); err != nil {
			return err
		}
		if err := waitEgress(ctx, r, 0); err != nil {
			return err
		}
	}
	return r.WaitAnswer(ctx, pod, workload.HTTP, outsideTarget(r))
}

// addAddresses gives a node moreAddresses.
func addAddresses(ctx context.Context, node *topology.Host) error {
	for a := moreAddresses.Addr(); moreAddresses.Contains(a); a = a.Next() {
		if out, err := node.Command(ctx, "ip", "address", "add", a.String(), "dev", "eth0").CombinedOutput(); err != nil {
			return fmt.Errorf("give %s the address %s: %w: %s", node.Name, a, err, bytes.TrimSpace(out))
		}
	}
	return nil
}

// limitPods gives all pods the same few ports. So two pods often choose one port for connections
// that begin at the same time.
func (c outside) limitPods(r *harness.Harness) error {
	if c.own == 0 {
		return nil
	}
	for i := range c.pods {
		pod := r.Cluster.Pod(0, i)
		err := pod.Do(func() error {
			value := fmt.Sprintf("%d %d", firstOwn, firstOwn+c.own-1)
			return os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", []byte(value), 0o644)
		})
		if err != nil {
			return fmt.Errorf("limit the ports of %s: %w", pod.Name, err)
		}
	}
	return nil
}

// waitEgress waits until the agent of a node gives a pod's connections the node's address: the CNI's
// rule sees no more of them.
func waitEgress(ctx context.Context, r *harness.Harness, i int) error {
	const limit = 10 * time.Second
	deadline := time.Now().Add(limit)
	node, pod := r.Cluster.Node(i), r.Cluster.Pod(i, 0)
	for {
		before, err := masqueraded(ctx, node)
		if err != nil {
			return err
		}
		if err := r.WaitAnswer(ctx, pod, workload.HTTP, outsideTarget(r)); err != nil {
			return err
		}
		after, err := masqueraded(ctx, node)
		if err != nil {
			return err
		}
		if after == before {
			return nil
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return fmt.Errorf("wait for the agent's egress on %s: the CNI's rule still masquerades after %v", node.Name, limit)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// outsideCounters are what a sample changes.
type outsideCounters struct {
	conntrack   conntrack.Counters
	pods        harness.TCPCounters
	masqueraded uint64 // connections that met the CNI's rule
	noPort      float64
}

func (c outside) read(ctx context.Context, r *harness.Harness, m method) (out outsideCounters, err error) {
	node := r.Cluster.Node(0)
	if out.conntrack, err = r.Counters(ctx, node); err != nil {
		return out, err
	}
	for i := range c.pods {
		n, err := harness.ReadTCP(r.Cluster.Pod(0, i))
		if err != nil {
			return out, err
		}
		out.pods.Add(n)
	}
	if out.masqueraded, err = masqueraded(ctx, node); err != nil {
		return out, err
	}
	out.noPort, err = noPort(ctx, r, m, egressPorts)
	return out, err
}

// sample measures once.
func (c outside) sample(ctx context.Context, r *harness.Harness, m method, cfg load.Config,
	result *experiment.Measurement) (*load.Result, error) {
	before, err := c.read(ctx, r, m)
	if err != nil {
		return nil, err
	}
	got, err := r.LoadFrom(ctx, c.sources(r), cfg)
	if err != nil {
		return nil, err
	}
	after, err := c.read(ctx, r, m)
	if err != nil {
		return nil, err
	}
	return got, c.add(got, before, after, m, cfg.Duration, result)
}

// add adds the figures of a sample.
func (c outside) add(got *load.Result, before, after outsideCounters, m method, each time.Duration, result *experiment.Measurement) error {
	all := float64(got.Requests + got.Failed() + got.UnderWay)
	if all == 0 {
		return errors.New("nothing was sent")
	}
	percent := func(n float64) float64 { return 100 * n / all }
	counted := after.conntrack.Minus(before.conntrack)
	lost, reused := lostSYNs(after.pods.Minus(before.pods))
	result.Add("lost", percent(float64(lost)))
	result.Add("reused", percent(float64(reused)))
	result.Add("connections", all)
	result.Add("rate", got.Rate)
	result.Add("over1s", percent(float64(got.Over1s)))
	if each > 3*time.Second {
		result.Add("over3s", percent(float64(got.Over3s)))
	}
	result.Add("slowest", slowest(got).Seconds()*1000)
	result.Add("failed", percent(float64(got.Failed())))
	result.Add("insert_failed", float64(counted.InsertFailed))
	result.Add("drop", float64(counted.Drop))
	if m.mode == "ebpf" {
		result.Add("no_port", after.noPort-before.noPort)
	}
	if n := after.masqueraded - before.masqueraded; m.mode != "" && n > 0 {
		result.Note(fmt.Sprintf("%d connections of a sample met the CNI's rule.", n))
	}
	if got.ClientLimited {
		result.Note("The load generators were busy all the time: the rate is theirs.")
	}
	return nil
}

// lostSYNs returns the SYNs that were sent again because they were lost, and those that the server took
// for packets of an older connection from their port, which it still had in TIME-WAIT: it answers with an
// ACK, the client with an RST (RFC 9293, 3.5.2), and the next SYN opens the connection at once. The load
// ends each connection with an RST, so each further one is such an answer.
func lostSYNs(pods harness.TCPCounters) (lost, reused uint64) {
	if pods.Resets > pods.Opened {
		reused = min(pods.Resets-pods.Opened, pods.RepeatedSYNs)
	}
	return pods.RepeatedSYNs - reused, reused
}

// slowest returns the time of the slowest connection. Those without an answer at the end
// count with their time until then.
func slowest(got *load.Result) time.Duration {
	longest := time.Duration(got.Latency.Max * float64(time.Microsecond))
	for _, s := range got.Slow {
		longest = max(longest, time.Duration(s.Seconds*float64(time.Second)))
	}
	return longest
}

// distribute sets the latencies of all samples.
func distribute(all []*load.Result, result *experiment.Measurement) error {
	merged, err := load.Merge(all)
	if err != nil {
		return err
	}
	for _, p := range merged.Distribution() {
		result.Distribution = append(result.Distribution, experiment.Point{X: p.Percentile, Y: p.Micros})
	}
	return nil
}
