package attach

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

// facts are what a test's cluster says about addresses.
type facts struct {
	mu   sync.Mutex
	said map[netip.Addr]Fact
}

func (f *facts) set(fact Fact, addrs ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.said == nil {
		f.said = make(map[netip.Addr]Fact)
	}
	for _, a := range addrs {
		f.said[addr(a)] = fact
	}
}

func (f *facts) get(a netip.Addr) Fact {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.said[a]
}

// node is a node with a bridge, an external device and an Attacher.
type node struct {
	a *Attacher
	l listener
	facts
	mu       sync.Mutex
	reported []Refusal

	firstReport time.Time
}

func newNode(t *testing.T, cfg Config) *node {
	t.Helper()
	enterNetns(t)
	addLink(t, &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "cni0", HardwareAddr: []byte{2, 0, 0, 0, 0, 1}}})
	addAddr(t, "cni0", "10.244.1.1/24")
	addAddr(t, "cni0", "2001:db8:1::1/64")
	addDummyNIC(t, "eth0", "192.0.2.1/24")
	addRoute(t, "0.0.0.0/0", "eth0")
	n := &node{}
	cfg.PinDir, cfg.OnPods, cfg.Facts = mountBPF(t), n.l.told, n.get
	cfg.OnRefused = func(r Refusal) {
		n.mu.Lock()
		defer n.mu.Unlock()
		if len(n.reported) == 0 {
			n.firstReport = time.Now()
		}
		n.reported = append(n.reported, r)
	}
	n.a = newAttacher(t, cfg)
	return n
}

func (n *node) sync(t *testing.T) {
	t.Helper()
	must.Do(t, n.a.Sync(context.Background()))
}

// bridged makes a pod at a port of the bridge.
func (n *node) bridged(t *testing.T, name string, addrs ...string) *pod {
	t.Helper()
	p := newPod(t, name)
	setMaster(t, name, "cni0")
	for _, a := range addrs {
		p.addAddr(t, a)
	}
	return p
}

// want checks who has which address: "10.244.1.2 veth1". An address that several
// announce and none has is "10.244.1.2 none". Refusals are "10.244.1.2 veth2 in_use".
func (n *node) want(pods, refused string) error {
	names := map[int]string{0: "none"}
	links, err := netlink.LinkList()
	if err != nil {
		return err
	}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
	}
	var have, no []string
	n.l.mu.Lock()
	for a, p := range n.l.pods {
		have = append(have, fmt.Sprintf("%s %s", a, names[p.Ifindex]))
	}
	n.l.mu.Unlock()
	for _, r := range n.a.Refused() {
		no = append(no, fmt.Sprintf("%s %s %s", r.Addr, r.Interface, string(r.Reason)))
	}
	slices.Sort(have)
	slices.Sort(no)
	if got := strings.Join(have, ", "); got != pods {
		return fmt.Errorf("pods: %s; want: %s", got, pods)
	}
	if got := strings.Join(no, ", "); got != refused {
		return fmt.Errorf("refused: %s; want: %s", got, refused)
	}
	return nil
}

