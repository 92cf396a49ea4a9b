package nftables

import (
	"maps"
	"net"
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
)

// TestWhatIsDeniedIsDeniedThroughServicesToo connects to a pod by a Service of netfilter,
// which masquerades the client. The pod is also denied to a client that claims to be the
// node.
func TestWhatIsDeniedIsDeniedThroughServicesToo(t *testing.T) {
	m := newMachines(t)
	if out, err := runNft(`table ip service {
		chain pre { type nat hook prerouting priority -100; ip daddr 10.96.0.50 udp dport 80 dnat to 10.244.0.2:9; ip daddr 172.30.0.10 udp dport 30211 dnat to 10.244.0.2:9; }
		chain post { type nat hook postrouting priority 100; ct status dnat masquerade; }
	}`); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	d := oneCache(true)
	d.DoNotTrackPolicies["cache"].Ingress = []model.PolicyRule{{
		Ports: []model.PortRange{{Protocol: model.UDP, First: 9, Last: 9}},
		Peers: []model.PolicyPeer{{Block: netip.MustParsePrefix("10.244.0.3/32")}},
	}}
	p, tr := openPolicies(t), donottrack.New(donottrack.Config{NodeName: "here"})
	tr.Apply(d)
	if err := p.Replace(t.Context(), tr.State()); err != nil {
		t.Fatal(err)
	}
	m.in("lan", func() { run(t, "ip", "addr", "add", "10.244.0.1/32", "dev", "lo") }) // an address of the node
	service, pod := net.UDPAddr{IP: net.IPv4(10, 96, 0, 50), Port: 80}, net.UDPAddr{IP: net.IPv4(10, 244, 0, 2), Port: 9}
	for _, c := range []struct {
		from, as string
		to       net.UDPAddr
		verdict  string
	}{
		{"pod2", "", service, "untracked"},
		{"lan", "", service, "denied"},
		{"lan", "", net.UDPAddr{IP: net.IPv4(172, 30, 0, 10), Port: 30211}, "denied"},
		{"lan", "10.244.0.1", pod, "denied"},
		{"", "10.244.0.1", pod, ""},
	} {
		want := counted(t, p)
		if c.verdict != "" {
			want["cache "+c.verdict]++
		}
		in := func(f func()) { m.in(c.from, f) }
		if c.from == "" { // the node itself
			in = func(f func()) { f() }
		}
		in(func() {
			sock, err := net.ListenPacket("udp4", c.as+":0") // not connected: it hears of no refusal
			if err != nil {
				t.Error(err)
				return
			}
			defer sock.Close()
			if _, err := sock.WriteTo([]byte("x"), &c.to); err != nil {
				t.Error(err)
			}
		})
		if got := counted(t, p); !maps.Equal(got, want) {
			t.Errorf("%s asks %v as %q: %v, want %v\n%s", c.from, &c.to, c.as, got, want, listed(t))
		}
	}
	if err := p.Apply(t.Context(), tr.Apply(model.Delta{Full: true})); err != nil || listed(t) != "" {
		t.Errorf("without the policy: %v\n%s", err, listed(t))
	}
}

// TestRequestsAreDeniedByTheirEndpoint asks through Services of netfilter as a pod and as the
// node, of which a rule of egress denies all but one address. A Service decides nothing: neither
// one with the address of a peer, nor one with an endpoint there.
func TestRequestsAreDeniedByTheirEndpoint(t *testing.T) {
	m := newMachines(t)
	if out, err := runNft(`table ip service {
		map to { type ipv4_addr : ipv4_addr; elements = { 10.96.0.50 : 10.244.0.3, 10.96.0.51 : 172.30.0.99, 172.30.0.98 : 10.244.0.3 }; }
		chain pre { type nat hook prerouting priority -100; udp dport 9 dnat to ip daddr map @to; ip daddr 10.96.0.50 udp dport 10 dnat to 10.244.0.3:9; ip daddr 10.96.0.50 udp dport 11 dnat to 172.30.0.99:12; }
		chain out { type nat hook output priority -100; udp dport 9 dnat to ip daddr map @to; ip daddr 10.96.0.50 udp dport 10 dnat to 10.244.0.3:9; ip daddr 10.96.0.50 udp dport 11 dnat to 172.30.0.99:12; }
	}`); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	run(t, "ip", "route", "add", "10.96.0.0/24", "dev", "lan0")
	run(t, "ip", "route", "add", "172.30.0.98/32", "dev", "lan0")
	own := netip.MustParseAddr("10.244.0.1")
	rules := []model.PolicyRule{{
		Ports: []model.PortRange{{Protocol: model.UDP, First: 9, Last: 9}},
		Peers: []model.PolicyPeer{{Block: netip.MustParsePrefix("172.30.0.98/31")}},
	}}
	for from, selected := range map[string]model.DoNotTrackPolicy{
		"pod1": {Pods: &model.PodSelection{Pods: &model.Selector{MatchLabels: map[string]string{"role": "cache"}}}},
		"":     {Nodes: &model.Selector{MatchLabels: map[string]string{"is": "node"}}},
	} {
		d := oneCache(true)
		p := selected
		p.Name, p.DenyOthers, p.Egress = "out", true, rules
		d.DoNotTrackPolicies = map[string]*model.DoNotTrackPolicy{p.Name: &p}
		d.Nodes = map[string]*model.Node{"here": {Name: "here", Labels: map[string]string{"is": "node"}}}
		name := model.Name{Namespace: "tenant", Name: "s"}
		d.Services = map[model.Name]*model.Service{name: {Name: name}}
		d.Slices = map[model.Name]*model.EndpointSlice{name: {Name: name, Service: name,
			Ports:     []model.EndpointPort{{Protocol: model.UDP, Port: 9}},
			Endpoints: []model.Endpoint{{Addr: netip.MustParseAddr("172.30.0.99")}}}}
		table, tr := openPolicies(t), donottrack.New(donottrack.Config{NodeName: "here", Netfilter: true})
		tr.SetNodeAddrs([]netip.Addr{own, netip.MustParseAddr("172.30.0.10")})
		tr.Apply(d)
		if err := table.Replace(t.Context(), tr.State()); err != nil {
			t.Fatal(err)
		}
		for to, denied := range map[string]bool{
			"172.30.0.99:9": false, "10.244.0.3:9": true, "10.244.0.3:10": false,
			"10.96.0.50:9": true, "10.96.0.51:9": false, "10.96.0.50:10": true, "10.96.0.50:11": false,
			"172.30.0.98:9": true, // a peer's address, which a Service has
		} {
			source := map[string]string{"pod1": "10.244.0.2:0", "": own.String() + ":0"}[from]
			in := func(f func()) { m.in(from, f) }
			if from == "" {
				in = func(f func()) { f() }
			}
			before := counted(t, table)["out denied"]
			in(func() { sendFrom(t, netip.MustParseAddrPort(source), netip.MustParseAddrPort(to)) })
			if got := counted(t, table)["out denied"] > before; got != denied {
				t.Errorf("%q asks %s: denied %t, want %t\n%s", from, to, got, denied, listed(t))
			}
		}
		table.Close()
	}
}
