package drops

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel"
)

// Pod is a pod as the kernel knows it.
type Pod struct {
	Name string
	// Namespaces are its network namespaces: one, or none if it is on another node.
	Namespaces []conntrack.Namespace
	Addresses  []netip.Addr
}

// FindPod finds a pod by its address. On this node it also finds a pod by its name (its
// processes' host name), and by the name or a process of its network namespace. An
// address need not belong to a pod. Namespaces that pods made count only where no other has the
// address.
func FindPod(want string, list []conntrack.Namespace) (Pod, error) {
	p := Pod{Name: want}
	addr, err := netip.ParseAddr(want)
	byAddr := err == nil
	if byAddr {
		p.Addresses = []netip.Addr{addr.Unmap()}
	}
	for _, n := range list {
		if n.Own {
			continue // a node's own is no pod's
		}
		addrs := addressesOf(n)
		switch {
		case byAddr && !slices.Contains(addrs, addr.Unmap()):
		case !byAddr && want != hostName(n) && !n.Is(want):
		default:
			p.Namespaces = append(p.Namespaces, n)
			if !byAddr {
				p.Addresses = append(p.Addresses, addrs...)
			}
		}
	}
	if slices.ContainsFunc(p.Namespaces, madeByRuntime) {
		p.Namespaces = slices.DeleteFunc(p.Namespaces, func(n conntrack.Namespace) bool { return byAddr && !madeByRuntime(n) })
	}
	if !byAddr && len(p.Namespaces) == 0 {
		return p, fmt.Errorf("%s: no pod of this node has that name: use its address", want)
	}
	return p, nil
}

// addressesOf returns the addresses of a namespace that other hosts may use.
func addressesOf(n conntrack.Namespace) (list []netip.Addr) {
	_ = n.Enter(func() error {
		addrs, err := net.InterfaceAddrs()
		for _, a := range addrs {
			prefix, err := netip.ParsePrefix(a.String())
			if err == nil && !prefix.Addr().IsLoopback() && !prefix.Addr().IsLinkLocalUnicast() {
				list = append(list, prefix.Addr().Unmap())
			}
		}
		return err
	})
	return list
}

// madeByRuntime reports whether a container runtime made a network namespace, and not a pod: root has
// bound it to a name, or it belongs to the user namespace of the caller's.
func madeByRuntime(n conntrack.Namespace) bool {
	return len(n.Names) > 0 || owner(fmt.Sprintf("/proc/%d/ns/net", n.PID)) == owner("/proc/thread-self/ns/net")
}

// owner returns the inode of the user namespace that a namespace belongs to; 0 if that is above the
// caller's.
func owner(path string) uint64 {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0
	}
	defer unix.Close(fd)
	user, err := unix.IoctlRetInt(fd, unix.NS_GET_USERNS)
	if err != nil {
		return 0
	}
	defer unix.Close(user)
	var st unix.Stat_t
	if unix.Fstat(user, &st) != nil {
		return 0
	}
	return st.Ino
}

// hostName returns the host name of the first process of a namespace if it differs from this
// process's: for a pod's process it is the pod's name. Else it is "", also for a name that the pod
// itself may have chosen: in a namespace that it made, or in a user namespace of its own.
func hostName(n conntrack.Namespace) string {
	path := fmt.Sprintf("/proc/%d/ns/uts", n.PID)
	theirs, err := os.Readlink(path)
	own, ownErr := os.Readlink(ownUTS)
	if err != nil || ownErr != nil || theirs == own || !madeByRuntime(n) || owner(path) != owner(fmt.Sprintf("/proc/%d/ns/net", n.PID)) {
		return ""
	}
	name := make(chan string, 1)
	go func() { name <- hostNameBehind(path) }()
	return <-name
}

const ownUTS = "/proc/thread-self/ns/uts"

