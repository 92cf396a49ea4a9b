// Package soak keeps honest connections running through a cluster's Services for hours,
// while it changes, restarts, attacks and disconnects everything around them, at random
// from a seed. A loss that no document allows counts against a budget.
//
//	soak.go     Run: the cluster, the load, the end
//	plan.go     which action comes next
//	actions.go  the actions, and what each of them may cost
//	attack.go   hostile packets
//	client.go   honest clients: a process in a host's namespace and cgroup
//	clients.go  their processes, as the soak sees them
//	ledger.go   losses, excuses, counters
//	objects.go  Services, endpoints, policies
//	source.go   how agents learn of them: files, an API server
//	agent.go    processes of agents
//	growth.go   memory, map entries, rules at the start and at the end
//	report.go   the result
package soak

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

const (
	protocolTCP = corev1.ProtocolTCP
	protocolUDP = corev1.ProtocolUDP
)

// Modes are the dataplanes, in the order in which a node changes them.
var Modes = []string{"ebpf", "nftables", "iptables"}

// Config configures a run.
type Config struct {
	Name     string // of the lab cluster
	Duration time.Duration
	Budget   int // losses that a successful run may have
	// Seed chooses the actions, 0 a new seed. The same seed, Only and programs give
	// the same actions.
	Seed uint64
	// Steps ends the run after so many actions, 0 after Duration alone.
	Steps int
	// Only restricts the actions to these kinds, empty allows all.
	Only []string
	// Upgrades are further programs that nodes upgrade, or roll back, to.
	Upgrades []string
	Mode     string // of all nodes at the start
	// Patience is the time for an answer. It is long: the soak judges whether an answer comes,
	// not when.
	Patience time.Duration
	// Dir is the directory of the report, "" writes none.
	Dir string
	// Progress receives a line at least every ten seconds.
	Progress io.Writer

	program string // spillway; "" is that of harness.Spillway
	plant   bool   // an action that breaks connections, to test that the soak notices
	quick   bool   // pauses are short
}

// Validate returns an error of one line for an invalid Config.
func (c Config) Validate() error {
	for _, k := range c.Only {
		if !slices.Contains(Kinds(), k) {
			return fmt.Errorf("--only %q: not an action: use some of %s", k, strings.Join(Kinds(), ", "))
		}
	}
	switch {
	case c.Duration < 10*time.Second:
		return fmt.Errorf("--duration %v: at least 10s", c.Duration)
	case c.Budget < 0:
		return fmt.Errorf("--budget %d: must not be negative", c.Budget)
	case c.Steps < 0:
		return fmt.Errorf("--steps %d: must not be negative", c.Steps)
	case c.Patience < time.Second:
		return fmt.Errorf("--patience %v: at least 1s", c.Patience)
	case !slices.Contains(Modes, c.Mode):
		return fmt.Errorf("--proxy-mode %q: use one of %s", c.Mode, strings.Join(Modes, ", "))
	}
	return nil
}

// findPrograms checks that the machine has what a run needs.
func (c *Config) findPrograms() (err error) {
	if err := topology.RequireRoot(); err != nil {
		return err
	}
	if c.program == "" {
		if c.program, err = harness.Spillway(); err != nil {
			return err
		}
	}
	for _, u := range c.Upgrades {
		if _, err := os.Stat(u); err != nil {
			return fmt.Errorf("find the program to upgrade to: %w", err)
		}
	}
	return harness.NeedPrograms(map[string]string{"nft": "nftables", "iptables-nft-save": "iptables"})
}

// run is a soak under way.
type run struct {
	cfg      Config
	harness  *harness.Harness
	cluster  *topology.Cluster
	world    *world
	agents   []*nodeAgent
	programs []string // of agents: copies, at least two
	places   []*place
	onNode   []*process // the client on each node's own network
	servers  map[string]*topology.Cmd
	attack   []*attacker
	ledger   *ledger
	report   *Report
	events   *events
	broken   chan error // an agent ended by itself
	asked    int
	current  string // the action under way
	mu       sync.Mutex
	open     map[string]victim // sockets that are kept, by place and flow
	serial   int               // of temporary Services
}

