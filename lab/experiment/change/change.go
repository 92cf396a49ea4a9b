// Package change measures what a change of a Service costs each dataplane, in
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
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/rig"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/lab/topology"
	"spillway.dev/spillway/lab/workload"
)

// Modes are the dataplanes that can be measured.
var Modes = []string{"ebpf", "nftables", "iptables"}

// small is the size that first packets are compared with.
const small = 10

// Config says what to measure.
type Config struct {
	Name     string // of the clusters
	Modes    []string
	Services []int
	Changes  int // single ones, for the percentiles
	Rounds   int // of the comparison of first packets
	Progress *experiment.Progress
}

// Validate says what is wrong with a Config, in one line.
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
		return fmt.Errorf("rounds is %d: use %d or more", c.Rounds, experiment.MinRounds)
	}
	return nil
}

// Run measures everything, mode by mode. When ctx ends or something fails, the
// report holds what was complete, beside the error.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if err := rig.NeedPrograms(rig.Packages); err != nil {
		return nil, err
	}
	machine, err := experiment.ReadMachine()
	if err != nil {
		return nil, err
	}
	if cfg.Progress == nil {
		cfg.Progress = &experiment.Progress{}
	}
	defer cfg.Progress.Done()
	report := &Report{Machine: machine, Changes: cfg.Changes, Endpoints: Endpoints}
	for _, mode := range cfg.Modes {
		if err := measureMode(ctx, cfg, mode, report); err != nil {
			if ctx.Err() != nil {
				err = rig.EndError(ctx)
			}
			return report, err
		}
	}
	return report, nil
}

func measureMode(ctx context.Context, cfg Config, mode string, report *Report) (err error) {
	cfg.Progress.Step("%s: a node of %d Services", mode, small)
	base, err := newSide(ctx, cfg, mode, cfg.Name+"-small", small)
	if err != nil {
		return fmt.Errorf("measure %s: %w", mode, err)
	}
	defer func() { err = errors.Join(err, base.down()) }()
	for _, n := range cfg.Services {
		row, err := measureSize(ctx, cfg, mode, n, base)
		if err != nil {
			return fmt.Errorf("measure %s with %d Services: %w", mode, n, err)
		}
		report.Rows = append(report.Rows, row)
	}
	return nil
}

func measureSize(ctx context.Context, cfg Config, mode string, n int, base *side) (row Row, err error) {
	cfg.Progress.Step("%s: %d Services of %d endpoints", mode, n, Endpoints)
	s, err := newSide(ctx, cfg, mode, cfg.Name+"-large", n)
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, s.down()) }()
	row = Row{Mode: mode, Services: n, Cold: s.cold}
	cfg.Progress.Step("%s: %d Services: %d changes", mode, n, cfg.Changes)
	if _, err := fmt.Fprintln(s.ask); err != nil {
		return row, s.failed(err)
	}
	if err := s.answers.Decode(&row.Batch); err != nil {
		return row, s.failed(err)
	}
	cfg.Progress.Step("%s: %d Services: first packets", mode, n)
	pair := experiment.Pair[float64]{Name: mode, A: base.firstPacket, B: s.firstPacket, Rounds: cfg.Rounds, Progress: cfg.Progress.Part}
	trial, err := pair.Run(ctx)
	if err != nil {
		return row, err
	}
	itself := func(v float64) float64 { return v }
	row.Connect = experiment.Median(trial.B)
	row.FirstPacket = trial.Ratio(itself)
	return row, nil
}

// side is a node with a process that writes to its kernel.
type side struct {
	rig     *rig.Rig
	cmd     *topology.Cmd
	ask     io.WriteCloser
	answers *json.Decoder
	errors  strings.Builder
	cold    Cold
}

func newSide(ctx context.Context, cfg Config, mode, name string, services int) (*side, error) {
	spec := topology.DefaultSpec(name)
	spec.Nodes, spec.PodsPerNode, spec.Masquerade, spec.Conntrack = 1, 1, true, true
	r, err := rig.Up(ctx, spec)
	if err != nil {
		return nil, err
	}
	s := &side{rig: r}
	if err := s.start(ctx, cfg, mode, services); err != nil {
		return nil, errors.Join(err, s.down())
	}
	return s, nil
}

func (s *side) start(ctx context.Context, cfg Config, mode string, services int) error {
	node, pod := s.rig.Cluster.Node(0), s.rig.Cluster.Pod(0, 0)
	if err := s.rig.Serve(ctx, pod, workload.HTTP, ProbePort); err != nil {
		return err
	}
	bpffs := s.rig.Path("bpf/" + node.Name)
	if err := os.MkdirAll(bpffs, 0o700); err != nil {
		return fmt.Errorf("make directory for pinned objects: %w", err)
	}
	s.cmd = node.Command(ctx, s.rig.Program, "bench", "sync-side", "--proxy-mode", mode,
		"--services", strconv.Itoa(services), "--changes", strconv.Itoa(cfg.Changes),
		"--node", node.Name, "--pod", pod.IPv4.String(), "--bpffs", bpffs, "--cgroup-root", node.CgroupRoot)
	s.cmd.Stderr = &s.errors
	s.cmd.WaitDelay = time.Second
	var err error
	if s.ask, err = s.cmd.StdinPipe(); err != nil {
		return fmt.Errorf("open pipe: %w", err)
	}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return fmt.Errorf("open pipe: %w", err)
	}
	s.answers = json.NewDecoder(bufio.NewReader(out))
	if err := s.cmd.Start(); err != nil {
		return err
	}
	if err := s.answers.Decode(&s.cold); err != nil {
		return s.failed(err)
	}
	return s.rig.WaitAnswer(ctx, s.rig.Cluster.Client(0), workload.HTTP, s.target())
}

// failed says why a process does not answer, in its own words if it has any.
func (s *side) failed(err error) error {
	s.ask.Close()
	if end := s.cmd.Wait(); end != nil {
		err = end
	}
	if words := strings.TrimSpace(s.errors.String()); words != "" {
		return fmt.Errorf("%w: %s", err, words[strings.LastIndexByte(words, '\n')+1:])
	}
	return err
}

func (s *side) target() netip.AddrPort {
	return netip.AddrPortFrom(s.rig.Cluster.Node(0).IPv4, ProbeNodePort)
}

// firstPacket is the median time, in µs, of a request on a connection of its
// own, one at a time: the first packet of each looks for its Service.
func (s *side) firstPacket(ctx context.Context) (float64, error) {
	result, err := s.rig.Load(ctx, s.rig.Cluster.Client(0), load.Config{Kind: load.Conn, Target: s.target(),
		Connections: 1, Duration: 200 * time.Millisecond, Warmup: 30 * time.Millisecond})
	if err != nil {
		return 0, err
	}
	if result.Requests == 0 {
		return 0, fmt.Errorf("nothing answered at %s: %v", s.target(), result.Errors)
	}
	return result.Latency.P50, nil
}

func (s *side) down() error {
	if s.ask != nil {
		s.ask.Close()
	}
	if s.cmd != nil && s.cmd.Process != nil && s.cmd.ProcessState == nil {
		_ = s.cmd.Wait() // it ends with its input; the cluster's Down kills it otherwise
	}
	return s.rig.Down()
}
