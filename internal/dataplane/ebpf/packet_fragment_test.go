package ebpf

import (
	"bytes"
	"encoding/binary"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/test/must"
	"testing"
)

func TestPacketFragments(t *testing.T) {
	n := newPacketNode(t)
	t.Run("InOrder", func(t *testing.T) { eachTransport(t, n, n.fragmentsInOrder) })
	t.Run("FirstIsLate", func(t *testing.T) { eachFamily(t, n, n.fragmentsOvertake) })
	t.Run("Strangers", func(t *testing.T) { eachFamily(t, n, n.fragmentsOfOthers) })
	t.Run("LongAgo", func(t *testing.T) { eachFamily(t, n, n.fragmentsLongAgo) })
	t.Run("WithoutNumbers", func(t *testing.T) { eachFamily(t, n, n.fragmentsWithoutNumbers) })
	t.Run("Tiny", func(t *testing.T) { eachTransport(t, n, n.fragmentsTiny) })
	t.Run("DestOptsInFragments", func(t *testing.T) { n.forget(t); n.fragmentsOfOptions(t, plans["IPv6"]) })
}

// transportOf is what a fragment carries of the transport header and payload.
func transportOf(b []byte) []byte {
	ip := b[14:]
	if ip[0]>>4 == 4 {
		return ip[ip[0]&15*4 : binary.BigEndian.Uint16(ip[2:])]
	}
	rest := ip[40 : 40+binary.BigEndian.Uint16(ip[4:])]
	if ip[6] == extFragment {
		return rest[8:]
	}
	return rest
}

// sendFragments sends all of them, wants each translated along one path, and
// checks the sum of the whole.
func (n *packetNode) sendFragments(t *testing.T, hook at, frags [][]byte, firstVerdicts ...objects.TCVerdict) *view {
	t.Helper()
	var whole []byte
	var path *view
	for i, b := range frags {
		r := n.sendRaw(t, hook, b)
		if i == 0 {
			r.want(t, actRedirect, append(firstVerdicts, objects.TCVerdictTRANSLATED_DIRECT)...)
			path = r.v
		} else {
			r.want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
		}
		if r.v.src.Addr() != path.src.Addr() || r.v.dst.Addr() != path.dst.Addr() {
			t.Fatalf("fragment %d runs %s -> %s, the first one %s -> %s", i, r.v.src, r.v.dst, path.src, path.dst)
		}
		if r.out[14]>>4 == 4 && sum16(r.out[14:34], 0) != 0xffff {
			t.Errorf("fragment %d: IPv4 header checksum is wrong", i)
		}
		whole = append(whole, transportOf(r.out)...)
	}
	proto := frags[0][14+9]
	if frags[0][14]>>4 == 6 {
		proto = frags[0][14+40]
	}
	path.proto, path.payload = proto, whole
	switch sport, dport, id := whole[:2], whole[2:4], whole[4:6]; {
	case !isICMP(proto):
		path.src, path.dst = ap(path.src.Addr(), binary.BigEndian.Uint16(sport)), ap(path.dst.Addr(), binary.BigEndian.Uint16(dport))
	case whole[0] == 8 || whole[0] == 128:
		path.src = ap(path.src.Addr(), binary.BigEndian.Uint16(id))
	default:
		path.dst = ap(path.dst.Addr(), binary.BigEndian.Uint16(id))
	}
	if err := checkTransport(path.src.Addr(), path.dst.Addr(), proto, whole, false); err != nil {
		t.Errorf("datagram put together: %v", err)
	}
	return path
}

// fragmentsWithoutNumbers: a later fragment changes nothing of a connection's state, least
// of all by the sequence numbers of the packet before it.
func (n *packetNode) fragmentsWithoutNumbers(t *testing.T, p *plan) {
	n.serve(t, service(p, protoTCP, endpoint(p.pod1, 8080, here)))
	c, other := n.openHere(t, p, 40000), n.openHere(t, p, 40001)
	hook, f := c.frame(".", bytes.Repeat([]byte("x"), 1000))
	f.id = 78
	frags := f.fragments(n, "eth0", 512)
	n.sendRaw(t, hook, frags[0]).want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	before, _ := n.flow(c.keys()[0])
	other.forge(t, ".", c.sent+900, c.answered)
	n.sendRaw(t, hook, frags[1]).want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	if after, _ := n.flow(c.keys()[0]); after.Tcp != before.Tcp {
		t.Errorf("TCP state after a later fragment %+v, want %+v", after.Tcp, before.Tcp)
	}
}

func (n *packetNode) fragmentsInOrder(t *testing.T, p *plan, proto uint8) {
	payload := bytes.Repeat([]byte("0123456789abcde"), 100)
	for i, e := range []struct {
		where
		back at
	}{{here, inPod1}, {elsewhere, inTun0}} {
		dst := p.pod1
		if e.where == elsewhere {
			dst = p.far
		}
		n.serve(t, service(p, proto, endpoint(dst, 8080, e.where)))
		client, front := ap(p.client, uint16(40000+i)), ap(p.clusterIP, 80)
		f := frame{proto: proto, src: client, dst: front, flags: first(proto), payload: payload, id: 77}
		v := n.sendFragments(t, inEth0, f.fragments(n, "eth0", 512, 512), objects.TCVerdictFLOW_CREATED)
		if v.dst != ap(dst, 8080) || !bytes.HasSuffix(v.payload, payload) {
			t.Errorf("fragments went to %s, want %s", v.dst, ap(dst, 8080))
		}
		answer := frame{proto: proto, src: v.dst, dst: v.src, flags: "S.", payload: payload, id: 78}
		v = n.sendFragments(t, e.back, answer.fragments(n, e.back.iface, 64, 800))
		if v.src != front || v.dst != client {
			t.Errorf("fragments of the answer run %s -> %s, want %s -> %s", v.src, v.dst, front, client)
		}
	}
}

