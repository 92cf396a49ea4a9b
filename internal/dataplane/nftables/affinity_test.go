package nftables

import (
	"slices"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
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
	replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{web("a", "10.96.0.1", time.Hour), web("b", "10.96.0.2", time.Minute)}})
	got := run(t, "nft", "list chain inet spillway clients4-60s")
	if !strings.Contains(got, "timeout 1m") {
		t.Errorf("clients of b are not remembered for a minute:\n%s", got)
	}
	replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{web("a", "10.96.0.1", time.Hour)}})
	if _, err := runNft("list chain inet spillway clients4-60s"); err == nil {
		t.Error("the chain stays")
	}
}
