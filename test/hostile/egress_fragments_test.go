package hostile

import (
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/gopacket/gopacket/layers"
)

// fragmentSize is how many bytes of a datagram its first fragment has.
const fragmentSize = 64

// fragments builds the two frames of a datagram, in order.
func (s *sender) fragments(t *testing.T, p packet, id uint16) [2][]byte {
	t.Helper()
	whole, err := s.frame(p)
	if err != nil {
		t.Fatal(err)
	}
	const eth = 14
	header, next := 20, eth+9
	if p.dst.Addr().Is6() {
		header, next = 40, eth+6
	}
	l4 := whole[eth+header:]
	cut := func(off int, more uint16, part []byte) []byte {
		f := append([]byte{}, whole[:eth+header]...)
		if p.dst.Addr().Is6() {
			f[next] = byte(layers.IPProtocolIPv6Fragment)
			f = append(f, byte(layers.IPProtocolUDP), 0)
			f = binary.BigEndian.AppendUint16(f, uint16(off)|more)
			f = binary.BigEndian.AppendUint32(f, uint32(id))
			binary.BigEndian.PutUint16(f[eth+4:], uint16(8+len(part)))
			return append(f, part...)
		}
		ip := f[eth:]
		binary.BigEndian.PutUint16(ip[2:], uint16(header+len(part)))
		binary.BigEndian.PutUint16(ip[4:], id)
		binary.BigEndian.PutUint16(ip[6:], uint16(off/8)|more<<13)
		binary.BigEndian.PutUint16(ip[10:], 0)
		sum := uint32(0)
		for i := 0; i < header; i += 2 {
			sum += uint32(binary.BigEndian.Uint16(ip[i:]))
		}
		for sum > 0xffff {
			sum = sum>>16 + sum&0xffff
		}
		binary.BigEndian.PutUint16(ip[10:], ^uint16(sum))
		return append(f, part...)
	}
	return [2][]byte{cut(0, 1, l4[:fragmentSize]), cut(fragmentSize, 0, l4[fragmentSize:])}
}

// sendFragments sends the fragments of a datagram in an order.
func (s *sender) sendFragments(t *testing.T, p packet, id uint16, order ...int) {
	t.Helper()
	frames := s.fragments(t, p, id)
	for _, i := range order {
		if err := s.sendFrame(frames[i]); err != nil {
			t.Fatal(err)
		}
	}
}

// fragmentsOvertake: the second fragment of a datagram comes before the first, from a pod and from outside. No address of
// a pod is on the wire. Netfilter puts such a datagram together; with eBPF it is lost, and later ones are not.
func (e *env) fragmentsOvertake(t *testing.T, v variant) {
	pod := e.sender(t, neighbor)
	own, server := netip.AddrPortFrom(e.addr(neighbor, v), 40_404), netip.AddrPortFrom(e.addr(honest, v), 4040)
	long := packet{src: own, dst: server, proto: "udp", payload: make([]byte, 2*fragmentSize)}
	seen := e.capture(t, honest, func(p packet) bool { return p.dst.Addr() == server.Addr() && (p.proto == "" || p.dst == server) })
	node := e.addr(receiver, v)
	later := func(count int) (later int) {
		t.Helper()
		for _, p := range seen.wait(count) {
			if p.src.Addr() != node {
				t.Errorf("a packet of the pod has the source %s, want %s", p.src, node)
			}
			if p.later {
				later++
			}
		}
		return later
	}

	pod.sendFragments(t, long, 1, 1, 0)
	pod.send(t, packet{src: own, dst: server, proto: "udp", payload: []byte("whole")})
	overtook := later(2) // the first fragment, or the datagram that netfilter put together
	if e.Mode != "ebpf" {
		return
	}
	if overtook > 0 {
		t.Error("a fragment that came before the first has left")
	}
	pod.sendFragments(t, long, 2, 0, 1)
	if n := later(4); n != 1 {
		t.Errorf("%d later fragments have left, want that of the datagram in order", n)
	}
	for _, p := range seen.packets() {
		if p.proto == "udp" {
			e.answersOvertake(t, own, server, p.src)
		}
	}
}

// answersOvertake is fragmentsOvertake for answers to a pod's flow, which the outside sees as seenAs.
func (e *env) answersOvertake(t *testing.T, own, server, seenAs netip.AddrPort) {
	t.Helper()
	outside := e.sender(t, honest)
	answers := e.capture(t, neighbor, func(p packet) bool { return p.src.Addr() == server.Addr() })
	answer := packet{src: server, dst: seenAs, proto: "udp", payload: make([]byte, 2*fragmentSize)}
	outside.sendFragments(t, answer, 3, 1, 0)
	outside.sendFragments(t, answer, 4, 0, 1)
	later := 0
	for _, p := range answers.wait(3) {
		if p.dst.Addr() != own.Addr() {
			t.Errorf("the pod got a packet for %s", p.dst)
		}
		if p.later {
			later++
		}
	}
	if later != 1 {
		t.Errorf("%d later fragments of answers have come, want that of the datagram in order", later)
	}
}
