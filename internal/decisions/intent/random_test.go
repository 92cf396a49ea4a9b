package intent

import (
	"bytes"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// dice draws choices, from a random source or from a fuzzer's bytes.
type dice interface {
	upTo(n int) int // 0 to n-1
}

type random struct{ *rand.Rand }

func (r random) upTo(n int) int { return r.IntN(n) }

type script struct{ r *bytes.Reader }

func (s script) upTo(n int) int {
	b, _ := s.r.ReadByte() // all zeros at the end
	return int(b) % n
}

func pick[T any](d dice, list ...T) T { return list[d.upTo(len(list))] }

// some picks each of the list with even chance.
func some[T any](d dice, list ...T) []T {
	var out []T
	for _, v := range list {
		if d.upTo(2) == 0 {
			out = append(out, v)
		}
	}
	return out
}

// The names and addresses are few, so that random objects meet each other.
var (
	someNames = []model.Name{{Namespace: "ns", Name: "a"}, {Namespace: "ns", Name: "b"}, {Namespace: "ns", Name: "c"},
		{Namespace: "om", Name: "a"}}
	someNodes  = []string{here, there, ""}
	someZones  = []string{"zone-1", "zone-2", ""}
	podIPs     = addrs("10.1.0.1", "10.1.0.2", "192.168.0.1", "fd00:1::1", "fd00:1::2")
	nodeIPs    = addrs("192.168.0.1", "10.1.0.2", "fd00:1::2", "127.0.0.1")
	vips       = addrs("10.96.0.1", "10.96.0.2", "192.0.2.1", "fd00::1", "fd00::2", "127.0.0.9")
	someLabels = []labels{nil, {"app": "web"}, {"app": "db"}}
)

func randomService(d dice, n model.Name) *model.Service {
	s := &model.Service{
		Name:          n,
		Created:       pick(d, time.Time{}, time.Unix(0, 0), time.Unix(1, 0), time.Unix(2, 0)),
		Type:          pick(d, model.ClusterIP, model.NodePort, model.LoadBalancer),
		ProxyName:     pick(d, "", "", "", "other"),
		ClusterIPs:    some(d, vips...),
		ExternalIPs:   some(d, pick(d, vips[1:], nodeIPs, podIPs)...),
		Affinity:      time.Duration(d.upTo(2)) * time.Second,
		ExternalLocal: d.upTo(2) == 0, InternalLocal: d.upTo(2) == 0,
		HealthCheckNodePort: uint16(pick(d, 0, 31000, 31001)),
	}
	if d.upTo(3) == 0 {
		s.LoadBalancerIPs = some(d, vips...)
	}
	if d.upTo(3) == 0 {
		s.SourceRanges = some(d, prefixes("10.0.0.0/8", "fd00::/8")...)
	}
	if d.upTo(3) == 0 {
		s.Annotations = map[string]string{BalanceAnnotation: pick(d, "weighted", "weighted", "random", "least", "maglev", "odd"),
			WeightsAnnotation: pick(d, "", "a=3", "b=0 10.1.0.1=2,*=7", "10.0.0.0/8=0"), SlowStartAnnotation: pick(d, "", "30s")}
		if to := pick(d, "", "a", "b"); to != "" {
			s.Annotations[LocalRedirectAnnotation] = to
		}
	}
	for _, p := range []model.ServicePort{
		{Name: "x", Protocol: model.TCP, Port: 80}, {Name: "y", Protocol: model.UDP, Port: 80}, {Name: "x", Protocol: model.TCP, Port: 81},
		// These numbers meet NodePorts, healthCheckNodePorts and endpoints.
		{Name: "n", Protocol: model.TCP, Port: 30000}, {Name: "h", Protocol: model.TCP, Port: 31000},
		{Name: "e", Protocol: model.UDP, Port: 8080},
		{Name: "v", Protocol: model.UDP, Port: 8472}, // reserved at a node's address
	} {
		if d.upTo(4) > 0 {
			p.NodePort = uint16(pick(d, 0, 30000, 30001))
			s.Ports = append(s.Ports, p)
		}
	}
	return s
}

func randomSlice(d dice, n model.Name) *model.EndpointSlice {
	s := &model.EndpointSlice{
		Name: n, Service: pick(d, someNames...), Family: pick(d, model.IPv4, model.IPv4, model.IPv6),
		Ports: []model.EndpointPort{{Name: "x", Protocol: model.TCP, Port: 8080}, {Name: "y", Protocol: model.UDP, Port: 8080}},
	}
	for range d.upTo(4) {
		s.Endpoints = append(s.Endpoints, randomEndpoint(d))
	}
	if weight := uint8(d.upTo(5)); weight > 0 {
		s.Weight = &weight
	}
	return s
}

func randomEndpoint(d dice) model.Endpoint {
	ep := model.Endpoint{
		Addr:  pick(d, podIPs...),
		Node:  pick(d, someNodes...),
		Ready: d.upTo(3) > 0, Serving: d.upTo(3) > 0, Terminating: d.upTo(3) == 0,
	}
	if d.upTo(3) == 0 {
		forZones(pick(d, someZones...))(&ep)
	}
	if d.upTo(3) == 0 {
		forNodes(pick(d, here, there))(&ep)
	}
	if d.upTo(2) == 0 {
		ep.Pod = pick(d, someNames...)
	}
	return ep
}

// nudge puts a copy of a slice that differs in one field of one endpoint, which
// is how most slices change.
func nudge(d dice, known map[model.Name]*model.EndpointSlice, out *model.Delta) {
	old := known[pick(d, someNames...)]
	if old == nil || len(old.Endpoints) == 0 {
		return
	}
	s := *old
	s.Endpoints = slices.Clone(old.Endpoints)
	ep := &s.Endpoints[d.upTo(len(s.Endpoints))]
	switch other := randomEndpoint(d); d.upTo(6) {
	case 0:
		ep.Addr = other.Addr
	case 1:
		ep.Node = other.Node
	case 2:
		ep.Pod = other.Pod
	case 3:
		ep.Ready = !ep.Ready
	case 4:
		s.Service = pick(d, someNames...)
	case 5:
		s.Ports = s.Ports[:d.upTo(len(s.Ports)+1)]
	}
	out.Slices = map[model.Name]*model.EndpointSlice{s.Name: &s}
}

func randomNode(d dice, n string) *model.Node {
	return &model.Node{
		Name: n, Addresses: some(d, nodeIPs...), PodCIDRs: some(d, prefixes("10.1.0.0/24", "10.2.0.0/24")...),
		Labels: map[string]string{zoneLabel: pick(d, someZones...)},
	}
}

func randomPod(d dice, n model.Name) *model.Pod {
	p := &model.Pod{Name: n, Labels: pick(d, someLabels...), Node: pick(d, someNodes...), IPs: some(d, podIPs...)}
	if d.upTo(3) == 0 {
		p.HostPorts = some(d,
			model.HostPort{Protocol: model.TCP, Port: 8080, Host: 30000},
			model.HostPort{Protocol: model.UDP, Port: 8080, Host: 80},
			model.HostPort{Protocol: model.TCP, Port: 8080, Host: 81, IP: pick(d, nodeIPs...)},
		)
	}
	return p
}

func randomPolicy(d dice, n model.Name) *model.NetworkPolicy {
	return &model.NetworkPolicy{
		Name: n, Ingress: d.upTo(3) > 0, Egress: d.upTo(3) == 0,
		Selector: model.Selector{MatchLabels: pick(d, someLabels...)},
	}
}

// put sets a random object, or takes it away, in a map that may be nil.
func put[K comparable, V any](d dice, m *map[K]*V, key K, draw func(dice, K) *V) {
	if *m == nil {
		*m = map[K]*V{}
	}
	(*m)[key] = nil
	if d.upTo(4) > 0 {
		(*m)[key] = draw(d, key)
	}
}

func randomDelta(d dice) model.Delta {
	var out model.Delta
	for range 1 + d.upTo(3) {
		switch d.upTo(6) {
		case 0:
			put(d, &out.Services, pick(d, someNames...), randomService)
		case 1, 2:
			put(d, &out.Slices, pick(d, someNames...), randomSlice)
		case 3:
			put(d, &out.Nodes, pick(d, here, there), randomNode)
		case 4:
			put(d, &out.Pods, pick(d, someNames...), randomPod)
		case 5:
			put(d, &out.NetworkPolicies, pick(d, someNames...), randomPolicy)
		}
	}
	return out
}

// replica is a world and the state that the Changes add up to.
type replica struct {
	world    model.Delta
	addrs    []netip.Addr
	ports    map[PortID]*ServicePort
	node     Node
	health   map[model.Name]HealthCheck
	problems []model.Problem
}

func merge[K comparable, V any](into map[K]*V, from map[K]*V) {
	for key, v := range from {
		if v == nil {
			delete(into, key)
		} else {
			into[key] = v
		}
	}
}

func (r *replica) takeDelta(d model.Delta) {
	if d.Full {
		r.world = whole(delta())
	}
	merge(r.world.Services, d.Services)
	merge(r.world.Slices, d.Slices)
	merge(r.world.Nodes, d.Nodes)
	merge(r.world.Pods, d.Pods)
	merge(r.world.NetworkPolicies, d.NetworkPolicies)
}

// takeChanges applies Changes, and complains of any that change nothing.
func (r *replica) takeChanges(t *testing.T, c Changes) {
	t.Helper()
	for _, sp := range c.Upserts {
		if old := r.ports[sp.ID]; old != nil && sp.Equal(old) {
			t.Errorf("upsert of %v changes nothing", sp.ID)
		}
		r.ports[sp.ID] = sp
	}
	for _, id := range c.Deletes {
		if r.ports[id] == nil {
			t.Errorf("delete of %v, which is not there", id)
		}
		delete(r.ports, id)
	}
	if c.Node != nil {
		r.node = *c.Node
	}
	for _, h := range c.HealthChecks {
		if r.health[h.Service] == h {
			t.Errorf("health check of %v changes nothing", h.Service)
		}
		if r.health[h.Service] = h; h.Port == 0 {
			delete(r.health, h.Service)
		}
	}
	if c.Problems != nil {
		if slices.Equal(r.problems, c.Problems) {
			t.Errorf("problems change to the same: %v", c.Problems)
		}
		r.problems = c.Problems
	}
}

func summary(ports []*ServicePort, n Node, health []HealthCheck, problems []model.Problem) string {
	return fmt.Sprintf("%s\nnode %+v\nhealth %v\nproblems %v", describe(ports), n, health, problems)
}

func (r *replica) String() string {
	ports := slices.SortedFunc(maps.Values(r.ports), comparePorts)
	health := slices.SortedFunc(maps.Values(r.health), compareHealthChecks)
	return summary(ports, r.node, health, r.problems)
}

func (t *Tracker) summary() string {
	s := t.State()
	return summary(s.Ports, s.Node, t.HealthChecks(), t.Problems())
}

// checkSound wants what intent promises of every Service port.
func checkSound(t *testing.T, s State) {
	t.Helper()
	for _, sp := range s.Ports {
		cluster := slices.ContainsFunc(sp.Endpoints, func(e Endpoint) bool { return e.ClusterPolicy })
		local := slices.ContainsFunc(sp.Endpoints, func(e Endpoint) bool { return e.LocalPolicy })
		for _, f := range sp.Frontends {
			for _, r := range []Route{f.ExternalRoute, f.InternalRoute} {
				if r == ToCluster && !cluster || r == ToLocal && !local || r >= ToCluster && slices.Max(sp.Shares(r)) == 0 {
					t.Errorf("%v: a route leads nowhere:\n%s", sp.ID, describe([]*ServicePort{sp}))
				}
			}
		}
		for _, e := range sp.Endpoints {
			if !e.ClusterPolicy && !e.LocalPolicy || e.HostNetwork && !e.OnThisNode || e.LocalPolicy && !e.OnThisNode {
				t.Errorf("%v: an endpoint that makes no sense: %+v", sp.ID, e)
			}
		}
		if len(sp.Frontends) == 0 || !slices.IsSortedFunc(sp.Endpoints, func(a, b Endpoint) int { return a.Addr.Compare(b.Addr) }) {
			t.Errorf("%v: not canonical:\n%s", sp.ID, describe([]*ServicePort{sp}))
		}
	}
}

func (t *Tracker) owners() map[addressKey]PortID {
	out := map[addressKey]PortID{}
	for key := range t.addresses.requesters {
		out[key] = t.addresses.owner(key)
	}
	return out
}

// checkOwners wants what docs/reference/sources.md promises of those that claim the same.
func checkOwners(t *testing.T, tr *Tracker, world model.Delta, before, after map[addressKey]PortID) {
	t.Helper()
	type rival struct {
		rank    int // in the table of docs/reference/sources.md
		created time.Time
	}
	claims := map[addressKey]map[model.Name]rival{}
	claim := func(name model.Name, created time.Time, rank func(FrontendKind) int, p plan) {
		all := []addressRequest{}
		for _, port := range p.ports {
			all = append(all, port.requests...)
		}
		if p.health != nil {
			all = append(all, *p.health)
		}
		for _, c := range all {
			if claims[c.key] == nil {
				claims[c.key] = map[model.Name]rival{}
			}
			if r, ok := claims[c.key][name]; !ok || r.rank > rank(c.kind) {
				claims[c.key][name] = rival{rank(c.kind), created}
			}
		}
	}
	for _, svc := range world.Services {
		if svc.ProxyName != "" {
			continue
		}
		p := planOf(svc)
		if _, refused := tr.most.refused[tr.services[svc.Name]]; refused {
			p.ports = nil
		}
		claim(svc.Name, svc.Created, func(k FrontendKind) int { return []int{ClusterIP: 1, LoadBalancerIP: 2, ExternalIP: 3, NodePort: 3}[k] }, p)
	}
	for _, p := range world.Pods {
		if h := tr.hostPortsOf(p); h != nil && tr.cfg.HostPorts {
			claim(h.spec.Name, time.Time{}, func(FrontendKind) int { return 4 }, h.plan)
		}
	}
	if len(after) != len(claims) {
		t.Errorf("%d claims are held, want %d", len(after), len(claims))
	}
	for key, rivals := range claims {
		now := after[key].Service
		owner, ok := rivals[now]
		if !ok {
			t.Errorf("%v is held by %v, which does not claim it", key, now)
		}
		for name, r := range rivals {
			dated := !r.created.IsZero() && !owner.created.IsZero()
			switch {
			case r.rank != owner.rank:
				if r.rank < owner.rank {
					t.Errorf("%v: rank %d of %v waits for rank %d of %v", key, r.rank, name, owner.rank, now)
				}
			case dated && r.created.Before(owner.created):
				t.Errorf("%v: %v waits for %v, which is younger", key, name, now)
			case !dated && name == before[key].Service && name != now:
				t.Errorf("%v: %v was served, and lost it to %v, which is not known to be older", key, name, now)
			}
		}
	}
}

// externalIPs lists the externalIPs that are served to a namespace.
func (t *Tracker) externalIPs(namespace string) (out []string) {
	for _, p := range t.State().Ports {
		for _, f := range p.Frontends {
			if _, ofPod := model.PodOf(p.ID.Service); f.Kind == ExternalIP && p.ID.Service.Namespace == namespace && !ofPod {
				out = append(out, fmt.Sprint(p.ID, " ", f.Addr, " ", f.Port))
			}
		}
	}
	return out
}

// checkExternalIPs wants that no externalIP takes the address of a pod, and that no
// EndpointSlice of another namespace makes a difference. fresh makes Trackers.
func checkExternalIPs(t *testing.T, tr *Tracker, world model.Delta, fresh func(model.Delta) *Tracker) {
	t.Helper()
	for _, p := range tr.State().Ports {
		_, ofPod := model.PodOf(p.ID.Service)
		for _, f := range p.Frontends {
			if f.Kind == ExternalIP && !ofPod && addressOfPod(tr.cfg, world, f.Addr) {
				t.Errorf("%v takes %v, which is a pod's", p.ID, f.Addr)
			}
		}
	}
	for _, namespace := range []string{"ns", "om"} {
		own := world
		own.Slices = maps.Clone(world.Slices)
		maps.DeleteFunc(own.Slices, func(_ model.Name, s *model.EndpointSlice) bool { return s.Service.Namespace != namespace })
		if got, want := tr.externalIPs(namespace), fresh(own).externalIPs(namespace); !slices.Equal(got, want) {
			t.Errorf("externalIPs of %s:\n%s\nwithout the slices of other namespaces:\n%s", namespace, got, want)
		}
	}
}

// addressOfPod decides by looking at all objects.
func addressOfPod(cfg Config, world model.Delta, a netip.Addr) bool {
	inCluster := slices.IndexFunc(cfg.ClusterCIDRs, func(p netip.Prefix) bool { return p.Contains(a) })
	inNode := false
	for _, n := range world.Nodes {
		if slices.Contains(n.Addresses, a) {
			return false
		}
		inNode = inNode || slices.ContainsFunc(n.PodCIDRs, func(p netip.Prefix) bool { return p.Contains(a) })
		if inCluster >= 0 && slices.ContainsFunc(n.Addresses, cfg.ClusterCIDRs[inCluster].Contains) {
			inCluster = -1
		}
	}
	for _, p := range world.Pods {
		if p.Node != "" && slices.Contains(p.IPs, a) {
			return true
		}
	}
	return inNode || inCluster >= 0
}

// live lets a Tracker live through random changes and compares it at every step
// with one that is shown the whole world at once, and with what its Changes add
// up to.
func live(t *testing.T, d dice, steps int) {
	t.Helper()
	cfg := Config{
		NodeName: here, MaglevSize: 31, NodePortAddresses: some(d, prefixes("192.168.0.0/16", "fd00::/8")...),
		HostPorts: d.upTo(2) == 0, LocalhostNodePorts: d.upTo(2) == 0,
		ClusterCIDRs: some(d, prefixes("10.1.0.0/30", "192.0.2.0/24", "fd00:1::/64")...),
	}
	if d.upTo(3) == 0 {
		cfg.Capacity = Capacity{Frontends: 5 + d.upTo(40), Endpoints: 5 + d.upTo(40), SourceRanges: d.upTo(20)}
	}
	tr := New(cfg)
	r := &replica{world: whole(delta()), ports: map[PortID]*ServicePort{}, health: map[model.Name]HealthCheck{}}
	for step := range steps {
		held := tr.owners()
		switch d.upTo(10) {
		case 0:
			r.addrs = some(d, nodeIPs...)
			r.takeChanges(t, setNodeAddrs(tr, r.addrs))
		case 1:
			again := randomDelta(d)
			again.Full = true
			r.takeDelta(again)
			r.takeChanges(t, tr.Apply(again))
		case 2, 3:
			var change model.Delta
			nudge(d, r.world.Slices, &change)
			r.takeDelta(change)
			r.takeChanges(t, tr.Apply(change))
		default:
			change := randomDelta(d)
			r.takeDelta(change)
			r.takeChanges(t, tr.Apply(change))
		}
		checkOwners(t, tr, r.world, held, tr.owners())
		served := map[model.Name]bool{}
		for _, p := range tr.State().Ports {
			served[p.ID.Service] = true
		}
		if tr.Count() != len(served) {
			t.Fatalf("step %d: %d Services are counted, %d are served", step, tr.Count(), len(served))
		}
		fresh := func(world model.Delta) *Tracker {
			tr := New(cfg)
			setNodeAddrs(tr, r.addrs)
			maps.Copy(tr.addresses.before, held) // who was served is the one thing that the world does not say
			tr.Apply(world)
			return tr
		}
		want := fresh(r.world).summary()
		if got := tr.summary(); got != want {
			t.Fatalf("step %d: tracked state:\n%s\nwant that of the whole world:\n%s\n%s", step, got, want, diff(got, want))
		}
		if step > 0 || r.node.Name != "" {
			if got := r.String(); got != want {
				t.Fatalf("step %d: changes add up to:\n%s\nwant:\n%s\n%s", step, got, want, diff(got, want))
			}
		}
		checkSound(t, tr.State())
		if step%8 == 7 {
			checkExternalIPs(t, tr, r.world, fresh)
		}
		if t.Failed() {
			t.FailNow()
		}
	}
}

// diff names the lines that only one of two texts has.
func diff(got, want string) string {
	a, b := strings.Split(got, "\n"), strings.Split(want, "\n")
	var out []string
	for _, l := range a {
		if !slices.Contains(b, l) {
			out = append(out, "only got:    "+l)
		}
	}
	for _, l := range b {
		if !slices.Contains(a, l) {
			out = append(out, "only wanted: "+l)
		}
	}
	return strings.Join(out, "\n")
}

func TestAnyHistoryEndsInTheStateOfTheWholeWorld(t *testing.T) {
	histories := 300
	if testing.Short() {
		histories = 50
	}
	for seed := range histories {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			live(t, random{rand.New(rand.NewPCG(uint64(seed), 1))}, 40)
		})
	}
}

