package services

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// portWorld is a small cluster that changes at random.
type portWorld struct {
	rng      *rand.Rand
	services []*randomService
	holders  map[int]int // who has which of the shared addresses
	ports    map[intent.PortID]*intent.ServicePort
}

type randomService struct {
	id            intent.PortID
	there         bool
	generation    int
	endpoints     map[int]intent.Endpoint
	ranges        []netip.Prefix
	affinity      time.Duration
	external      bool // externalTrafficPolicy Local
	internalLocal bool
	tftp          bool
	weights       []uint16 // by the number of an endpoint; nil: equal
	maglev        int      // size of the table; 0: none
}

func newPortWorld(seed uint64) *portWorld {
	w := &portWorld{
		rng: rand.New(rand.NewPCG(seed, 1)), holders: map[int]int{},
		ports: map[intent.PortID]*intent.ServicePort{},
	}
	for i := range 8 {
		w.services = append(w.services, &randomService{
			endpoints: map[int]intent.Endpoint{},
			id: intent.PortID{
				Service: model.Name{Namespace: "test", Name: fmt.Sprint("service-", i)}, Number: uint16(80 + i),
				Protocol: []model.Protocol{model.TCP, model.UDP}[i%2],
				Family:   []model.Family{model.IPv4, model.IPv6}[i/2%2],
			},
		})
	}
	for range 5 {
		w.step()
	}
	return w
}

func (w *portWorld) state() []*intent.ServicePort {
	return slices.SortedFunc(maps.Values(w.ports), func(a, b *intent.ServicePort) int { return a.ID.Compare(b.ID) })
}

// step changes some things and says what a Tracker would say of it.
func (w *portWorld) step() intent.Changes {
	for range 1 + w.rng.IntN(4) {
		w.change(w.rng.IntN(len(w.services)))
	}
	before := w.ports
	w.ports = map[intent.PortID]*intent.ServicePort{}
	var c intent.Changes
	for i, s := range w.services {
		if !s.there {
			continue
		}
		p := w.decide(i)
		if old := before[p.ID]; old != nil && reflect.DeepEqual(old, p) {
			p = old
		} else {
			c.Upserts = append(c.Upserts, p)
		}
		w.ports[p.ID] = p
	}
	for id := range before {
		if w.ports[id] == nil {
			c.Deletes = append(c.Deletes, id)
		}
	}
	slices.SortFunc(c.Deletes, intent.PortID.Compare)
	slices.SortFunc(c.Upserts, func(a, b *intent.ServicePort) int { return a.ID.Compare(b.ID) })
	return c
}

func (w *portWorld) change(i int) {
	s := w.services[i]
	switch w.rng.IntN(12) {
	case 0:
		s.there = false
	case 1:
		s.generation++ // as when the port is renamed: same addresses, other id
		s.id.Port = fmt.Sprint("g", s.generation)
	case 2:
		clear(s.endpoints)
	case 3:
		s.ranges = [][]netip.Prefix{nil, {}, w.prefixes(s.id.Family, 1), w.prefixes(s.id.Family, 3)}[w.rng.IntN(4)]
	case 4:
		s.affinity = time.Duration(w.rng.IntN(2)) * 10800 * time.Second
	case 5:
		s.external = !s.external
		s.internalLocal = w.rng.IntN(4) == 0
		s.tftp = w.rng.IntN(2) == 0
		s.weights = w.weights()
		s.maglev = []int{0, 0, 7, 13}[w.rng.IntN(4)]
	case 6, 7:
		for range 3 {
			w.holders[w.rng.IntN(30)] = w.rng.IntN(len(w.services))
		}
	default:
		s.there = true
		for range 1 + w.rng.IntN(5) {
			n := w.rng.IntN(9)
			if _, ok := s.endpoints[n]; ok && w.rng.IntN(3) == 0 {
				delete(s.endpoints, n)
			} else {
				s.endpoints[n] = w.endpoint(s.id.Family, n)
			}
		}
	}
}

func (w *portWorld) prefixes(f model.Family, n int) []netip.Prefix {
	all := []string{"10.0.0.0/8", "10.1.0.0/16", "192.0.2.1/32", "0.0.0.0/0"}
	if f == model.IPv6 {
		all = []string{"2001:db8::/32", "2001:db8:1::/48", "2001:db8::1/128", "::/0"}
	}
	var out []netip.Prefix
	for _, i := range w.rng.Perm(len(all))[:n] {
		out = append(out, netip.MustParsePrefix(all[i]))
	}
	slices.SortFunc(out, func(a, b netip.Prefix) int {
		if c := a.Addr().Compare(b.Addr()); c != 0 {
			return c
		}
		return a.Bits() - b.Bits()
	})
	return out
}

func testAddr(f model.Family, net, host int) netip.Addr {
	if f == model.IPv6 {
		return netip.MustParseAddr(fmt.Sprintf("2001:db8:%x::%x", net, host))
	}
	return netip.AddrFrom4([4]byte{10, byte(net), 0, byte(host)})
}

