package ebpf

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

func addrList(list ...string) (out []netip.Addr) {
	for _, a := range list {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

func TestFactsAboutAddresses(t *testing.T) {
	ownPlace(t)
	b := newMapsBackend(t, Config{})
	want := func(what string, facts map[string]attach.Fact) {
		t.Helper()
		for a, f := range facts {
			if got := b.node.Fact(netip.MustParseAddr(a)); got != f {
				t.Errorf("%s: %s: fact %d, want %d", what, a, got, f)
			}
		}
	}
	want("before the first node", map[string]attach.Fact{"192.0.2.1": attach.Unknown})
	node := intent.Node{
		Addrs: addrList("192.0.2.1"), Peers: addrList("192.0.2.2", "192.0.2.3"), KnownPods: addrList("10.96.0.3", "10.244.1.2", "10.244.2.9"),
		OtherPods: addrList("10.244.1.9", "10.244.2.9"), PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24")},
		OtherPodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/20"), netip.MustParsePrefix("2001:db8:2::/64")},
	}
	// A NodePort is at no address, and an endpoint's is no Service's.
	first, second := objectstest.SimplePort(1, 1), objectstest.SimplePort(2, 1)
	first.Frontends = append(first.Frontends, intent.Frontend{Kind: intent.NodePort, Port: 30080, ExternalRoute: intent.ToCluster,
		InternalRoute: intent.ToCluster})
	third := objectstest.SimplePort(3, 1)
	must.Do(t, b.Apply(t.Context(), intent.Changes{Node: &node, Upserts: []*intent.ServicePort{first, second, third}}))
	want("all", map[string]attach.Fact{
		"192.0.2.1": attach.NodeAddress, "192.0.2.3": attach.OtherNode, "10.244.1.2": attach.PodHere, "10.244.2.9": attach.PodHere,
		"10.244.1.9": attach.PodElsewhere, "10.244.2.7": attach.OtherNodeRange, "10.244.1.7": attach.Unknown,
		"2001:db8:2::1": attach.OtherNodeRange,
		"2001:db8:3::1": attach.Unknown, "10.96.0.1": attach.ServiceAddress, "10.96.0.2": attach.ServiceAddress, "10.16.0.1": attach.Unknown,
		"0.0.0.0":   attach.Unknown,
		"10.96.0.3": attach.PodHere, // a user can give a Service any externalIP
	})
	// An address moves to another Service, which has it twice; a Service goes.
	moved := objectstest.SimplePort(2, 1)
	moved.Frontends = append(moved.Frontends, objectstest.SimplePort(1, 0).Frontends[0])
	other := moved.Frontends[1]
	other.Port = 81
	moved.Frontends = append(moved.Frontends, other)
	must.Do(t, b.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{moved}, Deletes: []intent.PortID{first.ID}}))
	want("moved", map[string]attach.Fact{"10.96.0.1": attach.ServiceAddress, "10.96.0.2": attach.ServiceAddress})
	must.Do(t, b.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{second}}))
	want("gone", map[string]attach.Fact{"10.96.0.1": attach.Unknown, "10.96.0.2": attach.ServiceAddress})
	b.makeParts() // as in the next run
	must.Do(t, b.node.Write(&node))
	_, err := b.services.Empty()
	must.Do(t, err)
	want("read from the maps", map[string]attach.Fact{"10.96.0.1": attach.Unknown, "10.96.0.2": attach.ServiceAddress})
}

// addPod makes a pod at a port of the bridge cni0.
func addPod(t *testing.T, name string, addrs ...string) (ifindex int) {
	t.Helper()
	bridge, err := netlink.LinkByName("cni0")
	must.Do(t, err)
	l, there := addVeth(t, netlink.LinkAttrs{Name: name, MasterIndex: bridge.Attrs().Index})
	must.Do(t, netlink.LinkSetUp(l))
	h, err := netlink.NewHandleAt(there, unix.NETLINK_ROUTE)
	must.Do(t, err)
	defer h.Close()
	eth0, err := h.LinkByName("eth0")
	must.Do(t, err)
	for _, a := range addrs {
		parsed, err := netlink.ParseAddr(a)
		must.Do(t, err)
		must.Do(t, h.AddrAdd(eth0, parsed))
	}
	must.Do(t, h.LinkSetUp(eth0))
	return l.Attrs().Index
}

