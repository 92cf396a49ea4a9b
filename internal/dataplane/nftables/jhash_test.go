package nftables

import (
	"maps"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/nft"
)

// remembered reads what packets wrote into a map of clients.
func remembered(t *testing.T, b *Backend, s *set) map[string]*nft.Value {
	t.Helper()
	elements, err := b.conn.Elements(t.Context(), b.nftTable, s.Name)
	if err != nil {
		t.Fatal(err)
	}
	return elements
}

func TestTheNumbersThatTheKernelRemembersAreThoseOfTheElements(t *testing.T) {
	enter(t)
	run(t, "ip", "link", "set", "lo", "up")
	for i, row := range []struct {
		family              model.Family
		service, pod, route string
	}{
		{model.IPv4, "10.96.0.1", "10.244.0.2", "10.96.0.0/16"},
		{model.IPv6, "fd96::1", "fd44::2", "fd96::/16"},
	} {
		bits := map[model.Family]string{model.IPv4: "/32", model.IPv6: "/128"}[row.family]
		run(t, "ip", "addr", "add", row.pod+bits, "dev", "lo", "nodad")
		run(t, "ip", "route", "add", row.route, "dev", "lo", "src", row.pod)
		endpoint := netip.AddrPortFrom(netip.MustParseAddr(row.pod), 8080)
		p := port("web", row.family, protocol(model.UDP), clusterIP(row.service, intent.ToCluster), affine(time.Hour), here(endpoint.String()))
		b := open(t)
		replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{p}})
		c, err := net.Dial("udp", net.JoinHostPort(row.service, "80"))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write([]byte("x"))
		c.Close()
		got := remembered(t, b, b.table.layout.common[i].clients)
		key := string(appendAddr(nil, endpoint.Addr())) + numberOf([]byte(p.ID.String()))
		want := numberOf(appendPort(appendProto(appendAddr(nil, endpoint.Addr()), model.UDP), 8080))
		if v := got[key]; v == nil || v.Data != want {
			t.Errorf("%s: remembered %q, want %x: %x", row.family, slices.Collect(maps.Keys(got)), key, want)
		}
	}
}