// A pod adds an address to its own interface that is not its own.
func TestForgedAddressIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		addr string
		fact Fact
		want Reason
	}{
		"another pod of the bridge":              {"10.244.1.2", PodHere, reasonOtherPod},
		"another pod of the bridge, no object":   {"10.244.1.2", Unknown, reasonInUse},
		"a routed pod":                           {"10.244.2.2", PodHere, reasonNoRoute},
		"the node's address at its bridge":       {"10.244.1.1", Unknown, reasonNodeAddress},
		"the node's address, by the kernel":      {"192.0.2.1", Unknown, reasonNodeAddress},
		"the node's address, by the Node":        {"10.244.1.77", NodeAddress, reasonNodeAddress},
		"a Service's":                            {"10.244.1.78", ServiceAddress, reasonServiceAddress},
		"another node's":                         {"10.244.1.79", OtherNode, reasonOtherNode},
		"a pod's of another node":                {"10.244.1.80", PodElsewhere, reasonPodElsewhere},
		"in the podCIDR of another node":         {"10.244.1.81", OtherNodeRange, reasonOtherNodeRange},
		"in the podCIDR of another node, IPv6":   {"2001:db8:1::81", OtherNodeRange, reasonOtherNodeRange},
		"somewhere on the Internet":              {"198.51.100.1", Unknown, reasonNoRoute},
		"somewhere on the IPv6 Internet":         {"2001:db8:99::1", Unknown, reasonNoRoute},
		"of a Pod, by the interface of another":  {"10.244.1.82", PodHere, reasonOtherPod},
		"of a Pod, by that of another, and IPv6": {"2001:db8:1::82", PodHere, reasonOtherPod},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, Config{})
			n.bridged(t, "veth1", "10.244.1.2/24")
			forger := n.bridged(t, "veth2", "10.244.1.3/24", "2001:db8:1::3/64")
			newPod(t, "cali1").addAddr(t, "10.244.2.2/32")
			addRoute(t, "10.244.2.2/32", "cali1")
			n.set(PodHere, "10.244.1.3", "2001:db8:1::3")
			n.set(c.fact, c.addr)
			const honest = "10.244.1.2 veth1, 10.244.1.3 veth2, 10.244.2.2 cali1, 2001:db8:1::3 veth2"
			n.sync(t)
			must.Do(t, n.want(honest, ""))
			forged := c.addr + "/32"
			if addr(c.addr).Is6() {
				forged = c.addr + "/128"
			}
			forger.addAddr(t, forged)
			n.sync(t)
			must.Do(t, n.want(honest, c.addr+" veth2 "+string(c.want)))
			// By news alone, and not once more.
			forger.delAddr(t, forged)
			run(t, n.a)
			await.NoError(t, func() error { return n.want(honest, "") })
		})
	}
}

// A second address that no Pod object names is nothing to refuse.
func TestFurtherAddressIsBelieved(t *testing.T) {
	n := newNode(t, Config{})
	n.set(PodHere, "10.244.1.2", "2001:db8:1::2")
	n.bridged(t, "veth1", "10.244.1.2/24", "10.244.1.9/24", "2001:db8:1::2/64", "fe80::7/64", "169.254.7.7/16")
	n.sync(t)
	must.Do(t, n.want("10.244.1.2 veth1, 10.244.1.9 veth1, 2001:db8:1::2 veth1", ""))
}

// With a CNI that does not keep to podCIDRs, the node's route to the pod, or the Pod
// object, counts.
func TestPodCIDROfAnotherNodeIsNoProof(t *testing.T) {
	n := newNode(t, Config{})
	n.set(OtherNodeRange, "10.244.2.2")
	newPod(t, "cali1").addAddr(t, "10.244.2.2/32")
	addRoute(t, "10.244.2.0/26", "cali1") // a wide route makes the device external
	n.sync(t)
	must.Do(t, n.want("", ""))
	delRoute(t, "10.244.2.0/26", "cali1")
	addRoute(t, "10.244.2.2/32", "cali1")
	n.bridged(t, "veth1", "10.244.1.2/24")
	n.set(PodHere, "10.244.1.2")
	n.sync(t)
	must.Do(t, n.want("10.244.1.2 veth1, 10.244.2.2 cali1", ""))
}

func TestOwnerKeepsItsAddress(t *testing.T) {
	n := newNode(t, Config{})
	n.bridged(t, "veth2") // older, but without the address
	victim := n.bridged(t, "veth3", "10.244.1.2/24")
	n.sync(t)
	run(t, n.a)
	must.Do(t, n.want("10.244.1.2 veth3", ""))

	newcomer := n.bridged(t, "veth4", "10.244.1.2/24")
	await.NoError(t, func() error { return n.want("10.244.1.2 veth3", "10.244.1.2 veth4 in_use") })
	n.set(PodHere, "10.244.1.2")
	n.a.NoteFacts()
	n.bridged(t, "veth5", "10.244.1.3/24") // is examined together with the facts, or later
	await.NoError(t, func() error { return n.want("10.244.1.2 veth3, 10.244.1.3 veth5", "10.244.1.2 veth4 in_use") })
	delLink(t, "veth5")

	// The owner releases the address, and the next device gets it.
	victim.delAddr(t, "10.244.1.2/24")
	await.NoError(t, func() error { return n.want("10.244.1.2 veth4", "") })
	victim.addAddr(t, "10.244.1.2/24")
	await.NoError(t, func() error { return n.want("10.244.1.2 veth4", "10.244.1.2 veth3 in_use") })
	newcomer.delete()
	await.NoError(t, func() error { return n.want("10.244.1.2 veth3", "") })
}

