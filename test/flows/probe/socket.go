package probe

import (
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// socket is a non-blocking socket whose calls take a deadline.
type socket struct {
	fd        int
	stream    bool
	mapped    bool // AF_INET6 towards a mapped IPv4 address
	connected bool
	pending   []byte // bytes of a stream behind the last whole line
}

// highPorts is the first local port above the range of Request.LowPorts.
const highPorts = 45000

// freshPorts counts the local ports of Request.FreshPorts.
var freshPorts atomic.Int32

// firstLowFreshPort is the first one with Request.LowPorts. The servers have ports below.
const firstLowFreshPort = 10007

// freshPort returns the nth port from first, which must be 7 modulo 8, without those that are 6: a
// node gives them to connections whose own port another one has. With DSR, a client's own socket
// with that port would not reach the same endpoint meanwhile.
func freshPort(first, n int) int { return first + n/7*8 + n%7 }

// openSocket makes a socket that can reach dst.
func openSocket(req Request, dst netip.AddrPort) (*socket, error) {
	s := &socket{stream: req.Proto != "udp", mapped: req.Mapped}
	domain, kind := unix.AF_INET, unix.SOCK_DGRAM
	if dst.Addr().Is6() || req.Mapped {
		domain = unix.AF_INET6
	}
	if s.stream {
		kind = unix.SOCK_STREAM
	}
	fd, err := unix.Socket(domain, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("make socket: %w", err)
	}
	s.fd = fd
	if domain == unix.AF_INET6 && !req.Mapped {
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1) // leaves an IPv4 socket its port
	}
	// Since Linux 6.3; before, two probes meet on a port now and then.
	ports := highPorts
	if req.LowPorts {
		ports = (highPorts - 1) << 16
	}
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_LOCAL_PORT_RANGE, ports)
	switch {
	case req.LocalPort != 0:
		// The linger of 0 lets the next try have the port at once.
		if s.stream {
			_ = unix.SetsockoptLinger(s.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		}
		err = s.bind(domain, req.LocalPort)
	case req.FreshPorts:
		first, last := highPorts+7, 65535
		if req.LowPorts {
			first, last = firstLowFreshPort, highPorts-1
		}
		port := freshPort(first, int(freshPorts.Add(1))-1)
		if port > last {
			err = errors.New("all ports of FreshPorts are used up")
			break
		}
		err = s.bind(domain, port)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// bind takes a local port.
func (s *socket) bind(domain, port int) error {
	_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	var sa unix.Sockaddr = &unix.SockaddrInet4{Port: port}
	if domain == unix.AF_INET6 {
		sa = &unix.SockaddrInet6{Port: port}
	}
	if err := unix.Bind(s.fd, sa); err != nil {
		return fmt.Errorf("bind local port %d: %w", port, err)
	}
	return nil
}

func (s *socket) close() { _ = unix.Close(s.fd) }

// sockaddr turns dst into what the socket's family wants.
func (s *socket) sockaddr(dst netip.AddrPort) unix.Sockaddr {
	if dst.Addr().Is4() && !s.mapped {
		return &unix.SockaddrInet4{Port: int(dst.Port()), Addr: dst.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(dst.Port()), Addr: dst.Addr().As16()}
}

// connect connects to dst before the deadline.
func (s *socket) connect(dst netip.AddrPort, deadline time.Time) error {
	err := unix.Connect(s.fd, s.sockaddr(dst))
	if err == unix.EINPROGRESS || err == unix.EINTR {
		if err = s.wait(unix.POLLOUT, deadline); err == nil {
			err = s.pendingError()
		}
	}
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	s.connected = true
	return nil
}

// pendingError takes the error that the kernel has stored for the socket.
func (s *socket) pendingError() error {
	n, err := unix.GetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err != nil {
		return err
	}
	if n != 0 {
		return unix.Errno(n)
	}
	return nil
}

// lastLook is how long a process still waits after the deadline: it, or the whole machine, may
// have stood still until then, with the answer on its way.
const lastLook = 100 * time.Millisecond

// wait returns when the socket is ready for events, or has an error stored.
func (s *socket) wait(events int16, deadline time.Time) error {
	for {
		last := !time.Now().Before(deadline)
		left := max(lastLook, time.Until(deadline))
		fds := []unix.PollFd{{Fd: int32(s.fd), Events: events}}
		n, err := unix.Poll(fds, int(left/time.Millisecond)+1)
		if err != nil && err != unix.EINTR {
			return err
		}
		if n > 0 {
			return nil
		}
		if last {
			return errTimeout
		}
	}
}

// send sends one question to dst, or to the peer of a connected socket.
func (s *socket) send(data []byte, dst netip.AddrPort) error {
	var to unix.Sockaddr
	if !s.connected {
		to = s.sockaddr(dst)
	}
	for {
		err := unix.Sendto(s.fd, data, unix.MSG_NOSIGNAL, to)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("send: %w", err)
		}
		return nil
	}
}

// receive returns what arrived and the address recvfrom named.
func (s *socket) receive(deadline time.Time) ([]byte, netip.AddrPort, error) {
	buf := make([]byte, 4096)
	for {
		n, from, err := unix.Recvfrom(s.fd, buf, 0)
		switch {
		case err == nil:
			return buf[:n], addrPort(from), nil
		case err == unix.EAGAIN:
			if err := s.wait(unix.POLLIN, deadline); err != nil {
				return nil, netip.AddrPort{}, fmt.Errorf("receive: %w", err)
			}
		case err != unix.EINTR:
			return nil, netip.AddrPort{}, fmt.Errorf("receive: %w", err)
		}
	}
}

// peer is getpeername; the zero value when the socket has no peer.
func (s *socket) peer() netip.AddrPort {
	sa, err := unix.Getpeername(s.fd)
	if err != nil {
		return netip.AddrPort{}
	}
	return addrPort(sa)
}

// local is getsockname: what a lost question is to be found by in a trace.
func (s *socket) local() netip.AddrPort {
	sa, err := unix.Getsockname(s.fd)
	if err != nil {
		return netip.AddrPort{}
	}
	return addrPort(sa)
}

// addrPort turns a kernel address into a netip one, mapped addresses unmapped.
func addrPort(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}
