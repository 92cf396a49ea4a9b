// Package overlay is the experiment overlay: a real-time-bidding exchange (examples/rtb).
// It runs on the machine itself, and as a pod behind a NodePort of another node, over
// VXLAN and over plain routes, with each proxy.
//
//	client0 ── LAN ── node0: NodePort ══ pod network ══ node1: exchange
//	                                                     ╠═ node0: DSP
//	                                                     ╠═ node2: DSP
//	                                                     ╚═ node3: DSP
package overlay

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"spillway.dev/spillway/examples/rtb"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

const (
	nodePort    = 30080
	podPort     = 8080
	metalPort   = 8081
	connections = 32
	dsps        = 3

	metal = "metal, or host networking" // the row without a proxy
)

// network is how pods of different nodes reach each other.
type network struct{ name, spec string }

var networks = []network{{"VXLAN", topology.VXLAN}, {"host-gw", topology.Routed}}

// New returns the experiment.
func New() experiment.Experiment {
	return experiment.Experiment{
		Name:  "overlay",
		Title: "A bidding exchange on metal and behind a Service",
		Question: "An exchange decodes bid requests of 3 KB and answers 404 while no bidder is registered; " +
			"with three bidders on three nodes it asks each of them and answers within 80 ms. " +
			"What is left of the machine's speed behind a NodePort of another node?",
		Published: "24,000 requests/s on bare metal and with host networking; " +
			"1/17 of that, with 6 times the tail latency, with k3s, flannel's VXLAN and kube-proxy in iptables mode; " +
			"10,000 with Cilium over VXLAN; about 1,600 with bidders. " +
			"Only the first is set beside a row: the second is a ratio, the third another program's, " +
			"and of the last it is not told how it was reached.",
		Sources: []experiment.Source{
			{Title: "Is K3S too slow? (The Misery Cloud, 4)", URL: "https://lazaroofarrill.com/blog/the-misery-cloud-4/"},
		},
		Packages: map[string]string{"nft": "nftables", "iptables-restore": "iptables"},
		Figures: []experiment.Figure{
			{Key: "rate0", Name: "no bidder", Unit: "requests/s", Better: "higher"},
			{Key: "p50_0", Name: "p50", Unit: "ms", Better: "lower"},
			{Key: "p99_0", Name: "p99", Unit: "ms", Better: "lower"},
			{Key: "p999_0", Name: "p99.9", Unit: "ms", Better: "lower"},
			{Key: "rate3", Name: "3 bidders", Unit: "requests/s", Better: "higher"},
			{Key: "p50_3", Name: "p50, 3 bidders", Unit: "ms", Better: "lower"},
			{Key: "p99_3", Name: "p99, 3 bidders", Unit: "ms", Better: "lower"},
			{Key: "p999_3", Name: "p99.9, 3 bidders", Unit: "ms", Better: "lower"},
			{Key: "failed", Name: "failed", Better: "lower"},
		},
		Charts: []experiment.Chart{
			{Kind: experiment.Bars, Title: "Requests/s without bidders", Figure: "rate0"},
			{Kind: experiment.Bars, Title: "Requests/s with three bidders", Figure: "rate3"},
			{Kind: experiment.Latency, Title: "Latency without bidders"},
		},
		Scale:    scale,
		Rows:     rows,
		Conclude: conclude,
		Card:     card,
	}
}

func length(o experiment.Options) (samples int, each time.Duration) {
	if o.Quick {
		return 1, time.Second
	}
	return 6, 1500 * time.Millisecond
}

func scale(o experiment.Options) string {
	samples, each := length(o)
	return fmt.Sprintf("Client, four nodes and all pods share the CPUs of one machine, over veth devices instead of cables: "+
		"what a packet costs shows, what a network card does for it (checksums and segmentation of VXLAN) does not. "+
		"%d connections in a closed loop. Samples of each row: %d, of %v, in the order of the rows. "+
		"Metal is host networking too: the exchange on the node's own address.", connections, samples, each)
}

func rows(o experiment.Options) []experiment.Row {
	samples, each := length(o)
	takes := 3*time.Second + 2*time.Duration(samples)*(each+200*time.Millisecond)
	out := []experiment.Row{{
		Name: metal, Group: "metal", Side: experiment.Metal, Takes: takes, Published: map[string]float64{"rate0": 24000},
		Run: func(ctx context.Context, m *experiment.Measurement) error { return run(ctx, o, networks[1], nil, m) },
	}}
	for _, n := range networks {
		for _, p := range proxies {
			// The quick form has no room for every pair.
			if o.Quick && (p.mode == "iptables" && !p.peer || p.mode == "nftables" && (!p.peer || n.spec == topology.Routed)) {
				continue
			}
			row := experiment.Row{Name: n.name + ": " + p.name, Group: n.name, Takes: takes,
				Run: func(ctx context.Context, m *experiment.Measurement) error { return run(ctx, o, n, &p, m) }}
			if p.peer {
				row.Needs = harness.NeedKubeProxy
				row.Takes += 2 * time.Second
			} else {
				row.Side = experiment.Spillway
			}
			out = append(out, row)
		}
	}
	return out
}

// run measures one row on a cluster of its own; without a proxy it is metal.
func run(ctx context.Context, o experiment.Options, n network, p *proxy, m *experiment.Measurement) (err error) {
	spec := topology.DefaultSpec(o.Name + "-rtb")
	spec.Nodes, spec.PodsPerNode, spec.Clients, spec.PodNetwork = 4, 2, 2, n.spec
	spec.Masquerade, spec.Conntrack = true, true // as flannel configures it
	r, err := harness.Up(ctx, spec)
	if err != nil {
		return err
	}
	defer r.EndRow(m, &err)
	target, err := setUp(ctx, r, p)
	if err != nil {
		return err
	}
	if err := measure(ctx, o, r, target, "0", 404, m); err != nil {
		return err
	}
	if err := startDSPs(ctx, r, p); err != nil {
		return err
	}
	if err := waitStatus(ctx, r, target, 200); err != nil {
		return err
	}
	return measure(ctx, o, r, target, "3", 200, m)
}

