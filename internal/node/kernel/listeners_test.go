package kernel

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func TestListeners(t *testing.T) {
	tcp, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	udp, err := net.ListenPacket("udp6", "[::1]:0")
	if err != nil {
		t.Skip(err) // no IPv6
	}
	defer udp.Close()
	connected, err := net.Dial("udp4", "127.0.0.1:9")
	if err != nil {
		t.Fatal(err)
	}
	defer connected.Close()
	list, err := Listeners()
	if err != nil {
		t.Fatal(err)
	}
	has := func(protocol uint8, at net.Addr) bool {
		return slices.ContainsFunc(list, func(l Listener) bool {
			return l.Protocol == protocol && l.Addr == netip.MustParseAddrPort(at.String()) && l.Inode != ""
		})
	}
	if !has(unix.IPPROTO_TCP, tcp.Addr()) || !has(unix.IPPROTO_UDP, udp.LocalAddr()) {
		t.Errorf("%s and %s are not among %v", tcp.Addr(), udp.LocalAddr(), list)
	}
	if has(unix.IPPROTO_UDP, connected.LocalAddr()) {
		t.Errorf("a connected socket counts as a listener")
	}
}
