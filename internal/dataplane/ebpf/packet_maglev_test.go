package ebpf

import (
	"net/netip"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/decisions/intent"
)

// TestPacketMaglev sends the first packets of the same flows to nodes of their own hash seeds
// and ids. All must choose the same endpoints, at each of the Service's addresses.
func TestPacketMaglev(t *testing.T) {
	chosen := func(t *testing.T, seed string, front func(*plan) netip.AddrPort) (list []string) {
		n := newPacketNode(t, func(c *Config) { c.MaglevSeed = seed })
		eachFamily(t, n, func(t *testing.T, p *plan) {
			sp := service(p, protoTCP, endpoint(p.far, 8080, elsewhere), endpoint(p.far, 8081, elsewhere), endpoint(p.far2, 8080, elsewhere))
			sp.Balance = intent.Maglev
			for slot := range 251 { // a third of the first slots, and no other, leads to the third endpoint
				sp.Table = append(sp.Table, uint32(slot%(2+min(1, slot%3))))
			}
			n.serve(t, sp)
			for i := range uint16(150) {
				c := n.newConn(ap(p.client, 20000+i*7), front(p), ap(p.far, 8080), inTun0)
				v := c.syn(t).v
				if v == nil {
					t.Fatal("a SYN left no packet")
				}
				list = append(list, v.dst.String())
			}
		})
		return list
	}
	atClusterIP := func(p *plan) netip.AddrPort { return ap(p.clusterIP, 80) }
	first := chosen(t, "", atClusterIP)
	counts := map[string]int{}
	for _, dst := range first {
		counts[dst]++
	}
	if len(counts) != 6 {
		t.Errorf("flows by endpoint %v, want 3 endpoints of 2 families", counts)
	}
	if !slices.Equal(first, chosen(t, "", atClusterIP)) {
		t.Error("two nodes choose different endpoints for the same flows")
	}
	if !slices.Equal(first, chosen(t, "", func(p *plan) netip.AddrPort { return ap(p.externalIP, 80) })) {
		t.Error("the endpoint depends on the address of the Service")
	}
	if slices.Equal(first, chosen(t, "secret", atClusterIP)) {
		t.Error("the endpoint does not depend on --maglev-seed")
	}
}
