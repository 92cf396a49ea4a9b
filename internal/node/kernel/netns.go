package kernel

import (
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Do runs f in the network namespace ns, on a separate thread if necessary, and returns
// f's error. f must not start goroutines that rely on the namespace.
func Do(ns netns.NsHandle, f func() error) error {
	if cur, err := netns.Get(); err == nil {
		same := cur.Equal(ns)
		cur.Close()
		if same {
			// Only a locked thread is sure to stay in its namespace.
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			if again, err := netns.Get(); err == nil {
				still := again.Equal(ns)
				again.Close()
				if still {
					return f()
				}
			}
		}
	}
	done := make(chan error, 1)
	go func() { done <- doOnOwnThread(ns, f) }()
	return <-done
}

// doOnOwnThread keeps the thread locked if it cannot return to its namespace. The thread
// then ends with the goroutine, and no other goroutine runs in the wrong namespace.
func doOnOwnThread(ns netns.NsHandle, f func() error) error {
	runtime.LockOSThread()
	home, err := netns.Get()
	if err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("open own network namespace: %w", err)
	}
	defer home.Close()
	if err := netns.Set(ns); err != nil {
		runtime.UnlockOSThread()
		return fmt.Errorf("enter network namespace: %w", err)
	}
	err = f()
	if back := netns.Set(home); back != nil {
		return errors.Join(err, fmt.Errorf("leave network namespace: %w", back))
	}
	runtime.UnlockOSThread()
	return err
}

// netnsPath converts the name of a network namespace into a path. A path stays, a number
// is a process id, and any other text is a name of "ip netns".
func netnsPath(name string) string {
	if strings.Contains(name, "/") {
		return name
	}
	if pid, err := strconv.Atoi(name); err == nil && pid > 0 {
		return fmt.Sprintf("/proc/%d/ns/net", pid)
	}
	return filepath.Join("/run/netns", name)
}

// OpenNetns opens a network namespace by path, process id or name (see
// netnsPath). The caller closes the handle.
func OpenNetns(name string) (netns.NsHandle, error) {
	h, err := netns.GetFromPath(netnsPath(name))
	if err != nil {
		return netns.None(), fmt.Errorf("open network namespace %s: %w", name, err)
	}
	return h, nil
}

// NetnsID identifies a network namespace.
type NetnsID struct {
	// Cookie is that of NetnsCookie.
	Cookie uint64
	// Inode is the number that "readlink /proc/PID/ns/net" shows. A new namespace may
	// reuse the number of a deleted one.
	Inode uint64
}

// String is the namespace as readlink shows it: "net:[4026531840]".
func (id NetnsID) String() string { return fmt.Sprintf("net:[%d]", id.Inode) }

// CurrentNetns returns the calling thread's network namespace.
func CurrentNetns() (NetnsID, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &st); err != nil {
		return NetnsID{}, fmt.Errorf("read own network namespace: %w", err)
	}
	cookie, err := NetnsCookie()
	return NetnsID{Cookie: cookie, Inode: st.Ino}, err
}

// FindNetns returns a path of a network namespace: of "ip netns" or of a process. It
// returns "" if neither is visible; the namespace is then most likely deleted.
func FindNetns(id NetnsID) string {
	var own unix.Stat_t
	if unix.Stat("/proc/thread-self/ns/net", &own) != nil {
		return ""
	}
	for _, pattern := range []string{netnsPath("*"), "/proc/[0-9]*/ns/net"} {
		paths, _ := filepath.Glob(pattern)
		for _, path := range paths {
			var st unix.Stat_t
			if unix.Stat(path, &st) == nil && st.Dev == own.Dev && st.Ino == id.Inode && cookieAt(path) == id.Cookie {
				return path
			}
		}
	}
	return ""
}

// cookieAt returns the cookie of the namespace at path, 0 if it cannot be entered.
func cookieAt(path string) (cookie uint64) {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return 0
	}
	defer ns.Close()
	_ = Do(ns, func() (err error) {
		cookie, err = NetnsCookie()
		return err
	})
	return cookie
}

// NetnsCookie returns the number of the calling thread's network namespace in BPF
// programs (bpf_get_netns_cookie). The kernel does not reuse it until a reboot.
func NetnsCookie() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("read netns cookie: %w", err)
	}
	defer unix.Close(fd)
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("read netns cookie (needs Linux 5.14): %w", err)
	}
	return cookie, nil
}
