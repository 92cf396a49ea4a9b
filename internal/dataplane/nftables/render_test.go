package nftables

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// A full sync writes a port again if its sets depend on what changed.
func TestAPortIsTheSameIfItsSetsAre(t *testing.T) {
	old := port("web", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), many(3))
	for name, test := range map[string]struct {
		change func(*intent.ServicePort)
		same   bool
	}{
		"nothing":   {func(*intent.ServicePort) {}, true},
		"shares":    {func(p *intent.ServicePort) { p.Weights = []uint16{3, 1, 1} }, false},
		"endpoints": {func(p *intent.ServicePort) { p.Endpoints = p.Endpoints[:2] }, false},
		"a table":   {func(p *intent.ServicePort) { p.Balance, p.Table = intent.Maglev, []uint32{0} }, true},
		"a socket":  {func(p *intent.ServicePort) { p.Lingering = []netip.AddrPort{{}} }, true},
	} {
		changed := *old
		test.change(&changed)
		if samePort(old, &changed) != test.same || samePort(&changed, old) != test.same {
			t.Errorf("%s: same is %v, want %v", name, !test.same, test.same)
		}
	}
}

func TestEachEndpointHasAsManySlotsAsEachOther(t *testing.T) {
	l := newLayout()
	for _, n := range []int{1, 2, 3, 4, 5, 9, 10, 16, 17, 33, 64, 65, 100, 1000, 1025, 5000} {
		r, err := renderPort(l, port("web", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), many(n)))
		if err != nil {
			t.Fatal(err)
		}
		slots, class := map[string]int{}, 0
		for _, e := range r.elems {
			if e.Data != "" {
				slots[e.Data]++
			}
			for _, c := range newLayout().addresses[0].inner.class {
				if e.set == c.members {
					class = c.size
				}
			}
		}
		total, least := 0, 1<<30
		for _, k := range slots {
			total, least = total+k, min(least, k)
		}
		if len(slots) != n || total != least*n {
			t.Errorf("%d endpoints have %d slots, the least %d", len(slots), total, least)
		}
		if class > 0 && total <= class/2 {
			t.Errorf("%d endpoints fill %d of %d slots: the last draw, among half of them, may miss", n, total, class)
		}
	}
}

func TestMoreEndpointsThanSlotsAreAnErrorOfThatPortAlone(t *testing.T) {
	enter(t)
	b := open(t)
	good, bad := port("good", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), many(1)),
		port("bad", model.IPv4, clusterIP("10.96.0.2", intent.ToCluster), many(65537))
	err := b.Replace(t.Context(), intent.State{Node: node(), Ports: []*intent.ServicePort{bad, good}})
	if err == nil || !strings.Contains(err.Error(), "serve default/bad:http/TCP/IPv4: 65537 endpoints are more than") {
		t.Errorf("error %v", err)
	}
	got, err := open(t).Applied(t.Context())
	if err != nil || len(got.Ports) != 2 || len(got.Ports[0].Endpoints) > 0 || got.Ports[1].ID != good.ID || len(got.Ports[1].Endpoints) != 1 {
		t.Errorf("served are %v, %v; want one, and the other closed", got.Ports, err)
	}
}

func TestACommentNamesItsPort(t *testing.T) {
	for _, id := range []intent.PortID{
		{Service: model.Name{Namespace: "default", Name: "web"}, Port: "http", Number: 80, Protocol: model.TCP, Family: model.IPv4},
		{Service: model.Name{Namespace: "a", Name: "b"}, Number: 5060, Protocol: model.SCTP, Family: model.IPv6},
	} {
		for _, kind := range []intent.FrontendKind{intent.ClusterIP, intent.NodePort, intent.ExternalIP, intent.LoadBalancerIP} {
			got, gotKind, ok := parsePort(describePort(id, kind), id.Family)
			if !ok || got != id || gotKind != kind {
				t.Errorf("%q is read as %v %v %v", describePort(id, kind), got, gotKind, ok)
			}
		}
	}
	for _, comment := range []string{"", "by hand", "a/b 80/TCP", "a/b 80/XYZ clusterIP", "a 80/TCP clusterIP",
		"a/b http 80/TCP clusterIP more"} {
		if id, _, ok := parsePort(comment, model.IPv4); ok {
			t.Errorf("%q is read as %v", comment, id)
		}
	}
}

func TestRangesOfASetDoNotOverlapOrTouch(t *testing.T) {
	for _, test := range []struct{ in, want string }{
		{"10.0.0.0/8", "10.0.0.0 -11.0.0.0"},
		{"10.0.0.0/8 10.1.0.0/16 10.1.2.0/24", "10.0.0.0 -11.0.0.0"},
		{"10.244.0.0/24 10.244.1.0/24 10.244.3.0/24", "10.244.0.0 -10.244.2.0 10.244.3.0 -10.244.4.0"},
		{"255.255.255.0/24", "255.255.255.0"},
		{"10.9.0.0/16 10.2.0.0/16 10.9.0.0/16 10.0.0.0/14", "10.0.0.0 -10.4.0.0 10.9.0.0 -10.10.0.0"},
		{"0.0.0.0/0 10.0.0.0/8", "0.0.0.0"},
		{"", ""},
	} {
		r := &rendering{}
		r.addIntervals(newLayout().common[0].localPods, prefixes(strings.Fields(test.in)...), false)
		var got []string
		for _, e := range r.elems {
			a, _ := netip.AddrFromSlice([]byte(e.key))
			got = append(got, map[bool]string{true: "-"}[e.IntervalEnd]+a.String())
		}
		if strings.Join(got, " ") != test.want {
			t.Errorf("%s is written as %v, want %s", test.in, got, test.want)
		}
	}
}

func TestAPortWithoutFrontendsForItIsNotTouchedByAnother(t *testing.T) {
	// An address that goes from one Service to another in one change is
	// written once.
	enter(t)
	b := open(t)
	a := port("a", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), endpoints("10.244.1.2:8080"))
	z := port("z", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), endpoints("10.244.1.3:8080"))
	replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{a}})
	for _, c := range []intent.Changes{
		{Upserts: []*intent.ServicePort{z}, Deletes: []intent.PortID{a.ID}},
		{Upserts: []*intent.ServicePort{a}, Deletes: []intent.PortID{z.ID}},
	} {
		if err := b.Apply(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		same(t, "after "+fmt.Sprint(c.Upserts[0].ID), holds(t, b), fresh(t, intent.State{Node: node(), Ports: c.Upserts}))
	}
}

func TestEveryNameIsOneThatNftCanRead(t *testing.T) {
	all := map[string]bool{}
	for _, s := range newLayout().sets {
		all[s.Name] = true
	}
	for _, c := range newTable(traits{}).ruleset(all, &intent.Node{}) {
		if slices.Contains([]string{"reject", "masquerade", "redirect", "drop", "accept"}, c.Name) {
			t.Errorf("%s is a word of nft's", c.Name)
		}
	}
}
