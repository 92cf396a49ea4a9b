package ebpf

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// TestPacketSCTPSockets has a pod's SCTP socket talk to one behind tun0 through a Service, so
// that the kernel's own packets arrive: without CRC, and GSO packets.
func TestPacketSCTPSockets(t *testing.T) {
	n := newPacketNode(t)
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP)
	if err != nil {
		t.Skipf("needs SCTP sockets in the kernel: %v", err)
	}
	ok(t, unix.Close(fd))
	n.onThread(t, func() error {
		return errors.Join(n.attachByFilter("pod1", tcProgFromPod), n.attachByFilter("tun0", tcProgFromNetwork))
	})
	client := n.newPeer(t, "pod1", podMAC("pod1"), plans["IPv4"].pod1, plans["IPv6"].pod1)
	server := n.newPeer(t, "tun0", net.HardwareAddr{2, 0, 0, 0, 9, 9}, plans["IPv4"].far, plans["IPv6"].far)
	eachFamily(t, n, func(t *testing.T, p *plan) {
		n.serve(t, service(p, protoSCTP, endpoint(p.far, 8080, elsewhere)))
		listener := sctpSocket(t, server, p)
		ok(t, unix.Bind(listener, sockaddr(ap(p.far, 8080))))
		ok(t, unix.Listen(listener, 1))
		dialer := sctpSocket(t, client, p)
		ok(t, unix.Bind(dialer, sockaddr(ap(p.pod1, 40000))))
		if err := unix.Connect(dialer, sockaddr(ap(p.clusterIP, 80))); err != nil {
			t.Fatalf("connect: %v; %s", err, verdictList(n.verdicts(t)))
		}
		accepted, _, err := unix.Accept(listener)
		ok(t, err)
		t.Cleanup(func() { ok(t, unix.Close(accepted)) })
		defer func() { t.Log(verdictList(n.verdicts(t))) }()
		for size := range 4 {
			message := bytes.Repeat([]byte("sctp"), 1<<(4*size))
			echo(t, dialer, accepted, message)
			echo(t, accepted, dialer, message)
		}
		a := &association{n: n, client: ap(p.pod1, 40000), front: ap(p.clusterIP, 80), server: ap(p.far, 8080), seen: ap(p.pod1, 40000)}
		a.wantState(t, tcFlowStateFLOW_ESTABLISHED)
		if !a.confirmed(t) {
			t.Error("the flow is unconfirmed")
		}
	})
}

// verdicts returns the programs' counters.
func (n *packetNode) verdicts(t *testing.T) map[tcVerdict]uint64 {
	all := map[tcVerdict]uint64{}
	for i, count := range n.counters(t) {
		if count > 0 {
			all[tcVerdict(i)] = count
		}
	}
	return all
}

// newPeer moves the far end of a device to a network namespace of its own, with these
// addresses. Functions given to it run there.
func (n *packetNode) newPeer(t *testing.T, iface string, mac net.HardwareAddr, addrs ...netip.Addr) func(func() error) {
	t.Helper()
	calls := make(chan func())
	var thread sync.WaitGroup
	thread.Go(func() {
		runtime.LockOSThread() // for good: the thread ends with its namespace
		for f := range calls {
			f()
		}
	})
	do := func(f func() error) {
		t.Helper()
		var err error
		done := make(chan struct{})
		calls <- func() { defer close(done); err = f() }
		<-done
		ok(t, err)
	}
	var ns netns.NsHandle
	do(func() (err error) { ns, err = netns.New(); return err })
	t.Cleanup(func() { close(calls); thread.Wait(); ns.Close() })
	n.onThread(t, func() error {
		link, err := netlink.LinkByName("far-" + iface)
		if err != nil {
			return err
		}
		return netlink.LinkSetNsFd(link, int(ns))
	})
	do(func() error {
		link, err := netlink.LinkByName("far-" + iface)
		if err != nil {
			return err
		}
		errs := []error{netlink.LinkSetHardwareAddr(link, mac), netlink.LinkSetUp(link)}
		for _, a := range addrs {
			gateway, bits := net.IPv4(169, 254, 1, 1), 32
			if a.Is6() {
				gateway, bits = net.ParseIP("fe80::1"), 128
			}
			errs = append(errs,
				netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, bits)}, Flags: unix.IFA_F_NODAD}),
				netlink.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, State: netlink.NUD_PERMANENT, IP: gateway, HardwareAddr: n.mac[iface]}),
				netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: gateway, Flags: int(netlink.FLAG_ONLINK)}))
		}
		return errors.Join(errs...)
	})
	return do
}

// sctpSocket opens a socket in the namespace of a peer.
func sctpSocket(t *testing.T, peer func(func() error), p *plan) (fd int) {
	t.Helper()
	family := unix.AF_INET
	if p.eth0.Is6() {
		family = unix.AF_INET6
	}
	peer(func() (err error) {
		fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
		return err
	})
	t.Cleanup(func() { ok(t, unix.Close(fd)) })
	wait := &unix.Timeval{Sec: 20}
	ok(t, errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, wait), unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, wait)))
	return fd
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// echo writes a message to one socket, and reads it from the other.
func echo(t *testing.T, from, to int, message []byte) {
	t.Helper()
	if _, err := unix.Write(from, message); err != nil {
		t.Fatalf("write %d bytes: %v", len(message), err)
	}
	got := make([]byte, 0, len(message))
	part := make([]byte, len(message))
	for len(got) < len(message) {
		size, err := unix.Read(to, part)
		if err != nil || size == 0 {
			t.Fatalf("read %d bytes after %d: %v", len(message), len(got), err)
		}
		got = append(got, part[:size]...)
	}
	if !bytes.Equal(got, message) {
		t.Errorf("%d bytes arrive changed", len(message))
	}
}
