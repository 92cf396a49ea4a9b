package nftables

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
)

// inPlace runs it where the test is.
func inPlace(f func() error) error { return f() }

// deniedBy is whose counter of denied packets grew.
func deniedBy(before, after map[string]float64) (policy string) {
	for _, name := range slices.Sorted(maps.Keys(after)) {
		var by, verdict string
		if _, err := fmt.Sscan(name, &by, &verdict); err == nil && verdict == "denied" && after[name] > before[name] {
			policy += by
		}
	}
	return policy
}

// randomPolicies are two policies about ports from 1 to 4 of pods or the node, or one
// for what either pod is asked.
func randomPolicies(r *rand.Rand, each bool) model.Delta {
	d := oneCache(true)
	d.DoNotTrackPolicies = map[string]*model.DoNotTrackPolicy{}
	client := &model.Pod{Name: model.Name{Namespace: "n", Name: "pod2"}, Node: "here", Labels: map[string]string{"role": "client"},
		IPs: []netip.Addr{netip.MustParseAddr("10.244.0.3")}}
	d.Pods[client.Name] = client
	d.Nodes = map[string]*model.Node{"here": {Name: "here", Labels: map[string]string{"is": "node"},
		Addresses: []netip.Addr{netip.MustParseAddr("10.244.0.1"), netip.MustParseAddr("172.30.0.10")}}}
	sel := func(role string) *model.PodSelection {
		return &model.PodSelection{Pods: &model.Selector{MatchLabels: map[string]string{"role": role}}}
	}
	blocks := []string{"10.244.0.3/32", "172.30.0.0/24", "10.244.0.0/23", "172.30.0.99/32", "192.0.2.0/24", "fd00::/64"}
	for i := range 2 {
		first := uint16(1 + r.IntN(4))
		rule := model.PolicyRule{Ports: []model.PortRange{{Protocol: model.UDP, First: first, Last: first + uint16(r.IntN(3))}}}
		for range 1 + r.IntN(2) {
			rule.Peers = append(rule.Peers, model.PolicyPeer{Block: netip.MustParsePrefix(blocks[r.IntN(len(blocks))])})
		}
		if r.IntN(3) == 0 {
			rule.Peers = append(rule.Peers, model.PolicyPeer{Pods: sel("client")})
		}
		p := &model.DoNotTrackPolicy{Name: fmt.Sprint("policy", i), Track: r.IntN(4) == 0, DenyOthers: r.IntN(4) > 0}
		switch {
		case each:
			p.Pods = sel([]string{"cache", "client"}[i])
		case r.IntN(3) == 0:
			p.Nodes = &model.Selector{MatchLabels: map[string]string{"is": "node"}}
		default:
			p.Pods = sel([]string{"cache", "client"}[r.IntN(2)])
		}
		if each || r.IntN(2) > 0 {
			p.Ingress = []model.PolicyRule{rule}
		} else {
			p.Egress = []model.PolicyRule{rule}
		}
		d.DoNotTrackPolicies[p.Name] = p
	}
	return d
}

