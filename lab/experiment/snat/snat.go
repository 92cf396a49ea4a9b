// Package snat is the experiment snat-race: connections from several machines to one
// address. All are translated to one source address, so that two may get the same port at
// the same time. It has two tables. Pods connect to the outside, as published:
//
//	pod0..7 ── node0: the CNI's masquerade rule ── LAN ── client0
//
// And clients connect to a NodePort, as proxies without egress can do:
//
//	client0..3 ── LAN ── node0: NodePort ─ DNAT, SNAT ── LAN ── node1 ── pod
//
// The rules of the first rows of each case are manual, as kube-proxy and CNIs had and have them.
// Spillway's rows are an agent with its own dataplane.
package snat

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/agent"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

const (
	clients  = 4
	nodePort = 30080
	podPort  = 8080
	// firstPort is the start of the small ranges of source ports. It is above the ports
	// of the node's own sockets, so that every dataplane may use the ranges.
	firstPort = 61000
	smallest  = 64
	crowded   = 1024
	occupied  = 973 // of crowded: 95 %
)

// The titles of the tables.
const (
	outsideTable  = "Pods of one node to one address outside, as published"
	nodePortTable = "Clients of one node's NodePort, which takes MASQUERADE's place"
)

// method is how source ports are chosen.
type method struct {
	name  string
	flags string // of MASQUERADE
	mode  string // of the agent; "" for rules made by hand
	more  bool   // the agent has moreAddresses
}

var methods = []method{
	{name: "MASQUERADE"},
	{name: "MASQUERADE --random", flags: "--random"},
	{name: "MASQUERADE --random-fully", flags: "--random-fully"},
	{name: "Spillway, eBPF", mode: "ebpf"},
	{name: "Spillway, nftables", mode: "nftables"},
}

// load describes the requests.
type traffic struct {
	name    string
	kind    load.Kind
	threads int
	ports   int // number of source ports to choose from; 0 is the usual range
	held    int // connections that are open all the while
}

// New returns the experiment.
func New() experiment.Experiment {
	return experiment.Experiment{
		Name:  "snat-race",
		Title: "Connections that lose a packet to a race of port numbers",
		Question: "Two connections to one address are translated to the same source at the same time. Netfilter chooses a port for each " +
			"before either is in its table; the second to get there is dropped (insert_failed), and its sender waits 1 s, then 3 s, to try again. " +
			"How often does that happen with each way to choose ports?",
		Published: "With 10 to 80 threads from several containers to one address, 2–4 % of new connections lost a packet; " +
			"fully random ports brought that to 0. DNS over UDP meets the same race in DNAT, with A and AAAA asked from one socket at once.",
		Sources: []experiment.Source{
			{Title: "A reason for unexplained connection timeouts on Kubernetes/Docker",
				URL: "https://tech.xing.com/a-reason-for-unexplained-connection-timeouts-on-kubernetes-docker-abd041cf7e02"},
		},
		Packages: map[string]string{"nginx": "nginx-light", "nft": "nftables", "iptables-restore": "iptables"},
		Figures: []experiment.Figure{
			{Key: "lost", Name: "lost packets", Unit: "per 100 connections", Better: "lower"},
			{Key: "connections", Name: "connections", Unit: "per sample"},
			{Key: "reused", Name: "SYN met TIME-WAIT at the server", Unit: "per 100 connections", Better: "lower"},
			{Key: "over1s", Name: "over 1 s", Unit: "%", Better: "lower"},
			{Key: "over3s", Name: "over 3 s", Unit: "%", Better: "lower"},
			{Key: "slowest", Name: "slowest", Unit: "ms", Better: "lower"},
			{Key: "failed", Name: "failed", Unit: "%", Better: "lower"},
			{Key: "rate", Name: "answered", Unit: "per s", Better: "higher"},
			{Key: "insert_failed", Name: "insert_failed", Better: "lower"},
			{Key: "drop", Name: "drop", Better: "lower"},
			{Key: "clash_resolve", Name: "clash_resolve"},
			{Key: "entries", Name: "conntrack entries at the end", Better: "lower"},
			{Key: "no_port", Name: "no port left (eBPF)", Better: "lower"},
		},
		Charts: []experiment.Chart{
			{Kind: experiment.Bars, Title: "Packets lost to ports, for 100 connections", Figure: "lost"},
			{Kind: experiment.Bars, Title: "Requests over 1 s", Figure: "over1s"},
			{Kind: experiment.Latency, Title: "Latency of pods to the outside, any port", Group: "outside"},
			{Kind: experiment.Latency, Title: "Latency, TCP to a NodePort, any port", Group: "TCP"},
		},
		Scale: scale,
		Rows: func(o experiment.Options) []experiment.Row {
			return append(outsideRows(o), rows(o)...)
		},
		Conclude: conclude,
		Card:     card,
	}
}