// fragmentsOvertake: one that comes before the first is left alone.
func (n *packetNode) fragmentsOvertake(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	f := frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), payload: make([]byte, 1500), id: 5}
	frags := f.fragments(n, "eth0", 512, 512)
	r := n.sendRaw(t, inEth0, frags[2])
	r.want(t, actNext, objects.TCVerdictPASS_FRAGMENT)
	if !bytes.Equal(r.out, frags[2]) {
		t.Error("a fragment left alone was changed")
	}
	n.sendRaw(t, inEth0, frags[0]).want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	for _, i := range []int{2, 1, 1} {
		n.sendRaw(t, inEth0, frags[i]).want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	}
}

// fragmentsOfOthers: another datagram's, another sender's.
func (n *packetNode) fragmentsOfOthers(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	f := frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), payload: make([]byte, 1500), id: 5}
	n.sendRaw(t, inEth0, f.fragments(n, "eth0", 512)[0]).want(t, actRedirect, objects.TCVerdictFLOW_CREATED,
		objects.TCVerdictTRANSLATED_DIRECT)
	other := f
	other.id = 6
	n.sendRaw(t, inEth0, other.fragments(n, "eth0", 512)[1]).want(t, actNext, objects.TCVerdictPASS_FRAGMENT)
	other = f
	other.src = ap(p.client2, 40000)
	n.sendRaw(t, inEth0, other.fragments(n, "eth0", 512)[1]).want(t, actNext, objects.TCVerdictPASS_FRAGMENT)
}

// fragmentsLongAgo: ids come again, and the one that the first fragment of an
// old datagram had says nothing about a new one's.
func (n *packetNode) fragmentsLongAgo(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	f := frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), payload: make([]byte, 1500), id: 5}
	frags := f.fragments(n, "eth0", 512)
	n.sendRaw(t, inEth0, frags[0]).want(t, actRedirect, objects.TCVerdictFLOW_CREATED, objects.TCVerdictTRANSLATED_DIRECT)
	const second = 1_000_000_000 >> 20 // of the clock in struct fragment, about
	for _, step := range []struct {
		age     uint32
		code    int
		verdict objects.TCVerdict
	}{{4 * second, actRedirect, objects.TCVerdictTRANSLATED_DIRECT}, {2 * second, actNext, objects.TCVerdictPASS_FRAGMENT}} {
		n.ageFragments(t, step.age)
		n.sendRaw(t, inEth0, frags[1]).want(t, step.code, step.verdict)
	}
	// The next datagram of this id has a first fragment too.
	n.sendRaw(t, inEth0, frags[0]).want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
	n.sendRaw(t, inEth0, frags[1]).want(t, actRedirect, objects.TCVerdictTRANSLATED_DIRECT)
}

// ageFragments lets every first fragment have come so much earlier.
func (n *packetNode) ageFragments(t *testing.T, by uint32) {
	t.Helper()
	all := map[objects.TCFragmentKey]objects.TCFragment{}
	must.Do(t, objects.Each(n.m(objects.TCMapFragments), func(k objects.TCFragmentKey, f objects.TCFragment) { all[k] = f }))
	if len(all) == 0 {
		t.Fatal("no fragment is remembered")
	}
	for k, f := range all {
		f.Seen -= by
		must.Do(t, n.m(objects.TCMapFragments).Put(k, f))
	}
}

// fragmentsTiny: a first fragment that cuts the transport header (RFC 1858), for
// TCP; 8 bytes are all of UDP's.
func (n *packetNode) fragmentsTiny(t *testing.T, p *plan, proto uint8) {
	n.serve(t, service(p, proto, endpoint(p.far, 8080, elsewhere)))
	f := frame{proto: proto, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: "S", payload: make([]byte, 100)}
	frags := f.fragments(n, "eth0", 8)
	if proto == protoUDP {
		n.sendFragments(t, inEth0, frags, objects.TCVerdictFLOW_CREATED)
		return
	}
	n.sendRaw(t, inEth0, frags[0]).want(t, actNext, objects.TCVerdictPASS_MALFORMED)
	n.sendRaw(t, inEth0, frags[1]).want(t, actNext, objects.TCVerdictPASS_FRAGMENT)
}

// fragmentsOfOptions: a destination options header behind the fragment header,
// which later fragments name as their protocol.
func (n *packetNode) fragmentsOfOptions(t *testing.T, p *plan) {
	n.serve(t, service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	udp := frame{proto: protoUDP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), payload: make([]byte, 1000)}
	whole := append([]byte{protoUDP, 0, 1, 4, 0, 0, 0, 0}, udp.transport()...)
	f := frame{proto: extDestOpts, src: udp.src, dst: udp.dst, payload: whole, id: 9}
	for i, b := range f.fragments(n, "eth0", 512) {
		r := n.sendRaw(t, inEth0, b)
		if r.code != actRedirect || r.verdicts[objects.TCVerdictTRANSLATED_DIRECT] != 1 {
			t.Errorf("fragment %d was not translated: %s", i, verdictList(r.verdicts))
		}
	}
}