// TestWhoDeniedAPacketIsReadBack compares, packet by packet, whose counter grew with
// who is said to have denied it.
func TestWhoDeniedAPacketIsReadBack(t *testing.T) {
	m := newMachines(t)
	seen := map[string]int{}
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 7))
		p, tr := openPolicies(t), donottrack.New(donottrack.Config{NodeName: "here"})
		d := randomPolicies(r, seed%3 == 0)
		tr.SetNodeAddrs(d.Nodes["here"].Addresses)
		tr.Apply(d)
		run := map[donottrack.Pair]bool{}
		end := func() netip.Addr {
			return netip.MustParseAddr([]string{"10.244.0.2", "10.244.0.3", "172.30.0.99"}[r.IntN(3)])
		}
		for range r.IntN(2) * 8 { // translated; a tracker would see that its peer is denied too
			run[donottrack.Pair{Local: end(), Peer: end(), Protocol: model.UDP, Port: uint16(1 + r.IntN(5))}] = true
		}
		tr.SetTracked(run)
		if err := p.Replace(t.Context(), tr.State()); err != nil {
			t.Fatal(err)
		}
		for range 24 {
			from := []string{"pod1", "pod2", "lan", ""}[r.IntN(4)]
			in, source, hook := func(f func()) { m.in(from, f) },
				map[string]string{"pod1": "10.244.0.2", "pod2": "10.244.0.3", "lan": "172.30.0.99"}[from], "PREROUTING"
			if from == "" {
				in, source, hook = func(f func()) { f() }, "10.244.0.1", "OUTPUT"
			}
			d := Dropped{Hook: hook, Protocol: model.UDP, FromThisNode: from == "",
				Source: netip.AddrPortFrom(netip.MustParseAddr(source), uint16(1+r.IntN(5))),
				Destination: netip.AddrPortFrom(netip.MustParseAddr([]string{"10.244.0.2", "10.244.0.3", "172.30.0.99", "172.30.0.10"}[r.IntN(4)]),
					uint16(1+r.IntN(5)))}
			if d.Source.Addr() == d.Destination.Addr() {
				continue
			}
			before := counted(t, p)
			in(func() { sendFrom(t, d.Source, d.Destination) })
			want := deniedBy(before, counted(t, p))
			got, err := Denied(inPlace, d)
			if hook == "PREROUTING" && err == nil && got.Policy == "" {
				hook, d.Hook = "FORWARD", "FORWARD"
				got, err = Denied(inPlace, d)
			}
			if err != nil || got.Policy != want || want != "" && (!slices.Contains(denyingHooks[hook], got.Chain) || len(got.Before) > 0) {
				t.Fatalf("seed %d: %+v: %+v, %v, but %q counted it\n%s", seed, d, got, err, want, listed(t))
			}
			seen[hook+" "+want]++
		}
		p.Close()
	}
	for _, what := range []string{"PREROUTING policy0", "PREROUTING policy1", "FORWARD ", "FORWARD policy0", "OUTPUT ", "OUTPUT policy0"} {
		if seen[what] < 3 {
			t.Errorf("%q: %d packets: too few to say anything: %v", what, seen[what], seen)
		}
	}
}

func sendFrom(t *testing.T, from, to netip.AddrPort) {
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(from)) // not connected: it hears of no refusal
	if err != nil {
		t.Error(err)
		return
	}
	defer c.Close()
	_, _ = c.WriteToUDPAddrPort([]byte("x"), to) // a denied one of this node is an error
}

// TestWhoMayHaveDroppedItBeforeIsSaid makes chains of others.
func TestWhoMayHaveDroppedItBeforeIsSaid(t *testing.T) {
	enter(t)
	d := Dropped{Hook: "PREROUTING", Protocol: model.TCP, Source: netip.MustParseAddrPort("198.51.100.1:9"),
		Destination: netip.MustParseAddrPort("10.244.0.2:11211")}
	expect := func(when string, d Dropped, policy, chain string, before ...string) {
		t.Helper()
		if got, err := Denied(inPlace, d); err != nil || got.Policy != policy || got.Chain != chain || !slices.Equal(got.Before, before) {
			t.Errorf("%s: %+v, %v", when, got, err)
		}
	}
	expect("without a table", d, "", "")
	p, tr := openPolicies(t), donottrack.New(donottrack.Config{NodeName: "here"})
	tr.Apply(oneCache(true))
	if err := p.Replace(t.Context(), tr.State()); err != nil {
		t.Fatal(err)
	}
	expect("alone", d, "cache", "prerouting")
	if out, err := runNft(`table inet early { chain sub { }; chain pre { type filter hook prerouting priority -310; jump sub; }; }
		table ip raw { chain PREROUTING { type filter hook prerouting priority raw; tcp dport 1 drop; }; chain OUTPUT { type filter hook output priority raw; tcp dport 1 drop; }; }
		table ip empty { chain pre { type filter hook prerouting priority -400; }; }
		table ip shut { chain pre { type filter hook prerouting priority -400; policy drop; }; }
		table ip6 other { chain pre { type filter hook prerouting priority -400; drop; }; }
		table inet later { chain pre { type filter hook prerouting priority mangle; drop; }; }`); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	expect("beside others", d, "cache", "prerouting", "early/pre", "raw/PREROUTING", "shut/pre")
	at := d
	at.Hook = "FORWARD"
	expect("translated", at, "cache", "translated-on")
	at.Hook = "POSTROUTING"
	expect("elsewhere", at, "", "")
	at = d
	at.Source = netip.MustParseAddrPort("10.244.1.2:9")
	expect("a peer", at, "", "")
	at = d
	at.Protocol = 1
	expect("ICMP", at, "", "")
}