// Run soaks until the Duration, the Steps or ctx ends. The report is complete so far also
// beside an error.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	if err := cfg.findPrograms(); err != nil {
		return nil, err
	}
	if cfg.Seed == 0 {
		cfg.Seed = rand.Uint64()>>1 + 1
	}
	if cfg.Progress == nil {
		cfg.Progress = io.Discard
	}
	ev, err := newEvents(cfg.Dir)
	if err != nil {
		return nil, err
	}
	defer ev.close()
	r := &run{cfg: cfg, events: ev, servers: map[string]*topology.Cmd{}, open: map[string]victim{},
		broken: make(chan error, 16), current: "load alone"}
	r.ledger = newLedger(ev.log)
	r.report = &Report{Seed: cfg.Seed, Only: cfg.Only, Budget: cfg.Budget, Mode: cfg.Mode, Upgrades: len(cfg.Upgrades), Began: time.Now()}
	r.progress("seed %d: building a cluster of three nodes", cfg.Seed)
	if err := r.build(ctx); err != nil {
		return nil, errors.Join(err, r.down())
	}
	err = r.soak(ctx)
	r.ledger.close()
	r.conclude(err)
	r.progress("removing the cluster")
	downErr := r.down()
	return r.report, errors.Join(err, downErr, ev.write(r.report))
}

func (r *run) progress(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	fmt.Fprintln(r.cfg.Progress, line)
	r.events.log("%s", line)
}

// build makes the cluster with servers, agents and clients.
func (r *run) build(ctx context.Context) error {
	spec := topology.DefaultSpec(r.cfg.Name)
	spec.Nodes, spec.PodsPerNode, spec.Clients, spec.Conntrack = 3, 3, 3, true // clients: honest, attacker, API server
	var err error
	if r.harness, err = harness.Up(ctx, spec); err != nil {
		return err
	}
	r.cluster = r.harness.Cluster
	for _, step := range []func(context.Context) error{r.startServers, r.prepareWorld, r.startAgents, r.startClients, r.openAttackers} {
		if err := step(ctx); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return harness.EndError(ctx)
		}
	}
	return nil
}

// down ends everything.
func (r *run) down() error {
	var errs []error
	for _, p := range r.places {
		p.proc.end()
	}
	for _, a := range r.attack {
		a.close()
	}
	for _, a := range r.agents {
		errs = append(errs, a.end(sigterm))
	}
	if r.world != nil {
		_ = r.world.stopAPI()
	}
	for _, s := range r.servers {
		_ = s.Process.Kill()
	}
	if r.harness != nil {
		errs = append(errs, r.harness.Down())
	}
	return errors.Join(errs...)
}

// pods returns the pods that serve: two of each node. The third has clients.
func (r *run) pods() (list []*topology.Host) {
	for n := range r.cluster.Spec.Nodes {
		list = append(list, r.cluster.Pod(n, 0), r.cluster.Pod(n, 1))
	}
	return list
}

func (r *run) startServers(context.Context) error {
	for _, p := range r.pods() {
		for _, kind := range []string{workload.TCP, workload.UDP} {
			if err := r.serve(p, kind, echoPort); err != nil {
				return err
			}
		}
		if p.Index == 1 && p.Node != "node2" {
			if err := r.serve(p, workload.TFTP, tftpPort); err != nil {
				return err
			}
		}
	}
	return nil
}

// serve starts a server, for the rest of the run.
func (r *run) serve(h *topology.Host, kind string, port int) error {
	cmd, err := workload.Start(context.Background(), h, workload.Config{Kind: kind, Listen: fmt.Sprint(":", port)})
	if err != nil {
		return err
	}
	r.servers[h.Name+" "+kind] = cmd
	go func() { _ = cmd.Wait() }() // down ends it; clients notice an earlier end
	return nil
}

// The Services, by name.
const (
	webService   = "web"   // on all serving pods
	localService = "local" // externalTrafficPolicy Local
	selfService  = "self"  // its client is its endpoint
	tftpService  = "tftp"
)

func (r *run) prepareWorld(context.Context) error {
	nodes, err := r.cluster.NodesYAML()
	if err != nil {
		return err
	}
	c := r.cluster
	local := newService(localService, 1, c.Pod(0, 0), c.Pod(1, 0))
	local.local = true
	files := newService(tftpService, 3, c.Pod(0, 1), c.Pod(1, 1))
	files.ports = []corev1.ServicePort{{Name: "tftp", Protocol: protocolUDP, Port: tftpPort,
		TargetPort: intstr.FromInt32(tftpPort), NodePort: 30030}}
	var pods []*topology.Host
	for _, h := range c.Hosts() {
		if h.Kind == topology.KindPod {
			pods = append(pods, h)
		}
	}
	r.world = &world{nodes: nodes, pods: pods, dir: r.harness.Path("manifests"), host: c.Client(2),
		services: []*service{newService(webService, 0, r.pods()...), local, newService(selfService, 2, c.Pod(0, 0)), files}}
	if err := os.MkdirAll(r.world.dir, 0o755); err != nil {
		return fmt.Errorf("make directory of manifests: %w", err)
	}
	kubeconfig, err := r.world.newAPI(c)
	if err != nil {
		return err
	}
	if _, err := r.harness.WriteFile("kubeconfig", kubeconfig); err != nil {
		return err
	}
	return r.world.publish()
}

