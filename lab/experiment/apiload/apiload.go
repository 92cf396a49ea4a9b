// Package apiload measures what the clients of many nodes cost an API server: the part of
// Spillway's agent that reads facts, and the informers of kube-proxy.
//
//	kube-apiserver, etcd ── 200 clients of one kind, in this process
//	   └─ 2,000 Services, 5,000 Nodes, and changes of them
//
// Each client has an identity, a client and connections of its own, as on a node of its
// own; only the process is shared. Bytes are counted at its connections. One kind of
// client runs after the other, on the same API server.
package apiload

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/features"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/test/testbed/controlplane"
)

// Kind is a kind of client.
type Kind struct {
	Name string
	// Proxy makes it kube-proxy's informers instead of Spillway's agent.
	Proxy bool
	// OwnNodeOnly is that of modes that need no other Nodes: nftables and iptables.
	OwnNodeOnly bool
	// WatchesNodes makes an agent watch all Nodes, as in a cluster that has few.
	WatchesNodes bool
	// Lists makes clients list and then watch, instead of a watch that begins with all
	// objects.
	Lists bool
	// NodesAsMetadata adds a watch of all Nodes' metadata.
	NodesAsMetadata bool
	ContentType     string // "": protobuf
}

// Kinds are the kinds of clients to measure. The first three are programs as they are; the
// others change one thing.
var Kinds = []Kind{
	{Name: "ebpf"},
	{Name: "nftables", OwnNodeOnly: true},
	{Name: "kube-proxy", Proxy: true},
	{Name: "ebpf-watch-nodes", WatchesNodes: true},
	{Name: "ebpf-watch-nodes-list", WatchesNodes: true, Lists: true},
	{Name: "nftables-list", OwnNodeOnly: true, Lists: true},
	{Name: "nftables-json", OwnNodeOnly: true, ContentType: "application/json"},
	{Name: "nftables-node-metadata", OwnNodeOnly: true, NodesAsMetadata: true},
}

// KindNames lists their names.
func KindNames() (names []string) {
	for _, k := range Kinds {
		names = append(names, k.Name)
	}
	return names
}

// Config selects the measurements.
type Config struct {
	Kinds     []string
	Agents    int
	AtOnce    int // clients that start at the same time
	Services  int
	Endpoints int // of each Service
	Nodes     int
	Pods      int // of each node with a client
	Changes   int // of EndpointSlices
	Beats     int // status updates of Nodes
	Restart   bool
	Progress  *experiment.Progress
}

// Validate returns an error of one line for an invalid Config.
func (c Config) Validate() error {
	for _, name := range c.Kinds {
		if !slices.Contains(KindNames(), name) {
			return fmt.Errorf("kind %q: no such kind: use %s", name, strings.Join(KindNames(), ", "))
		}
	}
	switch {
	case len(c.Kinds) == 0:
		return errors.New("nothing to measure: give at least one kind")
	case c.Agents < 1 || c.Agents > 1000:
		return fmt.Errorf("agents is %d: use 1 to 1000", c.Agents)
	case c.AtOnce < 1:
		return fmt.Errorf("at-once is %d: use 1 or more", c.AtOnce)
	case c.Services < 1 || c.Services > 10000:
		return fmt.Errorf("services is %d: use 1 to 10000", c.Services)
	case c.Endpoints < 1 || c.Endpoints > 1000:
		return fmt.Errorf("endpoints is %d: use 1 to 1000", c.Endpoints)
	case c.Nodes < c.Agents+1 || c.Nodes > 10000:
		return fmt.Errorf("nodes is %d: use 1 more than agents, to 10000", c.Nodes)
	case c.Pods < 0 || c.Changes < 0 || c.Beats < 0:
		return errors.New("a number is negative")
	}
	return nil
}

// Bench is an API server with objects.
type Bench struct {
	cfg      Config
	dir      string
	plane    *controlplane.ControlPlane
	server   *server
	api      kubernetes.Interface
	own      map[string]int // the API server's own watches
	identity []string       // kubeconfigs
	written  int            // rounds of changes
}

// Run measures one kind after the other. When ctx ends or a step fails, the report holds
// the complete results, beside the error.
func Run(ctx context.Context, cfg Config) (report *Report, err error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	machine, err := experiment.ReadMachine()
	if err != nil {
		return nil, err
	}
	klog.SetSlogLogger(slog.New(slog.DiscardHandler)) // of clients while the API server is down
	defer cfg.Progress.Done()
	gates() // before the first client
	b, err := Up(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.Down()) }()
	report = &Report{Machine: machine, Agents: cfg.Agents, AtOnce: cfg.AtOnce, Services: cfg.Services, Endpoints: cfg.Endpoints,
		Nodes: cfg.Nodes, Pods: cfg.Pods}
	cfg.Progress.Step("changes without clients")
	if report.Idle, err = b.measure(ctx, "no clients", nil); err != nil {
		return report, err
	}
	for _, name := range cfg.Kinds {
		row, err := b.Measure(ctx, name)
		if row.Name != "" {
			report.Rows = append(report.Rows, row)
		}
		if err != nil {
			if ctx.Err() != nil {
				err = errors.New("interrupted")
			}
			return report, fmt.Errorf("measure %s: %w", name, err)
		}
	}
	return report, nil
}

