package ebpf

import (
	"math"
	"testing"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/facts/model"
)

// has reports whether the filter may have a member.
func (f *portFilter) has(key tcFrontendKey) bool {
	index, set := f.place(&key)
	return f.word(index)&set == set
}

func filterKey(n uint32) tcFrontendKey {
	return tcFrontendKey{Addr: tcAddr{W: [4]uint32{n}}, Port: 80, Proto: uint8(model.TCP), Family: uint8(model.IPv4)}
}

// A member whose entry is deleted leaves the filter at the second sweep after enough
// others, unless a flow or a socket still uses it.
func TestFilterTidy(t *testing.T) {
	ownPlace(t)
	b := newMapsBackend(t, Config{Timeouts: testTimeouts, FlowTableSize: 1024, MaxFrontends: 1024, MaxEndpoints: 1024})
	f := b.objects.filter
	frontends := f.before(b.m(tcMapFrontends))
	const gone, withFlow, withReply, withSocket, untracked, added, members = 0, 1, 2, 3, 4, 5, 200
	for n := range uint32(members) {
		noError(t, frontends.Put(filterKey(n), tcFrontend{}))
	}
	keys, flows := testFlow(9, model.TCP, tcFlowStateFLOW_ESTABLISHED, bootSeconds())
	keys[0].Daddr, keys[0].Dport = filterKey(withFlow).Addr, filterKey(withFlow).Port
	keys[1].Saddr, keys[1].Sport = filterKey(withReply).Addr, filterKey(withReply).Port
	for i := range keys {
		noError(t, b.m(tcMapFlows).Put(keys[i], flows[i]))
	}
	s := filterKey(withSocket)
	noError(t, b.m(tcMapSockets).Put(tcSocketKey{Addr: s.Addr, Port: s.Port, Proto: s.Proto}, tcSocketPeer{}))
	noError(t, b.m(tcMapUntrackedPorts).Put(filterKey(untracked), tcUntrackedPort{}))
	for n := range uint32(members / 2) {
		noError(t, frontends.Delete(filterKey(n)))
	}
	noError(t, b.sweep(t.Context()))
	if !f.has(filterKey(gone)) {
		t.Error("a member left after the first sweep, when a program may just be storing its flow")
	}
	noError(t, frontends.Put(filterKey(added), tcFrontend{}))
	noError(t, b.sweep(t.Context()))
	left := 0
	for n := range uint32(members) {
		switch has := f.has(filterKey(n)); {
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
	if f.beginTidy() {
		t.Error("another tidy starts without more deletions")
	}
}

// The words of an address are in one group, so that a server's clients share cache lines,
// and a full group does not fill others.
func TestFilterGroups(t *testing.T) {
	f := &portFilter{mask: 1<<17 - 1, seed: 5}
	for what, test := range map[string]struct {
		addr  tcAddr
		words int
	}{"address": {filterKey(7).Addr, filterGroup}, "NodePorts": {tcAddr{}, filterGroupNodePorts}} {
		used, least, most := map[uint32]bool{}, f.mask, uint32(0)
		for port := range uint16(math.MaxUint16) {
			index, _ := f.place(&tcFrontendKey{Addr: test.addr, Port: port, Proto: uint8(model.TCP)})
			used[index], least, most = true, min(least, index), max(most, index)
		}
		if len(used) != test.words || most-least != uint32(test.words)-1 {
			t.Errorf("%s: %d words from %d to %d, want %d neighbors", what, len(used), least, most, test.words)
		}
	}
	groups := map[uint32]bool{}
	for n := range uint32(2000) {
		key := filterKey(n)
		index, _ := f.place(&key)
		groups[index/filterGroup] = true
	}
	if len(groups) < 1000 {
		t.Errorf("2000 addresses have %d groups of 2048", len(groups))
	}
}

// A new filter has the members that an older version has left in the other maps.
func TestFilterOfOlderVersion(t *testing.T) {
	ownPlace(t)
	b := newMapsBackend(t, Config{Timeouts: testTimeouts, FlowTableSize: 1024})
	keys, flows := testFlow(9, model.TCP, tcFlowStateFLOW_ESTABLISHED, bootSeconds())
	for i := range keys {
		noError(t, b.m(tcMapFlows).Put(keys[i], flows[i]))
	}
	noError(t, b.m(tcMapFrontends).Put(filterKey(5), tcFrontend{}))
	f, err := openFilter(b.objects)
	noError(t, err)
	for _, k := range []tcFrontendKey{filterKey(5), flowMember(&keys[0], &flows[0]), flowMember(&keys[1], &flows[1])} {
		if !f.has(k) {
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
			if r.code != actNext || r.verdicts[tcVerdictPASS_OTHER] != 1 {
				t.Errorf("%s with an empty filter: %d %v, want a packet that is not ours", name, r.code, r.verdicts)
			}
		}
		ok(t, n.objects.filter.fill(n.objects.maps))
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
	for i := range n.objects.filter.mask + 1 {
		ok(t, n.m(tcMapPortFilter).Update(i, uint64(0), ebpf.UpdateAny))
	}
}
