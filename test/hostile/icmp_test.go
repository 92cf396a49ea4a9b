package hostile

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/await"
)

var icmpScenarios = []scenario{
	{name: "Datagrams to a port without endpoints", run: unanswered, places: []string{"here"}},
	{name: "An ICMP error to another address than the quoted one", run: misdirectedError},
	{name: "TCP segments to be cut that exceed the route's MTU", run: largeSegments(false), places: []string{"elsewhere"}},
	{name: "TCP segments to be cut that exceed the route's locked MTU", run: largeSegments(true), places: []string{"elsewhere"}},
	{name: "Datagrams to be cut that exceed the route's MTU", run: largeDatagrams(3, false), places: []string{"elsewhere"}},
	{name: "Datagrams to be cut that exceed the route's locked MTU", run: largeDatagrams(3, true), places: []string{"elsewhere"}},
	{name: "A datagram that exceeds the route's MTU", run: largeDatagrams(1, false), places: []string{"elsewhere"}},
}

// mostErrors is how many ICMP errors one sender gets for a burst: a kernel sends
// 6 at once, and one in a second.
const mostErrors = 20

// unanswered: datagrams that are refused are answered a few times.
func unanswered(t *testing.T, e *env, v variant) {
	attacker := e.sender(t, outsider)
	refused := e.capture(t, outsider, func(p packet) bool { return p.proto == "icmp" && len(p.quoted) > 0 })
	src, dst := netip.AddrPortFrom(e.addr(outsider, v), 20000), e.nodePort(t, "none", "udp", v)
	attacker.flood(t, 3000, func(int) packet { return packet{src: src, dst: dst, proto: "udp", payload: []byte("x")} })
	if n := len(refused.settled()); n < 1 || n > mostErrors {
		t.Errorf("3,000 datagrams got %d ICMP errors, want 1 to %d", n, mostErrors)
	}
}

// misdirectedError: an error about a packet of the victim's flow is relayed to
// the victim only if it is addressed to that packet's source.
func misdirectedError(t *testing.T, e *env, v variant) {
	attacker := e.sender(t, outsider)
	victim := e.mustConnect(t, v, e.nodePort(t, v.place, "tcp", v))
	relayed := e.capture(t, honest, isUnreachable)
	quoted, err := packet{src: victim.seenAs(), dst: e.backend(v, endpointUp), proto: "tcp", flags: "A", seq: 1}.quote()
	if err != nil {
		t.Fatal(err)
	}
	report := packet{src: stranger(v, 0), proto: "icmp", icmpType: 3, icmpCode: 1, quoted: quoted}
	if v.v6 {
		report.icmpType, report.icmpCode = 1, 0
	}
	for _, host := range []string{"a0", "a/bridge", "b0", outsider} {
		report.dst = netip.AddrPortFrom(e.addr(host, v), 0)
		if report.dst.Addr() != victim.seenAs().Addr() {
			attacker.send(t, report)
		}
	}
	for range relayed.settled() {
		t.Fatal("the victim received an ICMP error that was addressed to another host")
	}
	report.dst = netip.AddrPortFrom(victim.seenAs().Addr(), 0)
	attacker.send(t, report)
	if len(relayed.wait(1)) != 1 {
		t.Error("the victim did not receive the ICMP error that was addressed to it")
	}
	if err := victim.ask(); err != nil {
		t.Error(err)
	}
}

func isUnreachable(p packet) bool {
	return p.proto == "icmp" && (p.icmpType == 3 && p.dst.Addr().Is4() || p.icmpType == 1 && p.dst.Addr().Is6())
}

// quote is the part of a packet that an ICMP error quotes: its IP header and 8
// bytes.
func (p packet) quote() ([]byte, error) {
	buf := gopacket.NewSerializeBuffer()
	options := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	if err := gopacket.SerializeLayers(buf, options, p.layers()...); err != nil {
		return nil, fmt.Errorf("build quoted packet: %w", err)
	}
	header := 20
	if p.dst.Addr().Is6() {
		header = 40
	}
	return buf.Bytes()[:header+8], nil
}

// routeMTU is that of the route to the other node's pods. It leaves room for no
// segment that a client cuts for its own Ethernet, and for none of datagramSize.
const (
	routeMTU     = 1280
	datagramSize = 1400
)