// A CNI gives a deleted pod's address to the next pod.
func TestAddressIsReused(t *testing.T) {
	n := newNode(t, Config{})
	n.set(PodHere, "10.244.1.2")
	old := n.bridged(t, "veth1", "10.244.1.2/24")
	n.sync(t)
	run(t, n.a)
	for i := range 3 {
		old.delete()
		name := fmt.Sprintf("veth%d", i+2)
		old = n.bridged(t, name, "10.244.1.2/24")
		await.NoError(t, func() error { return n.want("10.244.1.2 "+name, "") })
	}
}

// A pod takes an address that will be another pod's, and loses it when that Pod exists.
func TestAddressTakenInAdvance(t *testing.T) {
	n := newNode(t, Config{})
	n.set(PodHere, "10.244.1.2")
	squatter := n.bridged(t, "veth1", "10.244.1.2/24", "10.244.1.5/32")
	n.sync(t)
	run(t, n.a)
	must.Do(t, n.want("10.244.1.2 veth1, 10.244.1.5 veth1", ""))
	squatter.delAddr(t, "10.244.1.2/24") // it stays the interface of that Pod
	await.NoError(t, func() error { return n.want("10.244.1.5 veth1", "") })
	n.bridged(t, "veth2", "10.244.1.5/24")
	await.NoError(t, func() error { return n.want("10.244.1.5 veth1", "10.244.1.5 veth2 in_use") })
	n.set(PodHere, "10.244.1.5")
	n.a.NoteFacts()
	await.NoError(t, func() error { return n.want("10.244.1.5 veth2", "10.244.1.5 veth1 other_pod") })
}

// The cluster's facts are news of their own.
func TestNewFactsAreEnough(t *testing.T) {
	n := newNode(t, Config{})
	n.bridged(t, "veth1", "10.244.1.2/24")
	n.sync(t)
	must.Do(t, n.want("10.244.1.2 veth1", ""))
	n.a.events.flush()
	n.set(ServiceAddress, "10.244.1.2")
	n.a.NoteFacts()
	n.a.pass(false)
	n.a.podPass()
	must.Do(t, n.want("", "10.244.1.2 veth1 service_address"))
}

// The address that a pod has first is its own, whatever is added later and however
// late the Pod objects are known.
func TestFirstAddressIsThePods(t *testing.T) {
	n := newNode(t, Config{})
	n.bridged(t, "veth1", "10.244.1.7/24", "10.244.1.5/32")
	n.sync(t)
	must.Do(t, n.want("10.244.1.5 veth1, 10.244.1.7 veth1", ""))
	n.set(PodHere, "10.244.1.5", "10.244.1.7")
	n.sync(t)
	must.Do(t, n.want("10.244.1.7 veth1", "10.244.1.5 veth1 other_pod"))
}

// Without a Pod object nothing says which of two ports of a bridge is right.
func TestContestedAddressIsNobodys(t *testing.T) {
	n := newNode(t, Config{})
	first := n.bridged(t, "veth1", "10.244.1.2/24")
	n.bridged(t, "veth2", "10.244.1.2/24")
	n.sync(t)
	must.Do(t, n.want("10.244.1.2 none", "10.244.1.2 veth1 contested, 10.244.1.2 veth2 contested"))
	n.set(PodHere, "10.244.1.2")
	n.sync(t)
	must.Do(t, n.want("10.244.1.2 veth1", "10.244.1.2 veth2 in_use"))
	first.delete()
	run(t, n.a)
	await.NoError(t, func() error { return n.want("10.244.1.2 veth2", "") })
}

// sendARP sends an ARP request as the address would, in a frame of its own.
func (p *pod) sendARP(t *testing.T, sender, target string) {
	t.Helper()
	mac := p.mac(t)
	frame := slices.Concat([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, mac, []byte{0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1},
		mac, addr(sender).AsSlice(), make([]byte, 6), addr(target).AsSlice())
	must.Do(t, inNetns(p.ns, func() error {
		eth0, err := p.h.LinkByName("eth0")
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		proto := binary.NativeEndian.Uint16([]byte{0x08, 0x06})
		return unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: eth0.Attrs().Index, Protocol: proto, Halen: 6})
	}))
}

