package files

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// floodFrom sends a request from each of many ports of the calling thread's
// namespace, and waits for no answer.
func floodFrom(to netip.AddrPort, count int) error {
	dst := &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}
	for i := range count {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("flood: %w", err)
		}
		// Ports in turn: what the kernel hands out by itself comes again too soon.
		err = unix.Bind(fd, &unix.SockaddrInet4{Port: 10_000 + i%50_000})
		if err == nil {
			err = unix.Sendto(fd, request("flood"), 0, dst)
		}
		unix.Close(fd)
		if err != nil && err != unix.EADDRINUSE && err != unix.ECONNREFUSED && err != unix.ENOBUFS {
			return fmt.Errorf("flood: %w", err)
		}
	}
	return nil
}
