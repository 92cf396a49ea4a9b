package load

import (
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"
)

// endpoint holds the precomputed parameters of sockets to the target.
type endpoint struct {
	family, typ int
	target      unix.Sockaddr
	source      unix.Sockaddr // nil: the kernel's choice
	reset       bool          // close with RST instead of FIN
}

// newEndpoints returns one for each source.
func newEndpoints(cfg Config) []endpoint {
	if len(cfg.Sources) == 0 {
		return []endpoint{newEndpoint(cfg, netip.Addr{})}
	}
	var all []endpoint
	for _, source := range cfg.Sources {
		all = append(all, newEndpoint(cfg, source))
	}
	return all
}

func newEndpoint(cfg Config, source netip.Addr) endpoint {
	e := endpoint{typ: unix.SOCK_STREAM, family: unix.AF_INET6, reset: cfg.Kind == Conn}
	if cfg.datagrams() {
		e.typ = unix.SOCK_DGRAM
	}
	if cfg.Target.Addr().Unmap().Is4() {
		e.family = unix.AF_INET
	}
	e.target = sockaddr(cfg.Target)
	if source.IsValid() {
		e.source = sockaddr(netip.AddrPortFrom(source, 0))
	}
	return e
}

// sockaddr converts an address to the form of system calls.
func sockaddr(ap netip.AddrPort) unix.Sockaddr {
	if a := ap.Addr().Unmap(); a.Is4() {
		return &unix.SockaddrInet4{Port: int(ap.Port()), Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Port: int(ap.Port()), Addr: ap.Addr().As16()}
}

// localAddr returns the source address of a socket, "" if it has none.
func localAddr(fd int) string {
	if fd < 0 {
		return ""
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return ""
	}
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)).String()
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port)).String()
	}
	return ""
}

// open creates a non-blocking socket and starts to connect it; connected reports whether
// it is connected already.
func (e *endpoint) open() (fd int, connected bool, err error) {
	fd, err = unix.Socket(e.family, e.typ|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, false, err
	}
	if err := e.prepare(fd); err != nil {
		unix.Close(fd)
		return -1, false, err
	}
	switch err := unix.Connect(fd, e.target); err {
	case nil:
		return fd, true, nil
	case unix.EINPROGRESS:
		return fd, false, nil
	default:
		unix.Close(fd)
		return -1, false, err
	}
}

func (e *endpoint) prepare(fd int) error {
	if e.typ == unix.SOCK_STREAM && !e.reset {
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
			return err
		}
	}
	if e.reset {
		// Zero seconds of linger: close sends RST and leaves no TIME_WAIT.
		if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
			return err
		}
	}
	if e.source == nil {
		return nil
	}
	// connect must choose the port: it may reuse a port that is in use for another
	// target, bind may not.
	if err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1); err != nil {
		return err
	}
	return unix.Bind(fd, e.source)
}

// errorKind is the short name under which a failed request is counted.
func errorKind(err error) string {
	var errno unix.Errno
	if !errors.As(err, &errno) {
		return err.Error()
	}
	switch errno {
	case unix.ECONNREFUSED:
		return "refused"
	case unix.ECONNRESET, unix.EPIPE:
		return "reset"
	case unix.ETIMEDOUT:
		return "timeout"
	case unix.EHOSTUNREACH, unix.ENETUNREACH:
		return "unreachable"
	case unix.EADDRNOTAVAIL:
		return "no such source address, or out of source ports"
	case unix.EMFILE, unix.ENFILE:
		return "out of file descriptors"
	}
	return errno.Error()
}
