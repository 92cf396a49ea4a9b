package path

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/agent"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// EventsConfig sets the extent of a measurement of flow events and Service metrics against
// an agent with the default flags.
type EventsConfig struct {
	Name             string // of the clusters, with a suffix for each
	Rounds           int    // measurements of each row and side
	Duration, Warmup time.Duration
	Connections      int
	Rates            []int // new connections/s at which CPU is compared
	Progress         *experiment.Progress
}

// maxEventsName leaves room for the suffixes of the clusters.
const maxEventsName = 18

// Validate returns an error of one line for an invalid EventsConfig.
func (c EventsConfig) Validate() error {
	if len(c.Name) > maxEventsName {
		return fmt.Errorf("name %q: use at most %d characters: each cluster has a suffix behind it", c.Name, maxEventsName)
	}
	if slices.ContainsFunc(c.Rates, func(r int) bool { return r < 1 || r > 1e6 }) {
		return fmt.Errorf("rates are %v: use 1 to 1000000 connections/s", c.Rates)
	}
	return Config{Mode: "ebpf", Rounds: c.Rounds, Duration: c.Duration, Warmup: c.Warmup, Connections: c.Connections}.Validate()
}

// eventsSide is an agent's flags, measured on a cluster of its own.
type eventsSide struct {
	name   string // in the report
	flags  []string
	reader bool // a program follows the events
}

// eventsSides lists the sides. The first is the base, and the second its control: another
// cluster with the same flags.
var eventsSides = []eventsSide{
	{name: "base"},
	{name: "A/A control"},
	{name: "metrics", flags: []string{"--service-metrics", "all"}},
	{name: "events", flags: []string{"--flow-events", "all"}, reader: true},
	{name: "every event", flags: []string{"--flow-events", "all", "--flow-events-rate", "0"}, reader: true},
}

// eventsRow is one load.
type eventsRow struct {
	path string
	kind load.Kind
	rate float64 // 0: as fast as possible
	way  func(*topology.Cluster) way
}

func eventsRows(rates []int) (rows []eventsRow) {
	for _, p := range []struct {
		name string
		way  func(*topology.Cluster) way
	}{
		{"NodePort here", func(c *topology.Cluster) way {
			return way{c.Client(0), netip.AddrPortFrom(c.Node(0).IPv4, hereNodePort)}
		}},
		{"NodePort away", func(c *topology.Cluster) way {
			return way{c.Client(0), netip.AddrPortFrom(c.Node(0).IPv4, thereNodePort)}
		}},
		{"ClusterIP", func(c *topology.Cluster) way { return way{c.Pod(0, 1), netip.AddrPortFrom(thereClusterIP, podPort)} }},
	} {
		rows = append(rows, eventsRow{p.name, load.HTTP, 0, p.way}, eventsRow{p.name, load.Conn, 0, p.way})
		for _, rate := range rates {
			rows = append(rows, eventsRow{p.name, load.Conn, float64(rate), p.way})
		}
	}
	return rows
}

// loadName names the load of a row.
func (r eventsRow) loadName() string {
	switch {
	case r.kind == load.HTTP:
		return "keep-alive"
	case r.rate > 0:
		return fmt.Sprintf("new %.0f/s", r.rate)
	}
	return "new"
}

// EventsSample is one measurement.
type EventsSample struct {
	harness.Sample
	// ReaderCPU is the part of CPUPerRequest that the reader took, in µs. On all sides it
	// includes this program's own work at the start and the end of a measurement.
	ReaderCPU float64 `json:"reader_cpu_per_request_us"`
	// AgentCPU is the CPU time of the agent for each request, in µs. The kernel counts it
	// in hundredths of a second.
	AgentCPU float64 `json:"agent_cpu_per_request_us"`
	// Counts are those of the agent and of the reader, warmup included.
	Counts EventCounts `json:"events"`
}

