package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// ErrOverrun reports that notifications were lost because they arrived faster than they
// were read. The caller must read the full state again.
var ErrOverrun = errors.New("netlink notifications lost")

// OwnNetns is the NSID of notifications from the socket's own network namespace.
const OwnNetns = -1

// Notification is one netlink notification: a message to a multicast group.
type Notification struct {
	Type uint16 // RTM_NEWLINK, ...
	Port uint32 // netlink port of the socket that caused it; 0: the kernel
	Data []byte // without the netlink header; valid until the next Receive
	NSID int    // source namespace, or OwnNetns
}

// Subscription receives netlink notifications. Subscriptions of package netlink end at
// the first overrun and do not support other namespaces.
type Subscription struct {
	file   *os.File
	buf    []byte
	closed atomic.Bool
}

// Subscribe joins groups (unix.RTNLGRP_*) in the calling thread's network namespace. With
// allNSID it also receives notifications from every namespace that has an NSID in this
// one, such as the peers of veths; that needs CAP_NET_BROADCAST.
func Subscribe(allNSID bool, groups ...int) (*Subscription, error) {
	return subscribe(unix.NETLINK_ROUTE, "rtnetlink", allNSID, groups...)
}

// SubscribeNetfilter joins groups of netfilter (unix.NFNLGRP_*) in the calling thread's network
// namespace.
func SubscribeNetfilter(groups ...int) (*Subscription, error) {
	return subscribe(unix.NETLINK_NETFILTER, "nfnetlink", false, groups...)
}

func subscribe(proto int, name string, allNSID bool, groups ...int) (*Subscription, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, proto)
	if err != nil {
		return nil, fmt.Errorf("open %s socket: %w", name, err)
	}
	s := &Subscription{file: os.NewFile(uintptr(fd), name), buf: make([]byte, 1<<16)}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		s.Close()
		return nil, fmt.Errorf("bind %s socket: %w", name, err)
	}
	// Enough for a burst of a few hundred pods. FORCE exceeds net.core.rmem_max; without
	// the capability for it, the smaller default only causes more overruns.
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20)
	if allNSID {
		if err := unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_LISTEN_ALL_NSID, 1); err != nil {
			s.Close()
			return nil, fmt.Errorf("listen to all network namespaces: %w", err)
		}
	}
	for _, g := range groups {
		if err := s.Join(g); err != nil {
			s.Close()
			return nil, err
		}
	}
	return s, nil
}

// Join adds a group (unix.RTNLGRP_*, unix.NFNLGRP_*).
func (s *Subscription) Join(group int) error {
	raw, err := s.file.SyscallConn()
	if err != nil {
		return err
	}
	var opt error
	err = raw.Control(func(fd uintptr) {
		opt = unix.SetsockoptInt(int(fd), unix.SOL_NETLINK, unix.NETLINK_ADD_MEMBERSHIP, group)
	})
	if err = errors.Join(err, opt); err != nil {
		return fmt.Errorf("join group %d of %s: %w", group, s.file.Name(), err)
	}
	return nil
}

// IgnorePort makes the kernel omit notifications about changes by the socket with this
// netlink port: a program's own changes may far outnumber all other changes.
func (s *Subscription) IgnorePort(port uint32) error {
	// Classic BPF loads in network byte order; the header is in host byte order.
	var order [4]byte
	binary.NativeEndian.PutUint32(order[:], port)
	const nlmsgPid = 12 // in struct nlmsghdr
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: nlmsgPid},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: binary.BigEndian.Uint32(order[:])},
		{Code: unix.BPF_RET | unix.BPF_K, K: 0},
		{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 31},
	}
	raw, err := s.file.SyscallConn()
	if err != nil {
		return err
	}
	var opt error
	err = raw.Control(func(fd uintptr) {
		opt = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
	})
	if err = errors.Join(err, opt); err != nil {
		return fmt.Errorf("ignore own notifications of %s: %w", s.file.Name(), err)
	}
	return nil
}

// Receive waits for notifications. It may be called again after ErrOverrun. After Close
// it returns os.ErrClosed.
func (s *Subscription) Receive() ([]Notification, error) {
	n, nsid, from, err := s.recvmsg()
	switch {
	case s.closed.Load():
		return nil, os.ErrClosed // a raw connection returns a different error
	case errors.Is(err, unix.ENOBUFS):
		return nil, ErrOverrun
	case err != nil:
		return nil, fmt.Errorf("receive from %s: %w", s.file.Name(), err)
	}
	if sa, ok := from.(*unix.SockaddrNetlink); !ok || sa.Pid != 0 {
		return nil, nil // not from the kernel
	}
	msgs, err := syscall.ParseNetlinkMessage(s.buf[:n])
	if err != nil {
		return nil, fmt.Errorf("parse message of %s: %w", s.file.Name(), err)
	}
	news := make([]Notification, 0, len(msgs))
	for _, m := range msgs {
		news = append(news, Notification{Type: m.Header.Type, Port: m.Header.Pid, Data: m.Data, NSID: nsid})
	}
	return news, nil
}

func (s *Subscription) recvmsg() (n, nsid int, from unix.Sockaddr, err error) {
	raw, err := s.file.SyscallConn()
	if err != nil {
		return 0, 0, nil, err
	}
	var oob [64]byte
	var oobn int
	var inner error
	err = raw.Read(func(fd uintptr) bool {
		n, oobn, _, from, inner = unix.Recvmsg(int(fd), s.buf, oob[:], 0)
		return inner != unix.EAGAIN && inner != unix.EINTR
	})
	if inner != nil {
		return 0, 0, nil, inner
	}
	if err != nil {
		return 0, 0, nil, err
	}
	return n, parseNSID(oob[:oobn]), from, nil
}

// parseNSID returns the NSID that the kernel adds as ancillary data to messages from
// other namespaces, or OwnNetns.
func parseNSID(oob []byte) int {
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return OwnNetns
	}
	for _, m := range msgs {
		if m.Header.Level == unix.SOL_NETLINK && m.Header.Type == unix.NETLINK_LISTEN_ALL_NSID && len(m.Data) >= 4 {
			return int(int32(nativeEndian.Uint32(m.Data)))
		}
	}
	return OwnNetns
}

// Close ends the subscription and unblocks Receive.
func (s *Subscription) Close() error {
	s.closed.Store(true)
	return s.file.Close()
}

// Dump calls list again while the kernel reports that the table changed during the dump,
// at most five times.
func Dump[T any](list func() ([]T, error)) ([]T, error) {
	var res []T
	var err error
	for range 5 {
		res, err = list()
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return res, err
		}
	}
	// Notifications follow for entries that are missing or doubled now.
	return res, nil
}
