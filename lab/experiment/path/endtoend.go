package path

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// EndToEndConfig sets the extent of a measurement of nodes with an agent against the same
// nodes without one.
type EndToEndConfig struct {
	Name             string // of the clusters
	Mode             string // --proxy-mode of the agents
	Rounds           int    // measurements of each side of a row
	Duration, Warmup time.Duration
	Connections      int
	Progress         *experiment.Progress
}

// maxEndToEndName leaves room for the suffix of the second cluster.
const maxEndToEndName = 20 - len(vxlanSuffix)

const vxlanSuffix = "-vxlan"

// Validate returns an error of one line for an invalid EndToEndConfig.
func (c EndToEndConfig) Validate() error {
	if len(c.Name) > maxEndToEndName {
		return fmt.Errorf("name %q: use at most %d characters: the second cluster has %q behind it", c.Name, maxEndToEndName, vxlanSuffix)
	}
	return Config{Mode: c.Mode, Rounds: c.Rounds, Duration: c.Duration, Warmup: c.Warmup, Connections: c.Connections}.Validate()
}

const (
	streamPort        = 8082
	streamSize        = 1 << 20 // bytes of a body
	streamConnections = 4
)

// settle is how long nothing is measured after agents have started or were removed.
const settle = 500 * time.Millisecond

// state says whether the nodes have an agent.
type state int

const (
	without state = iota
	with
)

func (s state) String() string { return [...]string{"without agents", "with agents"}[s] }

// probe is one load on nodes in one state.
type probe struct {
	state  state
	vxlan  bool // on the cluster with the VXLAN
	kind   load.Kind
	stream bool // bodies of streamSize
	way    way
}

// endRow compares two probes.
type endRow struct {
	name          string
	base, service probe
	least         float64 // the target for service ÷ base, 0 for none
}

// endRows lists the rows on two clusters of the same plan: without and with a VXLAN.
func endRows(c, vxlan *topology.Cluster) []endRow {
	client, node, pod := c.Client(0), c.Node(0), c.Pod(0, 1)
	metal := way{client, netip.AddrPortFrom(node.IPv4, metalPort)}
	podHere := way{pod, netip.AddrPortFrom(c.Pod(0, 0).IPv4, podPort)}
	podThere := way{pod, netip.AddrPortFrom(c.Pod(1, 0).IPv4, podPort)}
	clientThere := way{client, podThere.to}
	byNode := way{client, netip.AddrPortFrom(c.Pod(1, 1).IPv4, podPort)}
	here := way{client, netip.AddrPortFrom(node.IPv4, hereNodePort)}
	there := way{client, netip.AddrPortFrom(node.IPv4, thereNodePort)}

	var rows []endRow
	notOurs := func(name string, kind load.Kind, w way) {
		rows = append(rows, endRow{name: name, base: probe{kind: kind, way: w}, service: probe{state: with, kind: kind, way: w}, least: 0.99})
	}
	notOurs("client → node", load.HTTP, metal)
	notOurs("client → node", load.Conn, metal)
	stream := probe{kind: load.HTTP, stream: true, way: way{client, netip.AddrPortFrom(node.IPv4, streamPort)}}
	streamWith := stream
	streamWith.state = with
	rows = append(rows, endRow{name: "client → node", base: stream, service: streamWith, least: 0.99})
	notOurs("pod → pod, same node", load.HTTP, podHere)
	notOurs("pod → pod, other node", load.HTTP, podThere)
	notOurs("pod → pod, other node", load.Conn, podThere)

	service := func(name string, base, service way, keepAlive, newConnections float64) {
		for _, k := range []struct {
			kind  load.Kind
			least float64
		}{{load.HTTP, keepAlive}, {load.Conn, newConnections}} {
			rows = append(rows, endRow{name: name, base: probe{kind: k.kind, way: base},
				service: probe{state: with, kind: k.kind, way: service}, least: k.least})
		}
	}
	service("NodePort here ÷ metal", metal, here, 0.97, 0.95)
	service("cluster IP ÷ pod", podThere, way{pod, netip.AddrPortFrom(thereClusterIP, podPort)}, 1.0, 1.0)
	service("NodePort away ÷ pod", clientThere, there, 0.95, 0.95)
	// What the other node takes by itself.
	for _, kind := range []load.Kind{load.HTTP, load.Conn} {
		rows = append(rows, endRow{name: "client → pod, by a node", base: probe{kind: kind, way: clientThere},
			service: probe{kind: kind, way: byNode}})
	}
	for _, kind := range []load.Kind{load.HTTP, load.Conn} {
		rows = append(rows, endRow{name: "NodePort away, VXLAN", base: probe{state: with, kind: kind, way: there},
			service: probe{state: with, vxlan: true, kind: kind, way: way{vxlan.Client(0), there.to}}, least: 0.9})
	}
	// What the VXLAN takes by itself.
	for _, kind := range []load.Kind{load.HTTP, load.Conn} {
		rows = append(rows, endRow{name: "pod → pod, VXLAN", base: probe{kind: kind, way: podThere},
			service: probe{vxlan: true, kind: kind, way: way{vxlan.Pod(0, 1), podThere.to}}})
	}
	return rows
}

