package top

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/test/await"
)

// flow is an entry; a Service's if to and endpoint differ.
func flow(from, to, endpoint string) *conntrack.Entry {
	e := &conntrack.Entry{Protocol: 6}
	e.Orig.Src, e.Orig.Dst = netip.MustParseAddrPort(from), netip.MustParseAddrPort(to)
	e.Reply.Src, e.Reply.Dst = netip.MustParseAddrPort(endpoint), e.Orig.Src
	return e
}

func collector(entries map[uint64][]*conntrack.Entry, failing error) *Collector {
	return &Collector{
		dropped: map[string]uint64{},
		ReadAll: func(context.Context) (list []conntrack.Report, err error) {
			for inode := range entries {
				list = append(list, conntrack.Report{Namespace: conntrack.Namespace{Inode: inode, Names: []string{"ns" + string(rune('0'+inode))}},
					Entries: len(entries[inode])})
			}
			return list, nil
		},
		Dump: func(_ context.Context, n conntrack.Namespace, each func(*conntrack.Entry) bool) error {
			if n.Inode == 9 {
				return failing
			}
			for _, e := range entries[n.Inode] {
				each(e)
			}
			return nil
		},
		Pods: func() map[netip.Addr]string { return map[netip.Addr]string{netip.MustParseAddr("10.1.0.7"): "web-0"} },
	}
}

func TestEntriesAreCountedByServiceEndpointAndSource(t *testing.T) {
	entries := map[uint64][]*conntrack.Entry{
		1: {
			flow("10.1.0.2:4000", "10.96.0.1:80", "10.1.0.7:8080"),
			flow("10.1.0.2:4001", "10.96.0.1:80", "10.1.0.8:8080"),
			flow("10.1.0.3:4000", "10.1.0.9:22", "10.1.0.9:22"),
		},
		2: {flow("10.1.0.2:4000", "10.96.0.1:80", "10.1.0.7:8080")},
		9: nil,
	}
	c := collector(entries, errors.New("no permission"))
	c.count(&drops.Drop{Packet: drops.Packet{Protocol: "tcp", Source: netip.MustParseAddr("10.1.0.3"),
		Destination: netip.MustParseAddr("10.96.0.1"), DestinationPort: 80}})
	for _, row := range []struct {
		view View
		only uint64
		want string
	}{
		{Services, 0, "tcp 10.96.0.1:80=3/1"},
		{Services, 2, "tcp 10.96.0.1:80=1/1"},
		{Endpoints, 0, "tcp 10.1.0.7:8080 web-0=2/0, tcp 10.1.0.8:8080=1/0"},
		{Sources, 0, "10.1.0.2=3/0, 10.1.0.3=1/1"},
		{Sources, 2, "10.1.0.2=1/0"},
	} {
		s, err := c.Read(t.Context(), row.view, row.only)
		if err != nil {
			t.Fatal(err)
		}
		sortRows(s.Rows, ByEntries)
		var got []string
		for _, r := range s.Rows {
			got = append(got, r.Name+"="+itoa(r.Entries)+"/"+itoa(int(r.Drops)))
		}
		if strings.Join(got, ", ") != row.want {
			t.Errorf("%s of %d: %s, want %s", row.view, row.only, got, row.want)
		}
		// An unreadable namespace is reported once, and the rest is present.
		if want := row.only == 0; (len(s.Problems) == 1) != want {
			t.Errorf("%s of %d: problems %q", row.view, row.only, s.Problems)
		}
	}
}

// fakeAgent has flows of its own, and names the addresses of a Service.
type fakeAgent struct {
	egress  []Flow
	more    bool
	err     error
	without error
}

// Flows returns all flows, as an agent of an earlier version.
func (a *fakeAgent) Flows(context.Context, bool) ([]Flow, bool, error) {
	at := netip.MustParseAddrPort
	return append([]Flow{
		{Protocol: "tcp", Client: at("10.1.0.2:5000"), Service: at("10.96.0.1:80"), Endpoint: at("10.1.0.7:8080")},
		{Protocol: "udp", Client: at("10.1.0.2:5000"), Service: at("10.96.0.1:80"), Endpoint: at("10.1.0.7:8080")},
	}, a.egress...), a.more, a.err
}

func (a *fakeAgent) WithoutEgress(context.Context) error { return a.without }