// EventCounts counts events.
type EventCounts struct {
	Received int64 `json:"received"` // by the agent
	Read     int64 `json:"read"`     // by the reader
	// Lost events did not fit into the kernel's ring; Missed ones were read too slowly.
	Lost   int64 `json:"lost"`
	Missed int64 `json:"missed"`
	// LeftOut counts flows that --flow-events-rate leaves out.
	LeftOut int64 `json:"left_out"`
}

func (c EventCounts) minus(d EventCounts) EventCounts {
	return EventCounts{c.Received - d.Received, c.Read - d.Read, c.Lost - d.Lost, c.Missed - d.Missed, c.LeftOut - d.LeftOut}
}

func (c EventCounts) plus(d EventCounts) EventCounts {
	return EventCounts{c.Received + d.Received, c.Read + d.Read, c.Lost + d.Lost, c.Missed + d.Missed, c.LeftOut + d.LeftOut}
}

// events is one run.
type events struct {
	cfg      EventsConfig
	clusters []*harness.Harness // by side
	readers  []*eventReader     // by side, nil without one
	rows     []eventsRow
	samples  [][][]EventsSample // by row, round and side
}

// Events builds a cluster for each side and measures all rows. In each round it measures a
// row on all sides, one after the other, and in the next round in the reverse order. When
// ctx ends or a step fails, the report holds the complete rounds, beside the error.
func Events(ctx context.Context, cfg EventsConfig) (report *EventsReport, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	machine, err := harness.Begin()
	if err != nil {
		return nil, err
	}
	e := &events{cfg: cfg, rows: eventsRows(cfg.Rates)}
	e.samples = make([][][]EventsSample, len(e.rows))
	defer func() {
		for _, r := range e.readers {
			if r != nil {
				r.stop()
			}
		}
		err = harness.End(ctx, err, cfg.Progress, e.clusters...)
		report = newEventsReport(cfg, machine, e.rows, e.samples)
	}()
	if err := e.setUp(ctx); err != nil {
		return nil, err
	}
	return nil, e.measureAll(ctx)
}

// setUp builds the clusters and starts servers, agents and readers. Only node0 has an
// agent: all measured packets to a Service pass it first.
func (e *events) setUp(ctx context.Context) error {
	e.cfg.Progress.Step("building %d clusters of two nodes, and starting servers and agents", len(eventsSides))
	for i, s := range eventsSides {
		spec := topology.DefaultSpec(fmt.Sprintf("%s-%c", e.cfg.Name, 'a'+i))
		spec.Masquerade, spec.Conntrack = true, true // as flannel configures it
		h, err := harness.Up(ctx, spec)
		if err != nil {
			return err
		}
		e.clusters = append(e.clusters, h)
		var reader *eventReader
		if reader, err = e.start(ctx, h, s); err != nil {
			return err
		}
		e.readers = append(e.readers, reader)
	}
	return nil
}

// start starts the servers, the agent and the reader of a side, nil without one.
func (e *events) start(ctx context.Context, h *harness.Harness, s eventsSide) (*eventReader, error) {
	c := h.Cluster
	for _, pod := range []*topology.Host{c.Pod(0, 0), c.Pod(1, 0)} {
		if err := h.Serve(ctx, pod, workload.HTTP, podPort); err != nil {
			return nil, err
		}
	}
	dir, err := writeManifests(h, false, false)
	if err != nil {
		return nil, err
	}
	socket := h.Path("api.sock")
	if err := h.Agent(ctx, c.Node(0), dir, "ebpf", append([]string{"--api-socket", socket}, s.flags...)...); err != nil {
		return nil, err
	}
	for _, r := range e.rows {
		w := r.way(c)
		if err := h.WaitAnswer(ctx, w.from, workload.HTTP, w.to); err != nil {
			return nil, err
		}
	}
	if !s.reader {
		return nil, nil
	}
	return readEvents(ctx, socket)
}

