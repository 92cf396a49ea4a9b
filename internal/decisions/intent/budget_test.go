package intent

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// tenant returns a Service of a namespace with a port for each number, one LoadBalancer address,
// and that many source ranges, and its slice of one endpoint.
func tenant(namespace, name string, created int64, ports, ranges int, family model.Family) (*model.Service, *model.EndpointSlice) {
	at := model.Name{Namespace: namespace, Name: name}
	s := &model.Service{Name: at, Type: model.LoadBalancer, Created: time.Unix(created, 0)}
	slice := &model.EndpointSlice{Name: at, Service: at, Family: family}
	seed := uint32(len(namespace))<<16 | uint32(created)
	ip := func(net byte, i uint32) netip.Addr {
		four := [4]byte{net, byte(i >> 16), byte(i >> 8), byte(i)}
		if family == model.IPv4 {
			return netip.AddrFrom4(four)
		}
		return netip.AddrFrom16([16]byte{0: 0xfd, 12: four[0], 13: four[1], 14: four[2], 15: four[3]})
	}
	s.ClusterIPs, s.LoadBalancerIPs = []netip.Addr{ip(10, seed)}, []netip.Addr{ip(11, seed)}
	slice.Endpoints = []model.Endpoint{{Addr: ip(12, seed), Ready: true, Serving: true, Node: there}}
	for i := range ports {
		s.Ports = append(s.Ports, model.ServicePort{Name: fmt.Sprintf("p%d", i), Protocol: model.TCP, Port: uint16(1000 + i)})
		slice.Ports = append(slice.Ports, model.EndpointPort{Name: fmt.Sprintf("p%d", i), Protocol: model.TCP, Port: 8080})
	}
	for i := range ranges {
		s.SourceRanges = append(s.SourceRanges, netip.PrefixFrom(ip(13, uint32(i)), ip(13, 0).BitLen()))
	}
	return s, slice
}

// cluster is a Tracker whose objects tests change.
type cluster struct {
	*Tracker
	t *testing.T
}

func newCluster(t *testing.T, c Capacity) *cluster {
	tr := New(Config{NodeName: here, Capacity: c, MaglevSize: 251, FallsBack: func(p *ServicePort) bool { return p.ID.Protocol == model.TCP }})
	tr.Changes()
	return &cluster{tr, t}
}

func (c *cluster) put(namespace, name string, created int64, ports, ranges int, family model.Family) Changes {
	s, slice := tenant(namespace, name, created, ports, ranges, family)
	if c.cfg.Capacity.AffinityEndpoints > 0 {
		s.Affinity = time.Hour
	}
	return c.Apply(model.Delta{Services: map[model.Name]*model.Service{s.Name: s},
		Slices: map[model.Name]*model.EndpointSlice{slice.Name: slice}})
}

func (c *cluster) remove(namespace, name string) Changes {
	n := model.Name{Namespace: namespace, Name: name}
	return c.Apply(model.Delta{Services: map[model.Name]*model.Service{n: nil}, Slices: map[model.Name]*model.EndpointSlice{n: nil}})
}

