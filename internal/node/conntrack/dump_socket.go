package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// dumpBuffer is the size of the largest datagram of a dump. The kernel fills as much as
// the reader once offered, up to 32 KiB (netlink_recvmsg).
const dumpBuffer = 64 << 10

// dumpSocket reads dumps into one buffer, so that a table of a million entries does not
// need a million slices.
type dumpSocket struct {
	fd   int
	port uint32 // the kernel's name for this socket
	seq  uint32
	buf  *[dumpBuffer]byte // from dumpBuffers
	// open reports that the kernel has not ended the last dump yet. The next dump reads
	// the rest of it first.
	open bool
}

// dumpBuffers are reused, since many namespaces are read one after the other.
var dumpBuffers = sync.Pool{New: func() any { return new([dumpBuffer]byte) }}

func openDump() (*dumpSocket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	s := &dumpSocket{fd: fd, buf: dumpBuffers.Get().(*[dumpBuffer]byte)}
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	if err == nil {
		// The kernel replies at once; the timeout is a safeguard.
		err = errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &nl.SocketTimeoutTv),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &nl.SocketTimeoutTv))
	}
	var own unix.Sockaddr
	if err == nil {
		own, err = unix.Getsockname(fd)
	}
	if err != nil {
		s.close()
		return nil, err
	}
	s.port = own.(*unix.SockaddrNetlink).Pid
	return s, nil
}

func (s *dumpSocket) close() {
	if s.fd >= 0 {
		unix.Close(s.fd)
		dumpBuffers.Put(s.buf)
		s.fd, s.buf = -1, nil
	}
}

// run sends a dump request and calls each with the body of each message of the reply,
// until each returns false. each must not keep the body.
func (s *dumpSocket) run(req *nl.NetlinkRequest, each func([]byte) bool) error {
	if s.open {
		if err := s.read(func([]byte) bool { return true }); s.open {
			return err
		}
	}
	s.seq++
	req.Seq = s.seq
	if err := unix.Sendto(s.fd, req.Serialize(), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	s.open = true
	return s.read(each)
}

// read reads to the end of the dump, or until each returns false.
func (s *dumpSocket) read(each func([]byte) bool) error {
	interrupted := false
	for {
		n, from, err := unix.Recvfrom(s.fd, s.buf[:], 0)
		if errors.Is(err, unix.EINTR) {
			continue // a signal of the Go runtime, not an interrupted dump
		}
		if err != nil {
			return fmt.Errorf("receive: %w", err)
		}
		if sender, ok := from.(*unix.SockaddrNetlink); !ok || sender.Pid != nl.PidKernel {
			continue
		}
		for b := s.buf[:n]; len(b) >= unix.SizeofNlMsghdr; {
			size := int(binary.NativeEndian.Uint32(b))
			if size < unix.SizeofNlMsghdr || size > len(b) {
				return fmt.Errorf("receive: message of %d bytes in %d: %w", size, len(b), unix.EBADMSG)
			}
			kind, flags := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint16(b[6:])
			seq, port := binary.NativeEndian.Uint32(b[8:]), binary.NativeEndian.Uint32(b[12:])
			body := b[unix.SizeofNlMsghdr:size]
			b = b[min((size+3)&^3, len(b)):]
			if seq != s.seq || port != s.port {
				continue // reply to an earlier request
			}
			interrupted = interrupted || flags&unix.NLM_F_DUMP_INTR != 0
			switch kind {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				s.open = false
				return ended(body, interrupted)
			default:
				if !each(body) {
					return nil
				}
			}
		}
	}
}

// ended returns the result of a dump from its last message.
func ended(body []byte, interrupted bool) error {
	if len(body) >= 4 {
		if no := int32(binary.NativeEndian.Uint32(body)); no < 0 {
			return unix.Errno(-no)
		}
	}
	if interrupted {
		return nl.ErrDumpInterrupted
	}
	return nil
}
