package ebpf

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/must"
)

// The tests in packet_*_test.go give single packets to the tc programs by
// BPF_PROG_RUN and look at what comes out. The programs believe they run on
// this node, whose interfaces lead nowhere:
//
//	clients, gateway ── eth0 (MTU 1500)   pod1, pod2 ── pods of this node
//	pods elsewhere ──── tun0 (MTU 1400)
const (
	mtuEth0 = 1500
	mtuTun0 = 1400
)

// plan is the address plan of one family.
type plan struct {
	family                        model.Family
	client, client2               netip.Addr // behind the gateway
	gateway, router               netip.Addr
	eth0, tun0                    netip.Addr // the node's own
	clusterIP, externalIP         netip.Addr
	pod1, pod2, far, far2, farGW  netip.Addr // far: on another node, by tun0
	eth0Net, tun0Net, farNet, all string
}

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

var plans = map[string]*plan{
	"IPv4": {
		family: model.IPv4,
		client: addr("203.0.113.10"), client2: addr("203.0.113.11"),
		gateway: addr("192.0.2.254"), router: addr("198.51.100.77"),
		eth0: addr("192.0.2.1"), tun0: addr("10.244.0.0"),
		clusterIP: addr("10.96.0.10"), externalIP: addr("198.51.100.5"),
		pod1: addr("10.244.0.5"), pod2: addr("10.244.0.6"),
		far: addr("10.244.1.5"), far2: addr("10.244.1.6"), farGW: addr("10.244.1.0"),
		eth0Net: "192.0.2.1/24", tun0Net: "10.244.0.0/32", farNet: "10.244.1.0/24", all: "0.0.0.0/0",
	},
	"IPv6": {
		family: model.IPv6,
		client: addr("2001:db8:c::10"), client2: addr("2001:db8:c::11"),
		gateway: addr("2001:db8:1::fe"), router: addr("2001:db8:77::77"),
		eth0: addr("2001:db8:1::1"), tun0: addr("fd00:10:244::1"),
		clusterIP: addr("fd00:10:96::a"), externalIP: addr("2001:db8:e::5"),
		pod1: addr("fd00:10:244::5"), pod2: addr("fd00:10:244::6"),
		far: addr("fd00:10:244:1::5"), far2: addr("fd00:10:244:1::6"), farGW: addr("fd00:10:244:1::1"),
		eth0Net: "2001:db8:1::1/64", tun0Net: "fd00:10:244::1/128", farNet: "fd00:10:244:1::/64", all: "::/0",
	},
}

// eachFamily runs a test in both address families; flows do not survive it.
func eachFamily(t *testing.T, n *packetNode, f func(t *testing.T, p *plan)) {
	for _, name := range []string{"IPv4", "IPv6"} {
		t.Run(name, func(t *testing.T) {
			n.forget(t)
			f(t, plans[name])
		})
	}
}

// packetNode is a node that has programs and maps but no network.
type packetNode struct {
	*Backend
	// key, and what makes the node that of a later test; see nodePool.
	key           string
	bpffs         string
	described     map[string]mapContent // of maps, after describe
	network, pins []string
	spent         bool // the test has changed what the pool does not compare

	calls   chan func()    // for the one thread that is in the namespace
	ended   sync.WaitGroup // for that thread
	ns      netns.NsHandle
	cpu     unix.CPUSet
	inside  bool // the caller is in the namespace itself
	ifindex map[string]int
	mac     map[string]net.HardwareAddr
	last    []uint64 // counters after the last packet; nil: others may have come
	live    bool     // programs are attached, so that packets come by themselves
	// freshened is when tc last got a frame of the flow freshFor, which XDP may send since.
	freshened time.Time
	freshFor  objects.TCTuple
	// checksComplete: the kernel knows testChecksumComplete.
	checksComplete bool
}

// do runs f in the node's network namespace, and always on the same CPU.
func (n *packetNode) do(f func()) {
	if n.inside {
		f()
		return
	}
	done := make(chan struct{})
	n.calls <- func() { defer close(done); f() }
	<-done
}