func scale(o experiment.Options) string {
	samples, d := length(o)
	return fmt.Sprintf("Published: containers of one machine ask an address outside, and MASQUERADE gives them the machine's. The first "+
		"table is that: pods of one node, flannel's rule, a server on the LAN. With an agent the rule stays, and a row begins when no more "+
		"connections meet it (--egress auto). Lost packets are SYNs that the pods sent again (TCPSynRetrans); one that is lost in the last "+
		"second of a sample is in insert_failed alone. "+
		"In the second table four client machines share the "+
		"threads and ask a NodePort of one node whose endpoint is on another: every connection is masqueraded all the same, to one address "+
		"and towards one, and "+
		"DNAT goes before it. There lost packets are insert_failed, and in eBPF packets without a port. "+
		"Samples of each row: %[1]d, of %[2]v. "+
		"Ports: the usual range; %[3]d ports; %[4]d ports of which %[5]d are taken by open connections of all clients (95 %%; of eBPF's own "+
		"range the same share: it uses seven of eight ports for SNAT). "+
		"To make races more frequent than two CPUs do, two things are added where a row says so. Pods of %[6]d ports choose from the "+
		"same %[6]d, so that MASQUERADE, which keeps a free port, chooses the same for two of them. And delay is %[7]d rules "+
		"of nftables that match "+
		"nothing: a first packet meets them after its port is chosen and before it is in conntrack's table. "+
		"A race needs two CPUs at the same place within microseconds: what a machine with few cores shows is less than what one with many does.",
		samples, d, smallest, crowded, occupied, ownPorts, delayRules)
}

func length(o experiment.Options) (samples int, each time.Duration) {
	if o.Quick {
		return 1, 2 * time.Second
	}
	// Longer than 3 s: a packet that is lost twice is sent again only then.
	return 3, 3200 * time.Millisecond
}

func traffics(o experiment.Options) []traffic {
	list := []traffic{
		{"TCP, 80 threads", load.Conn, 80, 0, 0},
		{"TCP, 40 threads, 64 ports", load.Conn, 40, smallest, 0},
		{"TCP, 20 threads, 95 % of 1024 ports taken", load.Conn, 20, crowded, occupied},
		{"DNS, 40 threads", load.DNS, 40, 0, 0},
	}
	if !o.Quick {
		list = append([]traffic{
			{"TCP, 10 threads", load.Conn, 10, 0, 0},
			{"TCP, 40 threads", load.Conn, 40, 0, 0},
		}, list...)
	}
	return list
}

func rows(o experiment.Options) []experiment.Row {
	samples, each := length(o)
	var out []experiment.Row
	for _, t := range traffics(o) {
		for _, m := range methods {
			// nftables' masquerading uses no range of ports that could be small, and the
			// quick form has no time for all flags.
			if m.mode == "nftables" && (t.ports > 0 || o.Quick) || m.flags == "--random" && o.Quick {
				continue
			}
			if t.threads < 40 && t.ports == 0 && (m.mode == "nftables" || m.flags == "--random") {
				continue // they need more threads to occur, if at all
			}
			row := experiment.Row{
				Name: t.name + ": " + m.name, Table: nodePortTable, X: float64(t.threads),
				Group: strings.Fields(strings.ReplaceAll(t.name, ",", " "))[0],
				Takes: 1500*time.Millisecond + time.Duration(samples)*(each+300*time.Millisecond),
				Run: func(ctx context.Context, result *experiment.Measurement) error {
					return run(ctx, o, m, t, result)
				},
			}
			if m.mode != "" {
				row.Side = experiment.Spillway
			}
			if t.ports > 0 {
				row.Group = "TCP, few ports"
			}
			out = append(out, row)
		}
	}
	return out
}

