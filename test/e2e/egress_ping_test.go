package e2e

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

// pinger sends and receives ICMP messages of one host, as ping does.
type pinger struct{ *net.IPConn }

// pings opens a raw socket of ICMP in the namespace of a host.
func (e *env) pings(t *testing.T, name string, v6 bool) pinger {
	t.Helper()
	host, err := e.Host(name)
	must.Do(t, err)
	network := map[bool]string{false: "ip4:icmp", true: "ip6:ipv6-icmp"}[v6]
	var conn *net.IPConn
	must.Do(t, host.Do(func() error {
		conn, err = net.ListenIP(network, &net.IPAddr{IP: e.Addr(name, v6).AsSlice()})
		return err
	}))
	t.Cleanup(func() { conn.Close() })
	return pinger{conn}
}

// receives returns the source of a message of this type, if one with the sequence number has arrived.
func (p pinger) receives(t *testing.T, typ uint8, id, seq uint16) (from netip.Addr, seen uint16) {
	t.Helper()
	must.Do(t, p.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	for b := make([]byte, 1<<16); ; {
		n, peer, err := p.ReadFromIP(b)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return netip.Addr{}, 0
		}
		must.Do(t, err)
		if n < 8 || b[0] != typ || binary.BigEndian.Uint16(b[6:]) != seq {
			continue
		}
		if seen = binary.BigEndian.Uint16(b[4:]); id == 0 || seen == id {
			from, _ = netip.AddrFromSlice(peer.IP)
			return from.Unmap(), seen
		}
	}
}

// echoOf is an echo request, with the ICMPv4 sum: the kernel fills in that of ICMPv6.
func echoOf(v6 bool, id, seq uint16, size int) []byte {
	b := make([]byte, 8+size)
	b[0] = map[bool]uint8{false: 8, true: 128}[v6]
	binary.BigEndian.PutUint16(b[4:], id)
	binary.BigEndian.PutUint16(b[6:], seq)
	sum := uint32(0)
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(b[2:], ^uint16(sum))
	return b
}

// wantPings: the pings of a pod and of its node reach the host outside, and the answers come back, although both have
// one identifier. The host outside sees the node's address twice, with different identifiers. Long ones have fragments.
func (e *env) wantPings(t *testing.T, id uint16) {
	t.Helper()
	for _, v6 := range []bool{false, true} {
		dst, node := e.Addr("client0", v6), e.Addr("a", v6)
		request, reply := uint8(8), uint8(0)
		if v6 {
			request, reply = 128, 129
		}
		outside, identifiers := e.pings(t, "client0", v6), map[uint16]bool{}
		for _, name := range []string{"a2", "a"} {
			own, seq := e.pings(t, name, v6), uint16(0)
			for _, size := range []int{56, 4000} {
				await.True(t, name+" pings "+dst.String(), func() bool {
					seq++ // an earlier one may have been lost: ping repeats it too
					_, err := own.WriteToIP(echoOf(v6, id, seq, size), &net.IPAddr{IP: dst.AsSlice()})
					must.Do(t, err)
					from, seen := outside.receives(t, request, 0, seq)
					if !from.IsValid() {
						return false
					}
					if from != node {
						t.Errorf("%s pings from %s, want from %s", name, from, node)
					}
					identifiers[seen] = true
					from, _ = own.receives(t, reply, id, seq)
					return from == dst
				})
			}
		}
		if len(identifiers) != 2 {
			t.Errorf("IPv6 %v: identifiers outside %v, want one of the pod and one of the node", v6, identifiers)
		}
	}
}
