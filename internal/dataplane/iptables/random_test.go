package iptables

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// randomWorld generates Service ports that change. As in intent, each frontend belongs to
// one port.
type randomWorld struct {
	*rand.Rand
	ports   map[intent.PortID]*intent.ServicePort
	claimed map[string]intent.PortID
	node    intent.Node
}

func newRandomWorld(seed uint64) *randomWorld {
	return &randomWorld{rand.New(rand.NewPCG(seed, 7)), map[intent.PortID]*intent.ServicePort{}, map[string]intent.PortID{}, testNode()}
}

// changeNode changes which pods get the node's address in egress.
func (w *randomWorld) changeNode(c *intent.Changes) {
	some := func(list ...string) string {
		return strings.Join(slices.DeleteFunc(list, func(string) bool { return w.IntN(2) == 0 }), " ")
	}
	w.node = withEgress(some("10.244.0.0/24", "10.244.1.0/24", "10.0.0.0/8", "0.0.0.0/0", "fd44:1::/64"),
		some("10.0.0.0/8", "224.0.0.0/4", "0.0.0.0/0", "fc00::/7", "::/0"))
	c.Node = new(w.node)
}

// change adds or removes one Service port.
func (w *randomWorld) change(c *intent.Changes) {
	f := []model.Family{model.IPv4, model.IPv6}[w.IntN(2)]
	of := id(fmt.Sprintf("svc-%d", w.IntN(60)), "http", 80, protocolDigits[w.IntN(3)], f)
	for claim, owner := range w.claimed {
		if owner == of {
			delete(w.claimed, claim)
		}
	}
	c.Deletes = slices.DeleteFunc(c.Deletes, func(id intent.PortID) bool { return id == of })
	c.Upserts = slices.DeleteFunc(c.Upserts, func(p *intent.ServicePort) bool { return p.ID == of })
	if _, there := w.ports[of]; there && w.IntN(3) == 0 {
		delete(w.ports, of)
		c.Deletes = append(c.Deletes, of)
		return
	}
	w.ports[of] = w.port(of)
	c.Upserts = append(c.Upserts, w.ports[of])
}

func (w *randomWorld) port(of intent.PortID) *intent.ServicePort {
	p := &intent.ServicePort{ID: of}
	for i, n := 0, w.IntN(12); i < n; i++ {
		p.Endpoints = append(p.Endpoints, w.endpoint(of.Family, i))
	}
	if w.IntN(4) == 0 {
		p.Affinity = time.Duration(1+w.IntN(3)) * time.Hour
	}
	if w.IntN(40) == 0 {
		p.Helper = map[model.Protocol]intent.Helper{model.TCP: intent.FTP, model.UDP: intent.TFTP}[of.Protocol]
	}
	if w.IntN(3) == 0 {
		for range p.Endpoints {
			p.Weights = append(p.Weights, uint16(w.IntN(4)))
		}
	}
	any := slices.ContainsFunc(p.Endpoints, func(e intent.Endpoint) bool { return e.ClusterPolicy })
	local := slices.ContainsFunc(p.Endpoints, func(e intent.Endpoint) bool { return e.LocalPolicy })
	cluster, external := intent.Reject, intent.Reject
	if any {
		cluster, external = intent.ToCluster, []intent.Route{intent.ToCluster, intent.Drop}[w.IntN(2)]
	}
	if local && w.IntN(2) == 0 {
		external = intent.ToLocal
	}
	for range 1 + w.IntN(4) {
		fe := intent.Frontend{Kind: intent.FrontendKind(w.IntN(4)), Port: uint16(1 + w.IntN(2000)),
			ExternalRoute: external, InternalRoute: cluster}
		switch {
		case fe.Kind == intent.ClusterIP:
			fe.ExternalRoute = cluster
		case fe.Kind == intent.LoadBalancerIP && w.IntN(2) == 0:
			fe.SourceRanges = rangesOf(of.Family, []netip.Prefix{prefix("192.0.2.0/24"), prefix("2001:db8::/32")})
		}
		if fe.Kind != intent.NodePort {
			fe.Addr = w.addr(of.Family, w.IntN(400))
		}
		claim := fmt.Sprint(fe.Addr, fe.Port, of.Protocol, of.Family)
		if _, taken := w.claimed[claim]; !taken {
			w.claimed[claim] = of
			p.Frontends = append(p.Frontends, fe)
		}
	}
	return p
}

