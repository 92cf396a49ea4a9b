package workload

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// endpoint is one address to listen on, of one family.
type endpoint struct {
	addr netip.AddrPort
}

// network returns "tcp4", "udp6" and the like.
func (e endpoint) network(base string) string {
	if e.addr.Addr().Is4() {
		return base + "4"
	}
	return base + "6"
}

// listenAddrs parses ":80", "80", "10.0.0.1:80" or "[fd00::1]:80". A port alone means two
// sockets, one for each family, so that answers show IPv4 addresses as such.
func listenAddrs(text string) ([]endpoint, error) {
	if a, err := netip.ParseAddrPort(text); err == nil {
		return []endpoint{{a}}, nil
	}
	port, err := strconv.ParseUint(strings.TrimPrefix(text, ":"), 10, 16)
	if err != nil || port == 0 {
		return nil, fmt.Errorf("serve: listen address %q is neither a port nor an address and port", text)
	}
	return []endpoint{
		{netip.AddrPortFrom(netip.IPv4Unspecified(), uint16(port))},
		{netip.AddrPortFrom(netip.IPv6Unspecified(), uint16(port))},
	}, nil
}

// listenAll opens a socket for each address. It omits a family that the kernel does not
// have, unless it is the only one.
func listenAll[T interface{ Close() error }](text string, open func(endpoint) (T, error)) ([]T, error) {
	endpoints, err := listenAddrs(text)
	if err != nil {
		return nil, err
	}
	var opened []T
	for _, e := range endpoints {
		s, err := open(e)
		if errors.Is(err, syscall.EAFNOSUPPORT) && len(endpoints) > 1 {
			continue
		}
		if err != nil {
			closeAll(opened)
			return nil, err
		}
		opened = append(opened, s)
	}
	if len(opened) == 0 {
		return nil, fmt.Errorf("listen on %s: %w", text, syscall.EAFNOSUPPORT)
	}
	return opened, nil
}

func closeAll[T interface{ Close() error }](open []T) {
	for _, s := range open {
		s.Close()
	}
}

// receiveBuffer, in bytes, has room for the questions of many clients while a busy machine
// does not run the server. Without room the kernel drops them, as if the path had lost them.
const receiveBuffer = 8 << 20

// listenUDP opens a socket that reports the destination address of each datagram.
func listenUDP(ctx context.Context, e endpoint) (*net.UDPConn, error) {
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		ctl := raw.Control(func(fd uintptr) {
			if e.addr.Addr().Is4() {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_PKTINFO, 1)
			} else {
				err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_RECVPKTINFO, 1)
			}
			if e := unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer); !errors.Is(e, unix.EPERM) {
				err = errors.Join(err, e)
			}
		})
		return errors.Join(ctl, err)
	}}
	c, err := lc.ListenPacket(ctx, e.network("udp"), e.addr.String())
	if err != nil {
		return nil, err
	}
	return c.(*net.UDPConn), nil
}
