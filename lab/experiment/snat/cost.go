package snat

import (
	"context"
	"fmt"
	"time"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// The ways out of a node, by the number of the node that has it.
const (
	plainRouting = iota // the server has a route to the pods: no NAT, no conntrack
	byMasquerade
	byEBPF
	byNftables
)

// ways are their names, and the dataplanes of the agents.
var ways = []struct{ name, mode string }{
	plainRouting: {"plain routing", ""},
	byMasquerade: {"MASQUERADE", ""},
	byEBPF:       {"Spillway, eBPF", "ebpf"},
	byNftables:   {"Spillway, nftables", "nftables"},
}

// cost is one comparison of two ways.
type cost struct {
	name        string
	base, other int
	kind        load.Kind
	// full compares other with itself: with an empty conntrack table, and with one that is full of open
	// connections.
	full bool
	// open compares other with itself: alone, and beside openFlows connections of pods to the outside.
	open bool
}

func costs(o experiment.Options) []cost {
	list := []cost{
		{name: "new connections", base: byMasquerade, other: byEBPF, kind: load.Conn},
		{name: "new connections", base: plainRouting, other: byEBPF, kind: load.Conn},
		{name: "new connections, conntrack full", base: byEBPF, other: byEBPF, kind: load.Conn, full: true},
		{name: fmt.Sprintf("new connections, %d open", openFlows(o)), base: byEBPF, other: byEBPF, kind: load.Conn, open: true},
	}
	if o.Quick {
		return list
	}
	return append(list,
		cost{name: "new connections", base: byMasquerade, other: byNftables, kind: load.Conn},
		cost{name: "new connections", base: plainRouting, other: plainRouting, kind: load.Conn},
		cost{name: "new connections, conntrack full", base: byMasquerade, other: byMasquerade, kind: load.Conn, full: true},
		cost{name: "keep-alive", base: byMasquerade, other: byEBPF, kind: load.HTTP},
		cost{name: "keep-alive", base: plainRouting, other: byEBPF, kind: load.HTTP},
	)
}

// row is the name of the comparison's row.
func (c cost) row() string {
	switch {
	case c.full, c.open:
		return c.name + ": " + ways[c.other].name
	case c.base == c.other:
		return fmt.Sprintf("%s: %s with itself", c.name, ways[c.base].name)
	}
	return fmt.Sprintf("%s: %s to %s", c.name, ways[c.other].name, ways[c.base].name)
}

// Egress returns the experiment egress.
func Egress() experiment.Experiment {
	return experiment.Experiment{
		Name:  "egress",
		Title: "What a pod's way to the outside costs",
		Question: "A pod asks a server outside the cluster: by plain routing without NAT or conntrack, by flannel's MASQUERADE, and with " +
			"Spillway's --egress. How many new connections and requests are left, and what if the conntrack table is full?",
		Published: "Nothing: this is Spillway's own question.",
		Packages:  map[string]string{"nginx": "nginx-light", "iptables-restore": "iptables", "conntrack": "conntrack"},
		Figures: []experiment.Figure{
			{Key: "ratio", Name: "rate ÷ base", Better: "higher"},
			{Key: "cpu", Name: "CPU time a request ÷ base", Better: "lower"},
			{Key: "rate", Name: "rate", Unit: "per s", Better: "higher"},
			{Key: "base", Name: "base", Unit: "per s"},
			{Key: "entries", Name: "conntrack entries left", Better: "lower"},
			{Key: "failed", Name: "failed", Unit: "%", Better: "lower"},
			{Key: "p99", Name: "p99", Unit: "ms", Better: "lower"},
			{Key: "base_p99", Name: "base p99", Unit: "ms"},
			{Key: "walk", Name: "walk through the flow table", Unit: "ms", Better: "lower"},
			{Key: "memory", Name: "agent's memory", Unit: "MiB", Better: "lower"},
		},
		Charts: []experiment.Chart{{Kind: experiment.Bars, Title: "Rate ÷ base", Figure: "ratio"}},
		Scale: func(o experiment.Options) string {
			rounds, each := costLength(o)
			return fmt.Sprintf("Each way has a node of its own, with one pod, and all ask one server on the LAN. Both sides of a row are "+
				"measured in turns, A B B A, %d times for %v with %d connections. Client, nodes and server share the CPUs of one machine, which "+
				"they use up: the CPU time is that of the whole machine.", rounds, each, costThreads)
		},
		Rows:     costRows,
		Conclude: concludeCost,
		Card:     costCard,
	}
}

// costCard compares the rates of new connections.
func costCard(res *experiment.Result) *experiment.Card {
	c := &experiment.Card{
		Question:  "How many new connections do pods open to the outside in a second?",
		Unit:      "new connections/s of a pod, by the way out",
		Published: "nothing; this is Spillway's own question",
	}
	masquerade, plain := costs(experiment.Options{})[0], costs(experiment.Options{})[1]
	for _, bar := range []struct {
		cost cost
		key  string
		way  int
		side experiment.Side
	}{
		{plain, "base", plainRouting, experiment.Other}, {masquerade, "base", byMasquerade, experiment.Other},
		{masquerade, "rate", byEBPF, experiment.Spillway},
	} {
		if row := res.Row(bar.cost.row()); row != nil {
			if v, ok := row.Value(bar.key); ok {
				c.Bars = append(c.Bars, experiment.CardBar{Name: ways[bar.way].name, Side: bar.side, Value: v})
			}
		}
	}
	row := res.Row(masquerade.row())
	if row == nil {
		return nil
	}
	ratio, ok := row.Value("ratio")
	if !ok {
		return nil
	}
	c.Number = experiment.FormatNumber(ratio.Median)
	c.Verdict, c.Caption = "connections ÷ MASQUERADE's: "+c.Number, c.Unit
	return c
}

func concludeCost(*experiment.Result) []string {
	return []string{
		"With eBPF a packet goes from the pod's device to the network's, with the node's address, before routing and netfilter see it. So it " +
			"is also cheaper than plain routing, which has neither NAT nor conntrack.",
		"A full conntrack table drops each new connection that netfilter tracks. Flows of eBPF are not in it.",
	}
}

const costThreads = 64

func costLength(o experiment.Options) (rounds int, each time.Duration) {
	if o.Quick {
		return 1, time.Second
	}
	return 6, 1500 * time.Millisecond
}

func costRows(o experiment.Options) (rows []experiment.Row) {
	rounds, each := costLength(o)
	for _, c := range costs(o) {
		row := experiment.Row{
			Name: c.row(), Group: c.name,
			Takes: 4*time.Second + 2*time.Duration(rounds)*(each+400*time.Millisecond),
			Run:   func(ctx context.Context, m *experiment.Measurement) error { return c.run(ctx, o, m) },
		}
		if ways[c.other].mode != "" {
			row.Side = experiment.Spillway
		}
		if c.full {
			row.Takes += time.Duration(rounds) * 3 * time.Second
		}
		rows = append(rows, row)
	}
	return rows
}

// run measures one row on a cluster of its own.
func (c cost) run(ctx context.Context, o experiment.Options, m *experiment.Measurement) (err error) {
	spec := topology.DefaultSpec(o.Name + "-out")
	spec.Nodes, spec.PodsPerNode, spec.Clients = len(ways), 1, 1
	r, err := harness.Up(ctx, spec)
	if err != nil {
		return err
	}
	defer r.EndRow(m, &err)
	if err := c.setUp(ctx, r); err != nil {
		return err
	}
	rounds, each := costLength(o)
	cfg := load.Config{Kind: c.kind, Target: outsideTarget(r), Connections: costThreads, Duration: each,
		Warmup: 100 * time.Millisecond, Timeout: 5 * time.Second}
	pair := experiment.Pair[harness.Sample]{
		Name: c.row(), Rounds: rounds, Progress: o.Progress.Part,
		A: func(ctx context.Context) (harness.Sample, error) { return c.sample(ctx, r, c.base, false, cfg) },
		B: func(ctx context.Context) (harness.Sample, error) { return c.sample(ctx, r, c.other, c.full, cfg) },
	}
	if c.open {
		pair.A = func(ctx context.Context) (harness.Sample, error) { return c.openSample(ctx, r, 0, cfg, nil) }
		pair.B = func(ctx context.Context) (harness.Sample, error) { return c.openSample(ctx, r, openFlows(o), cfg, m) }
	}
	trial, err := pair.Run(ctx)
	c.add(trial, m)
	return err
}

// setUp starts the server, and the ways of this row.
func (c cost) setUp(ctx context.Context, r *harness.Harness) error {
	if err := r.Serve(ctx, r.Cluster.Client(0), workload.HTTP, podPort); err != nil {
		return err
	}
	if err := r.RoutePods(r.Cluster.Client(0)); err != nil {
		return err
	}
	for _, way := range []int{c.base, c.other} {
		if way == plainRouting {
			continue
		}
		node := r.Cluster.Node(way)
		if err := restore(ctx, node, masqueradeRules(r.Cluster.Spec.ClusterCIDR4, node.PodCIDRs[0], "--random-fully", 0)); err != nil {
			return err
		}
		if mode := ways[way].mode; mode != "" {
			dir, err := writeNodes(r)
			if err != nil {
				return err
			}
			if err := r.Agent(ctx, node, dir, mode, "--egress", "auto"); err != nil {
				return err
			}
			if err := waitEgress(ctx, r, way); err != nil {
				return err
			}
		}
		if c.base == c.other {
			break
		}
	}
	for _, way := range []int{c.base, c.other} {
		if err := r.WaitAnswer(ctx, r.Cluster.Pod(way, 0), workload.HTTP, outsideTarget(r)); err != nil {
			return err
		}
	}
	return nil
}

// sample measures one side once.
func (c cost) sample(ctx context.Context, r *harness.Harness, way int, full bool, cfg load.Config) (harness.Sample, error) {
	node := r.Cluster.Node(way)
	if way != plainRouting {
		if err := harness.EmptyConntrack(ctx, node); err != nil {
			return harness.Sample{}, err
		}
	}
	if full {
		if err := harness.FillConntrack(ctx, node, 0); err != nil {
			return harness.Sample{}, err
		}
		return r.MeasureAsIs(ctx, r.Cluster.Pod(way, 0), cfg)
	}
	return r.Measure(ctx, r.Cluster.Pod(way, 0), cfg)
}

// add adds the rounds that were complete.
func (c cost) add(trial experiment.Trial[harness.Sample], m *experiment.Measurement) {
	for i, a := range trial.A {
		b := trial.B[i]
		m.Add("base", a.Rate)
		m.Add("rate", b.Rate)
		if a.Rate > 0 {
			m.Add("ratio", b.Rate/a.Rate)
		}
		if a.CPUPerRequest > 0 && b.CPUPerRequest > 0 {
			m.Add("cpu", b.CPUPerRequest/a.CPUPerRequest)
		}
		if c.kind == load.Conn {
			m.Add("p99", b.Latency.P99/1000)
			m.Add("base_p99", a.Latency.P99/1000)
		}
		m.Add("entries", float64(b.Conntrack))
		if all := float64(b.Requests + b.Failed() + b.UnderWay); all > 0 {
			m.Add("failed", 100*float64(b.Failed()+b.UnderWay)/all)
		}
		if a.ClientLimited || b.ClientLimited {
			m.Note("The load generators were busy all the time: the rate is theirs.")
		}
	}
}