// served lists the Services of the state, sorted.
func (c *cluster) served() (names []string) {
	for _, p := range c.State().Ports {
		names = append(names, p.ID.Service.String())
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func (c *cluster) wantServed(what string, want ...string) {
	c.t.Helper()
	slices.Sort(want)
	if got := c.served(); !slices.Equal(got, want) {
		c.t.Errorf("%s: %v are served, want %v", what, got, want)
	}
}

// The Services of one namespace ask for all of a resource. Those of others are served, younger
// ones too, and change. The namespace gets a half, and the rest when it is gone.
func TestOneNamespaceCannotFillTheNode(t *testing.T) {
	for _, test := range []struct {
		name     string
		capacity Capacity
		says     string
	}{
		// A tenant's Service of 10 ports has 20 frontends, 10 endpoints, 10 slots, 20 of frontends, 100 ranges.
		{"Frontends", Capacity{Frontends: 100}, "20 addresses times ports"},
		{"Endpoints", Capacity{Endpoints: 50}, "10 endpoints times ports"},
		{"Slots", Capacity{Slots: 50}, "10 shares of endpoints"},
		{"FrontendSlots", Capacity{FrontendSlots: 100}, "20 addresses times ports times endpoints"},
		{"AffinityEndpoints", Capacity{AffinityEndpoints: 50}, "10 endpoints times ports with session affinity"},
		{"FallbackRanges", Capacity{FallbackRanges: 550}, "100 source ranges times ports that another"},
		{"SourceRanges", Capacity{SourceRanges: 550}, "100 source ranges times ports"},
	} {
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			t.Run(fmt.Sprintf("%s %s", test.name, family), func(t *testing.T) {
				c := newCluster(t, test.capacity)
				for i := range int64(5) { // all of it
					c.put("greedy", fmt.Sprintf("s%d", i), 100+i, 10, 10, family)
				}
				c.wantServed("alone", "greedy/s0", "greedy/s1")
				var of []string
				for _, p := range c.problems {
					if strings.Contains(p.What, test.says) && strings.Contains(p.What, "namespace greedy may have") {
						of = append(of, p.Object.Name.Name)
					}
				}
				if !slices.Equal(of, []string{"s2", "s3", "s4"}) {
					t.Errorf("problems of %v, want of s2 to s4: %v", of, c.problems)
				}
				changes := c.put("honest", "web", 1000, 10, 10, family)
				if len(changes.Upserts) != 10 {
					t.Errorf("the honest Service has %d ports in the changes, want 10", len(changes.Upserts))
				}
				c.wantServed("beside an honest Service", "greedy/s0", "greedy/s1", "honest/web")
				c.put("honest", "web", 1000, 1, 1, family) // a tightened range, and fewer ports
				if ports := c.State().Ports; len(ports) != 21 {
					t.Errorf("%d ports after the change, want 21", len(ports))
				}
				c.remove("greedy", "s0")
				c.wantServed("one less", "greedy/s1", "greedy/s2", "honest/web")
				for i := range 5 {
					c.remove("greedy", fmt.Sprintf("s%d", i))
				}
				c.wantServed("without the namespace", "honest/web")
				if len(c.problems) > 0 || len(c.budget.of) != 1 || len(c.budget.refused) > 0 {
					t.Errorf("left: %v %v %v", c.problems, c.budget.of, c.budget.refused)
				}
				c.put("honest", "two", 1001, 10, 10, family)
				c.wantServed("others may have it", "honest/two", "honest/web")
			})
		}
	}
}

// A Service that does not fit costs no more than its objects: a tenant may change any number of
// them, and others' changes wait.
func TestServicesThatDoNotFitAreNotDecided(t *testing.T) {
	const ports, endpoints, services = 200, 50, 20
	for resource, capacity := range map[string]Capacity{
		"Endpoints": {Endpoints: ports*endpoints*3 - 1}, "Frontends": {Frontends: ports*2*3 - 1}, "SourceRanges": {SourceRanges: ports*3 - 1},
		"Slots": {Slots: 251*ports*3 - 1},
	} {
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			c := newCluster(t, capacity)
			change := func(n int) model.Delta {
				d := model.Delta{Services: map[model.Name]*model.Service{}, Slices: map[model.Name]*model.EndpointSlice{}}
				for i := range n {
					s, slice := tenant("greedy", fmt.Sprint("s", i), int64(100+i), ports, 1, family)
					if resource == "Slots" {
						s.Annotations = map[string]string{BalanceAnnotation: "maglev"}
					}
					for k := range byte(endpoints - 1) {
						a := netip.AddrFrom4([4]byte{9, 1, 1, k})
						if family == model.IPv6 {
							a = netip.AddrFrom16([16]byte{0: 0xfd, 1: 9, 15: k})
						}
						slice.Endpoints = append(slice.Endpoints, model.Endpoint{Addr: a, Ready: true, Node: there})
					}
					d.Services[s.Name], d.Slices[slice.Name] = s, slice
				}
				return d
			}
			c.Apply(change(services))
			c.wantServed(resource, "greedy/s0")
			allocations := func(n int) float64 {
				return testing.AllocsPerRun(1, func() {
					for i := range n {
						c.markDirty(c.services[model.Name{Namespace: "greedy", Name: fmt.Sprint("s", i)}])
					}
					c.Changes()
				})
			}
			one, all := allocations(1), allocations(services)
			if each := (all - one) / (services - 1); each > ports/4 {
				t.Errorf("%s, %s: a decision that a Service of %d ports does not fit makes %.0f allocations", resource, family, ports, each)
			}
		}
	}
}

