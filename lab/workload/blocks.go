package workload

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// blockPorts is how many ports the server of Kind Blocks answers from.
const blockPorts = 64

const blockSize = 512

// blockServer is a TFTP server for measurements: it answers each request from
// another port than it was sent to, in turn, and each acknowledgement with the
// next block, and keeps no transfer in mind. One thread does it all with as few
// system calls as there can be, so that it is not what is measured.
type blockServer struct {
	listen, poll int
	ports        []int
	next         int // of ports
	content      []byte
	in, out      [blockSize + 4]byte
	from         unix.RawSockaddrAny
	fromLen      uint32
}

// Close closes all sockets.
func (s *blockServer) Close() error {
	for _, fd := range append(s.ports, s.listen, s.poll) {
		unix.Close(fd)
	}
	return nil
}

// ServeBlocks runs the server of Kind Blocks, one for each family.
func ServeBlocks(ctx context.Context, c Config) error {
	size := c.Size
	if size == 0 {
		size = tftpSize
	}
	servers, err := listenAll(c.Listen, func(e endpoint) (*blockServer, error) {
		return newBlockServer(e.addr, pad(c.Name, size))
	})
	if err != nil {
		return err
	}
	return serveAll(ctx, c, servers, func(s *blockServer) error { return s.serve(ctx) })
}

func newBlockServer(addr netip.AddrPort, content []byte) (*blockServer, error) {
	s := &blockServer{content: content, listen: -1}
	var err error
	if s.poll, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("make epoll: %w", err)
	}
	if s.listen, err = s.open(addr); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	for range blockPorts {
		fd, err := s.open(netip.AddrPortFrom(addr.Addr(), 0))
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.ports = append(s.ports, fd)
	}
	return s, nil
}

// open opens a socket and watches it.
func (s *blockServer) open(addr netip.AddrPort) (int, error) {
	family := unix.AF_INET6
	var local unix.Sockaddr = &unix.SockaddrInet6{Port: int(addr.Port()), Addr: addr.Addr().As16()}
	if addr.Addr().Is4() {
		family, local = unix.AF_INET, &unix.SockaddrInet4{Port: int(addr.Port()), Addr: addr.Addr().As4()}
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	if family == unix.AF_INET6 {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 1)
	}
	if err == nil {
		err = unix.Bind(fd, local)
	}
	if err == nil {
		err = unix.EpollCtl(s.poll, unix.EPOLL_CTL_ADD, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
	}
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("listen on %s: %w", addr, err)
	}
	return fd, nil
}

// serve answers until ctx ends.
func (s *blockServer) serve(ctx context.Context) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	events := make([]unix.EpollEvent, blockPorts)
	for ctx.Err() == nil {
		n, err := unix.EpollWait(s.poll, events, int(100*time.Millisecond/time.Millisecond))
		if err != nil && err != unix.EINTR {
			return fmt.Errorf("wait for requests: %w", err)
		}
		for i := range max(n, 0) {
			for fd := int(events[i].Fd); s.answer(fd); {
			}
		}
	}
	return nil
}

// answer answers one packet of a socket; false: it has none.
func (s *blockServer) answer(fd int) bool {
	s.fromLen = unix.SizeofSockaddrAny
	n, _, errno := unix.Syscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&s.in[0])), uintptr(len(s.in)), 0,
		uintptr(unsafe.Pointer(&s.from)), uintptr(unsafe.Pointer(&s.fromLen)))
	if errno != 0 {
		return errno == unix.ECONNREFUSED || errno == unix.EINTR
	}
	number := 0
	switch {
	case fd == s.listen && n > 4 && s.in[1] == 1:
		fd, number = s.ports[s.next], 1
		s.next = (s.next + 1) % len(s.ports)
	case fd != s.listen && n == 4 && s.in[1] == 4:
		number = int(binary.BigEndian.Uint16(s.in[2:])) + 1
	}
	if number == 0 || (number-1)*blockSize > len(s.content) {
		return true
	}
	size := s.block(number)
	_, _, _ = unix.Syscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&s.out[0])), uintptr(size), 0,
		uintptr(unsafe.Pointer(&s.from)), uintptr(s.fromLen))
	return true
}

// block makes the n-th block, and returns its length. The last is shorter than
// the others.
func (s *blockServer) block(n int) int {
	binary.BigEndian.PutUint16(s.out[:], 3)
	binary.BigEndian.PutUint16(s.out[2:], uint16(n))
	rest := s.content[(n-1)*blockSize:]
	return 4 + copy(s.out[4:], rest[:min(len(rest), blockSize)])
}