// measureAll measures rounds: all rows, and each row on all sides.
func (e *events) measureAll(ctx context.Context) error {
	order := make([]int, len(eventsSides))
	for i := range order {
		order[i] = i
	}
	for round := range e.cfg.Rounds {
		e.cfg.Progress.Step("round %d of %d", round+1, e.cfg.Rounds)
		for i, row := range e.rows {
			e.cfg.Progress.Part(i, len(e.rows))
			samples := make([]EventsSample, len(eventsSides))
			for _, side := range order {
				var err error
				if samples[side], err = e.measure(ctx, row, side); err != nil {
					return fmt.Errorf("measure %s, %s, %s: %w", row.path, row.loadName(), eventsSides[side].name, err)
				}
			}
			e.samples[i] = append(e.samples[i], samples)
		}
		slices.Reverse(order)
	}
	return nil
}

// measure takes one sample, and a second one if nothing was answered: a stall of the
// machine is no result.
func (e *events) measure(ctx context.Context, row eventsRow, side int) (s EventsSample, err error) {
	for range 2 {
		if s, err = e.sample(ctx, row, side); err != nil || s.Requests > 0 {
			return s, err
		}
	}
	return s, errors.New("nothing was answered, twice")
}

func (e *events) sample(ctx context.Context, row eventsRow, side int) (s EventsSample, err error) {
	h, reader := e.clusters[side], e.readers[side]
	counts, err := e.counts(ctx, side)
	if err != nil {
		return s, err
	}
	before, err := clusterCPU(h)
	if err != nil {
		return s, err
	}
	own, err := ownCPU()
	if err != nil {
		return s, err
	}
	w := row.way(h.Cluster)
	s.Sample, err = h.Measure(ctx, w.from, load.Config{Kind: row.kind, Target: w.to, Rate: row.rate,
		Connections: e.cfg.Connections, Duration: e.cfg.Duration, Warmup: e.cfg.Warmup})
	if err != nil {
		return s, err
	}
	if reader != nil {
		if err := reader.settle(ctx); err != nil {
			return s, err
		}
	}
	ownAfter, err := ownCPU() // before this process reads the CPU time of others
	if err != nil {
		return s, err
	}
	after, err := clusterCPU(h)
	if err != nil {
		return s, err
	}
	left, err := e.counts(ctx, side)
	if err != nil {
		return s, err
	}
	s.Counts = left.minus(counts)
	if s.Requests > 0 {
		share := 1e6 / float64(s.Requests) * s.Seconds / (s.Seconds + e.cfg.Warmup.Seconds())
		s.ReaderCPU, s.AgentCPU = (ownAfter-own)*share, (after.agent-before.agent)*share
		s.CPUPerRequest = (after.cluster-before.cluster)*share + s.ReaderCPU
	}
	return s, nil
}

// cpu holds CPU times in seconds.
type cpu struct {
	cluster float64 // with its agent, its clients and servers, and the kernel's threads
	agent   float64
}

func clusterCPU(h *harness.Harness) (c cpu, err error) {
	if c.cluster, err = h.RanFor(); err != nil {
		return c, err
	}
	c.agent, err = h.AgentsCPU()
	return c, err
}

// ownCPU returns the CPU time of this process in seconds. While a load runs, it only reads
// events.
func ownCPU() (float64, error) {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0, fmt.Errorf("read own CPU time: %w", err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9, nil
}

// counts reads the metrics of a side's agent, and the counts of its reader.
func (e *events) counts(ctx context.Context, side int) (c EventCounts, err error) {
	for name, n := range map[string]*int64{
		"spillway_flow_events_total": &c.Received, "spillway_flow_events_lost_total": &c.Lost, "spillway_flow_events_left_out_total": &c.LeftOut,
	} {
		v, err := agent.Metric(ctx, e.clusters[side].Cluster.Node(0), name, "")
		if err != nil {
			return c, err
		}
		*n = int64(v)
	}
	if r := e.readers[side]; r != nil {
		c.Read, c.Missed = r.read.Load(), r.missed.Load()
	}
	return c, nil
}

// flagsText names the flags of a side.
func (s eventsSide) flagsText() string {
	if len(s.flags) == 0 {
		return "default flags"
	}
	text := strings.Join(s.flags, " ")
	if s.reader {
		text += ", with a reader"
	}
	return text
}
