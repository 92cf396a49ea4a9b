package kernel

import (
	"errors"
	"net/netip"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// A socket ends only if its cookie is given, too: another may have its addresses by now.
func TestSocketDestroyComparesTheCookie(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: ends a socket")
	}
	if err := ProbeSocketDestroy(); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	lo := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: lo.As4()}),
		unix.Connect(fd, &unix.SockaddrInet4{Addr: lo.As4(), Port: 9})); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_COOKIE)
	if err != nil {
		t.Fatal(err)
	}
	d, err := OpenSocketDestroyer()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	s := Socket{Protocol: unix.IPPROTO_UDP, Local: netip.AddrPortFrom(lo, uint16(name.(*unix.SockaddrInet4).Port)),
		Peer: netip.AddrPortFrom(lo, 9), Cookie: cookie + 1}
	if err := d.Destroy(s); err == nil {
		t.Error("a socket with another cookie has ended")
	}
	if err := d.Destroy(Socket{Protocol: s.Protocol, Local: s.Local, Peer: netip.AddrPortFrom(lo, 10), Cookie: cookie}); err == nil {
		t.Error("a socket with another peer has ended")
	}
	if soft, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || soft != 0 {
		t.Errorf("error of the socket: %d, %v", soft, err)
	}
	s.Cookie = cookie
	if err := d.Destroy(s); err != nil {
		t.Error(err)
	}
	if soft, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil || unix.Errno(soft) != unix.ECONNABORTED {
		t.Errorf("error of the socket: %d, %v", soft, err)
	}
}