// A virtual machine is known by what it says of itself, in one frame.
func TestForgedNeighbor(t *testing.T) {
	n := newNode(t, Config{})
	// Else the kernel believes no second message within a second.
	must.Do(t, os.WriteFile("/proc/sys/net/ipv4/neigh/cni0/locktime", []byte("0"), 0o644))
	vm, forger := n.bridged(t, "tap1"), n.bridged(t, "tap2")
	n.bridged(t, "veth1", "10.244.1.2/24")
	n.set(ServiceAddress, "10.244.1.78")
	n.set(OtherNodeRange, "10.244.1.81")
	n.sync(t)
	run(t, n.a)
	vm.sendARP(t, "10.244.1.5", "10.244.1.1")
	await.NoError(t, func() error { return n.want("10.244.1.2 veth1, 10.244.1.5 tap1", "") })

	for _, c := range []struct {
		addr   string
		reason Reason
	}{
		{"10.244.1.2", reasonInUse}, {"10.244.1.5", reasonInUse}, {"10.244.1.78", reasonServiceAddress}, {"10.244.1.81", reasonOtherNodeRange},
	} {
		forger.sendARP(t, c.addr, "10.244.1.1")
		await.NoError(t, func() error {
			return n.want("10.244.1.2 veth1, 10.244.1.5 tap1", c.addr+" tap2 "+string(c.reason))
		})
		if got := podsOf(n.a)[addr("10.244.1.5")]; got.PodMAC.String() != vm.mac(t).String() {
			t.Errorf("%s: the machine's MAC is %s, want %s", c.addr, got.PodMAC, vm.mac(t))
		}
		dropNeighbor(t, c.addr)
		if c.addr == "10.244.1.5" {
			vm.sendARP(t, c.addr, "10.244.1.1")
		}
		await.NoError(t, func() error { return n.want("10.244.1.2 veth1, 10.244.1.5 tap1", "") })
	}

	// The kernel drops the neighbor, of itself or because there are too many.
	dropNeighbor(t, "10.244.1.5")
	await.NoError(t, func() error { return n.want("10.244.1.2 veth1", "") })
	forger.sendARP(t, "10.244.1.5", "10.244.1.1")
	await.NoError(t, func() error { return n.want("10.244.1.2 veth1, 10.244.1.5 none", "10.244.1.5 tap2 contested") })
	vm.delete()
	await.NoError(t, func() error { return n.want("10.244.1.2 veth1, 10.244.1.5 tap2", "") })
}

func dropNeighbor(t *testing.T, a string) {
	t.Helper()
	must.Do(t, netlink.NeighDel(&netlink.Neigh{LinkIndex: ifindex(t, "cni0"), IP: addr(a).AsSlice()}))
}

func TestRoutesDecide(t *testing.T) {
	n := newNode(t, Config{})
	one, two := newPod(t, "cali1"), newPod(t, "cali2")
	one.addAddr(t, "10.244.2.2/32")
	two.addAddr(t, "10.244.2.3/32")
	n.sync(t)
	run(t, n.a)
	must.Do(t, n.want("", "10.244.2.2 cali1 no_route, 10.244.2.3 cali2 no_route"))
	addRoute(t, "10.244.2.2/32", "cali1")
	addRoute(t, "10.244.2.3/32", "cali2")
	const both = "10.244.2.2 cali1, 10.244.2.3 cali2"
	await.NoError(t, func() error { return n.want(both, "") })
	// Moved, moved back, made the node's own, and gone.
	addRoute(t, "10.244.2.2/32", "cali2")
	await.NoError(t, func() error { return n.want("10.244.2.3 cali2", "10.244.2.2 cali1 no_route") })
	two.addAddr(t, "10.244.2.2/32")
	await.NoError(t, func() error { return n.want("10.244.2.2 cali2, 10.244.2.3 cali2", "10.244.2.2 cali1 no_route") })
	addRoute(t, "10.244.2.2/32", "cali1")
	two.delAddr(t, "10.244.2.2/32")
	await.NoError(t, func() error { return n.want(both, "") })
	addAddr(t, "lo", "10.244.2.2/32")
	await.NoError(t, func() error { return n.want("10.244.2.3 cali2", "10.244.2.2 cali1 node_address") })
	lo, err := netlink.LinkByName("lo")
	must.Do(t, err)
	must.Do(t, netlink.AddrDel(lo, parseCIDR(t, "10.244.2.2/32")))
	await.NoError(t, func() error { return n.want(both, "") })
	delRoute(t, "10.244.2.2/32", "cali1")
	await.NoError(t, func() error { return n.want("10.244.2.3 cali2", "10.244.2.2 cali1 no_route") })
	addRoute(t, "10.244.2.2/32", "cali1")
	await.NoError(t, func() error { return n.want(both, "") })

	// A rule that leads elsewhere.
	rule := netlink.NewRule()
	rule.Table, rule.Priority, rule.Dst = 100, 100, route(t, "10.244.2.2/32", "cali1").Dst
	elsewhere := route(t, "10.244.2.0/24", "eth0")
	elsewhere.Table = 100
	must.Do(t, netlink.RouteAdd(elsewhere))
	must.Do(t, netlink.RuleAdd(rule))
	await.NoError(t, func() error { return n.want("10.244.2.3 cali2", "10.244.2.2 cali1 no_route") })
	must.Do(t, netlink.RuleDel(rule))
	await.NoError(t, func() error { return n.want(both, "") })

	// The kernel removes the routes of a device that goes down without a word.
	l, err := netlink.LinkByName("cali1")
	must.Do(t, err)
	must.Do(t, netlink.LinkSetDown(l))
	await.NoError(t, func() error { return n.want("10.244.2.3 cali2", "10.244.2.2 cali1 no_route") })
	must.Do(t, netlink.LinkSetUp(l))
	addRoute(t, "10.244.2.2/32", "cali1")
	await.NoError(t, func() error { return n.want(both, "") })
}

