package nftables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/nft"
)

func TestWhatClientsHaveSurvivesRestartsAndChanges(t *testing.T) {
	enter(t)
	s := intent.State{Node: node(), Ports: shapes()["affinity"]}
	replace(t, open(t), s)
	const client = "10.244.0.7 . 0:2"
	run(t, "nft", "add element inet spillway clients4 { "+client+" timeout 3h : 0:1 }")
	b := open(t)
	replace(t, b, s)
	more := *s.Ports[0]
	more.Endpoints = slices.Clone(more.Endpoints)
	endpoints("10.244.1.9:8080")(&more)
	if err := b.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{&more}}); err != nil {
		t.Fatal(err)
	}
	if got := run(t, "nft", "list map inet spillway clients4"); !strings.Contains(got, "10.244.0.7 . ") {
		t.Errorf("the client is forgotten:\n%s", got)
	}
	if err := b.Apply(t.Context(), intent.Changes{Deletes: []intent.PortID{more.ID}}); err != nil {
		t.Fatal(err)
	}
	if _, err := runNft("list map inet spillway clients4"); err == nil {
		t.Error("the map stays when no port has affinity")
	}
}

func TestOneEndpointsChangeWritesFewElementsHoweverManyPortsHaveAffinity(t *testing.T) {
	enter(t)
	b, s := open(t), largeState(500)
	for _, p := range s.Ports {
		p.Affinity = 3 * time.Hour
	}
	replace(t, b, s)
	before := b.counts.bytes.Load()
	p := *s.Ports[250]
	p.Endpoints = p.Endpoints[1:]
	if err := b.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{&p}}); err != nil {
		t.Fatal(err)
	}
	if wrote := b.counts.bytes.Load() - before; wrote > 8<<10 {
		t.Errorf("%d bytes were written", wrote)
	}
	if n := len(b.table.chains); n > 20 {
		t.Errorf("%d chains for %d ports", n, len(s.Ports))
	}
}

func TestTimeOutsHaveSetsAndRulesOfTheirOwnWhileTheyAreInUse(t *testing.T) {
	enter(t)
	b := open(t)
	web := func(name, ip string, d time.Duration) *intent.ServicePort {
		return port(name, model.IPv4, clusterIP(ip, intent.ToCluster), affine(d), endpoints("10.244.1.2:8080"))
	}
	replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{web("a", "10.96.0.1", time.Hour),
		web("b", "10.96.0.2", time.Minute)}})
	got := run(t, "nft", "list chain inet spillway clients4-60s")
	if !strings.Contains(got, "timeout 1m") {
		t.Errorf("clients of b are not remembered for a minute:\n%s", got)
	}
	replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{web("a", "10.96.0.1", time.Hour)}})
	if _, err := runNft("list chain inet spillway clients4-60s"); err == nil {
		t.Error("the chain stays")
	}
}

// The kernel looks at every chain in every commit, and a connection's first packet at every rule of
// a chain: what a namespace chooses must not make them many.
func TestTimeoutsMakeFewSetsAndRules(t *testing.T) {
	ch := newTable(traits{}).change()
	before := len(ch.t.layout.sets)
	for i := range 20_000 {
		timeout, name := time.Duration(4*i+1)*time.Second, fmt.Sprint("s", i)
		a, b := byte(i>>8), byte(i)
		for _, p := range []*intent.ServicePort{
			port(name, model.IPv4, clusterIP(netip.AddrFrom4([4]byte{10, 96, a, b}).String(), intent.ToCluster), affine(timeout),
				endpoints("10.244.1.2:8080")),
			port(name, model.IPv6, clusterIP(netip.AddrFrom16([16]byte{0: 0xfd, 14: a, 15: b}).String(), intent.ToCluster), affine(timeout),
				endpoints("[fd44::2]:8080")),
		} {
			if err := ch.setPort(p.ID, p); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := len(ch.t.layout.sets) - before; n > 2*len(timeouts) {
		t.Errorf("%d sets", n)
	}
	rules := 0
	for _, c := range ch.t.ruleset(ch.plan(nft.Table{}).exists, &intent.Node{}) {
		rules = max(rules, len(c.Rules))
	}
	if rules > 4*len(timeouts) {
		t.Errorf("a chain of %d rules", rules)
	}
}

func TestAffinityLastsAtLeastAsLongAsConfigured(t *testing.T) {
	for _, exact := range []time.Duration{time.Second, 10 * time.Second, time.Minute, time.Hour, 3 * time.Hour, 24 * time.Hour} {
		if got := timeoutOf(exact); got != exact {
			t.Errorf("%v lasts %v", exact, got)
		}
	}
	for d := time.Second; d <= 24*time.Hour; d += time.Second {
		if got := timeoutOf(d); got < d || got > d+d/2 {
			t.Fatalf("%v lasts %v", d, got)
		}
	}
}
