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

const (
	// blockPorts is how many ports the server of Kind Blocks answers from.
	blockPorts = 64
	// blockTurn is the number of consecutive transfers that use one port: concurrent
	// transfers share few sockets and so need few system calls.
	blockTurn = 32
	// blockBatch is the number of packets in one system call.
	blockBatch = 32

	blockSize = 512
)

// blockServer is a TFTP server for measurements. It answers each request from another
// port than it was sent to, and each acknowledgment with the next block. It stores no
// transfer. One thread does everything with as few system calls as possible, from
// prepared packets, so that the server is not the bottleneck. (Two threads have half of
// the packets for each call, and answered no more on two cores.)
type blockServer struct {
	listen, poll int
	ports        []int
	asked        int      // requests so far
	blocks       [][]byte // the packets of all blocks, from number 1
	in, out      batch
	buf          [blockBatch][blockSize + 4]byte
	from         [blockBatch]unix.RawSockaddrAny
}

// batch holds the packets of one system call, as recvmmsg(2) and sendmmsg(2) define them.
type batch struct {
	msgs [blockBatch]struct {
		hdr unix.Msghdr
		len uint32
	}
	iovs [blockBatch]unix.Iovec
}

// call runs a system call for the packets from first up to end, and returns for how
// many it did its work.
func (b *batch) call(trap uintptr, fd, first, end int) int {
	done, _, errno := unix.RawSyscall6(trap, uintptr(fd), uintptr(unsafe.Pointer(&b.msgs[first])), uintptr(end-first), unix.MSG_DONTWAIT, 0, 0)
	if errno != 0 {
		return 0
	}
	return int(done)
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
	s := &blockServer{blocks: dataPackets(content), listen: -1}
	for i := range blockBatch {
		in, out := &s.in.msgs[i].hdr, &s.out.msgs[i].hdr
		in.Iov, out.Iov = &s.in.iovs[i], &s.out.iovs[i]
		in.SetIovlen(1)
		out.SetIovlen(1)
		in.Name = (*byte)(unsafe.Pointer(&s.from[i]))
		s.in.iovs[i].Base = &s.buf[i][0]
		s.in.iovs[i].SetLen(len(s.buf[i]))
	}
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

// dataPackets returns the packets of a file's blocks. The last is shorter than the
// others, and may be empty.
func dataPackets(content []byte) (out [][]byte) {
	for number := 1; ; number++ {
		size := min(len(content), blockSize)
		packet := binary.BigEndian.AppendUint16([]byte{0, 3}, uint16(number))
		out = append(out, append(packet, content[:size]...))
		if content = content[size:]; size < blockSize {
			return out
		}
	}
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
			s.answer(int(events[i].Fd))
		}
	}
	return nil
}

// answer answers the packets in a socket, up to a batch. The rest causes another event.
func (s *blockServer) answer(fd int) {
	for i := range s.in.msgs {
		s.in.msgs[i].hdr.Namelen = unix.SizeofSockaddrAny
	}
	n := s.in.call(unix.SYS_RECVMMSG, fd, 0, blockBatch)
	by, queued := fd, 0
	for i := range n {
		packet := s.reply(fd, s.buf[i][:s.in.msgs[i].len])
		if packet == nil {
			continue
		}
		if fd == s.listen {
			port := s.ports[s.asked/blockTurn%len(s.ports)]
			s.asked++
			if port != by {
				s.send(by, queued)
				by, queued = port, 0
			}
		}
		to := &s.out.msgs[queued].hdr
		to.Name, to.Namelen = s.in.msgs[i].hdr.Name, s.in.msgs[i].hdr.Namelen
		s.out.iovs[queued].Base = &packet[0]
		s.out.iovs[queued].SetLen(len(packet))
		queued++
	}
	s.send(by, queued)
}

// send sends the first n packets of the batch and skips the ones that the kernel rejects.
func (s *blockServer) send(fd, n int) {
	for first := 0; first < n; {
		first += max(s.out.call(unix.SYS_SENDMMSG, fd, first, n), 1)
	}
}

// reply returns the answer to a received packet; nil for none.
func (s *blockServer) reply(fd int, got []byte) []byte {
	number := 0
	switch {
	case fd == s.listen && len(got) > 4 && got[1] == 1:
		number = 1
	case fd != s.listen && len(got) == 4 && got[1] == 4:
		number = int(binary.BigEndian.Uint16(got[2:])) + 1
	}
	if number == 0 || number > len(s.blocks) {
		return nil
	}
	return s.blocks[number-1]
}