// Up starts the API server and creates all objects. It keeps etcd in memory if possible:
// etcd waits for every write.
func Up(ctx context.Context, cfg Config) (b *Bench, err error) {
	b = &Bench{cfg: cfg}
	if b.dir, err = os.MkdirTemp("/dev/shm", "spillway-apiload-"); err != nil {
		if b.dir, err = os.MkdirTemp("", "spillway-apiload-"); err != nil {
			return nil, fmt.Errorf("make directory for the control plane: %w", err)
		}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Down())
		}
	}()
	cfg.Progress.Step("%d Services of %d endpoints, %d Nodes", cfg.Services, cfg.Endpoints, cfg.Nodes)
	// A streaming list needs etcd 3.4.31, 3.5.13 or newer; Debian 12's is 3.4.23.
	etcd, err := controlplane.Program("etcd")
	if err != nil {
		return b, err
	}
	if b.plane, err = controlplane.Up(ctx, controlplane.Config{Dir: b.dir, Etcd: etcd, StartWithin: 5 * time.Minute}); err != nil {
		return b, err
	}
	b.server = &server{b.plane}
	if b.api, err = kubernetes.NewForConfig(b.plane.REST()); err != nil {
		return b, fmt.Errorf("open client: %w", err)
	}
	if b.own, err = b.plane.Watches(ctx); err != nil {
		return b, err
	}
	if err := populate(ctx, b.api, cfg); err != nil {
		return b, err
	}
	for i := range cfg.Agents {
		file, err := b.plane.Kubeconfig(controlplane.User{Name: "system:node:" + nodeName(i), Groups: []string{"system:masters"}})
		if err != nil {
			return b, err
		}
		b.identity = append(b.identity, file)
	}
	return b, nil
}

// Down ends the API server and removes its files.
func (b *Bench) Down() error {
	if b.plane != nil {
		b.plane.Down()
	}
	return os.RemoveAll(b.dir)
}

// streaming decides whether Reflectors that start stream their lists.
type streaming struct {
	features.Gates
	off atomic.Bool
}

// Enabled implements features.Gates.
func (s *streaming) Enabled(f features.Feature) bool {
	return s.Gates.Enabled(f) && (f != features.WatchListClient || !s.off.Load())
}

// gates replaces client-go's, which are read once from the environment.
var gates = sync.OnceValue(func() *streaming {
	s := &streaming{Gates: features.FeatureGates()}
	features.ReplaceFeatureGates(s)
	return s
})

// Measure starts clients of a kind, gives them changes and stops them. The row is complete
// but for the restart if only that fails.
func (b *Bench) Measure(ctx context.Context, name string) (row Row, err error) {
	kind := Kinds[slices.Index(KindNames(), name)]
	if kind.Lists {
		gates().off.Store(true)
		defer gates().off.Store(false)
	}
	var clients []*client
	defer func() {
		for _, c := range clients {
			c.cancel()
		}
		for _, c := range clients {
			c.stop()
		}
	}()
	if err := b.server.forget(); err != nil {
		return row, err
	}
	b.cfg.Progress.Step("%s: start", name)
	begin, err := b.server.cpu()
	if err != nil {
		return row, err
	}
	for len(clients) < b.cfg.Agents {
		first := len(clients)
		for i := first; i < min(first+b.cfg.AtOnce, b.cfg.Agents); i++ {
			c, err := start(kind, nodeName(i), b.identity[i])
			if err != nil {
				return row, err
			}
			clients = append(clients, c)
		}
		for _, c := range clients[first:] {
			if err := c.wait(ctx); err != nil {
				return row, err
			}
		}
	}
	start := b.phase(clients, nil)
	if start.CPU, err = b.cpuSince(begin); err != nil {
		return row, err
	}
	if row, err = b.measure(ctx, name, clients); err != nil {
		return Row{}, err
	}
	row.Start = start
	if row.RSS, row.Peak, err = b.server.memory(); err != nil {
		return row, err
	}
	if b.cfg.Restart {
		row.Restart, err = b.restart(ctx, name, clients)
	}
	return row, err
}

// watches returns the clients' open watches.
func (b *Bench) watches(ctx context.Context) (map[string]int, error) {
	all, err := b.plane.Watches(ctx)
	for resource, n := range b.own {
		if all[resource] -= n; all[resource] == 0 {
			delete(all, resource)
		}
	}
	return all, err
}

func (b *Bench) cpuSince(begin float64) (float64, error) {
	now, err := b.server.cpu()
	return now - begin, err
}