// A pod in a VRF is routed by the VRF's table.
func TestRoutesOfVRF(t *testing.T) {
	n := newNode(t, Config{})
	if err := netlink.LinkAdd(&netlink.Vrf{LinkAttrs: netlink.LinkAttrs{Name: "red"}, Table: 77}); err != nil {
		t.Skipf("no VRF devices in this kernel: %v", err)
	}
	setUp(t, "red")
	newPod(t, "cali1").addAddr(t, "10.244.2.2/32")
	setMaster(t, "cali1", "red")
	n.sync(t)
	must.Do(t, n.want("", "10.244.2.2 cali1 no_route"))
	r := route(t, "10.244.2.2/32", "cali1")
	r.Table = 77
	must.Do(t, netlink.RouteReplace(r))
	n.sync(t)
	must.Do(t, n.want("10.244.2.2 cali1", ""))
}

func TestRestartKeepsOwners(t *testing.T) {
	n := newNode(t, Config{})
	n.bridged(t, "veth1", "10.244.1.2/24")
	n.sync(t)
	first := podsOf(n.a)
	n.a.Close()
	// While no agent runs, two others announce the address: one by ARP, the other is
	// the older interface by its index, which a pod cannot choose, but may have.
	addVeth(t, "veth2", 1000)
	setMaster(t, "veth2", "cni0")
	n.bridged(t, "veth3", "10.244.1.2/24")
	for _, c := range []struct {
		name   string
		owners map[netip.Addr]Pod
		want   string
	}{
		{"the owner is known", first, "10.244.1.2 veth1"},
		{"the newer one is the owner", map[netip.Addr]Pod{addr("10.244.1.2"): {Ifindex: ifindex(t, "veth3")}}, "10.244.1.2 veth3"},
		{"the owner is gone", map[netip.Addr]Pod{addr("10.244.1.2"): {Ifindex: 4711}}, "10.244.1.2 none"},
		{"the owner announces it no more", map[netip.Addr]Pod{addr("10.244.1.2"): {Ifindex: ifindex(t, "eth0")}}, "10.244.1.2 none"},
		{"no owner is known", nil, "10.244.1.2 none"},
	} {
		n.a = newAttacher(t, Config{PinDir: mountBPF(t), OnPods: n.l.told, Facts: n.get, Owners: c.owners})
		n.sync(t)
		refused := "10.244.1.2 veth1 contested, 10.244.1.2 veth3 contested"
		switch c.want {
		case "10.244.1.2 veth1":
			refused = "10.244.1.2 veth3 in_use"
		case "10.244.1.2 veth3":
			refused = "10.244.1.2 veth1 in_use"
		}
		if err := n.want(c.want, refused); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		n.a.Close()
	}
}

