package nftables

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket/layers"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/decisions/outlier"
	"spillway.dev/spillway/internal/facts/model"
)

// watched has the handshakes of all endpoints counted.
func watched(p *intent.ServicePort) {
	for i := range p.Endpoints {
		p.Endpoints[i].Watched = true
	}
}

// outcomes are written as "failed refused accepted".
func outcomes(t *testing.T, b *Backend) map[string]string {
	t.Helper()
	list, err := b.Outcomes()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, o := range list {
		out[o.Port.Service.Name+" "+o.Endpoint.String()] = fmt.Sprintf("%d %d %v", o.Failed, o.Refused, !o.Accepted.IsZero())
		if o.Since.IsZero() != (o.Failed == 0) {
			t.Errorf("%s: %d handshakes failed since %s", o.Endpoint, o.Failed, o.Since)
		}
	}
	return out
}

// Conntrack begins a connection with any packet, and any host can send it. Only a SYN counts.
func TestPacketsOfUnknownConnectionsAreNoHandshakes(t *testing.T) {
	m := newMachines(t)
	m.serve("pod1")
	b := open(t)
	const endpoint = "10.244.0.2:8080"
	replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{
		port("web", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), here(endpoint), watched),
	}})
	m.ask("lan", "10.96.0.1:80")
	for i := range 30 {
		m.send("lan", "172.30.0.99", "10.96.0.1", &layers.TCP{SrcPort: layers.TCPPort(40000 + i), DstPort: 80, Seq: 1000, Ack: 2000,
			ACK: true, Window: 1000})
	}
	m.ask("lan", "10.96.0.1:80") // after the others
	if out := run(t, "nft", "list", "set", "inet", "spillway", "handshakes4"); !strings.Contains(out, "counter packets 2 ") {
		t.Errorf("two SYNs were sent:\n%s", out)
	}
	if got := outcomes(t, b); got["web "+endpoint] != "0 0 true" {
		t.Errorf("failed, refused, accepted: %v", got)
	}
}

// Connections to three watched endpoints are counted: one accepts, one refuses, and one does
// not answer. Another Service with the same endpoint has its counters. Connections without a
// Service are not counted.
func TestHandshakesOfWatchedEndpointsAreCounted(t *testing.T) {
	m := newMachines(t)
	m.serve("pod1")
	b := open(t)
	run(t, "ip", "route", "add", "10.244.0.9/32", "dev", "veth1") // without an answer to ARP
	const accepts, refuses, silent = "10.244.0.2:8080", "10.244.0.3:8080", "10.244.0.9:8080"
	services := map[string]*intent.ServicePort{}
	s := intent.State{Node: node()}
	for i, endpoint := range []string{accepts, refuses, silent} {
		name := []string{"accepts", "refuses", "silent"}[i]
		services[name] = port(name, model.IPv4, clusterIP(fmt.Sprintf("10.96.0.%d", i+1), intent.ToCluster), here(endpoint), watched)
		s.Ports = append(s.Ports, services[name])
	}
	replace(t, b, s)
	ask := func(times, service int) {
		for range times {
			for _, from := range []string{"lan", "pod1"} {
				m.ask(from, fmt.Sprintf("10.96.0.%d:80", service))
			}
		}
	}
	want := func(when string, all map[string]string) {
		t.Helper()
		got := outcomes(t, b)
		for endpoint, want := range all {
			if got[endpoint] != want {
				t.Errorf("%s: %s: failed, refused, accepted: %s, want %s", when, endpoint, got[endpoint], want)
			}
		}
		if len(got) != len(all) {
			t.Errorf("%s: %v", when, got)
		}
	}
	want("at first", map[string]string{"accepts " + accepts: "0 0 false", "refuses " + refuses: "0 0 false", "silent " + silent: "0 0 false"})
	ask(2, 1)
	ask(3, 2)
	ask(1, 3) // each sends two SYNs, and counts once
	m.ask("lan", refuses)
	counted := map[string]string{"accepts " + accepts: "0 0 true", "refuses " + refuses: "6 6 false", "silent " + silent: "2 0 false"}
	want("after the connections", counted)
	want("when nothing has happened", counted)

	also := port("also", model.IPv4, clusterIP("10.96.0.4", intent.ToCluster), here(refuses), watched)
	if err := b.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{also},
		Deletes: []intent.PortID{services["silent"].ID}}); err != nil {
		t.Fatal(err)
	}
	delete(counted, "silent "+silent)
	counted["also "+refuses] = "6 6 false" // an endpoint's counters are those of all its Services
	want("after a change", counted)
	m.serve("pod2")
	ask(1, 2)
	counted["refuses "+refuses], counted["also "+refuses] = "0 0 true", "0 0 true"
	want("when the endpoint works", counted)

	again := open(t)
	replace(t, again, intent.State{Node: node(), Ports: []*intent.ServicePort{services["accepts"], services["refuses"], also}})
	if r := again.Repaired(); r.Any() {
		t.Errorf("after a restart, the counters look like another program's change: %+v", r)
	}
	replace(t, again, intent.State{Node: node(), Ports: []*intent.ServicePort{port("accepts", model.IPv4,
		clusterIP("10.96.0.1", intent.ToCluster), here(accepts))}})
	if out := run(t, "nft", "list", "table", "inet", "spillway"); strings.Contains(out, "handshakes") {
		t.Errorf("no endpoint is watched:\n%s", out)
	}
	if got := outcomes(t, again); len(got) > 0 {
		t.Errorf("no endpoint is watched: %v", got)
	}
}