// planOf returns what a Service requests.
func planOf(svc *model.Service) plan {
	p := planService(svc, &Config{})
	p.addPorts(svc, &Config{})
	return p
}

// A Service that does not fit keeps no list of its addresses times its ports, which its object
// multiplies: 256 ports times 254 externalIPs are 20 KB. So it takes no address, either.
func TestServicesThatDoNotFitRequestNoAddress(t *testing.T) {
	const count, each = 100, 30 // ports, and externalIPs
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		c := newCluster(t, Capacity{Frontends: count * (each + 2) * 3})
		wide := func(name string, created int64) *model.Service {
			s, _ := tenant("greedy", name, created, count, 0, family)
			for i := range byte(each) {
				a := netip.AddrFrom4([4]byte{192, 0, 2, i})
				if family == model.IPv6 {
					a = netip.AddrFrom16([16]byte{0: 0x20, 1: 0x01, 2: 0x0d, 3: 0xb8, 15: i})
				}
				s.ExternalIPs = append(s.ExternalIPs, a)
			}
			return s
		}
		d := model.Delta{Services: map[model.Name]*model.Service{}}
		for i := range 20 {
			s := wide(fmt.Sprint("s", i), int64(100+i))
			d.Services[s.Name] = s
		}
		c.Apply(d)
		fit := []model.Name{}
		for name, e := range c.services {
			if _, refused := c.most.refused[e]; !refused {
				fit = append(fit, name)
			}
		}
		if len(fit) != 1 || fit[0].Name != "s0" {
			t.Fatalf("%s: %v fit, want s0", family, fit)
		}
		if got, want := len(c.addresses.requesters), count*(each+2); got != want {
			t.Errorf("%s: %d addresses times ports are requested, want %d, those of the one that fits", family, got, want)
		}

		// An annotation of it changes no request, and concerns no other Service.
		ejecting := wide("s0", 100)
		ejecting.Annotations = map[string]string{OutlierEjectionAnnotation: "true"}
		honest := &model.Service{Name: model.Name{Namespace: "honest", Name: "web"}, Created: time.Unix(1000, 0), ClusterIPs: ejecting.ClusterIPs,
			Ports: ejecting.Ports[:1]}
		honest.ClusterIPs = []netip.Addr{ejecting.ClusterIPs[0].Next()}
		honest.ExternalIPs = ejecting.ExternalIPs[:1]
		c.Apply(model.Delta{Services: map[model.Name]*model.Service{honest.Name: honest}})
		c.facts.Apply(model.Delta{Services: map[model.Name]*model.Service{ejecting.Name: ejecting}})
		c.divideMost()
		c.planDirty()
		if len(c.addresses.before) > 0 || c.services[honest.Name].dirty {
			t.Errorf("%s: an annotation requests %d addresses anew, and concerns the other Service: %v", family, len(c.addresses.before),
				c.services[honest.Name].dirty)
		}
		c.Changes()

		// Without the one that fits, another does, and requests its addresses.
		c.remove("greedy", "s0")
		if owner := c.addresses.owner(addressKey{Addr: ejecting.ExternalIPs[0], Protocol: model.TCP, Port: 1000}); owner.Service.Name != "s1" {
			t.Errorf("%s: %v has the address, want the oldest that fits", family, owner)
		}
		for i := range 20 {
			c.remove("greedy", fmt.Sprint("s", i))
		}
		if got := len(c.addresses.requesters); got != 2 {
			t.Errorf("%s: %d addresses are requested when the Services are gone, want 2", family, got)
		}
	}
}

// What is served does not depend on the order in which objects come.
func TestTheOldestServicesAreServed(t *testing.T) {
	order := []int64{3, 0, 4, 1, 2}
	c := newCluster(t, Capacity{SourceRanges: 550})
	for _, i := range order {
		c.put("greedy", fmt.Sprintf("s%d", i), 100+i, 10, 10, model.IPv4)
	}
	c.wantServed("in another order", "greedy/s0", "greedy/s1")
}

