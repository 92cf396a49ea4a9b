package ebpf

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

// loopbackOf returns the loopback address that a test uses. All of 127.0.0.0/8 counts.
func loopbackOf(p *plan) netip.Addr {
	if p.family == model.IPv6 {
		return netip.IPv6Loopback()
	}
	return addr("127.8.9.10")
}

// sourceOption is a control message for sendmsg() with a source address.
func sourceOption(a netip.Addr) []byte {
	if a.Is4() {
		return unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: a.As4()})
	}
	return unix.PktInfo6(&unix.Inet6Pktinfo{Addr: a.As16()})
}

// TestLoopbackNodePorts sends to a NodePort at a loopback address. A process of the node
// listens there too, and gets what the hooks leave.
func TestLoopbackNodePorts(t *testing.T) {
	n := newSocketNode(t)
	both := []model.Family{model.IPv4, model.IPv6}
	eachFamily(t, n.packetNode, func(t *testing.T, p *plan) {
		front, bound := ap(loopbackOf(p), 30080), ap(loopbackOf(p), 0)
		n.serve(t, service(p, protoUDP, endpoint(p.eth0, 8080, here)))
		open := func(at netip.AddrPort) int {
			fd, _ := n.socket(t, domainOf(p), protoUDP)
			if at.IsValid() {
				must.Do(t, unix.Bind(fd, sockaddr(at)))
			}
			return fd
		}
		process, server := open(front), open(ap(p.eth0, 8080))
		connected := func(fd int) int { must.Do(t, unix.Connect(fd, sockaddr(front))); return fd }
		write := func(fd int) { _, err := unix.Write(fd, []byte("x")); must.Do(t, err) }
		send := func(fd int, option []byte) { must.Do(t, unix.Sendmsg(fd, []byte("x"), option, sockaddr(front), 0)) }
		// wantAt reads the datagram, answers it and wants the answer from the NodePort.
		wantAt := func(t *testing.T, what string, receiver, sender int) {
			t.Helper()
			buffer := make([]byte, 1)
			_, from, err := unix.Recvfrom(receiver, buffer, 0)
			if err != nil {
				t.Fatalf("%s: not received: %v", what, err)
			}
			must.Do(t, unix.Sendto(receiver, []byte("y"), 0, from))
			_, from, err = unix.Recvfrom(sender, buffer, 0)
			must.Do(t, err)
			if got := addrPortOf(t, from); got != front {
				t.Errorf("%s: answer from %s, want %s", what, got, front)
			}
		}
		peerOf := func(fd int) netip.AddrPort {
			name, err := unix.Getpeername(fd)
			must.Do(t, err)
			return addrPortOf(t, name)
		}

		fd := connected(open(netip.AddrPort{}))
		write(fd)
		wantAt(t, "without the setting", process, fd)

		n.setNode(t, func(node *intent.Node) { node.LoopbackNodePorts = both })
		fd = connected(open(netip.AddrPort{}))
		if got := peerOf(fd); got != front {
			t.Errorf("getpeername: %s, want %s", got, front)
		}
		write(fd)
		wantAt(t, "connected", server, fd)
		fd = open(netip.AddrPort{})
		send(fd, nil)
		wantAt(t, "sendto", server, fd)
		fd = open(ap(p.eth0, 0))
		send(fd, nil)
		wantAt(t, "sendto, bound to the node's address", server, fd)

		fd = connected(open(bound))
		write(fd)
		wantAt(t, "bound to loopback, connected", process, fd)
		fd = open(bound)
		send(fd, nil)
		wantAt(t, "bound to loopback, sendto", process, fd)
		fd = open(netip.AddrPort{})
		send(fd, sourceOption(bound.Addr()))
		wantAt(t, "source option of loopback", process, fd)

		n.setNode(t, func(node *intent.Node) {
			node.LoopbackNodePorts = []model.Family{model.IPv4 + model.IPv6 - p.family}
		})
		fd = connected(open(netip.AddrPort{}))
		write(fd)
		wantAt(t, "with the other family only", process, fd)
	})
}

// TestLoopbackNodePortsMapped binds an IPv6 socket to ::ffff:127.0.0.1: it is left.
func TestLoopbackNodePortsMapped(t *testing.T) {
	n := newSocketNode(t)
	p := plans["IPv4"]
	n.serve(t, service(p, protoUDP, endpoint(p.eth0, 8080, here)))
	n.setNode(t, func(node *intent.Node) { node.LoopbackNodePorts = []model.Family{model.IPv4} })
	front := ap(loopbackOf(p), 30080)
	mapped := netip.AddrFrom16(front.Addr().As16())
	for _, row := range []struct {
		what       string
		bind       bool
		connect    bool
		toEndpoint bool
	}{
		{"connect", false, true, true}, {"sendto", false, false, true}, {"bound, connect", true, true, false},
		{"bound, sendto", true, false, false},
	} {
		process, closeProcess := n.socket(t, unix.AF_INET, protoUDP)
		server, closeServer := n.socket(t, unix.AF_INET, protoUDP)
		must.Do(t, unix.Bind(process, sockaddr(front)))
		must.Do(t, unix.Bind(server, sockaddr(ap(p.eth0, 8080))))
		fd, _ := n.socket(t, unix.AF_INET6, protoUDP)
		if row.bind {
			must.Do(t, unix.Bind(fd, sockaddr(ap(mapped, 0))))
		}
		if row.connect {
			must.Do(t, unix.Connect(fd, sockaddr(ap(mapped, 30080))))
			_, err := unix.Write(fd, []byte("x"))
			must.Do(t, err)
		} else {
			must.Do(t, unix.Sendto(fd, []byte("x"), 0, sockaddr(ap(mapped, 30080))))
		}
		receiver := process
		if row.toEndpoint {
			receiver = server
		}
		if _, _, err := unix.Recvfrom(receiver, make([]byte, 1), 0); err != nil {
			t.Errorf("%s: not received: %v", row.what, err)
		}
		closeProcess()
		closeServer()
	}
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}