// An ejected endpoint gets no new connection, not even of a client with affinity to it.
func TestAnEjectedEndpointGetsNoClientWithAffinity(t *testing.T) {
	m := newMachines(t)
	m.serve("pod1")
	m.serve("pod2")
	b := open(t)
	web := func() *intent.ServicePort {
		p := port("web", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), here("10.244.0.2:8080", "10.244.0.3:8080"), watched)
		p.Affinity = time.Hour
		return p
	}
	replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{web()}})
	first := strings.Fields(m.ask("lan", "10.96.0.1:80"))[0]
	ejected := web()
	for i := range ejected.Endpoints {
		ejected.Endpoints[i].Ejected = (first == "pod1") == (ejected.Endpoints[i].Addr == netip.MustParseAddrPort("10.244.0.2:8080"))
	}
	if err := b.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{ejected}}); err != nil {
		t.Fatal(err)
	}
	for range 4 {
		if got := strings.Fields(m.ask("lan", "10.96.0.1:80"))[0]; got == first {
			t.Errorf("the client is still sent to %s", got)
		}
	}
}

// Counters that begin again at 0, because another program has flushed them, are no failures,
// and hide none for long.
func TestCountersThatBeginAgain(t *testing.T) {
	var c handshakeCount
	now := time.Unix(1000, 0)
	for _, step := range []struct {
		begun, accepted, refused uint64
		want                     outlier.Outcome
	}{
		{10, 10, 0, outlier.Outcome{Accepted: now}},
		{14, 10, 4, outlier.Outcome{Accepted: now, Failed: 4, Refused: 4, Since: now}},
		{0, 0, 0, outlier.Outcome{Accepted: now}},
		{5, 0, 5, outlier.Outcome{Accepted: now, Failed: 5, Refused: 5, Since: now}},
		{6, 1, 5, outlier.Outcome{Accepted: now}},
	} {
		c.observe(now, step.begun, step.accepted, step.refused)
		if c.Outcome != step.want {
			t.Errorf("after %d handshakes, %d accepted, %d refused: %+v, want %+v", step.begun, step.accepted, step.refused, c.Outcome, step.want)
		}
	}
}

// BenchmarkOutcomes measures one look at the handshakes of all watched endpoints.
func BenchmarkOutcomes(b *testing.B) {
	for _, services := range []int{1, 100, 1000} {
		b.Run(fmt.Sprintf("endpoints=%d", 10*services), func(b *testing.B) {
			enter(b)
			be, s := open(b), largeState(services)
			for _, p := range s.Ports {
				watched(p)
			}
			replace(b, be, s)
			for b.Loop() {
				if list, err := be.Outcomes(); err != nil || len(list) != 10*services {
					b.Fatal(len(list), err)
				}
			}
		})
	}
}