// The tables of maglev and the weights of endpoints are slots.
func TestTablesAndWeightsCountAsSlots(t *testing.T) {
	for balance, want := range map[string]int{"maglev": 251, "weighted": 7} {
		c := newCluster(t, Capacity{Slots: 10000})
		s, slice := tenant("ns", "s", 100, 1, 1, model.IPv4)
		s.Annotations = map[string]string{BalanceAnnotation: balance, WeightsAnnotation: "12.0.0.0/8=7 0.0.0.0/0=1"}
		slice.Endpoints = append(slice.Endpoints, model.Endpoint{Addr: addr("9.1.1.1"), Ready: true, Serving: true, Node: there})
		c.Apply(model.Delta{Services: map[model.Name]*model.Service{s.Name: s}, Slices: map[model.Name]*model.EndpointSlice{s.Name: slice}})
		if got := c.services[s.Name].entries[slotEntries]; got != want && got != want+1 {
			t.Errorf("%s asks for %d slots, want %d for its endpoints", balance, got, want)
		}
	}
}

// Endpoints that serve and are not selected have entries too: UDP flows stay with them.
func TestEndpointsThatDrainCount(t *testing.T) {
	c := newCluster(t, Capacity{Endpoints: 10000})
	s, slice := tenant("ns", "s", 100, 1, 1, model.IPv4)
	s.Ports[0].Protocol, slice.Ports[0].Protocol = model.UDP, model.UDP
	for i := range 9 {
		slice.Endpoints = append(slice.Endpoints, model.Endpoint{Addr: addr(fmt.Sprintf("9.1.1.%d", 1+i)), Serving: true,
			Terminating: true, Node: there})
	}
	c.Apply(model.Delta{Services: map[model.Name]*model.Service{s.Name: s}, Slices: map[model.Name]*model.EndpointSlice{s.Name: slice}})
	if got := c.services[s.Name].entries[endpointEntries]; got != 10 {
		t.Errorf("it asks for %d endpoints, want 10", got)
	}
}

// Whatever namespaces ask for: one that stays within the share gets it all, no other has more
// than is left free, and nothing is free that a namespace lacks.
func TestShares(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 10000 {
		capacity, sum, over := 1+r.IntN(1000), 0, false
		demands := make([]int, r.IntN(8))
		for i := range demands {
			demands[i] = r.IntN(1 + r.IntN(2*capacity))
		}
		share := shareOf(capacity, demands)
		for _, n := range demands {
			sum += min(n, share)
			over = over || n > share
		}
		if free := capacity - sum; free < share && over || !over && free != share {
			t.Fatalf("of %d, %v ask, the share is %d, and %d stay free", capacity, demands, share, free)
		} else if over && free > share+len(demands)+1 {
			t.Fatalf("of %d, %v ask, the share is %d, and %d stay free although some lack", capacity, demands, share, free)
		}
	}
}

// The health check of a Service that does not fit fails.
func TestAServiceThatDoesNotFitIsUnhealthy(t *testing.T) {
	c := newCluster(t, Capacity{SourceRanges: 100})
	s, slice := tenant("ns", "s", 100, 10, 10, model.IPv4)
	s.ExternalLocal, s.HealthCheckNodePort = true, 31000
	slice.Endpoints[0].Node = here
	got := c.Apply(model.Delta{Services: map[model.Name]*model.Service{s.Name: s}, Slices: map[model.Name]*model.EndpointSlice{s.Name: slice}})
	want := []HealthCheck{{Service: s.Name, Port: 31000}}
	if !slices.Equal(got.HealthChecks, want) || len(got.Upserts) > 0 {
		t.Errorf("health checks %v, %d ports, want %v and none", got.HealthChecks, len(got.Upserts), want)
	}
	copied := *s
	s = &copied
	s.SourceRanges = s.SourceRanges[:1]
	got = c.Apply(model.Delta{Services: map[model.Name]*model.Service{s.Name: s}})
	want[0].Endpoints = 1
	if !slices.Equal(got.HealthChecks, want) || len(got.Upserts) != 10 {
		t.Errorf("health checks %v, %d ports, want %v and 10", got.HealthChecks, len(got.Upserts), want)
	}
}
