package nftables

import (
	"maps"
	"net"
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/decisions/policy"
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
	p, tr := openPolicies(t), policy.New(policy.Config{NodeName: "here"})
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
