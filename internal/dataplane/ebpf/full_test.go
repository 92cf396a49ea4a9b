package ebpf

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

// small are maps that a test fills.
var small = Config{FlowTableSize: 1024, MaxFrontends: 64, MaxEndpoints: 64, MaxSourceRanges: 64}

// ipOf returns an address of a family: net says what for.
func ipOf(family model.Family, net byte, i int) netip.Addr {
	four := [4]byte{net, byte(i >> 16), byte(i >> 8), byte(i)}
	if family == model.IPv4 {
		return netip.AddrFrom4(four)
	}
	return netip.AddrFrom16([16]byte{0: 0xfd, 12: four[0], 13: four[1], 14: four[2], 15: four[3]})
}

// The networks of ipOf.
const (
	netServices = 20 + iota
	netEndpoints
	netAllowed // before the change
	netTightened
	netGreedy
	netNodes
	netPods
)

// portWith returns a Service port with that many of each. Its addresses follow from first.
func portWith(family model.Family, name string, first, frontends, endpoints int, ranges []netip.Prefix) *intent.ServicePort {
	p := &intent.ServicePort{ID: intent.PortID{Service: model.Name{Namespace: "ns", Name: name}, Number: 80,
		Protocol: model.TCP, Family: family}}
	for i := range frontends {
		p.Frontends = append(p.Frontends, intent.Frontend{
			Kind: intent.LoadBalancerIP, Addr: ipOf(family, netServices, first+i), Port: 80,
			ExternalRoute: intent.ToCluster, InternalRoute: intent.ToCluster, SourceRanges: ranges,
		})
	}
	for i := range endpoints {
		p.Endpoints = append(p.Endpoints, intent.Endpoint{Addr: netip.AddrPortFrom(ipOf(family, netEndpoints, first+i), 8080),
			ClusterPolicy: true})
	}
	return p
}

func prefixesOf(family model.Family, net byte, n int) (out []netip.Prefix) {
	for i := range n {
		a := ipOf(family, net, i)
		out = append(out, netip.PrefixFrom(a, a.BitLen()))
	}
	return out
}

// fillings are ports that fill one map each; cost is what they take of it.
var fillings = map[string]func(family model.Family, first, cost int) *intent.ServicePort{
	"services": func(family model.Family, first, cost int) *intent.ServicePort {
		return portWith(family, fmt.Sprint("greedy-", first), first, 1, 0, nil)
	},
	"frontends": func(family model.Family, first, cost int) *intent.ServicePort {
		return portWith(family, fmt.Sprint("greedy-", first), first, cost, 0, nil)
	},
	"backends": func(family model.Family, first, cost int) *intent.ServicePort {
		return portWith(family, fmt.Sprint("greedy-", first), first, 1, cost, nil)
	},
	"slots, by weights": func(family model.Family, first, cost int) *intent.ServicePort {
		p := portWith(family, fmt.Sprint("greedy-", first), first, 1, 1, nil)
		p.Weights = []uint16{uint16(cost)}
		return p
	},
	"slots, by a table": func(family model.Family, first, cost int) *intent.ServicePort {
		p := portWith(family, fmt.Sprint("greedy-", first), first, 1, 1, nil)
		p.Balance, p.Table = intent.Maglev, make([]uint32, cost)
		return p
	},
	"source_ranges": func(family model.Family, first, cost int) *intent.ServicePort {
		return portWith(family, fmt.Sprint("greedy-", first), first, 1, 0, prefixesOf(family, netGreedy, cost))
	},
}

// fill applies ports until none fits any more, and returns them.
func fill(t *testing.T, b *Backend, family model.Family,
	next func(model.Family, int, int) *intent.ServicePort) (all []*intent.ServicePort) {
	t.Helper()
	first := 1000
	for _, cost := range []int{16, 1} {
		for {
			p := next(family, first, cost)
			first += 100
			err := b.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{p}})
			if all = append(all, p); errors.Is(err, objects.ErrFull) {
				break
			}
			must.Do(t, err)
			if len(all) > 1000 {
				t.Fatal("nothing is full")
			}
		}
	}
	return all
}

// A map of Services is full. What protects is written, what ends is removed, and a restricted
// Service is closed. When there is room again, everything is served.
func TestAnyFullMap(t *testing.T) {
	for name, next := range fillings {
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			for _, restart := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/restart %t", name, family, restart), func(t *testing.T) { fullMap(t, family, next, restart) })
			}
		}
	}
}

