package ebpf

import (
	"testing"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

func filterKey(n uint32) objects.TCFrontendKey {
	return objects.TCFrontendKey{Addr: objects.TCAddr{W: [4]uint32{n}}, Port: 80, Proto: uint8(model.TCP), Family: uint8(model.IPv4)}
}

// A member whose entry is deleted leaves the filter at the second sweep after enough
// others, unless a flow or a socket still uses it.
func TestFilterTidy(t *testing.T) {
	ownPlace(t)
	b := newMapsBackend(t, Config{Timeouts: objectstest.Timeouts, FlowTableSize: 1024, MaxFrontends: 1024, MaxEndpoints: 1024})
	f := b.objects.Filter
	frontends := f.Before(b.m(objects.TCMapFrontends))
	const gone, withFlow, withReply, withSocket, untracked, added, members = 0, 1, 2, 3, 4, 5, 200
	for n := range uint32(members) {
		must.Do(t, frontends.Put(filterKey(n), objects.TCFrontend{}))
	}
	keys, flows := objectstest.Flow(9, model.TCP, objects.TCFlowStateFLOW_ESTABLISHED, objects.BootSeconds())
	keys[0].Daddr, keys[0].Dport = filterKey(withFlow).Addr, filterKey(withFlow).Port
	keys[1].Saddr, keys[1].Sport = filterKey(withReply).Addr, filterKey(withReply).Port
	for i := range keys {
		must.Do(t, b.m(objects.TCMapFlows).Put(keys[i], flows[i]))
	}
	s := filterKey(withSocket)
	must.Do(t, b.m(objects.TCMapSockets).Put(objects.TCSocketKey{Addr: s.Addr, Port: s.Port, Proto: s.Proto}, objects.TCSocketPeer{}))
	must.Do(t, b.m(objects.TCMapUntrackedPorts).Put(filterKey(untracked), objects.TCUntrackedPort{}))
	for n := range uint32(members / 2) {
		must.Do(t, frontends.Delete(filterKey(n)))
	}
	must.Do(t, b.flows.Sweep(t.Context()))
	if !f.Has(filterKey(gone)) {
		t.Error("a member left after the first sweep, when a program may just be storing its flow")
	}
	must.Do(t, frontends.Put(filterKey(added), objects.TCFrontend{}))
	must.Do(t, b.flows.Sweep(t.Context()))
	left := 0
	for n := range uint32(members) {
		switch has := f.Has(filterKey(n)); {
		case n >= members/2, n == withFlow, n == withReply, n == withSocket, n == untracked, n == added:
			if !has {
				t.Errorf("member %d is lost", n)
			}
		case has:
			left++
		}
	}
	if left > members/10 {
		t.Errorf("%d of %d deleted members are left after two sweeps", left, members/2)
	}
	if f.BeginTidy() {
		t.Error("another tidy starts without more deletions")
	}
}

// A new filter has the members that an older version has left in the other maps.
func TestFilterOfOlderVersion(t *testing.T) {
	ownPlace(t)
	b := newMapsBackend(t, Config{Timeouts: objectstest.Timeouts, FlowTableSize: 1024})
	keys, flows := objectstest.Flow(9, model.TCP, objects.TCFlowStateFLOW_ESTABLISHED, objects.BootSeconds())
	for i := range keys {
		must.Do(t, b.m(objects.TCMapFlows).Put(keys[i], flows[i]))
	}
	must.Do(t, b.m(objects.TCMapFrontends).Put(filterKey(5), objects.TCFrontend{}))
	f, err := objects.OpenFilter(b.objects)
	must.Do(t, err)
	for _, k := range []objects.TCFrontendKey{filterKey(5), objects.FlowMember(&keys[0], &flows[0]), objects.FlowMember(&keys[1], &flows[1])} {
		if !f.Has(k) {
			t.Errorf("%+v is missing", k)
		}
	}
}

// The two implementations of the filter agree: packets to members, and from them, are ours.
func TestPacketFilter(t *testing.T) {
	n := newPacketNode(t)
	eachFamily(t, n, func(t *testing.T, p *plan) {
		n.serve(t, service(p, protoTCP, endpoint(p.pod1, 8080, here)))
		c := n.openHere(t, p, 40000)
		hook, in := c.frame("P.", []byte{0})
		back, out := c.frame("<P.", []byte{0})
		n.clearFilter(t)
		for name, r := range map[string]result{"request": n.send(t, hook, in), "reply": n.send(t, back, out)} {
			if r.code != actNext || r.verdicts[objects.TCVerdictPASS_OTHER] != 1 {
				t.Errorf("%s with an empty filter: %d %v, want a packet that is not ours", name, r.code, r.verdicts)
			}
		}
		must.Do(t, n.objects.Filter.Fill(n.objects.Maps))
		for name, r := range map[string]result{"request": n.send(t, hook, in), "reply": n.send(t, back, out)} {
			if r.code != actRedirect {
				t.Errorf("%s with the filter: %d %v, want a redirect", name, r.code, r.verdicts)
			}
		}
	})
}

// clearFilter removes all members.
func (n *packetNode) clearFilter(t *testing.T) {
	t.Helper()
	for i := range n.objects.Filter.Mask + 1 {
		must.Do(t, n.m(objects.TCMapPortFilter).Update(i, uint64(0), ebpf.UpdateAny))
	}
}
