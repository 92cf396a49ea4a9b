// Package stream measures the time of a change from the API server to the kernel, among
// many other changes:
//
//	writer ── 200 EndpointSlices a second ──> kube-apiserver ── watch ──> proxy ──> kernel
//	   └─ of these some are probes: from the moment of writing, a pod connects to the
//	      Service again and again, until what the kernel does is what was written
//
// Each proxy has a minute and a node of its own, one after the other, with one API
// server. The measurement is from outside, so it is the same for all. After the start,
// each probe has three times. First the API server answers. Then a watch of the lab has
// the change, so the proxy's has it too. Last, a connection has the new state.
package stream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// Proxies lists the proxies to measure. hack/peers builds kube-proxy.
var Proxies = []string{"ebpf", "nftables", "kube-proxy-nftables"}

const kubeProxy = "kube-proxy-"

// Endpoints is how many endpoints each Service of the many has.
const Endpoints = 10

// Config selects the measurements.
type Config struct {
	Name     string // of the cluster
	Proxies  []string
	Services int
	Rate     int // changes a second
	Duration time.Duration
	Probes   int // changes in a second that a probe waits for
	Progress *experiment.Progress
}

// Validate returns an error of one line for an invalid Config.
func (c Config) Validate() error {
	for _, p := range c.Proxies {
		if !slices.Contains(Proxies, p) {
			return fmt.Errorf("mode %q: not a mode: use %s", p, strings.Join(Proxies, ", "))
		}
	}
	switch {
	case len(c.Proxies) == 0:
		return errors.New("nothing to measure: give at least one mode")
	case c.Services < 1 || c.Services > 50000:
		return fmt.Errorf("services is %d: use 1 to 50000", c.Services)
	case c.Rate < 1 || c.Rate > 2000:
		return fmt.Errorf("rate is %d: use 1 to 2000", c.Rate)
	case c.Probes < 1 || c.Probes > c.Rate:
		return fmt.Errorf("probes is %d: use 1 to the rate, %d", c.Probes, c.Rate)
	case c.Duration < time.Second:
		return fmt.Errorf("duration is %v: use a second or more", c.Duration)
	}
	return nil
}

// bench is a cluster with an API server and many Services.
type bench struct {
	cfg     Config
	harness *harness.Harness
	plane   *controlplane.ControlPlane
	client  kubernetes.Interface
	crowd   controlplane.Crowd
	// unready are the Services of the crowd whose first endpoint was written so.
	unready map[int]bool
}

// Run measures one proxy after the other. When ctx ends or a step fails, the report holds
// the complete results, beside the error.
func Run(ctx context.Context, cfg Config) (report *Report, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	machine, err := harness.Begin()
	if err != nil {
		return nil, err
	}
	defer cfg.Progress.Done()
	report = &Report{Machine: machine, Services: cfg.Services, Endpoints: Endpoints, Rate: cfg.Rate, Seconds: cfg.Duration.Seconds()}
	b := &bench{cfg: cfg, unready: map[int]bool{}}
	defer func() { err = errors.Join(err, b.down()) }()
	if err := b.up(ctx); err != nil {
		return report, err
	}
	for i, proxy := range cfg.Proxies {
		row, err := b.measure(ctx, i, proxy)
		if err != nil {
			if ctx.Err() != nil {
				err = harness.EndError(ctx)
			}
			return report, fmt.Errorf("measure %s: %w", proxy, err)
		}
		report.Rows = append(report.Rows, row)
	}
	return report, nil
}

// up builds a node for each proxy, the API server on the outside client, and all
// objects.
func (b *bench) up(ctx context.Context) error {
	b.cfg.Progress.Step("%d Services of %d endpoints", b.cfg.Services, Endpoints)
	spec := topology.DefaultSpec(b.cfg.Name)
	spec.Nodes, spec.PodsPerNode, spec.Clients, spec.Masquerade, spec.Conntrack = len(b.cfg.Proxies), 2, 1, true, true
	var err error
	if b.harness, err = harness.Up(ctx, spec); err != nil {
		return err
	}
	for i := range b.cfg.Proxies {
		if err := b.harness.Serve(ctx, b.harness.Cluster.Pod(i, 1), workload.HTTP, probePort); err != nil {
			return err
		}
	}
	dir, err := b.harness.PlaneDir()
	if err != nil {
		return err
	}
	if b.plane, err = controlplane.Up(ctx, controlplane.Config{Dir: dir, Host: b.harness.Cluster.Client(0)}); err != nil {
		return err
	}
	if b.client, err = kubernetes.NewForConfig(b.plane.REST()); err != nil {
		return fmt.Errorf("open client: %w", err)
	}
	return b.populate(ctx)
}

func (b *bench) down() error {
	if b.plane != nil {
		b.plane.Down()
	}
	if b.harness == nil {
		return nil
	}
	return b.harness.Down()
}

// measure starts a proxy on the node of that number, and gives it the stream.
func (b *bench) measure(ctx context.Context, node int, proxy string) (row Row, err error) {
	b.cfg.Progress.Step("%s: start", proxy)
	probes, err := b.prepareProbes(ctx, node)
	if err != nil {
		return row, err
	}
	p, err := b.start(node, proxy)
	if err != nil {
		return row, err
	}
	defer p.stop()
	for _, probe := range probes {
		if err := probe.await(ctx, true, startWithin); err != nil {
			return row, errors.Join(err, p.exited())
		}
	}
	cpu, err := p.cpu()
	if err != nil {
		return row, err
	}
	b.cfg.Progress.Step("%s: %d changes a second for %v", proxy, b.cfg.Rate, b.cfg.Duration)
	row = Row{Mode: proxy}
	w, err := b.watchProbes(ctx)
	if err != nil {
		return row, err
	}
	err = b.write(ctx, probes, w, &row)
	if lost := w.stop(); err == nil {
		err = lost
	}
	if err != nil {
		return row, err
	}
	if err := b.settle(ctx, p, &row); err != nil {
		return row, err
	}
	after, err := p.cpu()
	if err != nil {
		return row, err
	}
	row.CPU = after - cpu
	row.RSS, row.Peak, err = p.memory()
	return row, err
}