// setUp starts the exchange and the proxies, and returns the client's destination.
func setUp(ctx context.Context, r *harness.Harness, p *proxy) (target netip.AddrPort, err error) {
	c := r.Cluster
	host, port := c.Pod(1, 0), uint16(podPort)
	target = netip.AddrPortFrom(c.Node(0).IPv4, nodePort)
	if p == nil {
		host, port = c.Node(0), metalPort
		target = netip.AddrPortFrom(c.Node(0).IPv4, metalPort)
	}
	if err := r.Serve(ctx, host, workload.Exchange, port); err != nil {
		return target, err
	}
	if p != nil {
		if err := startProxies(ctx, r, *p); err != nil {
			return target, err
		}
	}
	return target, waitStatus(ctx, r, target, 404)
}

// startDSPs starts the bidders: in pods of three nodes, or on the nodes.
func startDSPs(ctx context.Context, r *harness.Harness, p *proxy) error {
	c := r.Cluster
	for i, node := range []int{0, 2, 3}[:dsps] {
		host, port := c.Pod(node, 1), uint16(podPort)
		exchange := netip.AddrPortFrom(c.Pod(1, 0).IPv4, podPort)
		if p == nil {
			host, port = c.Node([]int{1, 2, 3}[i]), metalPort
			exchange = netip.AddrPortFrom(c.Node(0).IPv4, metalPort)
		}
		err := r.Start(ctx, host, workload.Config{Kind: workload.DSP, Listen: fmt.Sprintf(":%d", port), Name: host.Name,
			Exchange: "http://" + exchange.String() + "/register",
			Self:     "http://" + netip.AddrPortFrom(host.IPv4, port).String() + "/bid"})
		if err != nil {
			return err
		}
	}
	// All three must have registered: the first already causes status 200.
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(500 * time.Millisecond):
		return nil
	}
}

func bids(target netip.AddrPort) load.Config {
	return load.Config{Kind: load.HTTP, Target: target, Path: "/bid", Body: string(rtb.Sample()), AnyStatus: true, Timeout: 2 * time.Second}
}

// waitStatus sends requests until the exchange answers with a status.
func waitStatus(ctx context.Context, r *harness.Harness, target netip.AddrPort, status int) error {
	const limit = 10 * time.Second
	cfg := bids(target)
	cfg.Connections, cfg.MaxRequests, cfg.Duration = 1, 1, 300*time.Millisecond
	var last string
	for began := time.Now(); time.Since(began) < limit; {
		got, err := r.Load(ctx, r.Cluster.Client(0), cfg)
		if err != nil {
			return err
		}
		if got.Statuses[status] > 0 {
			return nil
		}
		last = fmt.Sprintf("statuses %v, errors %v", got.Statuses, got.Errors)
	}
	return fmt.Errorf("wait for the exchange at %s to answer with %d: not after %v: %s", target, status, limit, last)
}

// measure takes all samples with a number of bidders. The exchange answers all with one
// status.
func measure(ctx context.Context, o experiment.Options, r *harness.Harness, target netip.AddrPort, bidders string, status int,
	m *experiment.Measurement) error {
	samples, each := length(o)
	cfg := bids(target)
	cfg.Connections, cfg.Duration, cfg.Warmup = connections, each, 200*time.Millisecond
	var all []*load.Result
	for i := range samples {
		o.Progress.Part(i, samples)
		got, err := r.Load(ctx, r.Cluster.Client(0), cfg)
		if err != nil {
			return err
		}
		all = append(all, got)
		m.Add("rate"+bidders, got.Rate)
		m.Add("p50_"+bidders, got.Latency.P50/1000)
		m.Add("p99_"+bidders, got.Latency.P99/1000)
		m.Add("p999_"+bidders, got.Latency.P999/1000)
		m.Add("failed", float64(got.Failed()))
		for s, n := range got.Statuses {
			if s != status {
				m.Note(fmt.Sprintf("%d of %d answers with %s bidders had status %d.", n, got.Requests, bidders, s))
			}
		}
		if got.ClientLimited {
			m.Note("The load generator was busy all the time: the rate is its own.")
		}
	}
	if bidders != "0" {
		return nil
	}
	merged, err := load.Merge(all)
	if err != nil {
		return err
	}
	for _, p := range merged.Distribution() {
		m.Distribution = append(m.Distribution, experiment.Point{X: p.Percentile, Y: p.Micros})
	}
	return nil
}

// conclude compares each row with metal.
func conclude(res *experiment.Result) []string {
	var out, parts []string
	if own := res.Row(metal); own != nil {
		base, ok := own.Value("rate0")
		for _, row := range res.Rows {
			v, has := row.Value("rate0")
			if ok && has && row.Name != metal && base.Median > 0 {
				parts = append(parts, fmt.Sprintf("%s %.2f", row.Name, v.Median/base.Median))
			}
		}
	}
	if len(parts) > 0 {
		out = append(out, "Measured, requests/s without bidders as a share of metal: "+strings.Join(parts, "; ")+".")
	}
	return append(out, "The published share of 1/17 was between machines with network cards, where VXLAN also costs what the card would "+
		"have done. Here every row "+
		"pays for client, exchange and network with the same CPUs, and the exchange's own work (decoding JSON) is most of a request: shares "+
		"come out nearer to 1.")
}
