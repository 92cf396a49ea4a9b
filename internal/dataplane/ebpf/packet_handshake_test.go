package ebpf

import (
	"net/netip"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
)

// TestPacketHandshakes is about endpoints that are removed before the client has acknowledged an
// answer: the client's next SYN starts a new flow. RFC 9293, 3.8.3: the client repeats its SYN.
func TestPacketHandshakes(t *testing.T) {
	n := newPacketNode(t)
	for name, gone := range map[string]func(p *plan) (netip.Addr, where, at){
		"Elsewhere": func(p *plan) (netip.Addr, where, at) { return p.far, elsewhere, inTun0 },
		"Here":      func(p *plan) (netip.Addr, where, at) { return p.pod1, here, inPod1 },
	} {
		t.Run(name, func(t *testing.T) {
			eachFamily(t, n, func(t *testing.T, p *plan) {
				addr, place, answers := gone(p)
				old, next := endpoint(addr, 8080, place), endpoint(p.pod2, 8080, here)
				begin := func(t *testing.T, port uint16, said ...string) *conn {
					n.serve(t, service(p, protoTCP, old))
					c := n.newConn(ap(p.client, port), ap(p.clusterIP, 80), old.Addr, answers)
					c.syn(t).wantPath(t, c.seen, old.Addr)
					c.talk(t, said...)
					return c
				}
				repeat := func(c *conn) result { return c.forge(t, "S", clientISN, 0) }

				t.Run("Present", func(t *testing.T) {
					c := begin(t, 40000)
					both := []intent.Endpoint{old, next}
					slices.SortFunc(both, func(a, b intent.Endpoint) int { return a.Addr.Compare(b.Addr) })
					n.serve(t, service(p, protoTCP, both...))
					for range 16 { // by chance, a new flow would find the same endpoint
						repeat(c).wantPath(t, c.seen, old.Addr)
					}
				})
				for i, said := range [][]string{nil, {"<S."}} {
					c := begin(t, 40001+uint16(i), said...)
					n.serve(t, service(p, protoTCP, next))
					r := repeat(c)
					r.wantPath(t, c.client, next.Addr)
					if r.verdicts[objects.TCVerdictFLOW_CREATED] != 1 {
						t.Errorf("after %q: %s", said, verdictList(r.verdicts))
					}
					// A late answer of the old endpoint is not from the Service.
					if r := c.forge(t, "<S.", serverISN, clientISN+1); r.v != nil && r.v.src == c.front {
						t.Errorf("after %q: the removed endpoint's answer comes from the Service", said)
					}
					c.server, c.out, c.seen = next.Addr, inPod2, c.client
					c.sent, c.answered = clientISN+1, serverISN
					c.talk(t, "<S.", ".")
				}
				t.Run("Established", func(t *testing.T) {
					c := begin(t, 40003, "<S.", ".")
					n.serve(t, service(p, protoTCP, next))
					repeat(c).wantPath(t, c.seen, old.Addr)
					c.talk(t, ".")
				})
				t.Run("None", func(t *testing.T) {
					c := begin(t, 40004)
					n.serve(t, service(p, protoTCP))
					repeat(c).want(t, actRedirect, objects.TCVerdictREJECTED_RST)
				})
				t.Run("AddressMoved", func(t *testing.T) {
					c := begin(t, 40006)
					first, second := service(p, protoTCP, old), service(p, protoTCP, next)
					second.ID.Service.Name = "second"
					first.Frontends, second.Frontends = first.Frontends[1:], second.Frontends[:1]
					n.serve(t, first, second)
					repeat(c).wantPath(t, c.seen, old.Addr)
				})
				t.Run("Deleted", func(t *testing.T) {
					c := begin(t, 40005)
					other := service(p, protoTCP, old)
					other.ID.Service.Name, other.Frontends = "other", nil // the endpoint stays
					n.serve(t, other)
					f := frame{proto: protoTCP, src: c.client, dst: c.front, flags: "S"}
					n.untouched(t, "a SYN to no Service", inEth0, f.bytes(n, "eth0"), objects.TCVerdictPASS_OTHER)
				})
			})
		})
	}
}