func TestAnEmptiedTrackerHoldsNothing(t *testing.T) {
	for seed := range 20 {
		d := random{rand.New(rand.NewPCG(uint64(seed), 2))}
		tr := New(Config{NodeName: here, ClusterCIDRs: prefixes("192.168.0.0/16"), HostPorts: true})
		for range 100 {
			tr.Apply(randomDelta(d))
		}
		tr.Apply(whole(model.Delta{}))
		setNodeAddrs(tr, nil)
		left := len(tr.services) + len(tr.addresses.requesters) + len(tr.addresses.before) + len(tr.conflictable) +
			len(tr.problemsOf) + len(tr.problems) +
			len(tr.own.mustTraverse) + len(tr.own.mustTraverseOfPod) + len(tr.own.mustTraverseOfSlice) + len(tr.own.knownPods) +
			len(tr.own.otherNodesPods) + len(tr.own.nodeAddrs) + len(tr.own.addrs) +
			len(tr.ranges.nodes) + len(tr.ranges.lengths) + tr.ranges.cluster[0].nodes + len(tr.podsWithHostPorts)
		if left > 0 {
			t.Errorf("seed %d: %d entries are left: %+v", seed, left, tr.own)
		}
	}
}

// FuzzTracker wants -fuzzminimizetime 10x: the order of Go's maps changes from
// run to run and with it the coverage, which the fuzzer's minimizer would chase
// for a minute an input.
func FuzzTracker(f *testing.F) {
	for seed := range 8 {
		history := make([]byte, 400)
		r := rand.New(rand.NewPCG(uint64(seed), 3))
		for i := range history {
			history[i] = byte(r.Uint32())
		}
		f.Add(history)
	}
	f.Fuzz(func(t *testing.T, history []byte) {
		live(t, script{bytes.NewReader(history)}, min(30, 1+len(history)/8))
	})
}