func (w *randomWorld) addr(f model.Family, n int) netip.Addr {
	if f == model.IPv6 {
		return netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x96, 14: byte(n >> 8), 15: byte(n)})
	}
	return netip.AddrFrom4([4]byte{10, 96, byte(n >> 8), byte(n)})
}

func (w *randomWorld) endpoint(f model.Family, n int) intent.Endpoint {
	node := byte(1 + w.IntN(3))
	a := netip.AddrFrom4([4]byte{10, 244, node, byte(10 + n)})
	if f == model.IPv6 {
		a = netip.AddrFrom16([16]byte{0: 0xfd, 1: 0x44, 3: node, 15: byte(10 + n)})
	}
	return intent.Endpoint{
		Addr: netip.AddrPortFrom(a, 8080), OnThisNode: node == 1,
		ClusterPolicy: w.IntN(5) > 0, LocalPolicy: node == 1 && w.IntN(5) > 0,
	}
}

func (w *randomWorld) state() intent.State {
	s := intent.State{Node: w.node}
	for _, p := range w.ports {
		s.Ports = append(s.Ports, p)
	}
	sortPorts(s.Ports)
	return s
}

// TestAThousandChangesEndInWhatOneFullSyncWrites compares incremental syncs with a full
// sync at every step, and with the kernel in between and at the end. With -short it ends after 400
// changes: the others are more of the same generator.
func TestAThousandChangesEndInWhatOneFullSyncWrites(t *testing.T) {
	changes := 1000
	if testing.Short() {
		changes = 400
	}
	eachVariant(t, func(b *bench) {
		be, w := b.open(), newRandomWorld(11)
		b.replace(be)
		for made := 0; made < changes; {
			var c intent.Changes
			for range 1 + w.IntN(8) {
				w.change(&c)
				made++
			}
			if w.IntN(12) == 0 {
				w.changeNode(&c)
			}
			if err := be.Apply(context.Background(), c); err != nil {
				t.Fatal(err)
			}
			sameWants(t, be, w.state())
			if made%200 < 4 {
				b.inSync(be)
			}
		}
		b.inSync(be)
		if n := metric(t, be, "kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total"); n != 0 {
			t.Errorf("%v partial syncs failed", n)
		}
		b.asFromScratch(w.state())
	})
}

// sameWants compares the chains that a backend wants with those that a full sync of the
// state wants.
func sameWants(t *testing.T, be *Backend, s intent.State) {
	t.Helper()
	for _, f := range be.families {
		inputs := newNodeInputs(f.ruleset.family, s.Node, f.liberal)
		inputs.sockets = f.sockets
		fresh := newRuleset(inputs)
		fresh.apply(s.Ports, nil)
		fresh.recomputeHelpers()
		for _, table := range allTables {
			have, want := f.want[table], fresh.want[table]
			for name := range have {
				if _, ok := want[name]; !ok {
					t.Fatalf("chain %s is too much", name)
				}
			}
			for name, sum := range want {
				if have[name] != sum {
					t.Fatalf("chain %s differs from a full sync's", name)
				}
			}
			if f.count(table) != fresh.count(table) {
				t.Fatalf("%d rules counted, %d are there", f.count(table), fresh.count(table))
			}
		}
	}
}

// inSync fails unless the kernel holds the rules that the backend wants.
func (b *bench) inSync(be *Backend) {
	b.t.Helper()
	if r, err := be.repair(context.Background()); err != nil || r.Any() {
		b.t.Fatalf("the kernel does not hold what is wanted: %+v, error %v", r, err)
	}
}

// asFromScratch fails unless the kernel holds the rules that a first full sync writes in
// a fresh namespace. The test continues in that namespace.
func (b *bench) asFromScratch(s intent.State) {
	b.t.Helper()
	got := b.dump()
	fresh := newBench(b.t)
	fresh.use(b.variant)
	if err := fresh.open().Replace(context.Background(), s); err != nil {
		b.t.Fatal(err)
	}
	if want := fresh.dump(); got != want {
		b.t.Errorf("the kernel holds\n%s\nbut after one full sync\n%s", got, want)
	}
}

// metric is the sum of a metric over its labels.
func metric(t testing.TB, be *Backend, name string) float64 {
	t.Helper()
	return gather(t, be)[name]
}
