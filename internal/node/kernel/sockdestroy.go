package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Socket identifies a TCP or UDP socket of one network namespace.
type Socket struct {
	Protocol uint8 // unix.IPPROTO_TCP or unix.IPPROTO_UDP
	Local    netip.AddrPort
	// Peer may be the zero address of the family, for a socket without a peer.
	Peer netip.AddrPort
	// Ifindex is the device that the socket is bound to; 0 if it is bound to none.
	Ifindex uint32
	// Cookie is SO_COOKIE. The kernel compares it, so no other socket with these addresses
	// is meant.
	Cookie uint64
}

// errNoSocketDestroy reports that the kernel cannot end sockets of other processes.
var errNoSocketDestroy = errors.New("the kernel lacks CONFIG_INET_DIAG_DESTROY")

// SocketDestroyer ends sockets of one network namespace. It is not safe for concurrent use.
type SocketDestroyer struct {
	fd  int
	seq uint32
}

// OpenSocketDestroyer returns a SocketDestroyer for the calling thread's network namespace.
// It remains usable on other threads. The caller closes it.
func OpenSocketDestroyer() (*SocketDestroyer, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, fmt.Errorf("open sock_diag: %w", err)
	}
	wait := unix.NsecToTimeval(int64(5 * time.Second))
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("open sock_diag: %w", err)
	}
	return &SocketDestroyer{fd: fd}, nil
}

// Close closes the SocketDestroyer.
func (d *SocketDestroyer) Close() error { return unix.Close(d.fd) }

// sockDestroy is SOCK_DESTROY of linux/sock_diag.h.
const sockDestroy = 21

// inetDiagRequest is struct inet_diag_req_v2 of linux/inet_diag.h.
type inetDiagRequest struct {
	family, protocol, ext, pad uint8
	states                     uint32
	localPort, peerPort        [2]byte
	local, peer                [16]byte
	ifindex                    uint32
	cookie                     [2]uint32
}

// Destroy ends a socket: its process gets ECONNABORTED, and a TCP peer gets an RST. The
// error is unix.ENOENT if there is no such socket any more, and errNoSocketDestroy if the
// kernel lacks support. It needs CAP_NET_ADMIN.
func (d *SocketDestroyer) Destroy(s Socket) error {
	req := inetDiagRequest{
		family: unix.AF_INET6, protocol: s.Protocol, states: ^uint32(0), ifindex: s.Ifindex,
		cookie: [2]uint32{uint32(s.Cookie), uint32(s.Cookie >> 32)},
	}
	if s.Local.Addr().Is4() {
		req.family = unix.AF_INET
	}
	copy(req.local[:], s.Local.Addr().AsSlice())
	copy(req.peer[:], s.Peer.Addr().AsSlice())
	binary.BigEndian.PutUint16(req.localPort[:], s.Local.Port())
	binary.BigEndian.PutUint16(req.peerPort[:], s.Peer.Port())

	d.seq++
	const size = unix.SizeofNlMsghdr + int(unsafe.Sizeof(req))
	var msg struct {
		hdr unix.NlMsghdr
		req inetDiagRequest
	}
	msg.hdr = unix.NlMsghdr{Len: uint32(size), Type: sockDestroy, Flags: unix.NLM_F_REQUEST | unix.NLM_F_ACK, Seq: d.seq}
	msg.req = req
	if err := unix.Sendto(d.fd, unsafe.Slice((*byte)(unsafe.Pointer(&msg)), size), 0,
		&unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("end socket: %w", err)
	}
	err := d.acknowledged()
	if errors.Is(err, unix.EOPNOTSUPP) {
		return errNoSocketDestroy
	}
	if err != nil {
		return fmt.Errorf("end socket: %w", err)
	}
	return nil
}

// acknowledged reads the answer to the last message. It skips answers to earlier ones.
func (d *SocketDestroyer) acknowledged() error {
	buf := make([]byte, 512)
	for range 16 {
		n, _, err := unix.Recvfrom(d.fd, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return err
		}
		if n < unix.SizeofNlMsghdr+4 {
			return unix.EBADMSG
		}
		hdr := (*unix.NlMsghdr)(unsafe.Pointer(&buf[0]))
		if hdr.Seq != d.seq {
			continue
		}
		if errno := -int32(binary.NativeEndian.Uint32(buf[unix.SizeofNlMsghdr:])); hdr.Type == unix.NLMSG_ERROR && errno != 0 {
			return unix.Errno(errno)
		} else if hdr.Type == unix.NLMSG_ERROR {
			return nil
		}
	}
	return unix.EBADMSG
}

// ProbeSocketDestroy ends two sockets of its own, and reports why that fails:
// errNoSocketDestroy, or another lack. The calling thread's namespace needs a loopback
// address.
func ProbeSocketDestroy() error {
	d, err := OpenSocketDestroyer()
	if err != nil {
		return err
	}
	defer d.Close()
	for protocol, typ := range map[uint8]int{unix.IPPROTO_TCP: unix.SOCK_STREAM, unix.IPPROTO_UDP: unix.SOCK_DGRAM} {
		if err := d.probe(protocol, typ); err != nil {
			return err
		}
	}
	return nil
}

func (d *SocketDestroyer) probe(protocol uint8, typ int) error {
	fd, err := unix.Socket(unix.AF_INET, typ|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open socket: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		return fmt.Errorf("bind socket to 127.0.0.1: %w", err)
	}
	if protocol == unix.IPPROTO_TCP {
		if err := unix.Listen(fd, 1); err != nil {
			return fmt.Errorf("listen at 127.0.0.1: %w", err)
		}
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		return fmt.Errorf("read address of socket: %w", err)
	}
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		return fmt.Errorf("read cookie of socket: %w", err)
	}
	local := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(name.(*unix.SockaddrInet4).Port))
	return d.Destroy(Socket{Protocol: protocol, Local: local, Peer: netip.AddrPortFrom(netip.IPv4Unspecified(), 0), Cookie: cookie})
}
