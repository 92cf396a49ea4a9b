package trace

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"path/filepath"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel"
)

// clientKind says where the connection begins.
type clientKind string

const (
	podClient     clientKind = "pod"     // a pod of this node, with a network of its own
	nodeClient    clientKind = "node"    // a process on the node's network
	outsideClient clientKind = "outside" // another machine, or a pod of another node
)

// client is where the connection begins.
type client struct {
	kind    clientKind
	ifindex int    // of the device by which its packets arrive
	device  string // its name
	route   string // how the device was found
	ns      *conntrack.Namespace
	cgroup  string // directory of the cgroup of one of its processes; "" if unknown
	pid     int
	hooks   bool // its sockets pass the socket hooks
	cookie  uint64
}

// findClient finds the client's device, network namespace and cgroup.
func (t *tracer) findClient() error {
	served := attach.ServedCgroup(t.BPFFS)
	t.cgroups = kernel.FindCgroupTree()
	if own, _ := t.view.NodeAddr(t.From.Addr); own || t.From.Addr.IsLoopback() {
		t.client = client{kind: nodeClient}
		t.client.cgroup = t.cgroups.ByID(served.ID)
		t.client.hooks = t.client.cgroup != "" && len(served.Hooks) > 0
		t.Client = string(nodeClient)
		t.client.cookie = t.view.Netns().Cookie
		return nil
	}
	if pod := t.view.Pod(t.From.Addr); pod != nil {
		t.client = client{kind: podClient, ifindex: pod.Ifindex, route: "entry of the map pods"}
		t.Client = string(podClient)
		t.findProcess(served)
	} else {
		t.client = client{kind: outsideClient}
		t.Client = string(outsideClient)
		if err := t.findDevice(); err != nil {
			return err
		}
	}
	return t.inside(func() error {
		dev, err := net.InterfaceByIndex(t.client.ifindex)
		if err != nil {
			return fmt.Errorf("find device %d of %s: %w", t.client.ifindex, t.From, err)
		}
		t.client.device = dev.Name
		return nil
	})
}

// findDevice finds the device by which an outside client's packets arrive: that of the
// route back to it.
func (t *tracer) findDevice() error {
	return t.inside(func() error {
		routes, err := netlink.RouteGet(t.From.Addr.AsSlice())
		if err != nil {
			return fmt.Errorf("find the device towards %s: %w: this node has no route to the client", t.From, err)
		}
		for _, r := range routes {
			if r.LinkIndex > 0 {
				t.client.ifindex, t.client.route = r.LinkIndex, "the node's route to the client"
				return nil
			}
		}
		return fmt.Errorf("find the device towards %s: this node has no route to the client", t.From)
	})
}

// findProcess finds the namespace of a pod, and a process in it; one that passes the socket
// hooks if there is one.
func (t *tracer) findProcess(served attach.Cgroup) {
	if t.client.ns = t.peerNamespace(t.client.ifindex); t.client.ns == nil {
		t.note("The pod's network namespace is not visible here (run with hostPID): its socket hooks and the probe are left out.")
		return
	}
	t.client.cookie = drops.Cookie(*t.client.ns)
	for _, pid := range processesIn(t.client.ns.Inode) {
		dir := t.cgroups.Of(pid)
		hooks := t.view.Hooked(served, &t.cgroups, dir)
		if t.client.pid == 0 || hooks && !t.client.hooks {
			t.client.pid, t.client.cgroup, t.client.hooks = pid, dir, hooks
		}
	}
	if t.client.cgroup == "" && len(served.Hooks) > 0 {
		t.note("The cgroup of the pod's processes is not visible here (run with hostPID): the connection is traced as if no socket hook saw it.")
	}
}

// peerNamespace returns the network namespace of the other end of a device; nil if it is not
// visible. The pod's address does not tell: another namespace of the machine may have it.
func (t *tracer) peerNamespace(ifindex int) *conntrack.Namespace {
	ids := t.peerIDs()
	list, _ := conntrack.Namespaces() // a namespace that cannot be read counts as missing
	for i := range list {
		if id, known := ids[ifindex]; known && t.netnsID(list[i]) == id {
			return &list[i]
		}
	}
	return nil
}

// peerIDs returns the ids of the network namespaces of the other ends of devices, by the
// index of the device in the instance's namespace.
func (t *tracer) peerIDs() map[int]int {
	ids := map[int]int{}
	_ = t.inside(func() error {
		links, err := netlink.LinkList()
		for _, l := range links {
			if id := l.Attrs().NetNsID; id >= 0 {
				ids[l.Attrs().Index] = id
			}
		}
		return err
	})
	return ids
}

// netnsID returns the id by which the instance's namespace knows another, -1 for none.
func (t *tracer) netnsID(n conntrack.Namespace) int {
	var ns netns.NsHandle
	err := n.Enter(func() (err error) {
		ns, err = netns.Get()
		return err
	})
	if err != nil {
		return -1
	}
	defer ns.Close()
	id := -1
	_ = t.inside(func() (err error) {
		id, err = netlink.GetNetNsIdByFd(int(ns))
		return err
	})
	return id
}

// processesIn lists the processes in a network namespace.
func processesIn(inode uint64) (pids []int) {
	paths, _ := filepath.Glob("/proc/[0-9]*/ns/net")
	for _, path := range paths {
		var st unix.Stat_t
		var pid int
		if unix.Stat(path, &st) != nil || st.Ino != inode {
			continue
		}
		if _, err := fmt.Sscanf(path, "/proc/%d/", &pid); err == nil {
			pids = append(pids, pid)
		}
	}
	slices.Sort(pids)
	return pids
}

// choosePort returns the source port: the requested one, or one that neither a flow nor a socket of the
// client has.
func (t *tracer) choosePort() uint16 {
	if t.SourcePort != 0 {
		return t.SourcePort
	}
	return freePort(func(port uint16) bool {
		return t.view.Flow(t.Protocol, netip.AddrPortFrom(t.From.Addr, port), t.to()) == nil && t.canBind(port)
	})
}

// canBind reports whether a socket of the client can have the port; true where the client's namespace is not
// known.
func (t *tracer) canBind(port uint16) bool {
	if t.client.kind == outsideClient || t.client.kind == podClient && t.client.ns == nil {
		return true
	}
	err := t.insideClient(func() error {
		r := t.request(port)
		fd, err := r.socket()
		if err == nil {
			unix.Close(fd)
		}
		return err
	})
	return !errors.Is(err, unix.EADDRINUSE)
}

// freePort returns a random port of Linux's default range that is free, if it finds one.
func freePort(free func(uint16) bool) (port uint16) {
	const first, last, tries = 32768, 60999, 64
	for range tries {
		if port = uint16(first + rand.IntN(last-first+1)); free(port) {
			break
		}
	}
	return port
}

// hook is the tc hook at which the client's packets arrive.
func (c *client) hook() inspect.Hook {
	if c.kind == podClient {
		return inspect.FromPod
	}
	return inspect.FromNetwork
}