// A whole agent: a pod forges addresses while no agent runs, and while one does.
func TestForgedPodAddresses(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	var notes []string
	cfg.Refused = func(note string) { notes = append(notes, note) }
	addOutward(t, "spw-eth0", "192.0.2.10/24")
	must.Do(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "cni0"}}))
	cni0, err := netlink.LinkByName("cni0")
	must.Do(t, err)
	must.Do(t, netlink.LinkSetUp(cni0))
	gateway, err := netlink.ParseAddr("10.244.1.1/24")
	must.Do(t, err)
	must.Do(t, netlink.AddrAdd(cni0, gateway))
	state := intent.State{
		Ports: []*intent.ServicePort{objectstest.SimplePort(1, 1)},
		Node: intent.Node{
			Name: "node", Addrs: addrList("192.0.2.10"), KnownPods: addrList("10.244.1.2"),
			OtherPodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.1.128/25")},
		},
	}
	victim := addPod(t, "veth1", "10.244.1.2/24")
	want := func(b *Backend, what string, ifindexes map[string]int) {
		t.Helper()
		await.NoError(t, func() error {
			have := objectstest.ReadAll[objects.TCAddrKey, objects.TCPod](t, b.m(objects.TCMapPods))
			if len(have) != len(ifindexes) {
				return fmt.Errorf("%s: %d entries, want %d: %v", what, len(have), len(ifindexes), have)
			}
			for a, i := range ifindexes {
				if got := have[objects.AddrKey(netip.MustParseAddr(a))]; int(got.Ifindex) != i {
					return fmt.Errorf("%s: %s is behind interface %d, want %d", what, a, got.Ifindex, i)
				}
			}
			return nil
		})
	}
	b, err := New(t.Context(), cfg)
	must.Do(t, err)
	must.Do(t, b.Replace(t.Context(), state))
	want(b, "at first", map[string]int{"10.244.1.2": victim})
	must.Do(t, b.Close())

	forger := addPod(t, "veth2", "10.244.1.3/24", "10.244.1.2/32", "10.244.1.1/32", "10.244.1.200/32", "10.244.1.78/32")
	// An earlier run's entry is all that tells who had the address without an object.
	state.Node.KnownPods = nil
	b, err = New(t.Context(), cfg)
	must.Do(t, err)
	defer b.Close()
	must.Do(t, b.Replace(t.Context(), state))
	want(b, "after a restart", map[string]int{"10.244.1.2": victim, "10.244.1.3": forger, "10.244.1.78": forger})
	// A Service gets the address that the pod has taken.
	service := objectstest.SimplePort(2, 1)
	service.Frontends[0].Addr = netip.MustParseAddr("10.244.1.78")
	service.Frontends[0].Kind = intent.ExternalIP
	must.Do(t, b.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{service}}))
	want(b, "with a Service", map[string]int{"10.244.1.2": victim, "10.244.1.3": forger})
	// The Pod objects of both.
	state.Node.KnownPods = addrList("10.244.1.2", "10.244.1.3")
	must.Do(t, b.Apply(t.Context(), intent.Changes{Node: &state.Node}))
	want(b, "with Pod objects", map[string]int{"10.244.1.2": victim, "10.244.1.3": forger})

	wantGauge(t, b, map[string]float64{"node_address": 1, "range_of_other_node": 1, "service_address": 1, "other_pod": 1, "in_use": 0})
	b.node.OnRefused(b.attacher.Refused()[0])
	if len(notes) != 1 || !strings.Contains(notes[0], "10.244.1.1 ") || !strings.Contains(notes[0], "veth2") ||
		!strings.Contains(notes[0], "address of this node") {
		t.Errorf("notes %q", notes)
	}
}

// wantGauge checks how many addresses are refused, by reason.
func wantGauge(t *testing.T, b *Backend, want map[string]float64) {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	must.Do(t, registry.Register(b))
	await.NoError(t, func() error {
		families, err := registry.Gather()
		must.Do(t, err)
		have := map[string]float64{}
		for _, f := range families {
			if f.GetName() == "spillway_ebpf_refused_pod_addresses" {
				for _, m := range f.GetMetric() {
					have[m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue()
				}
			}
		}
		for reason, n := range want {
			if got, ok := have[reason]; !ok || got != n {
				return fmt.Errorf("refused addresses %v, want %v", have, want)
			}
		}
		return nil
	})
}