// endToEnd is one run.
type endToEnd struct {
	cfg    EndToEndConfig
	routed *harness.Harness
	vxlan  *harness.Harness
	state  state
	dirs   map[*harness.Harness]string // of manifests
	rows   []endRow
	probes []probe
	phases []phase
}

// phase holds the samples of all probes of a state, measured one after the other.
type phase struct {
	state   state
	samples map[probe]harness.Sample
}

// EndToEnd builds two clusters and measures all rows. It measures the nodes without and
// with agents in turns, and removes the agents in between. When ctx ends or a step fails,
// the report holds the complete rounds, beside the error.
func EndToEnd(ctx context.Context, cfg EndToEndConfig) (report *EndToEndReport, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	machine, err := harness.Begin()
	if err != nil {
		return nil, err
	}
	e := &endToEnd{cfg: cfg, dirs: map[*harness.Harness]string{}}
	defer func() {
		err = harness.End(ctx, err, cfg.Progress, e.routed, e.vxlan)
		report = newEndToEndReport(cfg, machine, e.rows, e.phases)
	}()
	if err := e.setUp(ctx); err != nil {
		return nil, err
	}
	return nil, e.measureAll(ctx)
}

// setUp builds the clusters and starts the servers.
func (e *endToEnd) setUp(ctx context.Context) (err error) {
	e.cfg.Progress.Step("building two clusters of two nodes, and starting servers")
	spec := topology.DefaultSpec(e.cfg.Name)
	spec.Masquerade, spec.Conntrack = true, true // as flannel configures it
	if e.routed, err = harness.Up(ctx, spec); err != nil {
		return err
	}
	spec.Name, spec.PodNetwork = e.cfg.Name+vxlanSuffix, topology.VXLAN
	if e.vxlan, err = harness.Up(ctx, spec); err != nil {
		return err
	}
	for _, h := range []*harness.Harness{e.routed, e.vxlan} {
		if err := e.serve(ctx, h); err != nil {
			return err
		}
	}
	e.rows = endRows(e.routed.Cluster, e.vxlan.Cluster)
	for _, r := range e.rows {
		for _, p := range []probe{r.base, r.service} {
			if !slices.Contains(e.probes, p) {
				e.probes = append(e.probes, p)
			}
		}
	}
	return nil
}

// serve starts the servers of a cluster and writes its manifests.
func (e *endToEnd) serve(ctx context.Context, h *harness.Harness) (err error) {
	c := h.Cluster
	for _, s := range []struct {
		host *topology.Host
		port uint16
	}{{c.Node(0), metalPort}, {c.Pod(0, 0), podPort}, {c.Pod(1, 0), podPort}, {c.Pod(1, 1), podPort}} {
		if err := h.Serve(ctx, s.host, workload.HTTP, s.port); err != nil {
			return err
		}
	}
	err = h.Start(ctx, c.Node(0), workload.Config{Kind: workload.HTTP, Listen: fmt.Sprintf(":%d", streamPort), Size: streamSize})
	if err != nil {
		return err
	}
	if err := h.RoutePods(c.Client(0)); err != nil {
		return err
	}
	if err := h.RoutePodBy(c.Client(0), c.Pod(1, 1), c.Node(0)); err != nil {
		return err
	}
	e.dirs[h], err = writeManifests(h, false, false)
	return err
}

