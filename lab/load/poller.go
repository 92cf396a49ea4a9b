package load

import (
	"fmt"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// poller is an epoll instance with timeouts finer than a millisecond
// (epoll_pwait2, Linux 5.11).
type poller struct {
	fd     int
	events [256]unix.EpollEvent
}

func newPoller() (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make epoll: %w", err)
	}
	return &poller{fd: fd}, nil
}

// add watches a socket, edge-triggered, for everything that can happen to it.
func (p *poller) add(fd int, slot, generation int32) error {
	ev := unix.EpollEvent{
		Events: unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET,
		Fd:     slot, Pad: generation,
	}
	return unix.EpollCtl(p.fd, unix.EPOLL_CTL_ADD, fd, &ev)
}

// wait returns events that are pending, or that arrive within d.
func (p *poller) wait(d time.Duration) ([]unix.EpollEvent, error) {
	ts := unix.NsecToTimespec(int64(max(d, 0)))
	n, _, errno := unix.Syscall6(unix.SYS_EPOLL_PWAIT2, uintptr(p.fd),
		uintptr(unsafe.Pointer(&p.events[0])), uintptr(len(p.events)),
		uintptr(unsafe.Pointer(&ts)), 0, 0)
	if errno == unix.EINTR {
		return nil, nil
	}
	if errno != 0 {
		return nil, errno
	}
	return p.events[:n], nil
}