// narrowRoute gives the receiving node's route to the endpoint an MTU until the
// test ends. A kernel forwards by it, locked or not: ip_forward, ip6_forward.
func (e *env) narrowRoute(t *testing.T, v variant, locked bool) {
	t.Helper()
	set := func(mtu int) error {
		routes, err := netlink.RouteList(nil, map[bool]int{false: netlink.FAMILY_V4, true: netlink.FAMILY_V6}[v.v6])
		if err != nil {
			return err
		}
		for _, r := range routes {
			if r.Dst != nil && r.Gw != nil && !r.Dst.IP.IsUnspecified() && r.Dst.Contains(e.addr("b0", v).AsSlice()) {
				r.MTU, r.MTULock = mtu, mtu != 0 && locked
				return netlink.RouteReplace(&r)
			}
		}
		return fmt.Errorf("node %s has no route to b0", receiver)
	}
	e.Do(t, receiver, func() error { return set(routeMTU) })
	t.Cleanup(func() {
		e.Do(t, receiver, func() error { return set(0) })
		for _, client := range []string{honest, outsider} { // what they have learned
			e.Output(t, client, "ip", "-4", "route", "flush", "cache")
			e.Output(t, client, "ip", "-6", "route", "flush", "cache")
		}
	})
}

func isTooBig(p packet) bool {
	return p.proto == "icmp" && (p.icmpType == 3 && p.icmpCode == 4 && p.dst.Addr().Is4() || p.icmpType == 2 && p.dst.Addr().Is6())
}

// awaitTooBig calls send until an ICMP error with the route's MTU has come. A node may need a
// moment to know that MTU.
func awaitTooBig(t *testing.T, tooBig *capture, send func() error) {
	t.Helper()
	await.NoError(t, func() error {
		if err := send(); err != nil {
			return err
		}
		if len(tooBig.packets()) == 0 {
			return fmt.Errorf("no ICMP error for packets of more than %d bytes", routeMTU)
		}
		return nil
	})
	for _, p := range tooBig.packets() {
		if p.mtu != routeMTU {
			t.Errorf("an ICMP error has MTU %d, want %d", p.mtu, routeMTU)
		}
	}
}

// largeSegments: a client hands its device many segments at once, which are only
// cut behind the node.
func largeSegments(locked bool) func(t *testing.T, e *env, v variant) {
	return func(t *testing.T, e *env, v variant) {
		e.narrowRoute(t, v, locked)
		tooBig := e.capture(t, honest, isTooBig)
		c := e.mustConnect(t, v, e.nodePort(t, v.place, "tcp", v))
		awaitTooBig(t, tooBig, func() error { return c.askText(strings.Repeat("y", 30_000)) })
	}
}

// largeDatagrams is largeSegments with UDP_SEGMENT, or with single datagrams.
func largeDatagrams(number int, locked bool) func(t *testing.T, e *env, v variant) {
	return func(t *testing.T, e *env, v variant) {
		e.narrowRoute(t, v, locked)
		tooBig := e.capture(t, outsider, isTooBig)
		host, err := e.Host(outsider)
		if err != nil {
			t.Fatal(err)
		}
		conn, err := host.Dial(t.Context(), string(v.combo("udp")), e.nodePort(t, v.place, "udp", v).String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := control(conn, cutInto(datagramSize, v)); err != nil {
			t.Fatal(err)
		}
		awaitTooBig(t, tooBig, func() error {
			_, _ = conn.Write(make([]byte, number*datagramSize)) // an error is what the one before led to
			return nil
		})
	}
}

// cutInto has the kernel cut what is written into datagrams of a size, which must
// not be fragmented.
func cutInto(size int, v variant) func(fd int) error {
	return func(fd int) error {
		level, option := unix.IPPROTO_IP, unix.IP_MTU_DISCOVER
		if v.v6 {
			level, option = unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER
		}
		if err := unix.SetsockoptInt(fd, level, option, unix.IP_PMTUDISC_DO); err != nil {
			return os.NewSyscallError("setsockopt MTU_DISCOVER", err)
		}
		return os.NewSyscallError("setsockopt UDP_SEGMENT", unix.SetsockoptInt(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT, size))
	}
}

// control calls a function with the socket of a connection.
func control(conn net.Conn, fn func(fd int) error) error {
	raw, err := conn.(*net.UDPConn).SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = fn(int(fd)) }); err != nil {
		return err
	}
	return failed
}