func fullMap(t *testing.T, family model.Family, next func(model.Family, int, int) *intent.ServicePort, restart bool) {
	b := newMapsBackend(t, small)
	allowed, tightened := prefixesOf(family, netAllowed, 2), prefixesOf(family, netTightened, 8)
	web, open := portWith(family, "web", 0, 1, 3, allowed), portWith(family, "open", 50, 1, 1, nil)
	old := portWith(family, "old", 70, 1, 1, nil)
	must.Do(t, b.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{open, old, web}, Node: &intent.Node{Name: "node"}}))
	greedy := fill(t, b, family, next)

	webNow, openNow := portWith(family, "web", 0, 4, 12, tightened), portWith(family, "open", 50, 1, 1, tightened)
	webNow.Endpoints = webNow.Endpoints[1:]
	node := intent.Node{
		Name: "node", Peers: []netip.Addr{ipOf(family, netNodes, 1)}, ClusterCIDRs: prefixesOf(family, netPods, 20),
		MustTraverseNetfilter: []netip.Addr{ipOf(family, netPods, 1)},
	}
	honest := []*intent.ServicePort{openNow, webNow}
	write := func(greedy []*intent.ServicePort, deletes ...intent.PortID) error {
		return b.Apply(t.Context(), intent.Changes{Upserts: honest, Deletes: deletes, Node: &node})
	}
	if restart {
		write = func(greedy []*intent.ServicePort, _ ...intent.PortID) error {
			b.makeParts()
			node := b.node.Write(&node)
			failed, err := b.services.Replace(t.Context(), slices.Concat(greedy, honest))
			return errors.Join(err, dataplane.NodeErrorOf(node, failed))
		}
	}
	var part *dataplane.PortErrors
	if err := write(greedy, old.ID); err != nil && !errors.As(err, &part) || part != nil && part.Node != nil {
		t.Errorf("error %v, want one of single ports", err)
	}
	wantProtected(t, b, &node)
	removed := netip.AddrPortFrom(ipOf(family, netEndpoints, 0), 8080)
	for _, v := range objectstest.ReadAll[uint32, objects.TCBackend](t, b.m(objects.TCMapBackends)) {
		if at := objects.EndpointOf(v); at == removed || at == old.Endpoints[0].Addr {
			t.Errorf("the endpoint %s was removed, and gets connections", at)
		}
	}
	var entry objects.TCFrontend
	if b.m(objects.TCMapFrontends).Lookup(objects.FrontendKey(old.ID, old.Frontends[0]), &entry) == nil {
		t.Error("a deleted Service is served")
	}
	for _, p := range honest {
		must.Do(t, b.m(objects.TCMapFrontends).Lookup(objects.FrontendKey(p.ID, p.Frontends[0]), &entry))
		for _, client := range []netip.Addr{allowed[0].Addr(), ipOf(family, netGreedy, 0)} {
			var one uint8
			found := b.m(objects.TCMapSourceRanges).Lookup(objects.RangeKey(entry.Service, netip.PrefixFrom(client, client.BitLen())), &one) == nil
			if objects.TCFrontendFlags(entry.Flags)&objects.TCFrontendFlagsFRONTEND_RANGES == 0 || found {
				t.Errorf("%s is served by %s, whose ranges exclude it", client, p.ID.Service)
			}
		}
	}

	var ids []intent.PortID
	for _, p := range greedy {
		ids = append(ids, p.ID)
	}
	must.Do(t, write(nil, ids...))
	wantApplied(t, b, honest)
	wantAgreement(t, b)
}

// wantAgreement fails unless the maps of Services have what was written, no more and no less.
func wantAgreement(t *testing.T, b *Backend) {
	t.Helper()
	must.Do(t, b.services.Check())
	select {
	case <-b.Drifted():
		_, err := b.services.Empty() // reads the maps
		t.Errorf("the maps are not what was written: %+v, %v", b.Repaired(), err)
	default:
	}
}

// wantProtected fails unless the maps have what a node needs to protect others.
func wantProtected(t *testing.T, b *Backend, node *intent.Node) {
	t.Helper()
	ranges := objectstest.ReadAll[objects.TCRangeKey, uint8](t, b.m(objects.TCMapClusterRanges))
	var want []objects.TCRangeKey
	for _, c := range node.ClusterCIDRs {
		want = append(want, objects.RangeKey(objects.RangePods, c))
	}
	for _, a := range node.Peers {
		want = append(want, objects.RangeKey(objects.RangePeers, netip.PrefixFrom(a, a.BitLen())))
	}
	for _, key := range want {
		if ranges[key] == 0 {
			t.Errorf("cluster_ranges lacks %s of %#x", objects.RangePrefix(key), key.Scope)
		}
	}
	for _, a := range node.MustTraverseNetfilter {
		var pod objects.TCPod
		if b.m(objects.TCMapPods).Lookup(objects.AddrKey(a), &pod) != nil ||
			objects.TCPodFlags(pod.Flags)&objects.TCPodFlagsPOD_TRAVERSES_NETFILTER == 0 {
			t.Errorf("packets of %s may bypass netfilter, whose policy denies them", a)
		}
	}
}

