package soak

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// kind is an action that is not an attack. Its doc says what it may cost.
type kind struct {
	name string
	do   func(r *run, ctx context.Context, d *rand.Rand) (string, error)
}

// known are the actions that are no attacks.
var known = []kind{
	{"endpoint-remove", (*run).removeEndpoint},
	{"endpoint-add", (*run).addEndpoint},
	{"endpoint-end", (*run).endEndpoint},
	{"service", (*run).temporaryService},
	{"restart", (*run).restartAgent},
	{"kill", (*run).killAgent},
	{"suspend", (*run).suspendAgent},
	{"upgrade", (*run).upgradeAgent},
	{"mode", (*run).changeMode},
	{"api-outage", (*run).apiOutage},
	{"bad-file", (*run).badFile},
	{"network-policy", (*run).toggleNetworkPolicy},
	{"do-not-track", (*run).toggleDoNotTrack},
	{"link", (*run).flapLink},
	{"node-away", (*run).nodeAway},
}

// planted breaks connections, for the test of the soak.
var planted = kind{"planted", (*run).removeServer}

func init() { known = append(known, planted) }

// Kinds returns the names of all actions.
func Kinds() (names []string) {
	for _, k := range known {
		if k.name != planted.name {
			names = append(names, k.name)
		}
	}
	for name := range attacks {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// kinds are those that this run draws from.
func (r *run) kinds() []string {
	switch {
	case r.cfg.plant:
		return []string{planted.name}
	case len(r.cfg.Only) > 0:
		return r.cfg.Only
	}
	return Kinds()
}

const sigterm = syscall.SIGTERM

// settleMoves is the time after a change in which a kept UDP socket may still meet it.
const settleMoves = time.Second

// restarted are the nodes whose agents are restarted. The last node's agent runs from start to end,
// to show what grows.
const restarted = 2

// publish writes the facts and waits until nodes serve them.
func (r *run) publish(ctx context.Context, nodes ...int) error {
	if err := r.world.publish(); err != nil {
		return err
	}
	return r.applied(ctx, nodes...)
}

// restart ends an agent with a signal and starts it again.
func (r *run) restart(ctx context.Context, a *nodeAgent, sig syscall.Signal) error {
	if err := a.end(sig); err != nil {
		return err
	}
	if err := a.start(); err != nil {
		return err
	}
	return a.ready(ctx)
}

// allowMoves excuses single datagrams of kept UDP sockets of a Service whose endpoints are
// removed: one that is on the way when the socket moves may be lost (drain-a-node.md). The
// next one must be answered.
func (r *run) allowMoves(service string) func(time.Duration) {
	return r.ledger.allow(excuseMove, func(x *Loss) bool {
		return x.service == service && (x.kind == keptUDP || x.kind == sendtoUDP) && x.Again
	})
}

// web is the Service whose endpoints change.
func (r *run) web() *service { return r.world.services[0] }

// leastReady is the number of endpoints that web keeps.
const leastReady = 2

// removable chooses an endpoint that may go.
func (r *run) removable(d *rand.Rand) (int, bool) {
	at := r.web().on(ready)
	if len(at) <= leastReady {
		return 0, false
	}
	return at[d.IntN(len(at))], true
}

// removeEndpoint removes an endpoint whose server runs on: its connections continue.
func (r *run) removeEndpoint(ctx context.Context, d *rand.Rand) (string, error) {
	s := r.web()
	i, ok := r.removable(d)
	if gone := s.on(terminating); len(gone) > 0 && d.IntN(2) == 0 {
		i, ok = gone[0], true
	}
	if !ok {
		return "nothing: too few endpoints", nil
	}
	defer r.allowMoves(s.name)(settleMoves)
	s.states[i] = absent
	return s.pods[i].Name, r.publish(ctx, 0, 1, 2)
}

// addEndpoint adds an endpoint.
func (r *run) addEndpoint(ctx context.Context, d *rand.Rand) (string, error) {
	s := r.web()
	at := append(s.on(absent), s.on(terminating)...)
	if len(at) == 0 {
		return "nothing: all are there", nil
	}
	i := at[d.IntN(len(at))]
	s.states[i] = ready
	return s.pods[i].Name, r.publish(ctx, 0, 1, 2)
}

// endEndpoint has an endpoint terminate: it serves on, without new connections.
func (r *run) endEndpoint(ctx context.Context, d *rand.Rand) (string, error) {
	s := r.web()
	i, ok := r.removable(d)
	if !ok {
		return "nothing: too few endpoints", nil
	}
	s.states[i] = terminating
	return s.pods[i].Name, r.publish(ctx, 0, 1, 2)
}

// temporaryService creates a Service, which must be served once all nodes report it, uses it and deletes it.
func (r *run) temporaryService(ctx context.Context, d *rand.Rand) (string, error) {
	r.serial++
	pods := r.pods()
	d.Shuffle(len(pods), func(i, j int) { pods[i], pods[j] = pods[j], pods[i] })
	s := newService(fmt.Sprintf("temporary-%d", r.serial), 10+r.serial%30, pods[:1+d.IntN(3)]...)
	r.world.services = append(r.world.services, s)
	if err := r.publish(ctx, 0, 1, 2); err != nil {
		return s.name, err
	}
	for range 10 {
		p := r.places[d.IntN(len(r.places))]
		v6, udp := d.IntN(2) == 0, d.IntN(2) == 0
		f := flow{Kind: connect, Patience: r.cfg.Patience}
		protocol := protocolTCP
		if udp {
			f.Kind, protocol = freshUDP, protocolUDP
		}
		to := netip.AddrPortFrom(s.clusterIP(v6), servicePort)
		info := flowInfo{kind: f.Kind, service: s.name, from: p.node, entry: r.nodeIndex(p.node)}
		if p.node == "" {
			info.entry = d.IntN(len(r.agents))
			to = netip.AddrPortFrom(r.addr(info.entry, v6), s.nodePort(protocol))
		}
		r.asked++
		f.To, f.Name = to.String(), fmt.Sprintf("%s from %s to %s (%s, %d)", f.Kind, p.name, s.name, to, r.asked)
		r.ledger.know(f.Name, info)
		e, err := p.proc.await(ctx, f.Name, order{Once: &f})
		if err != nil {
			return s.name, err
		}
		if e.Error != "" {
			e.Op = "lost"
			r.note(*p, e)
		}
		r.ledger.forget(f.Name)
	}
	r.world.services = slices.DeleteFunc(r.world.services, func(o *service) bool { return o == s })
	return s.name, r.publish(ctx, 0, 1, 2)
}

// agent chooses an agent that may be restarted.
func (r *run) agent(d *rand.Rand) *nodeAgent { return r.agents[d.IntN(restarted)] }

// restartAgent ends an agent with SIGTERM and starts it again.
func (r *run) restartAgent(ctx context.Context, d *rand.Rand) (string, error) {
	a := r.agent(d)
	return a.host.Name, r.restart(ctx, a, sigterm)
}

// killAgent kills an agent, every second time while it applies a change.
func (r *run) killAgent(ctx context.Context, d *rand.Rand) (string, error) {
	a, did := r.agent(d), ""
	if i, ok := r.removable(d); ok && d.IntN(2) == 0 {
		s := r.web()
		defer r.allowMoves(s.name)(settleMoves)
		s.states[i] = absent
		if err := r.world.publish(); err != nil {
			return "", err
		}
		did = ", while it removes " + s.pods[i].Name
		pause(ctx, time.Duration(d.IntN(150))*time.Millisecond)
	}
	if err := r.restart(ctx, a, syscall.SIGKILL); err != nil {
		return a.host.Name, err
	}
	return a.host.Name + did, r.applied(ctx, 0, 1, 2)
}

// suspendAgent stops an agent for some seconds.
func (r *run) suspendAgent(ctx context.Context, d *rand.Rand) (string, error) {
	a, d1 := r.agents[d.IntN(len(r.agents))], time.Duration(200+d.IntN(3000))*time.Millisecond
	if err := a.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		return "", err
	}
	pause(ctx, d1)
	return fmt.Sprintf("%s for %s", a.host.Name, d1), a.cmd.Process.Signal(syscall.SIGCONT)
}

// upgradeAgent starts another program.
func (r *run) upgradeAgent(ctx context.Context, d *rand.Rand) (string, error) {
	a := r.agent(d)
	next := (slices.Index(r.programs, a.binary) + 1 + d.IntN(len(r.programs)-1)) % len(r.programs)
	a.binary = r.programs[next]
	return fmt.Sprintf("%s to program %d", a.host.Name, next), r.restart(ctx, a, sigterm)
}

// changeMode starts the agent with the next dataplane.
func (r *run) changeMode(ctx context.Context, d *rand.Rand) (string, error) {
	a := r.agent(d)
	before := a.mode
	a.use(Modes[(slices.Index(Modes, a.mode)+1)%len(Modes)])
	return fmt.Sprintf("%s from %s to %s", a.host.Name, before, a.mode), r.restart(ctx, a, sigterm)
}

// apiOutage makes the API server unavailable. Every second time, an agent that reads
// from it is restarted meanwhile: the kernel serves the last state.
func (r *run) apiOutage(ctx context.Context, d *rand.Rand) (string, error) {
	long, again := time.Duration(500+d.IntN(8000))*time.Millisecond, d.IntN(2) == 0
	a, did := r.agents[1], fmt.Sprint("for ", long)
	if err := r.world.stopAPI(); err != nil {
		return did, err
	}
	if again {
		did += ", with a restart of " + a.host.Name
		if err := errors.Join(a.end(sigterm), a.start()); err != nil {
			return did, err
		}
	}
	pause(ctx, long)
	if err := r.world.startAPI(); err != nil {
		return did, err
	}
	if err := a.ready(ctx); err != nil {
		return did, err
	}
	return did, r.publish(ctx, 0, 1, 2)
}

// badFile makes the manifests unreadable for some seconds: the last good state stays.
func (r *run) badFile(ctx context.Context, d *rand.Rand) (string, error) {
	text, err := r.world.manifest()
	if err != nil {
		return "", err
	}
	other := d.IntN(2) == 0
	if other {
		err = r.world.write("other.yaml", []byte("kind: Service\nspec: {ports: 1}\n---\n\t\x00"))
	} else {
		bad := "---\napiVersion: v1\nkind: Service\nmetadata: {name: web, namespace: soak}\nspec: [\n"
		err = r.world.write("soak.yaml", append(text, bad...))
	}
	if err != nil {
		return "", err
	}
	pause(ctx, time.Duration(500+d.IntN(2000))*time.Millisecond)
	if other {
		if err := r.world.write("other.yaml", nil); err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("another file: %v", other), r.publish(ctx, 0, 1, 2)
}

// toggle adds a pod to a list or removes it.
func toggle(list []*topology.Host, h *topology.Host) ([]*topology.Host, bool) {
	if i := slices.Index(list, h); i >= 0 {
		return slices.Delete(slices.Clone(list), i, i+1), false
	}
	return append(slices.Clone(list), h), true
}

// toggleNetworkPolicy selects a pod by a NetworkPolicy that allows everything, or no more.
func (r *run) toggleNetworkPolicy(ctx context.Context, d *rand.Rand) (string, error) {
	h, on := r.world.pods[d.IntN(len(r.world.pods))], false
	r.world.restricted, on = toggle(r.world.restricted, h)
	return fmt.Sprintf("%s: %v", h.Name, on), r.publish(ctx, 0, 1, 2)
}

// toggleDoNotTrack selects a pod of the first node, which reads files, by a
// DoNotTrackPolicy, or no more.
func (r *run) toggleDoNotTrack(ctx context.Context, d *rand.Rand) (string, error) {
	h, on := r.cluster.Pod(0, d.IntN(2)), false
	r.world.untracked, on = toggle(r.world.untracked, h)
	return fmt.Sprintf("%s: %v", h.Name, on), r.publish(ctx, 0, 1, 2)
}

// linkSettles is the time after which a link that is up again delivers every datagram. The
// kernel drops those that wait for a neighbor when three probes, one a second, have no
// answer. Probes from before the link was up count.
const linkSettles = 4 * time.Second

// flapLink takes a node's link down for less than two seconds, so that no neighbor fails.
// TCP repeats what is lost. A datagram that would use the link is lost.
func (r *run) flapLink(ctx context.Context, d *rand.Rand) (string, error) {
	node, down := d.IntN(len(r.agents)), time.Duration(100+d.IntN(1600))*time.Millisecond
	name := r.cluster.Node(node).Name
	done := r.ledger.allow(excuseLink, func(x *Loss) bool {
		if !isDatagram(x.kind) {
			return false
		}
		server, _ := r.cluster.Find(x.Server)
		known := x.kind != freshUDP && server != nil
		return x.entry == node || x.from == name || known && server.Node == name || !known && x.service == webService
	})
	defer done(linkSettles)
	did := fmt.Sprintf("%s down for %s", name, down)
	if err := r.setLink(node, false); err != nil {
		return did, err
	}
	pause(ctx, down)
	return did, r.setLink(node, true)
}

// setLink changes the state of the LAN's port of a node: the node loses its carrier.
func (r *run) setLink(node int, up bool) error {
	lan := &topology.Host{Cluster: r.cluster.Spec.Name, Namespace: "spw-" + r.cluster.Spec.Name + "-lan"}
	err := lan.Do(func() error {
		l, err := netlink.LinkByName(r.cluster.Node(node).Name)
		if err != nil {
			return err
		}
		if up {
			return netlink.LinkSetUp(l)
		}
		return netlink.LinkSetDown(l)
	})
	if err != nil {
		return fmt.Errorf("change the link of node%d: %w", node, err)
	}
	return nil
}

// nodeAway removes the endpoints of the last node, disconnects the node for some seconds, and
// returns both. Connections of its clients, to its addresses and to its servers may break. No other may.
func (r *run) nodeAway(ctx context.Context, d *rand.Rand) (string, error) {
	node, away := len(r.agents)-1, time.Duration(3+d.IntN(9))*time.Second
	name, s := r.cluster.Node(node).Name, r.web()
	before := slices.Clone(s.states)
	moved := r.allowMoves(s.name)
	for i, p := range s.pods {
		if p.Node == name {
			s.states[i] = absent
		}
	}
	if len(s.on(ready)) == 0 { // both remaining ones were there
		s.states[0] = ready
	}
	if err := r.publish(ctx, 0, 1, 2); err != nil {
		return name, err
	}
	moved(settleMoves)
	done := r.ledger.allow(excuseAway, func(x *Loss) bool {
		server, _ := r.cluster.Find(x.Server)
		return x.entry == node || x.from == name || x.kind == stream && server != nil && server.Node == name
	})
	stays := r.ledger.allow(excuseStay, func(x *Loss) bool {
		server, _ := r.cluster.Find(x.Server)
		return server != nil && server.Node == name && r.staysWithEndpoint(x)
	})
	defer stays(0)
	if err := r.setLink(node, false); err != nil {
		return name, err
	}
	pause(ctx, away)
	if err := r.setLink(node, true); err != nil {
		return name, err
	}
	defer done(0)
	pause(ctx, linkSettles)
	// The states of before: what changes during an action is part of it alone.
	moved = r.allowMoves(s.name)
	defer moved(settleMoves)
	copy(s.states, before)
	return fmt.Sprintf("%s for %s", name, away), r.publish(ctx, 0, 1, 2)
}

// staysWithEndpoint reports whether a socket keeps its endpoint when that is removed: a hook has
// connected it, and the tc programs that would move it are gone.
func (r *run) staysWithEndpoint(x *Loss) bool {
	i := slices.IndexFunc(r.agents, func(a *nodeAgent) bool { return a.host.Name == x.from })
	return i >= 0 && x.kind == keptUDP && !x.opened.IsZero() && x.opened.UnixNano() < r.agents[i].left.Load()
}

// removeServer ends a server before its endpoint is removed: the wrong order.
func (r *run) removeServer(ctx context.Context, _ *rand.Rand) (string, error) {
	s := r.web()
	h := s.pods[1] // not the canary's
	if err := r.servers[h.Name+" "+workload.TCP].Process.Kill(); err != nil {
		return "", err
	}
	pause(ctx, 500*time.Millisecond)
	s.states[1] = absent
	if err := r.publish(ctx, 0, 1, 2); err != nil {
		return h.Name, err
	}
	if err := r.serve(h, workload.TCP, echoPort); err != nil {
		return h.Name, err
	}
	s.states[1] = ready
	return h.Name, r.publish(ctx, 0, 1, 2)
}