func (a *fakeAgent) Owners(_ context.Context, addrs []Address) ([]Owner, error) {
	out := make([]Owner, len(addrs))
	for i, addr := range addrs {
		switch addr.String() {
		case "tcp 10.96.0.1:80":
			out[i].Service = "shop/web:http"
		case "tcp 10.1.0.7:8080":
			out[i] = Owner{Pod: "shop/web-0", EndpointOf: []string{"shop/web:http", "shop/api:80"}}
		case "10.1.0.2":
			out[i].Pod = "shop/client"
		}
	}
	return out, a.err
}

func TestAnAgentAddsNamesAndItsOwnFlows(t *testing.T) {
	entries := map[uint64][]*conntrack.Entry{2: {flow("10.1.0.2:4000", "10.96.0.1:80", "10.1.0.7:8080")}}
	c := collector(entries, nil)
	agent := &fakeAgent{egress: []Flow{{
		Protocol: "tcp", Client: netip.MustParseAddrPort("10.1.0.4:5000"), Endpoint: netip.MustParseAddrPort("203.0.113.5:443"), Egress: true,
	}}}
	c.Agent = agent
	check := func(view View, only uint64, want, problems string) {
		t.Helper()
		s, err := c.Read(t.Context(), view, only)
		if err != nil {
			t.Fatal(err)
		}
		wantRows(t, s, want, problems)
	}
	check(Services, 0, "tcp 10.96.0.1:80 shop/web:http=2, udp 10.96.0.1:80=1", "")
	check(Endpoints, 0, "tcp 10.1.0.7:8080 shop/web-0 of shop/web:http, shop/api:80=2, udp 10.1.0.7:8080 web-0=1", "")
	check(Sources, 0, "10.1.0.2 shop/client=3, 10.1.0.4=1", "")
	check(Sources, 2, "10.1.0.2 shop/client=1", "") // another namespace than the agent's
	agent.more = true
	check(Sources, 0, "10.1.0.2 shop/client=3, 10.1.0.4=1", "Spillway's flow table has more flows than are counted here")
	agent.err = errors.New("no agent")
	check(Sources, 0, "10.1.0.2 shop/client=1", "no agent")
}

// wantRows sorts the rows of a sample, and compares them, as "name=entries", and its problems.
func wantRows(t *testing.T, s Sample, want, problems string) {
	t.Helper()
	sortRows(s.Rows, ByEntries)
	var got []string
	for _, r := range s.Rows {
		got = append(got, r.Name+"="+itoa(r.Entries))
	}
	if strings.Join(got, ", ") != want || strings.Join(s.Problems, "; ") != problems {
		t.Errorf("%s: %s, want %s; problems %q, want %q", s.View, strings.Join(got, ", "), want, s.Problems, problems)
	}
}

func TestEgressIsCountedByPodAndDestination(t *testing.T) {
	at := netip.MustParseAddrPort
	out := func(pod, client, destination string) Flow {
		return Flow{Protocol: "tcp", Client: at(client), Endpoint: at(destination), Egress: true, Pod: pod}
	}
	agent := &fakeAgent{without: errors.New("egress is off")}
	c := collector(map[uint64][]*conntrack.Entry{1: {flow("10.1.0.2:4000", "203.0.113.5:443", "203.0.113.6:443")}}, nil)
	c.Agent = agent
	check := func(want, problems string) (s Sample) {
		t.Helper()
		s, err := c.Read(t.Context(), Egress, 0)
		if err != nil {
			t.Fatal(err)
		}
		wantRows(t, s, want, problems)
		return s
	}
	check("", "egress is off")
	// Two pods have one name, one after the other, and the name of a third comes later.
	const last = ", shop/a icmp 203.0.113.5=1, shop/a tcp 203.0.113.5:80=1, shop/a tcp 203.0.113.5:80=1"
	agent.egress = []Flow{
		out("", "10.1.0.3:1", "203.0.113.5:53"), out("", "10.1.0.3:2", "203.0.113.5:53"), out("", "10.1.0.3:3", "203.0.113.5:53"),
		out("shop/a", "10.1.0.2:1", "203.0.113.5:443"), out("shop/a", "10.1.0.2:2", "203.0.113.5:443"),
		out("shop/a", "10.1.0.2:1", "203.0.113.5:80"), out("shop/a", "10.1.0.9:1", "203.0.113.5:80"),
		{Protocol: "icmp", Client: at("10.1.0.2:7"), Endpoint: at("203.0.113.5:0"), Egress: true, Pod: "shop/a"},
	}
	check("10.1.0.3 tcp 203.0.113.5:53=3, shop/a tcp 203.0.113.5:443=2"+last, "")
	for i := range 3 {
		agent.egress[i].Pod = "shop/b"
	}
	agent.egress = append(agent.egress, out("shop/a", "10.1.0.2:3", "203.0.113.5:443"), out("shop/a", "10.1.0.2:4", "203.0.113.5:443"))
	s := check("shop/a tcp 203.0.113.5:443=4, shop/b tcp 203.0.113.5:53=3"+last, "")
	for i, r := range s.Rows {
		if grown := i == 0; !r.Compared || r.Rate > 0 != grown || r.Rate < 0 {
			t.Errorf("growth of %s: %v", r.Name, r.Rate)
		}
	}
	agent.more = true
	check("shop/a tcp 203.0.113.5:443=4, shop/b tcp 203.0.113.5:53=3"+last,
		"Spillway's flow table has more flows than are counted here")
	agent.err = errors.New("broken")
	check("", "broken")
	c.Agent = nil
	check("", "connections of egress are not listed: they need an agent")
}

