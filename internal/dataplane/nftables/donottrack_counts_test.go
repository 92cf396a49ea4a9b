package nftables

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/await"
)

// countersOf returns the counters that c collects of a metric, by the values of their labels. A
// registry would ask on another thread, which is in another namespace.
func countersOf(t *testing.T, c prometheus.Collector, of *prometheus.Desc) map[string]float64 {
	t.Helper()
	ch := make(chan prometheus.Metric, 100)
	c.Collect(ch)
	close(ch)
	out := map[string]float64{}
	for m := range ch {
		var d dto.Metric
		if err := m.Write(&d); err != nil {
			t.Fatal(err)
		}
		if m.Desc() != of {
			continue
		}
		var labels []string
		for _, l := range d.Label {
			labels = append(labels, l.GetValue())
		}
		out[strings.Join(labels, " ")] = d.Counter.GetValue()
	}
	return out
}

// counted is what the metric of packets says, by policy and verdict.
func counted(t *testing.T, p *Policies) map[string]float64 {
	t.Helper()
	out := countersOf(t, p, policyPacketsDesc)
	denials, err := p.Denials(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for key, n := range out {
		policy, is := strings.CutSuffix(key, " denied")
		if have, known := denials[policy]; is && (!known || have < uint64(n)) { // a packet may come between
			t.Errorf("denials %v, want %s of %v", denials, policy, n)
		}
	}
	return out
}

// TestPacketsAreCountedByPolicyAndVerdict sends so many datagrams to a pod, through
// changes that write the rules anew.
func TestPacketsAreCountedByPolicyAndVerdict(t *testing.T) {
	m := newMachines(t)
	send := func(from string, n int) {
		m.in(from, func() {
			c, err := net.ListenPacket("udp4", ":0") // not connected: it hears of no refusal
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			for range n {
				if _, err := c.WriteTo([]byte("x"), &net.UDPAddr{IP: net.IPv4(10, 244, 0, 2), Port: 9}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	p, tr := openPolicies(t), donottrack.New(donottrack.Config{NodeName: "here"})
	world := func(track bool, peers ...string) model.Delta {
		d := oneCache(true)
		spec := d.DoNotTrackPolicies["cache"]
		spec.Track = track
		spec.Ingress = []model.PolicyRule{{Ports: []model.PortRange{{Protocol: model.UDP, First: 9, Last: 9}}}}
		for _, peer := range peers {
			spec.Ingress[0].Peers = append(spec.Ingress[0].Peers, model.PolicyPeer{Block: netip.MustParsePrefix(peer)})
		}
		return d
	}
	expect := func(when string, want map[string]float64) {
		t.Helper()
		await.NoError(t, func() error { // a datagram may wait for a neighbor
			if got := counted(t, p); !maps.Equal(got, want) {
				return fmt.Errorf("%s: %v, want %v\n%s", when, got, want, listed(t))
			}
			return nil
		})
	}
	expect("before all", map[string]float64{})
	tr.Apply(world(false, "10.244.0.3/32"))
	if err := p.Replace(t.Context(), tr.State()); err != nil {
		t.Fatal(err)
	}
	expect("nothing sent", map[string]float64{"cache untracked": 0, "cache denied": 0})
	send("pod2", 3)
	send("lan", 2)
	want := map[string]float64{"cache untracked": 3, "cache denied": 2}
	expect("sent", want)
	expect("read again", want)
	for i, d := range []model.Delta{world(false, "10.244.0.3/32", "fd00::/64"), world(false, "10.244.0.3/32")} { // rules anew
		if err := p.Apply(t.Context(), tr.Apply(d)); err != nil {
			t.Fatal(err)
		}
		expect(fmt.Sprint("written anew ", i), want)
		send("pod2", 1)
		send("lan", 5)
		want["cache untracked"]++
		want["cache denied"] += 5
		expect(fmt.Sprint("sent after ", i), want)
	}
	if err := p.Apply(t.Context(), tr.Apply(world(true, "10.244.0.3/32"))); err != nil {
		t.Fatal(err)
	}
	send("pod2", 4)
	expect("tracked", map[string]float64{"cache tracked": 4, "cache denied": want["cache denied"]})
	if err := p.Apply(t.Context(), tr.Apply(model.Delta{Full: true})); err != nil {
		t.Fatal(err)
	}
	expect("without the policy", map[string]float64{})
}
