package dsrprobe

import (
	"context"
	"net"
	"net/netip"
	"os"
	"sync/atomic"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/wire"
)

// TestEncapsulated reads a probe with gopacket.
func TestEncapsulated(t *testing.T) {
	for _, p := range []path{
		{netip.MustParseAddrPort("10.0.0.1:40000"), netip.MustParseAddrPort("10.1.1.1:6080")},
		{netip.MustParseAddrPort("[fd00::1]:40000"), netip.MustParseAddrPort("[fd00:1::1]:6080")},
	} {
		b := p.encapsulated([16]byte{1}, []byte("odd"))
		header := gueLen + len(p.option([16]byte{1}))
		first := gopacket.LayerType(layers.LayerTypeIPv6)
		if p.is4() {
			first = layers.LayerTypeIPv4
		}
		if words := int(b[0]); gueLen+words*4 != header || header+ipOf(p)+wire.UDPLen != Room(p.is4()) {
			t.Errorf("%d words of %d bytes", words, header)
		}
		packet := gopacket.NewPacket(b[header:], first, gopacket.Default)
		udp, isUDP := packet.TransportLayer().(*layers.UDP)
		if !isUDP || udp.SrcPort != 40000 || udp.DstPort != 6080 || string(udp.Payload) != "odd" {
			t.Fatalf("read %v", packet)
		}
		if err := udp.SetNetworkLayerForChecksum(packet.NetworkLayer()); err != nil {
			t.Fatal(err)
		}
		if err, mismatches := packet.VerifyChecksums(); err != nil || len(mismatches) > 0 {
			t.Errorf("checksums: %v, %v", err, mismatches)
		}
	}
}

func ipOf(p path) int {
	if p.is4() {
		return wire.IPv4Len
	}
	return wire.IPv6Len
}

// TestProbe has a socket answer as the programs do, first to options alone, then to datagrams of a
// length, then to none. The kernel must send the option.
func TestProbe(t *testing.T) {
	for _, addr := range []string{"127.0.0.1", "::1"} {
		n := newFakeNode(t, addr)
		for _, row := range []struct {
			options bool
			longest int
			want    Result
		}{
			{true, 0, Result{Option: true}},
			{false, 1450, Result{MTU: 1450}},
			{false, 1 << 17, Result{}},
			{false, 0, Result{}},
		} {
			n.options.Store(row.options)
			n.longest.Store(int64(row.longest))
			p := Prober{Key: n.key, Port: n.port}
			got, err := p.Probe(context.Background(), netip.MustParseAddr(addr))
			if row.longest > 1<<16 { // the loopback device's MTU is more than a datagram can have
				row.want.MTU = got.MTU
				if got.MTU < 8950 {
					t.Errorf("%s: %+v", addr, got)
				}
			}
			if err != nil || got != row.want {
				t.Errorf("%s: %+v, %v, want %+v", addr, got, err, row.want)
			}
		}
	}
}

// TestErrorsOfTheNetwork: a firewall or a router that answers a probe with an ICMP error says that it
// did not arrive. What this node refuses says nothing about the network.
func TestErrorsOfTheNetwork(t *testing.T) {
	s := &session{}
	for err, network := range map[error]bool{
		unix.EACCES: true, unix.EPROTO: true, unix.ECONNREFUSED: true, unix.EHOSTUNREACH: true,
		unix.EPERM: false, unix.ENOBUFS: false, net.ErrClosed: false,
	} {
		if got := s.sendError(&net.OpError{Op: "read", Err: os.NewSyscallError("recvfrom", err)}); (got == nil) != network {
			t.Errorf("%v: %v", err, got)
		}
	}
}

// fakeNode answers probes: a fake of the programs, which need a node. The e2e tests have real ones.
type fakeNode struct {
	key     [16]byte
	port    uint16
	options atomic.Bool
	longest atomic.Int64
}

func newFakeNode(t *testing.T, addr string) *fakeNode {
	c, err := net.ListenUDP("udp", &net.UDPAddr{IP: net.ParseIP(addr)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	_ = raw.Control(func(fd uintptr) {
		if addr == "::1" {
			_ = unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_RECVDSTOPTS, 1)
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_NO_CHECK6_RX, 1)
		} else {
			err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_RECVOPTS, 1)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	n := &fakeNode{key: [16]byte{7}, port: c.LocalAddr().(*net.UDPAddr).AddrPort().Port()}
	go n.serve(c)
	return n
}

func (n *fakeNode) serve(c *net.UDPConn) {
	b, oob := make([]byte, 1<<16), make([]byte, 256)
	for {
		size, oobn, _, from, err := c.ReadMsgUDPAddrPort(b, oob)
		if err != nil {
			return
		}
		if oobn > 0 && n.options.Load() {
			_, _ = c.WriteToUDPAddrPort(b[:size], from)
		}
		outer := wire.IPv6Len + wire.UDPLen
		if from.Addr().Unmap().Is4() {
			outer = wire.IPv4Len + wire.UDPLen
		}
		if oobn == 0 && int64(outer+size) <= n.longest.Load() {
			_, _ = c.WriteToUDPAddrPort(b[:size], from)
		}
	}
}