// newPacketNode returns a node for the test alone, with nothing in its maps but what describe writes.
// It has no socket hooks.
func newPacketNode(t testing.TB, change ...func(*Config)) *packetNode {
	t.Helper()
	return newNode(t, ebpf.CGroupSockAddr, change...)
}

// newNode returns a node whose programs of one type do nothing.
func newNode(t testing.TB, unused ebpf.ProgramType, change ...func(*Config)) *packetNode {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a network namespace and loads BPF programs")
	}
	cfg := Config{CgroupRoot: "/sys/fs/cgroup", FlowTableSize: 8192, MaxFrontends: 1024, MaxEndpoints: 1024}
	for _, f := range change {
		f(&cfg)
	}
	n := nodes.take(t, cfg, unused)
	arp := append(make([]byte, 12), 0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1)
	_, _, err := n.run(inEth0, arp, 0, testChecksumComplete)
	n.checksComplete = err == nil
	return n
}

// thread never unlocks: it ends with its namespace.
func (n *packetNode) thread() {
	runtime.LockOSThread()
	for f := range n.calls {
		f()
	}
}

func (n *packetNode) onThread(t testing.TB, f func() error) {
	t.Helper()
	var err error
	n.do(func() { err = f() })
	must.Do(t, err)
}

func (n *packetNode) makeNetns() error {
	var err error
	if n.ns, err = netns.New(); err != nil {
		return err
	}
	// Per-CPU maps are easier to read when there is one CPU.
	cpu, err := currentCPU()
	if err != nil {
		return err
	}
	n.cpu.Set(cpu)
	return unix.SchedSetaffinity(0, &n.cpu)
}

// enter moves the test itself into the namespace, for good: calls are then many
// times faster. Its thread ends with it.
func (n *packetNode) enter(t *testing.T) {
	t.Helper()
	runtime.LockOSThread()
	must.Do(t, netns.Set(n.ns))
	must.Do(t, unix.SchedSetaffinity(0, &n.cpu))
	n.inside = true
	t.Cleanup(func() { n.inside = false })
}

func currentCPU() (int, error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return 0, err
	}
	for cpu := range ebpf.MustPossibleCPU() {
		if set.IsSet(cpu) {
			return cpu, nil
		}
	}
	return 0, errors.New("no CPU may be used")
}

// nodeFeatures probes the kernel once: all nodes have the same.
var nodeFeatures = sync.OnceValues(func() (kernel.Features, error) {
	_ = kernel.LoadConntrack()
	return kernel.Probe(kernel.Place{BPFFS: nodes.root})
})

// load loads the programs, as New does.
func (n *packetNode) load(cfg Config) error {
	cfg.Log = slog.New(slog.DiscardHandler)
	if err := errors.Join(cfg.Validate(), kernel.EnsureBPFFS(cfg.BPFFS)); err != nil {
		return err
	}
	features, err := nodeFeatures()
	if err != nil {
		return err
	}
	n.bpffs, n.Backend = cfg.BPFFS, &Backend{cfg: cfg}
	n.objects, n.migrator, err = upgrade.Open(&n.cfg, features)
	return err
}

// begin does what New and the attacher do when the programs are loaded.
func (n *packetNode) begin(t testing.TB) {
	t.Helper()
	n.Backend = &Backend{cfg: n.cfg, objects: n.objects, migrator: n.migrator}
	n.makeParts()
	var err error
	n.objects.Filter, err = objects.OpenFilter(n.objects)
	must.Do(t, err)
	must.Do(t, n.openPolicies())
	_, err = n.services.Empty() // reads the maps
	must.Do(t, err)
	n.onThread(t, n.describe)
}

var nodeSysctls = map[string]string{
	"net.ipv4.ip_forward": "1", "net.ipv6.conf.all.forwarding": "1",
	"net.ipv4.icmp_ratelimit": "0", "net.ipv6.icmp.ratelimit": "0", // but see TestPacketAnswers
}