// hostNameBehind keeps the thread locked if it cannot return to its namespace. The thread
// then ends with the goroutine, and no other goroutine runs in the wrong namespace.
func hostNameBehind(path string) string {
	runtime.LockOSThread()
	home, err := unix.Open(ownUTS, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(home)
	there, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(there)
	var u unix.Utsname
	if unix.Setns(there, unix.CLONE_NEWUTS) != nil || unix.Uname(&u) != nil || unix.Setns(home, unix.CLONE_NEWUTS) != nil {
		return ""
	}
	runtime.UnlockOSThread()
	name, _, _ := strings.Cut(string(u.Nodename[:]), "\x00")
	return name
}

// Cookie is the kernel's number of a network namespace. The kernel does not reuse it
// while the machine runs, unlike inodes. It is 0 if the namespace was deleted.
func Cookie(n conntrack.Namespace) (cookie uint64) {
	_ = n.Enter(func() (err error) {
		cookie, err = kernel.NetnsCookie()
		return err
	})
	return cookie
}

// places maps cookies to network namespaces, and tracks interfaces.
type places struct {
	list   func() ([]conntrack.Namespace, error)
	known  map[uint64]place
	devs   map[deviceKey]string
	looked time.Time     // when the last look ended
	took   time.Duration // of the last look
}

type place struct {
	conntrack.Namespace
	cookie uint64
	pod    string
}

// enter is Namespace.Enter, except if another namespace has the path and the inode now.
func (p place) enter(f func() error) error {
	return p.Enter(func() error {
		if cookie, err := kernel.NetnsCookie(); err != nil || cookie != p.cookie {
			return fmt.Errorf("enter network namespace %s: %w", p, os.ErrNotExist)
		}
		return f()
	})
}

type deviceKey struct {
	cookie uint64
	index  uint32
}

const (
	// refreshInterval is how often unknown namespaces are looked for, at most lookShare of the time.
	refreshInterval = time.Second
	lookShare       = 10
	// maxPlaces is the number of devices, and of namespaces if some of them are deleted, that are kept.
	maxPlaces = 4096
)

func newPlaces(list func() ([]conntrack.Namespace, error)) *places {
	p := &places{list: list, known: map[uint64]place{}, devs: map[deviceKey]string{}}
	p.refresh()
	return p
}

// refresh lists the namespaces. It keeps deleted ones, whose last drops may still arrive, up to
// maxPlaces.
func (p *places) refresh() {
	begin := time.Now()
	defer func() { p.looked, p.took = time.Now(), time.Since(begin) }()
	found, _ := p.list() // an unreadable namespace is named by its number
	if len(p.known) > maxPlaces {
		clear(p.known)
	}
	for _, n := range found {
		cookie := Cookie(n)
		if old, ok := p.known[cookie]; cookie != 0 && (!ok || n.String() != old.String()) {
			p.known[cookie] = place{n, cookie, hostName(n)}
		}
	}
}

// at finds a namespace by its cookie, also a new one.
func (p *places) at(cookie uint64) (place, bool) {
	n, ok := p.known[cookie]
	if !ok && cookie != 0 && time.Since(p.looked) > max(refreshInterval, lookShare*p.took) {
		p.refresh()
		n, ok = p.known[cookie]
	}
	return n, ok
}

// fill adds names to the numbers in a Drop's place.
func (p *places) fill(to *Place, cookie, inode uint64, index uint32) {
	n, ok := p.at(cookie)
	to.Inode, to.cookie = inode, cookie
	switch {
	case ok:
		to.Namespace, to.Pod = n.String(), n.pod
	case inode == 0:
		to.Namespace = "(unknown)"
	default:
		to.Namespace = fmt.Sprintf("net:[%d]", inode)
	}
	if to.Interface == "" && to.Out == "" && index != 0 && ok {
		to.Interface = p.device(n, index)
	}
}

// device is the name of an interface by its index.
func (p *places) device(n place, index uint32) string {
	key := deviceKey{n.cookie, index}
	if name, ok := p.devs[key]; ok {
		return name
	}
	name := fmt.Sprintf("if%d", index)
	_ = n.enter(func() error {
		dev, err := net.InterfaceByIndex(int(index))
		if err == nil {
			name = dev.Name
		}
		return err
	})
	if len(p.devs) >= maxPlaces {
		clear(p.devs)
	}
	p.devs[key] = name
	return name
}

// Pods returns the pods of this machine: network namespaces whose first process has a
// host name of its own.
func Pods(list []conntrack.Namespace) (pods []Pod) {
	for _, n := range list {
		if n.Own {
			continue
		}
		if name := hostName(n); name != "" {
			pods = append(pods, Pod{Name: name, Namespaces: []conntrack.Namespace{n}, Addresses: addressesOf(n)})
		}
	}
	return pods
}