// Whatever one namespace asks for: everything that is decided fits into the maps, other
// namespaces get what they ask for, and the namespace gets more again when it asks for less.
func TestCapacityIsThatOfTheMaps(t *testing.T) {
	for _, test := range []struct {
		name   string
		change func(*model.Service, *model.EndpointSlice, model.Family)
	}{
		{"services", func(s *model.Service, slice *model.EndpointSlice, _ model.Family) {
			s.LoadBalancerIPs, slice.Endpoints = nil, nil
		}},
		{"frontends", func(s *model.Service, slice *model.EndpointSlice, family model.Family) {
			slice.Endpoints = nil
			base := int(s.Created.Unix()) * 100
			for i := range 5 {
				s.ExternalIPs = append(s.ExternalIPs, ipOf(family, netAllowed, base+i))
			}
		}},
		{"backends", func(s *model.Service, slice *model.EndpointSlice, family model.Family) {
			base := int(s.Created.Unix()) * 100
			for i := range 5 {
				slice.Endpoints = append(slice.Endpoints, model.Endpoint{Addr: ipOf(family, netEndpoints, base+1+i), Ready: true,
					Serving: true, Node: "other"})
			}
		}},
		{"weights", func(s *model.Service, _ *model.EndpointSlice, _ model.Family) {
			s.Annotations = map[string]string{intent.BalanceAnnotation: "weighted", intent.WeightsAnnotation: "0.0.0.0/0=9 ::/0=9"}
		}},
		{"maglev", func(s *model.Service, _ *model.EndpointSlice, _ model.Family) {
			s.Annotations = map[string]string{intent.BalanceAnnotation: "maglev"}
		}},
		{"source_ranges", func(s *model.Service, _ *model.EndpointSlice, family model.Family) {
			s.SourceRanges = prefixesOf(family, netTightened, 5)
		}},
	} {
		for _, family := range []model.Family{model.IPv4, model.IPv6} {
			t.Run(test.name+"/"+family.String(), func(t *testing.T) {
				cfg := small
				if test.name == "maglev" { // slots for some tables
					cfg.MaxEndpoints = 256
				}
				b := newMapsBackend(t, cfg)
				tr := intent.New(intent.Config{NodeName: "node", Capacity: b.cfg.Capacity(), MaglevSize: 31})
				apply := func(d model.Delta) intent.Changes {
					t.Helper()
					c := tr.Apply(d)
					must.Do(t, b.Apply(t.Context(), c))
					wantAgreement(t, b)
					return c
				}
				served := func(namespace string) (n int) {
					for _, p := range tr.State().Ports {
						if p.ID.Service.Namespace == namespace {
							n++
						}
					}
					return n
				}
				apply(tenantObjects("first", 1, family, test.change))
				for i := range 80 {
					apply(tenantObjects("greedy", 100+i, family, test.change))
				}
				most := served("greedy")
				c := apply(tenantObjects("second", 2, family, test.change))
				if served("first") != 2 || served("second") != 2 || most < 2 || most > 100 || len(tr.Changes().Problems)+len(c.Problems) == 0 {
					t.Errorf("%d and %d ports of others are served, and %d of the greedy namespace", served("first"), served("second"), most)
				}
				for i := range 80 {
					apply(gone(tenantObjects("greedy", 100+i, family, test.change)))
				}
				if n := served("greedy"); n != 0 {
					t.Errorf("%d ports of deleted Services are served", n)
				}
				wantApplied(t, b, tr.State().Ports)
				apply(tenantObjects("third", 3, family, test.change))
				if served("third") != 2 {
					t.Error("there is no room after the greedy namespace")
				}
			})
		}
	}
}