// measure gives clients that have started changes, and waits until they have them.
func (b *Bench) measure(ctx context.Context, name string, clients []*client) (row Row, err error) {
	row.Name = name
	if row.Watches, err = b.watches(ctx); err != nil {
		return row, err
	}
	b.cfg.Progress.Step("%s: %d changes of endpoints", name, b.cfg.Changes)
	row.Changes, err = b.record(clients, func() error { return b.change(ctx, clients) })
	if err != nil {
		return row, err
	}
	b.cfg.Progress.Step("%s: %d status updates of Nodes", name, b.cfg.Beats)
	row.Beats, err = b.record(clients, func() error { return b.beat(ctx, clients) })
	return row, err
}

// record measures what a step costs.
func (b *Bench) record(clients []*client, step func() error) (p Phase, err error) {
	begin, err := b.server.cpu()
	if err != nil {
		return p, err
	}
	before := readings(clients)
	if err := step(); err != nil {
		return p, err
	}
	p = b.phase(clients, before)
	p.CPU, err = b.cpuSince(begin)
	return p, err
}

// change changes an endpoint in each of many slices, and waits until all clients have the
// changes.
func (b *Bench) change(ctx context.Context, clients []*client) error {
	b.written++
	crowd, ready := b.cfg.crowd(), b.written%2 == 0
	var before []int64
	for _, c := range clients {
		before = append(before, c.slices.Load())
	}
	n := min(b.cfg.Changes, b.cfg.Services)
	if err := each(ctx, n, func(ctx context.Context, i int) error { return changeEndpoint(ctx, b.api, crowd, i, ready) }); err != nil {
		return err
	}
	for i, c := range clients {
		if err := until(ctx, "changes of endpoints", func() (bool, error) { return c.slices.Load() >= before[i]+int64(n), nil }); err != nil {
			return err
		}
	}
	return nil
}

// beat updates the status of many Nodes. The last of them gets another zone, which marks
// the end for clients that watch all Nodes.
func (b *Bench) beat(ctx context.Context, clients []*client) error {
	at := time.Now()
	var before []int64
	for _, c := range clients {
		before = append(before, c.nodes.Load())
	}
	last := b.cfg.Nodes - 1
	n := min(b.cfg.Beats, last)
	// From the end: the first Nodes are the clients' own.
	if err := each(ctx, n, func(ctx context.Context, i int) error { return beat(ctx, b.api, last-1-i, at) }); err != nil {
		return err
	}
	if err := rezone(ctx, b.api, last, fmt.Sprintf("zone-%d", b.written)); err != nil {
		return err
	}
	for i, c := range clients {
		if !c.allNodes {
			continue
		}
		if err := until(ctx, "changes of Nodes", func() (bool, error) { return c.nodes.Load() > before[i], nil }); err != nil {
			return err
		}
	}
	return nil
}

// restart kills the API server, starts it again, and waits until all clients watch it.
func (b *Bench) restart(ctx context.Context, name string, clients []*client) (p Phase, err error) {
	b.cfg.Progress.Step("%s: restart of the API server", name)
	want, err := b.watches(ctx)
	if err != nil {
		return p, err
	}
	before := readings(clients)
	b.plane.StopAPIServer()
	if err := b.plane.StartAPIServer(ctx); err != nil {
		return p, err
	}
	begin := time.Now()
	if err := until(ctx, "watches after a restart", func() (bool, error) {
		is, err := b.watches(ctx)
		return maps.Equal(is, want), err
	}); err != nil {
		return p, err
	}
	if err := b.change(ctx, clients); err != nil {
		return p, err
	}
	p = b.phase(clients, before)
	p.Seconds = time.Since(begin).Seconds()
	p.CPU, err = b.server.cpu()
	return p, err
}

func readings(clients []*client) (out []reading) {
	for _, c := range clients {
		out = append(out, c.read())
	}
	return out
}

// phase sums up what clients received since the readings before.
func (b *Bench) phase(clients []*client, before []reading) (p Phase) {
	if len(clients) == 0 {
		return p
	}
	n := float64(len(clients))
	total := map[Request]*Traffic{}
	for i, c := range clients {
		now := c.read()
		was := reading{}
		if before != nil {
			was = before[i]
		}
		p.Wire += float64(now.wire-was.wire) / n
		p.Connections += float64(now.conns-was.conns) / n
		for r, count := range now.requests {
			t := total[r]
			if t == nil {
				t = &Traffic{Request: r}
				total[r] = t
			}
			t.Count += float64(count-was.requests[r]) / n
			t.Bytes += float64(now.bytes[r]-was.bytes[r]) / n
		}
	}
	for _, t := range total {
		if t.Count > 0 || t.Bytes > 0 {
			p.Requests = append(p.Requests, *t)
		}
	}
	slices.SortFunc(p.Requests, func(a, b Traffic) int {
		return cmp.Or(cmp.Compare(b.Bytes, a.Bytes), cmp.Compare(a.Resource, b.Resource), cmp.Compare(a.Verb, b.Verb),
			cmp.Compare(a.Status, b.Status))
	})
	return p
}