func TestRatesOutliveNames(t *testing.T) {
	c := collector(map[uint64][]*conntrack.Entry{1: {flow("10.1.0.2:4000", "10.96.0.1:80", "10.1.0.7:8080")}}, nil)
	if _, err := c.Read(t.Context(), Services, 0); err != nil {
		t.Fatal(err)
	}
	c.Agent = &fakeAgent{}
	s, err := c.Read(t.Context(), Services, 0)
	if err != nil || len(s.Rows) != 2 {
		t.Fatalf("%+v, %v", s, err)
	}
	sortRows(s.Rows, ByEntries)
	if r := s.Rows[0]; c.before[r.Address.String()].Entries != 2 || !r.Compared {
		t.Errorf("a row that got a name is new: %+v", r)
	}
}

func itoa(n int) string { return strings.TrimSpace(string(rune('0' + n))) }

func TestANamespaceThatVanishesIsLeftOut(t *testing.T) {
	c := collector(map[uint64][]*conntrack.Entry{1: {flow("10.1.0.3:4000", "10.1.0.9:22", "10.1.0.9:22")}, 9: nil}, os.ErrNotExist)
	s, err := c.Read(t.Context(), Sources, 0)
	if err != nil || len(s.Rows) != 1 || len(s.Problems) != 0 {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestRatesAreBetweenSamplesOfOneView(t *testing.T) {
	c := &Collector{}
	at := time.Now()
	first := Sample{At: at, View: Sources, Rows: []Row{{Name: "a", Entries: 10, Drops: 4}}}
	c.compare(&first, 0)
	second := Sample{At: at.Add(2 * time.Second), View: Sources, Rows: []Row{{Name: "a", Entries: 30, Drops: 10}, {Name: "b", Entries: 4}}}
	c.compare(&second, 0)
	if r := second.Rows; r[0].Rate != 10 || r[0].PerSec != 3 || r[1].Rate != 2 {
		t.Errorf("%+v", r)
	}
	other := Sample{At: at.Add(4 * time.Second), View: Services, Rows: []Row{{Name: "a", Entries: 50}}}
	c.compare(&other, 0)
	if other.Rows[0].Rate != 0 {
		t.Errorf("another view is compared: %+v", other.Rows)
	}
}

// The machine's own drops are counted by the sender of the dropped packet.
func TestDropsAreCountedByAddress(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: follows dropped packets")
	}
	c := NewCollector()
	ctx, stop := context.WithTimeout(t.Context(), await.Limit)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer stop()
	watching.Go(func() { c.Watch(ctx) })
	await.True(t, "a drop is counted", func() bool {
		if conn, err := net.Dial("udp", "127.0.0.1:9"); err == nil {
			_, _ = conn.Write([]byte("nobody listens"))
			conn.Close()
		}
		s, err := c.Read(ctx, Sources, 0)
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(s.Rows, func(r Row) bool { return r.Name == "127.0.0.1" && r.Drops > 0 })
	})
}

func TestAnAddressOfTwoPodsNamesNone(t *testing.T) {
	a, b := netip.MustParseAddr("10.244.1.2"), netip.MustParseAddr("fd00::2")
	got := namesOf([]drops.Pod{{Name: "web", Addresses: []netip.Addr{a}}, {Name: "forger", Addresses: []netip.Addr{b, a}},
		{Name: "third", Addresses: []netip.Addr{a}}})
	if len(got) != 1 || got[b] != "forger" {
		t.Errorf("%v", got)
	}
}