// The kernel is asked once for each address, however many events there are.
func TestPathsAreCached(t *testing.T) {
	n := newNode(t, Config{})
	for i := range 10 {
		n.bridged(t, fmt.Sprintf("veth%d", i), fmt.Sprintf("10.244.1.%d/24", i+2))
	}
	n.sync(t)
	asked := func() int {
		n.a.mu.Lock()
		defer n.a.mu.Unlock()
		return n.a.pods.paths.queries
	}
	before := asked()
	run(t, n.a)
	for i := range 10 {
		late := n.bridged(t, fmt.Sprintf("late%d", i))
		late.addAddr(t, fmt.Sprintf("10.244.1.%d/24", i+100))
		addRoute(t, fmt.Sprintf("198.51.100.%d/32", i), "eth0")
		n.a.NoteFacts()
		await.NoError(t, func() error {
			if len(podsOf(n.a)) != 11+i {
				return fmt.Errorf("%d pods", len(podsOf(n.a)))
			}
			return nil
		})
	}
	if got := asked() - before; got != 10 {
		t.Errorf("%d questions for 10 new addresses", got)
	}
	for i := range 10 {
		delLink(t, fmt.Sprintf("late%d", i))
		await.NoError(t, func() error {
			if len(podsOf(n.a)) != 19-i {
				return fmt.Errorf("%d pods", len(podsOf(n.a)))
			}
			return nil
		})
	}
	if got := asked() - before; got != 10 {
		t.Errorf("%d questions when pods went", got-10)
	}
}

func TestRefusalsAreReportedOnce(t *testing.T) {
	const reportAfter = 400 * time.Millisecond
	n := newNode(t, Config{ReportAfter: reportAfter})
	begun := time.Now()
	n.set(ServiceAddress, "10.244.1.78")
	p := n.bridged(t, "veth1", "10.244.1.2/24", "10.244.1.78/32")
	n.sync(t)
	run(t, n.a)
	reported := func() []Refusal {
		n.mu.Lock()
		defer n.mu.Unlock()
		return slices.Clone(n.reported)
	}
	want := Refusal{Addr: addr("10.244.1.78"), Ifindex: ifindex(t, "veth1"), Interface: "veth1", Reason: reasonServiceAddress}
	await.NoError(t, func() error {
		if got := reported(); len(got) != 1 || got[0] != want {
			return fmt.Errorf("reported %v, want %v", got, want)
		}
		return nil
	})
	n.mu.Lock()
	if after := n.firstReport.Sub(begun); after < reportAfter {
		t.Errorf("reported after %v, want %v at least", after, reportAfter)
	}
	n.mu.Unlock()
	// An IPv6 address that the pod has made itself is no reason to report anything.
	eth0, err := p.h.LinkByName("eth0")
	must.Do(t, err)
	slaac := parseCIDR(t, "2001:db8:99::7/64")
	slaac.ValidLft, slaac.PreferedLft = 3600, 3600
	must.Do(t, p.h.AddrAdd(eth0, slaac))
	await.NoError(t, func() error {
		return n.want("10.244.1.2 veth1", "10.244.1.78 veth1 service_address, 2001:db8:99::7 veth1 no_route")
	})
	// The next refusal is reported after it would have been.
	refuse := func(device string) Refusal {
		n.bridged(t, device, "10.244.1.78/32")
		return Refusal{Addr: addr("10.244.1.78"), Ifindex: ifindex(t, device), Interface: device, Reason: reasonServiceAddress}
	}
	wantReported := func(want Refusal, count int) {
		t.Helper()
		await.True(t, "the next report", func() bool { return slices.Contains(reported(), want) })
		if got := reported(); len(got) != count {
			t.Errorf("reported %v, want %d", got, count)
		}
	}
	wantReported(refuse("veth2"), 2)
	// One pod cannot fill the log.
	for i := range 2 * maxReports {
		p.addAddr(t, fmt.Sprintf("198.51.100.%d/32", i))
	}
	await.NoError(t, func() error {
		if got := reported(); len(got) != maxReports+1 || !got[maxReports].Last {
			return fmt.Errorf("reported %d, want %d", len(got), maxReports+1)
		}
		return nil
	})
	wantReported(refuse("veth3"), maxReports+2)
}

// One pod cannot fill the maps.
func TestTooManyAddresses(t *testing.T) {
	n := newNode(t, Config{})
	p := n.bridged(t, "veth1", "10.244.1.2/24")
	n.set(PodHere, "10.244.1.2")
	for i := range maxUnnamed + 44 {
		p.addAddr(t, fmt.Sprintf("2001:db8:1::%x/128", i+2))
	}
	n.sync(t)
	if got := len(podsOf(n.a)); got != maxUnnamed+1 {
		t.Errorf("%d addresses, want %d", got, maxUnnamed+1)
	}
	if got := n.a.Refused(); len(got) != 44 || got[0].Reason != reasonTooMany {
		t.Errorf("%d refused, want 44: %v", len(got), got)
	}
}