func (n *packetNode) makeInterfaces() error {
	// The first of them gives the node its primary address.
	for _, link := range []struct {
		name string
		mtu  int
	}{{"eth0", mtuEth0}, {"tun0", mtuTun0}, {"pod1", mtuEth0}, {"pod2", mtuEth0}} {
		if err := n.makeVeth(link.name, link.mtu); err != nil {
			return fmt.Errorf("make %s: %w", link.name, err)
		}
	}
	for name, value := range nodeSysctls {
		if err := kernel.WriteSysctl(name, value); err != nil {
			return err
		}
	}
	_ = kernel.WriteSysctl("net.ipv4.icmp_msgs_per_sec", "0") // since 6.12
	for _, p := range plans {
		if err := n.makeRoutes(p); err != nil {
			return fmt.Errorf("%s: %w", p.family, err)
		}
	}
	return nil
}

func (n *packetNode) makeVeth(name string, mtu int) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = name, mtu
	attrs.HardwareAddr = net.HardwareAddr{2, 0, 0, 0, 1, byte(len(n.ifindex) + 1)}
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "far-" + name}); err != nil {
		return err
	}
	for _, end := range []string{"far-" + name, name} {
		link, err := netlink.LinkByName(end)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return err
		}
		n.ifindex[name], n.mac[name] = link.Attrs().Index, link.Attrs().HardwareAddr
	}
	return nil
}

func (n *packetNode) makeRoutes(p *plan) error {
	var errs []error
	for name, cidr := range map[string]string{"eth0": p.eth0Net, "tun0": p.tun0Net} {
		a, err := netlink.ParseAddr(cidr)
		if err != nil {
			return err
		}
		a.Flags = unix.IFA_F_NODAD
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		errs = append(errs, netlink.AddrAdd(link, a))
	}
	route := func(dst, dev string, gw netip.Addr) {
		_, prefix, err := net.ParseCIDR(dst)
		errs = append(errs, err)
		r := &netlink.Route{Dst: prefix, LinkIndex: n.ifindex[dev]}
		if gw.IsValid() {
			r.Gw, r.Flags = gw.AsSlice(), int(netlink.FLAG_ONLINK)
			errs = append(errs, netlink.NeighSet(&netlink.Neigh{
				LinkIndex: n.ifindex[dev], State: netlink.NUD_PERMANENT, IP: r.Gw,
				HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 9, 9},
			}))
		}
		errs = append(errs, netlink.RouteAdd(r))
	}
	route(p.all, "eth0", p.gateway)
	route(p.farNet, "tun0", p.farGW)
	route(netip.PrefixFrom(p.pod1, p.pod1.BitLen()).String(), "pod1", netip.Addr{})
	route(netip.PrefixFrom(p.pod2, p.pod2.BitLen()).String(), "pod2", netip.Addr{})
	return errors.Join(errs...)
}

// routeTo leads to one address by a device until the test ends.
func (n *packetNode) routeTo(t testing.TB, a netip.Addr, dev string) {
	t.Helper()
	_, dst, err := net.ParseCIDR(netip.PrefixFrom(a, a.BitLen()).String())
	must.Do(t, err)
	route := &netlink.Route{Dst: dst, LinkIndex: n.ifindex[dev]}
	n.onThread(t, func() error { return netlink.RouteReplace(route) })
	t.Cleanup(func() { n.onThread(t, func() error { return netlink.RouteDel(route) }) })
}

func podMAC(name string) net.HardwareAddr {
	return net.HardwareAddr{2, 0, 0, 0, 5, name[len(name)-1]}
}

// describe writes the maps about the node.
func (n *packetNode) describe() error {
	v4, v6 := plans["IPv4"], plans["IPv6"]
	n.node.OnUplinks(map[int]attach.Uplink{
		n.ifindex["eth0"]: {Name: "eth0", V4: v4.eth0, V6: v6.eth0},
		n.ifindex["tun0"]: {Name: "tun0", V4: v4.tun0, V6: v6.tun0},
	})
	pods := map[netip.Addr]attach.Pod{}
	for _, p := range plans {
		pods[p.pod1] = attach.Pod{Ifindex: n.ifindex["pod1"], PodMAC: podMAC("pod1"), HostMAC: n.mac["pod1"]}
		pods[p.pod2] = attach.Pod{Ifindex: n.ifindex["pod2"], PodMAC: podMAC("pod2"), HostMAC: n.mac["pod2"]}
	}
	n.node.OnPods(attach.PodChanges{Full: true, Upserts: pods})
	node := defaultNode()
	return n.node.Write(&node)
}