// measureAll measures rounds in the order A B B A, A being without agents. One phase more
// without agents at each end makes more pairs of phases for the A/A control.
func (e *endToEnd) measureAll(ctx context.Context) error {
	order := []state{without}
	for i := range e.cfg.Rounds {
		round := []state{without, with}
		if i%2 == 1 {
			slices.Reverse(round)
		}
		order = append(order, round...)
	}
	if order[len(order)-1] == without {
		order = append(order, without)
	}
	for i, s := range order {
		if err := e.enter(ctx, s); err != nil {
			return err
		}
		e.cfg.Progress.Step("measurement %d of %d: nodes %s", i+1, len(order), s)
		if err := e.measure(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// enter starts or removes all agents, unless the nodes are in that state.
func (e *endToEnd) enter(ctx context.Context, s state) error {
	if e.state == s {
		return nil
	}
	for _, h := range []*harness.Harness{e.routed, e.vxlan} {
		for i := range h.Cluster.Spec.Nodes {
			node := h.Cluster.Node(i)
			var err error
			if s == with {
				err = h.Agent(ctx, node, e.dirs[h], e.cfg.Mode)
			} else {
				err = h.RemoveAgent(ctx, node, e.cfg.Mode)
			}
			if err != nil {
				return err
			}
		}
	}
	e.state = s
	if err := e.check(ctx, s); err != nil {
		return err
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(settle):
		return nil
	}
}

// check returns an error unless NodePorts answer in the state with agents, and in no
// other.
func (e *endToEnd) check(ctx context.Context, s state) error {
	for _, h := range []*harness.Harness{e.routed, e.vxlan} {
		for _, port := range []uint16{hereNodePort, thereNodePort} {
			client, to := h.Cluster.Client(0), netip.AddrPortFrom(h.Cluster.Node(0).IPv4, port)
			if s == with {
				if err := h.WaitAnswer(ctx, client, workload.HTTP, to); err != nil {
					return err
				}
				continue
			}
			a, err := workload.Ask(ctx, client, workload.Question{Kind: workload.HTTP, To: to.String(), Timeout: time.Second})
			if err != nil {
				return err
			}
			if a.Outcome == workload.Answered {
				return fmt.Errorf("measure nodes without agents: %s still answers %s", to, client.Name)
			}
		}
	}
	return nil
}

// measure takes one sample of each probe of a state.
func (e *endToEnd) measure(ctx context.Context, s state) error {
	mine := slices.DeleteFunc(slices.Clone(e.probes), func(p probe) bool { return p.state != s })
	ph := phase{s, map[probe]harness.Sample{}}
	for i, p := range mine {
		e.cfg.Progress.Part(i, len(mine))
		h := e.routed
		if p.vxlan {
			h = e.vxlan
		}
		cfg := load.Config{Kind: p.kind, Target: p.way.to, Connections: e.cfg.Connections, Duration: e.cfg.Duration, Warmup: e.cfg.Warmup}
		if p.stream {
			cfg.Connections = min(cfg.Connections, streamConnections)
		}
		sample, err := e.sample(ctx, h, p, cfg)
		if err != nil {
			return err
		}
		ph.samples[p] = sample
	}
	e.phases = append(e.phases, ph)
	return nil
}

// sample measures once more if nothing was answered: a stall of the machine is no result.
// Its CPU time is that of the cluster alone: other clusters and programs run beside it.
func (e *endToEnd) sample(ctx context.Context, h *harness.Harness, p probe, cfg load.Config) (harness.Sample, error) {
	for range 2 {
		before, err := h.RanFor()
		if err != nil {
			return harness.Sample{}, err
		}
		s, err := h.Measure(ctx, p.way.from, cfg)
		if err != nil {
			return s, err
		}
		after, err := h.RanFor()
		if err != nil {
			return s, err
		}
		if s.Requests > 0 {
			share := s.Seconds / (s.Seconds + cfg.Warmup.Seconds())
			s.CPUPerRequest = (after - before) * 1e6 / float64(s.Requests) * share
			return s, nil
		}
	}
	return harness.Sample{}, fmt.Errorf("measure %s from %s, %s: nothing was answered, twice", p.way.to, p.way.from.Name, p.state)
}

// loadName names the load of a row.
func (r endRow) loadName() string {
	switch {
	case r.base.stream:
		return "stream"
	case r.base.kind == load.Conn:
		return "new"
	}
	return "keep-alive"
}