// startAgents copies the programs and starts an agent on each node. The first reads files, the others an API server.
func (r *run) startAgents(ctx context.Context) error {
	own := r.cfg.program
	programs := append([]string{own}, r.cfg.Upgrades...)
	if len(programs) == 1 {
		programs = append(programs, own) // another file of the same build
	}
	for i, from := range programs {
		to := r.harness.Path(fmt.Sprintf("programs/%d/spillway", i))
		if err := copyProgram(from, to); err != nil {
			return err
		}
		r.programs = append(r.programs, to)
	}
	for n := range r.cluster.Spec.Nodes {
		host := r.cluster.Node(n)
		a := &nodeAgent{host: host, mode: r.cfg.Mode, binary: r.programs[0], bpffs: r.harness.Path("bpf/" + host.Name),
			log:    cmp.Or(r.events.path("agent-"+host.Name+".log"), r.harness.Path("agent-"+host.Name+".log")),
			source: []string{"--kubeconfig", r.harness.Path("kubeconfig")}, died: func(err error) {
				select {
				case r.broken <- err:
				default:
				}
			}}
		if n == 0 {
			a.source = []string{"--manifests", r.world.dir}
		}
		if err := os.MkdirAll(a.bpffs, 0o700); err != nil {
			return fmt.Errorf("make directory for pinned objects: %w", err)
		}
		r.agents = append(r.agents, a)
		if err := a.start(); err != nil {
			return err
		}
	}
	for _, a := range r.agents {
		if err := a.ready(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) startClients(ctx context.Context) error {
	c := r.cluster
	vm := *c.Pod(0, 1) // no cgroup hook sees its sockets: only packets can be translated
	vm.Cgroup = filepath.Join(filepath.Dir(c.Node(0).CgroupRoot), "outside-vm")
	if err := os.MkdirAll(vm.Cgroup, 0o755); err != nil {
		return fmt.Errorf("make cgroup: %w", err)
	}
	r.places = []*place{{name: "outside", host: c.Client(0)}, {name: "pod0", host: c.Pod(0, 2)}, {name: "pod1", host: c.Pod(1, 2)},
		{name: "pod2", host: c.Pod(2, 2)}, {name: "self", host: c.Pod(0, 0)}, {name: "vm", host: &vm}}
	for n := range c.Spec.Nodes {
		r.places = append(r.places, &place{name: c.Node(n).Name, host: c.Node(n)})
	}
	started := r.places
	r.places = nil
	for _, p := range started {
		p.node = p.host.Node
		var err error
		if p.proc, err = startClient(*p, r.note); err != nil {
			return err
		}
		r.places = append(r.places, p)
		if p.host.Kind == topology.KindNode {
			r.onNode = append(r.onNode, p.proc)
		}
	}
	return r.applied(ctx, 0, 1, 2)
}

// note takes over what a client reports.
func (r *run) note(p place, e event) {
	key := p.name + " " + e.Flow
	switch e.Op {
	case "lost":
		local, server := "", e.Server
		if e.Local.IsValid() {
			local = e.Local.String()
		}
		r.mu.Lock()
		opened := r.open[key].Began
		r.mu.Unlock()
		r.ledger.lose(Loss{at: e.Began, opened: opened, Took: e.Ended.Sub(e.Began), Flow: e.Flow, Local: local, Server: server,
			Error: e.Error, Again: e.Again})
	case "open":
		r.mu.Lock()
		r.open[key] = victim{e, p.node}
		r.mu.Unlock()
	case "close":
		r.mu.Lock()
		delete(r.open, key)
		r.mu.Unlock()
	}
}

// victim chooses an open socket of a kind.
func (r *run) victim(d *rand.Rand, kind string) (victim, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var keys []string
	for k, v := range r.open {
		if r.ledger.flow(v.Flow).kind == kind {
			keys = append(keys, k)
		}
	}
	if len(keys) == 0 {
		return victim{}, false
	}
	slices.Sort(keys)
	return r.open[keys[d.IntN(len(keys))]], true
}

// endpoint returns the address at which a victim's server listens.
func (r *run) endpoint(v victim) (netip.AddrPort, bool) {
	h, err := r.cluster.Find(v.Server)
	if err != nil || !v.Seen.IsValid() {
		return netip.AddrPort{}, false
	}
	return netip.AddrPortFrom(h.Addr(v.Seen.Addr()), echoPort), true
}

func (r *run) addr(node int, v6 bool) netip.Addr {
	if v6 {
		return r.cluster.Node(node).IPv6
	}
	return r.cluster.Node(node).IPv4
}

func (r *run) openAttackers(context.Context) error {
	c := r.cluster
	for _, from := range []struct {
		host, node *topology.Host
		device     string
	}{{c.Client(1), c.Node(0), "eth0"}, {c.Pod(1, 2), c.Node(1), "cni0"}, {c.Pod(0, 2), c.Node(0), "cni0"}} {
		a, err := newAttacker(from.host, from.node, from.device)
		if err != nil {
			return err
		}
		r.attack = append(r.attack, a)
	}
	return nil
}

// startFlows starts the honest load.
func (r *run) startFlows() error {
	for _, p := range r.places {
		for _, f := range r.flowsOf(p) {
			if err := p.proc.order(order{Start: &f.flow}); err != nil {
				return err
			}
		}
	}
	return nil
}

// plannedFlow is a flow with what excuses ask of it.
type plannedFlow struct {
	flow
	info flowInfo
}

// flowsOf plans the flows of a place, and tells the ledger of them.
func (r *run) flowsOf(p *place) (list []plannedFlow) {
	add := func(s *service, entry int, address string, to netip.AddrPort, kinds ...string) {
		for _, kind := range kinds {
			f := flow{Kind: kind, To: to.String(), Patience: r.cfg.Patience, Pause: 600 * time.Millisecond}
			switch kind {
			case stream:
				f.Pause, f.Life = 400*time.Millisecond, 2*time.Minute
			case keptUDP, sendtoUDP:
				f.Pause, f.Life = 700*time.Millisecond, time.Minute
			case files:
				f.Pause = 4 * time.Second
			}
			f.Name = fmt.Sprintf("%s from %s to %s at %s (%s)", kind, p.name, s.name, address, to)
			info := flowInfo{kind: kind, service: s.name, from: p.node, entry: entry}
			r.ledger.know(f.Name, info)
			list = append(list, plannedFlow{f, info})
		}
	}
	web, local, self, tftp := r.world.services[0], r.world.services[1], r.world.services[2], r.world.services[3]
	for _, v6 := range []bool{false, true} {
		clusterIP := func(s *service, port uint16, kinds ...string) {
			add(s, r.nodeIndex(p.node), "its cluster IP", netip.AddrPortFrom(s.clusterIP(v6), port), kinds...)
		}
		switch {
		case p.name == "outside":
			for n := range r.cluster.Spec.Nodes {
				at := fmt.Sprintf("node%d", n)
				add(web, n, at, netip.AddrPortFrom(r.addr(n, v6), web.nodePort(protocolTCP)), stream, connect)
				add(web, n, at, netip.AddrPortFrom(r.addr(n, v6), web.nodePort(protocolUDP)), freshUDP, keptUDP)
			}
			add(web, 0, "its load balancer", netip.AddrPortFrom(web.external(v6), servicePort), stream, connect, freshUDP, keptUDP)
			for n := range 2 {
				add(local, n, fmt.Sprintf("node%d", n), netip.AddrPortFrom(r.addr(n, v6), local.nodePort(protocolTCP)), stream, connect)
			}
			add(tftp, 0, "node0", netip.AddrPortFrom(r.addr(0, v6), tftp.nodePort(protocolUDP)), files)
			add(tftp, 1, "node1", netip.AddrPortFrom(r.addr(1, v6), tftp.nodePort(protocolUDP)), files)
		case p.name == "self":
			clusterIP(self, servicePort, stream, connect, freshUDP, keptUDP)
		case p.host.Kind == topology.KindNode:
			clusterIP(web, servicePort, stream, connect, freshUDP) // no kept UDP: limits.md
		default:
			clusterIP(web, servicePort, stream, connect, freshUDP, keptUDP, sendtoUDP)
			clusterIP(tftp, tftpPort, files)
		}
	}
	return list
}

// nodeIndex returns the number of a node, -1 for none.
func (r *run) nodeIndex(name string) int {
	for n := range r.cluster.Spec.Nodes {
		if r.cluster.Node(n).Name == name {
			return n
		}
	}
	return -1
}

// flushConntrack empties the nodes' tables, so that what only serves old connections can end.
func (r *run) flushConntrack() error {
	for n := range r.cluster.Spec.Nodes {
		err := r.cluster.Node(n).Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
		if err != nil {
			return fmt.Errorf("empty conntrack table: %w", err)
		}
	}
	return nil
}