func defaultNode() intent.Node {
	v4, v6 := plans["IPv4"], plans["IPv6"]
	return intent.Node{
		Name:          "node",
		Addrs:         []netip.Addr{v4.eth0, v4.tun0, v6.eth0, v6.tun0},
		NodePortAddrs: []netip.Addr{v4.eth0, v4.tun0, v6.eth0, v6.tun0},
		ClusterCIDRs:  []netip.Prefix{netip.MustParsePrefix(v4.farNet), netip.MustParsePrefix(v6.farNet)},
	}
}

// setNode changes what intent says of the node until the test ends.
func (n *packetNode) setNode(t testing.TB, change func(*intent.Node)) {
	t.Helper()
	node := defaultNode()
	change(&node)
	n.onThread(t, func() error { return n.node.Write(&node) })
	t.Cleanup(func() {
		node := defaultNode()
		n.onThread(t, func() error { return n.node.Write(&node) })
	})
}

// snatPorts returns the ports that may replace a client's.
func (n *packetNode) snatPorts(t testing.TB) []uint16 {
	t.Helper()
	s, ports := objectstest.Settings(t, n.objects), objectstest.ReadAll[uint32, uint16](t, n.m(objects.TCMapSnatPorts))
	list := make([]uint16, s.SnatPorts+s.NetworkPorts)
	for i := range list {
		list[i] = ports[uint32(i)]
	}
	return list
}

// serve makes these the Services of the node.
func (n *packetNode) serve(t testing.TB, ports ...*intent.ServicePort) {
	t.Helper()
	failed, err := n.services.Replace(context.Background(), ports)
	must.Do(t, err)
	must.Do(t, dataplane.PortErrorsOf(failed))
}

// forget empties what the programs have written.
func (n *packetNode) forget(t testing.TB) {
	t.Helper()
	empty[objects.TCTuple, objects.TCFlow](t, n.m(objects.TCMapFlows))
	empty[objects.TCFragmentKey, objects.TCFragment](t, n.m(objects.TCMapFragments))
	empty[objects.TCAffinityKey, objects.TCAffinity](t, n.m(objects.TCMapAffinities))
}

func empty[K, V any](t testing.TB, m *ebpf.Map) {
	t.Helper()
	var key K
	var value V
	var keys []K
	it := m.Iterate()
	for it.Next(&key, &value) {
		keys = append(keys, key)
	}
	for _, k := range keys {
		if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			t.Fatal(err)
		}
	}
}

// at is a hook of an interface.
type at struct{ prog, iface string }

var (
	inEth0  = at{objects.TCProgFromNetwork, "eth0"}
	inTun0  = at{objects.TCProgFromNetwork, "tun0"}
	inPod1  = at{objects.TCProgFromPod, "pod1"}
	inPod2  = at{objects.TCProgFromPod, "pod2"}
	outEth0 = at{objects.TCProgToNetwork, "eth0"}
	outTun0 = at{objects.TCProgToNetwork, "tun0"}
	outPod1 = at{objects.TCProgToNetwork, "pod1"}
)

// skBuff is what BPF_PROG_RUN takes of struct __sk_buff.
type skBuff struct {
	_              [9]uint32
	IngressIfindex uint32
	Ifindex        uint32
	_              [27]uint32
	Tstamp         uint64
	WireLen        uint32
	GSOSegs        uint32
	_              uint64
	GSOSize        uint32
	_              uint32
}

// xdpMD is struct xdp_md.
type xdpMD struct{ Data, DataEnd, DataMeta, IngressIfindex, RxQueueIndex, EgressIfindex uint32 }

// What the tc programs return.
const (
	actNext     = -1
	actDrop     = 2
	actRedirect = 7
)

// testChecksumComplete is BPF_F_TEST_SKB_CHECKSUM_COMPLETE (6.16): the packet is
// as from a network card that has summed it, and the sum must stay right.
const testChecksumComplete = 1 << 2