func (w *portWorld) endpoint(f model.Family, n int) intent.Endpoint {
	here := w.rng.IntN(2) == 0
	return intent.Endpoint{
		Addr:          netip.AddrPortFrom(testAddr(f, 200, n/2+1), uint16(8080+n%2)),
		ClusterPolicy: w.rng.IntN(5) > 0, LocalPolicy: w.rng.IntN(2) == 0,
		OnThisNode: here, HostNetwork: here && w.rng.IntN(4) == 0, MustTraverseNetfilter: w.rng.IntN(4) == 0,
	}
}

// weights returns weights that no set of endpoints has only zeros of: Applied could not tell
// them from equal shares.
func (w *portWorld) weights() []uint16 {
	if w.rng.IntN(2) == 0 {
		return nil
	}
	all := make([]uint16, 9)
	for i := range all {
		all[i] = uint16(w.rng.IntN(5))
	}
	return all
}

// weigh sets the weights of a port.
func (s *randomService) weigh(p *intent.ServicePort) {
	if s.weights == nil {
		return
	}
	sum := map[intent.Route]int{}
	for _, n := range slices.Sorted(maps.Keys(s.endpoints)) {
		e := s.endpoints[n]
		if !e.ClusterPolicy && !e.LocalPolicy {
			continue
		}
		p.Weights = append(p.Weights, s.weights[n])
		for _, route := range []intent.Route{intent.ToCluster, intent.ToLocal} {
			if e.In(route) {
				sum[route] += int(s.weights[n])
			}
		}
	}
	for _, e := range p.Endpoints {
		if e.ClusterPolicy && sum[intent.ToCluster] == 0 || e.LocalPolicy && sum[intent.ToLocal] == 0 {
			p.Weights = nil
			return
		}
	}
	if !slices.ContainsFunc(p.Weights, func(w uint16) bool { return w != p.Weights[0] }) {
		p.Weights = nil
	}
}

// fillTable gives a port a table, in which some endpoint has no slot.
func (s *randomService) fillTable(p *intent.ServicePort) {
	var used []uint32
	for i, e := range p.Endpoints {
		if e.ClusterPolicy {
			used = append(used, uint32(i))
		}
	}
	if s.maglev == 0 || len(used) == 0 {
		return
	}
	p.Balance, p.Weights, p.Affinity = intent.Maglev, nil, 0
	for slot := range s.maglev {
		p.Table = append(p.Table, used[slot*slot%len(used)])
	}
}

// decide is intent's part, as far as it matters here.
func (w *portWorld) decide(i int) *intent.ServicePort {
	s := w.services[i]
	p := &intent.ServicePort{ID: s.id, Affinity: s.affinity}
	if s.tftp {
		p.Helper = intent.TFTP
	}
	cluster, local := false, false
	for _, n := range slices.Sorted(maps.Keys(s.endpoints)) {
		e := s.endpoints[n]
		if !e.ClusterPolicy && !e.LocalPolicy {
			p.ServingUnselected = append(p.ServingUnselected, e)
			continue
		}
		p.Endpoints = append(p.Endpoints, e)
		cluster, local = cluster || e.ClusterPolicy, local || e.LocalPolicy
	}
	s.weigh(p)
	s.fillTable(p)
	route := func(localOnly bool) intent.Route {
		switch {
		case localOnly && local:
			return intent.ToLocal
		case localOnly && cluster:
			return intent.Drop
		case cluster:
			return intent.ToCluster
		}
		return intent.Reject
	}
	inside := route(s.internalLocal)
	p.Frontends = []intent.Frontend{{Addr: testAddr(s.id.Family, 96, i+1), Port: s.id.Number, ExternalRoute: inside, InternalRoute: inside}}
	for n, holder := range w.holders {
		if holder != i {
			continue
		}
		f := intent.Frontend{Port: 443, ExternalRoute: route(s.external), InternalRoute: route(false)}
		switch n % 3 {
		case 0:
			f.Kind, f.Port = intent.NodePort, uint16(30000+n)
		case 1:
			f.Kind, f.Addr = intent.ExternalIP, testAddr(s.id.Family, 50, n)
			if n > 22 { // the address of an endpoint, too
				f.Addr, f.Port = testAddr(s.id.Family, 200, 1), uint16(8080+n%2)
			}
		case 2:
			f.Kind, f.Addr, f.SourceRanges = intent.LoadBalancerIP, testAddr(s.id.Family, 51, n), s.ranges
		}
		p.Frontends = append(p.Frontends, f)
	}
	slices.SortFunc(p.Frontends, func(a, b intent.Frontend) int {
		if a.Kind != b.Kind {
			return int(a.Kind) - int(b.Kind)
		}
		if c := a.Addr.Compare(b.Addr); c != 0 {
			return c
		}
		return int(a.Port) - int(b.Port)
	})
	return p
}