// run measures one row on a cluster of its own.
func run(ctx context.Context, o experiment.Options, m method, t traffic, result *experiment.Measurement) (err error) {
	spec := topology.DefaultSpec(o.Name + "-snat")
	spec.Nodes, spec.PodsPerNode, spec.Clients, spec.Conntrack = 2, 1, clients, true
	r, err := harness.Up(ctx, spec)
	if err != nil {
		return err
	}
	defer r.EndRow(result, &err)
	if err := setUp(ctx, r, m, t); err != nil {
		return err
	}
	samples, each := length(o)
	cfg := load.Config{Kind: t.kind, Target: target(r), Connections: t.threads, Duration: each, Warmup: 100 * time.Millisecond,
		Timeout: 5 * time.Second}
	stop, err := hold(ctx, r, sources(r), target(r), m.held(t.held), each*time.Duration(samples+2)+2*openTime)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	var all []*load.Result
	for i := range samples {
		o.Progress.Part(i, samples)
		one, err := sample(ctx, r, m, cfg, result)
		if err != nil {
			return err
		}
		all = append(all, one)
	}
	return distribute(all, result)
}

// sources are the clients.
func sources(r *harness.Harness) (hosts []*topology.Host) {
	for i := range clients {
		hosts = append(hosts, r.Cluster.Client(i))
	}
	return hosts
}

func target(r *harness.Harness) netip.AddrPort {
	return netip.AddrPortFrom(r.Cluster.Node(0).IPv4, nodePort)
}

// setUp starts the server and the translation.
func setUp(ctx context.Context, r *harness.Harness, m method, t traffic) error {
	kind, ask := workload.HTTP, workload.HTTP
	if t.kind == load.DNS {
		kind, ask = workload.DNS, ""
	}
	if err := r.Serve(ctx, r.Cluster.Pod(1, 0), kind, podPort); err != nil {
		return err
	}
	if err := fewPorts(r.Cluster.Node(0), m, t.ports); err != nil {
		return err
	}
	if m.mode == "" {
		if err := loadRules(ctx, r, m, t); err != nil {
			return err
		}
	} else if err := startAgents(ctx, r, m.mode, t.kind); err != nil {
		return err
	}
	if ask == "" {
		return nil
	}
	return r.WaitAnswer(ctx, r.Cluster.Client(0), ask, target(r))
}

// sample measures once.
func sample(ctx context.Context, r *harness.Harness, m method, cfg load.Config, result *experiment.Measurement) (*load.Result, error) {
	node := r.Cluster.Node(0)
	before, err := r.Counters(ctx, node)
	if err != nil {
		return nil, err
	}
	noPort, err := noPort(ctx, r, m, servicePorts)
	if err != nil {
		return nil, err
	}
	got, err := r.LoadFrom(ctx, sources(r), cfg)
	if err != nil {
		return nil, err
	}
	after, err := r.Counters(ctx, node)
	if err != nil {
		return nil, err
	}
	counted := after.Minus(before)
	all := float64(got.Requests + got.Failed() + got.UnderWay)
	if all == 0 {
		return nil, errors.New("nothing was sent")
	}
	percent := func(n float64) float64 { return 100 * n / all }
	lost := float64(counted.InsertFailed)
	if m.mode == "ebpf" {
		left, err := noPortSince(ctx, r, m, noPort)
		if err != nil {
			return nil, err
		}
		result.Add("no_port", left)
		lost += left
	}
	result.Add("lost", percent(lost))
	result.Add("over1s", percent(float64(got.Over1s)))
	if cfg.Duration > 3*time.Second {
		result.Add("over3s", percent(float64(got.Over3s)))
	}
	result.Add("failed", percent(float64(got.Failed())))
	result.Add("rate", got.Rate)
	result.Add("insert_failed", float64(counted.InsertFailed))
	result.Add("drop", float64(counted.Drop))
	result.Add("clash_resolve", float64(counted.ClashResolve))
	if got.ClientLimited {
		result.Note("The load generators were busy all the time: the rate is theirs.")
	}
	return got, nil
}

// The reasons of spillway_ebpf_drops_total for packets without a port.
const (
	servicePorts = "snat_ports"
	egressPorts  = "egress_ports"
)

// noPort counts packets that eBPF dropped since there was no port for them.
func noPort(ctx context.Context, r *harness.Harness, m method, reason string) (float64, error) {
	if m.mode != "ebpf" {
		return 0, nil
	}
	return agent.Metric(ctx, r.Cluster.Node(0), "spillway_ebpf_drops_total", fmt.Sprintf("reason=%q", reason))
}

func noPortSince(ctx context.Context, r *harness.Harness, m method, before float64) (float64, error) {
	now, err := noPort(ctx, r, m, servicePorts)
	return now - before, err
}