// run gives one frame to one program.
func (n *packetNode) run(hook at, frame []byte, gso uint32, flags uint32) (int, []byte, error) {
	ctx := skBuff{Ifindex: uint32(n.ifindex[hook.iface]), GSOSize: gso}
	ctx.IngressIfindex = ctx.Ifindex
	opts := ebpf.RunOptions{Data: frame, DataOut: make([]byte, len(frame)+256), Context: ctx, Flags: flags}
	if hook.prog == objects.XDPProgXdpFromNetwork {
		opts.Context, opts.Flags = xdpMD{DataEnd: uint32(len(frame)), IngressIfindex: ctx.Ifindex}, 0
	}
	n.last = nil
	var code uint32
	var err error
	n.do(func() { code, err = n.objects.Programs[hook.prog].Run(&opts) })
	return int(int32(code)), opts.DataOut, err
}

// countersNow are the verdicts so far. They are not read again if no packet came since the last time:
// that takes longer than a packet.
func (n *packetNode) countersNow(t testing.TB) []uint64 {
	t.Helper()
	if n.last == nil || n.live {
		n.last = n.counters(t)
	}
	return n.last
}

// counters reads the verdicts.
func (n *packetNode) counters(t testing.TB) []uint64 {
	t.Helper()
	cpus := ebpf.MustPossibleCPU()
	keys := make([]uint32, objects.TCVerdictVERDICTS)
	values := make([]uint64, int(objects.TCVerdictVERDICTS)*cpus)
	var cursor ebpf.MapBatchCursor
	_, err := n.m(objects.TCMapVerdicts).BatchLookup(&cursor, keys, values, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		t.Fatal(err)
	}
	sums := make([]uint64, objects.TCVerdictVERDICTS)
	for i, v := range values {
		sums[i/cpus] += v
	}
	return sums
}

// nextHopOffset is the place of the last packet's next hop in struct scratch, in bytes.
var nextHopOffset = sync.OnceValues(func() (uint32, error) {
	spec, err := objects.LoadTC()
	if err != nil {
		return 0, err
	}
	var s *btf.Struct
	if err := spec.Types.TypeByName("scratch", &s); err != nil {
		return 0, err
	}
	offset, found := memberOf(s, "next_hop")
	if found == nil {
		return 0, errors.New("struct scratch has no next_hop")
	}
	return offset, nil
})

// nextHop is struct next_hop of bpf/lib/lookup/next_hop.h: where the last packet was sent.
type nextHop struct {
	kind    uint32
	ifindex int
	gateway netip.Addr
}

const (
	nextHopStack = iota
	nextHopPod
	nextHopNeigh
	nextHopLink
)

// scratches is the map of the tc programs. Those of other objects have the same name.
func (n *packetNode) scratches(t testing.TB) *ebpf.Map {
	t.Helper()
	info, err := n.objects.Programs[objects.TCProgFromNetwork].Info()
	must.Do(t, err)
	ids, _ := info.MapIDs()
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		must.Do(t, err)
		t.Cleanup(func() { m.Close() })
		if info, err := m.Info(); err == nil && info.Name == objects.TCMapScratches {
			return m
		}
	}
	t.Fatal("the program has no map of scratch memory")
	return nil
}

// lastNextHop reads it. There is one per CPU, and n uses one CPU.
func (n *packetNode) lastNextHop(t testing.TB) nextHop {
	t.Helper()
	offset, err := nextHopOffset()
	must.Do(t, err)
	var cpus [][]byte
	must.Do(t, n.scratches(t).Lookup(uint32(0), &cpus))
	for _, b := range cpus {
		b = b[offset:]
		if w := (nextHop{kind: binary.NativeEndian.Uint32(b), ifindex: int(binary.NativeEndian.Uint32(b[4:]))}); w != (nextHop{}) {
			switch binary.NativeEndian.Uint32(b[28:]) {
			case unix.AF_INET:
				w.gateway = netip.AddrFrom4([4]byte(b[32:36]))
			case unix.AF_INET6:
				w.gateway = netip.AddrFrom16([16]byte(b[32:48]))
			}
			return w
		}
	}
	return nextHop{}
}

// memberOf returns the offset in bytes and the type of a member of a struct.
func memberOf(s *btf.Struct, name string) (offset uint32, of btf.Type) {
	for _, m := range s.Members {
		if m.Name == name {
			return m.Offset.Bytes(), m.Type
		}
	}
	return 0, nil
}