// tenantObjects is a LoadBalancer Service of two ports and one endpoint.
func tenantObjects(namespace string, i int, family model.Family,
	change func(*model.Service, *model.EndpointSlice, model.Family)) model.Delta {
	name := model.Name{Namespace: namespace, Name: fmt.Sprint("s", i)}
	s := &model.Service{
		Name: name, Type: model.LoadBalancer, Created: time.Unix(int64(i), 0),
		ClusterIPs: []netip.Addr{ipOf(family, netServices, 2*i)}, LoadBalancerIPs: []netip.Addr{ipOf(family, netServices, 2*i+1)},
		Ports: []model.ServicePort{{Name: "a", Protocol: model.TCP, Port: 80}, {Name: "b", Protocol: model.TCP, Port: 81}},
	}
	slice := &model.EndpointSlice{
		Name: name, Service: name, Family: family,
		Endpoints: []model.Endpoint{{Addr: ipOf(family, netEndpoints, 100*i), Ready: true, Serving: true, Node: "other"}},
		Ports:     []model.EndpointPort{{Name: "a", Protocol: model.TCP, Port: 8080}, {Name: "b", Protocol: model.TCP, Port: 8080}},
	}
	change(s, slice, family)
	return model.Delta{Services: map[model.Name]*model.Service{name: s}, Slices: map[model.Name]*model.EndpointSlice{name: slice}}
}

// gone deletes the objects of a Delta.
func gone(d model.Delta) model.Delta {
	for name := range d.Services {
		d.Services[name], d.Slices[name] = nil, nil
	}
	return d
}

// The pods of one namespace, as peers of a rule, fill a map of do-not-track policies. Packets of
// those that do not fit traverse netfilter. What a policy no longer allows is removed, and what did
// not fit is written when there is room.
func TestFullMapsOfPolicies(t *testing.T) {
	for _, family := range []model.Family{model.IPv4, model.IPv6} {
		t.Run(family.String(), func(t *testing.T) {
			b := newMapsBackend(t, small)
			m, err := ebpf.NewMap(&ebpf.MapSpec{
				Type: ebpf.Hash, Flags: unix.BPF_F_NO_PREALLOC, MaxEntries: 8,
				KeySize: b.m(objects.TCMapUntrackedPods).KeySize(), ValueSize: b.m(objects.TCMapUntrackedPods).ValueSize(),
			})
			must.Do(t, err)
			b.m(objects.TCMapUntrackedPods).Close()
			b.objects.Maps[objects.TCMapUntrackedPods] = m
			err = b.openPolicies()
			must.Do(t, err)

			target := func(i int) donottrack.Target {
				return donottrack.Target{Addr: ipOf(family, netPods, i), Protocol: model.TCP, First: 80, Last: 80}
			}
			member := func(net byte, i int) donottrack.Member {
				return donottrack.Member{Rule: "rule", Addr: ipOf(family, net, i)}
			}
			s := donottrack.State{
				Rules:    map[string]*donottrack.Rule{"rule": {Name: "rule", Pods: true}},
				Verdicts: map[string]*donottrack.Verdict{"verdict": {Name: "verdict", Rules: []string{"rule"}}},
				Targets:  map[donottrack.Target]string{target(1): "verdict", target(2): "verdict"},
				Members:  map[donottrack.Member]bool{},
			}
			for i := range 20 {
				s.Members[member(netGreedy, i)] = true
			}
			write := func(c *donottrack.Changes) {
				t.Helper()
				must.Do(t, errors.Join(b.Revoke(s, c), b.Grant(s, c)))
			}
			write(nil)
			if n := len(objectstest.ReadAll[objects.TCUntrackedPodKey, uint8](t, m)); n != 8 {
				t.Fatalf("%d entries, want a full map of 8", n)
			}

			delete(s.Targets, target(2))
			s.Members[member(netAllowed, 1)] = true
			write(&donottrack.Changes{
				Targets: []donottrack.Change[donottrack.Target, string]{{Key: target(2), Had: "verdict"}},
				Members: []donottrack.Change[donottrack.Member, bool]{{Key: member(netAllowed, 1), Want: true}},
			})
			ports := objectstest.ReadAll[objects.TCFrontendKey, objects.TCUntrackedPort](t, b.m(objects.TCMapUntrackedPorts))
			if _, kept := ports[objects.PortKey(target(1).Addr, model.TCP, 80)]; len(ports) != 1 || !kept {
				t.Errorf("%d ports bypass netfilter, want one", len(ports))
			}

			var c donottrack.Changes
			for i := range 20 {
				delete(s.Members, member(netGreedy, i))
				c.Members = append(c.Members, donottrack.Change[donottrack.Member, bool]{Key: member(netGreedy, i), Had: true})
			}
			write(&c)
			allowed := ipOf(family, netAllowed, 1)
			want := map[objects.TCUntrackedPodKey]uint8{
				{Addr: objects.ToAddr(allowed), Family: uint32(objects.FamilyOf(allowed)),
					Rule: ports[objects.PortKey(target(1).Addr, model.TCP, 80)].Rules[0].Id}: 1,
			}
			objectstest.WantSame(t, "peers when there is room", objectstest.ReadAll[objects.TCUntrackedPodKey, uint8](t, m), want)
		})
	}
}
