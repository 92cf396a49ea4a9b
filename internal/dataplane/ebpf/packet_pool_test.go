package ebpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/must"
)

// nodes has the packet nodes that no test uses now. The verifier took most of the time of the tests
// when each had a node of its own. The next test with the same Config gets a node whose programs
// are loaded already:
//
//	take: a node, its maps as they were when it was made
//	put:  the node stays, if its test has passed and its network is as it was
//
// A test that replaces the programs of its node, or leaves sockets, sets packetNode.spent.
var nodes nodePool

// idleNodes is the number of nodes that wait for a test. A node takes some 30 MiB.
const idleNodes = 8

type nodePool struct {
	root string        // the bpf file system of all nodes
	made int           // names their directories
	idle []*packetNode // the one that was used last is the last
}

func TestMain(m *testing.M) {
	code := m.Run()
	if err := nodes.close(); err != nil {
		fmt.Fprintln(os.Stderr, "close packet nodes:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

// close closes the nodes, and removes their file system.
func (pool *nodePool) close() error {
	for _, n := range pool.idle {
		n.close()
	}
	pool.idle = nil
	if pool.root == "" {
		return nil
	}
	return errors.Join(unix.Unmount(pool.root, unix.MNT_DETACH), os.Remove(pool.root))
}

// take returns a node with this configuration for the test, whose programs of one type do nothing.
func (pool *nodePool) take(t testing.TB, cfg Config, unused ebpf.ProgramType) *packetNode {
	t.Helper()
	if cfg.WatchNAT != nil || cfg.Refused != nil {
		t.Fatal("a node for several tests has no callbacks")
	}
	key := fmt.Sprintf("%+v without %s", cfg, unused)
	i := slices.IndexFunc(pool.idle, func(n *packetNode) bool { return n.key == key })
	if i >= 0 {
		n := pool.idle[i]
		pool.idle = slices.Delete(pool.idle, i, i+1)
		t.Cleanup(func() { pool.put(t, n) })
		n.again(t)
		return n
	}
	n := &packetNode{key: key, ns: netns.None(), calls: make(chan func()), ifindex: map[string]int{}, mac: map[string]net.HardwareAddr{}}
	n.ended.Go(n.thread)
	t.Cleanup(func() { pool.put(t, n) })
	if pool.root == "" {
		root, err := os.MkdirTemp("", "spw-nodes-")
		must.Do(t, err)
		must.Do(t, unix.Mount("bpf", root, "bpf", 0, ""))
		pool.root = root
	}
	pool.made++
	cfg.BPFFS = filepath.Join(pool.root, fmt.Sprint(pool.made))
	defer stubSome(func(p *ebpf.ProgramSpec) bool { return p.Type == unused })()
	n.make(t, cfg)
	return n
}

// put ends the test's use of a node.
func (pool *nodePool) put(t testing.TB, n *packetNode) {
	if t.Failed() || n.spent || !n.unchanged(t) {
		n.close()
		return
	}
	pool.idle = append(pool.idle, n)
	if len(pool.idle) > idleNodes {
		pool.idle[0].close()
		pool.idle = pool.idle[1:]
	}
}

// close frees the node. Its thread ends with its network namespace.
func (n *packetNode) close() {
	if n.Backend != nil && n.objects != nil {
		n.objects.Close()
	}
	_ = os.RemoveAll(n.bpffs)
	close(n.calls)
	n.ended.Wait()
	n.ns.Close()
}

// make makes the node, and remembers its state for later tests.
func (n *packetNode) make(t testing.TB, cfg Config) {
	t.Helper()
	n.onThread(t, n.makeNetns)
	n.onThread(t, n.makeInterfaces)
	n.onThread(t, func() error { return n.load(cfg) })
	n.begin(t)
	n.described = withoutBeats(n.contents(t, nil))
	n.onThread(t, func() (err error) { n.network, err = n.networkNow(); return err })
	n.pins = pinsBelow(t, n.bpffs)
}

// again makes the node as it was for its first test. What is left of the test before fails this one.
func (n *packetNode) again(t testing.TB) {
	t.Helper()
	same := map[string]bool{}
	for name, m := range n.objects.Maps {
		changed, err := restore(m, n.described[name])
		if err != nil {
			t.Fatalf("map %s as it was: %v", name, err)
		}
		same[name] = !changed
	}
	n.last, n.freshened, n.freshFor = nil, time.Time{}, objects.TCTuple{}
	n.begin(t)
	have := withoutBeats(n.contents(t, func(name string) bool { return !same[name] || !isLongArray(n.m(name)) }))
	for name := range have {
		if want := n.described[name]; !maps.Equal(have[name], want) {
			t.Fatalf("map %s is not as it was before the last test: %d entries, want %d", name, len(have[name]), len(want))
		}
	}
}

// unchanged reports whether the node's network and pins are as they were, and empties conntrack.
func (n *packetNode) unchanged(t testing.TB) bool {
	var now []string
	n.onThread(t, func() (err error) {
		_ = netlink.ConntrackTableFlush(netlink.ConntrackTable) // without ctnetlink no test has made an entry
		now, err = n.networkNow()
		return err
	})
	return slices.Equal(now, n.network) && slices.Equal(pinsBelow(t, n.bpffs), n.pins)
}

func pinsBelow(t testing.TB, dir string) (pins []string) {
	t.Helper()
	must.Do(t, filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		pins = append(pins, path)
		return err
	}))
	return pins
}

// networkNow describes links, addresses, routes, permanent neighbors, rules, queueing disciplines
// and sysctls. It leaves out what the kernel changes by itself: link-local addresses and multicast.
func (n *packetNode) networkNow() (lines []string, err error) {
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	links, err := netlink.LinkList()
	for _, l := range links {
		a := l.Attrs()
		add("link %d %s %d %s %s %v", a.Index, a.Name, a.MTU, a.HardwareAddr, a.Flags&net.FlagUp, a.Xdp)
		qdiscs, err := netlink.QdiscList(l)
		if err != nil {
			return nil, err
		}
		for _, q := range qdiscs {
			add("qdisc %d %s", a.Index, q.Type())
		}
	}
	addrs, addrErr := netlink.AddrList(nil, netlink.FAMILY_ALL)
	for _, a := range addrs {
		if !a.IP.IsLinkLocalUnicast() {
			add("address %d %s", a.LinkIndex, a.IPNet)
		}
	}
	neighbors, neighErr := netlink.NeighList(0, 0)
	for _, neigh := range neighbors {
		if neigh.State == netlink.NUD_PERMANENT {
			add("neighbor %d %s %s", neigh.LinkIndex, neigh.IP, neigh.HardwareAddr)
		}
	}
	err = errors.Join(err, addrErr, neighErr)
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, routeErr := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		for _, r := range routes {
			if r.Dst == nil || !r.Dst.IP.IsLinkLocalUnicast() && !r.Dst.IP.IsMulticast() {
				add("route %d %s %s %d %d %d %s", r.Table, r.Dst, r.Gw, r.LinkIndex, r.Type, r.Priority, r.Src)
			}
		}
		rules, ruleErr := netlink.RuleList(family)
		for _, r := range rules {
			add("rule %s", r)
		}
		err = errors.Join(err, routeErr, ruleErr)
	}
	for name := range nodeSysctls {
		value, sysctlErr := kernel.ReadSysctl(name)
		add("%s=%s", name, value)
		err = errors.Join(err, sysctlErr)
	}
	slices.Sort(lines)
	return lines, err
}

// mapContent has the entries of a map, a value of all CPUs as one. Of an array it has one entry: all
// values. Of a ring it has the number of unread bytes.
type mapContent map[string]string

// isLongArray reports whether a look at the map takes tens of milliseconds.
func isLongArray(m *ebpf.Map) bool { return isArray(m) && m.MaxEntries() >= 1<<16 }

// contents reads all maps, or those that are wanted.
func (n *packetNode) contents(t testing.TB, wanted func(name string) bool) map[string]mapContent {
	t.Helper()
	out := map[string]mapContent{}
	for name, m := range n.objects.Maps {
		if wanted != nil && !wanted(name) {
			continue
		}
		var err error
		if out[name], err = contentOf(m); err != nil {
			t.Fatalf("read map %s: %v", name, err)
		}
	}
	return out
}

// withoutBeats clears the time at which the agent was seen last, and the count of changes.
func withoutBeats(all map[string]mapContent) map[string]mapContent {
	for key, settings := range all[objects.TCMapNodeSettings] {
		b := []byte(settings)
		clear(b[unsafe.Offsetof(objects.TCSettings{}.AgentSeen):])
		all[objects.TCMapNodeSettings][key] = string(b)
	}
	delete(all, objects.TCMapServiceChanges)
	return all
}

func contentOf(m *ebpf.Map) (mapContent, error) {
	out := mapContent{}
	switch m.Type() {
	case ebpf.SkStorage: // an entry ends with its socket
		return out, nil
	case ebpf.RingBuf:
		unread, err := readRing(m, false)
		out["unread"] = fmt.Sprint(unread)
		return out, err
	case ebpf.LPMTrie:
		var key, value []byte
		it := m.Iterate()
		for it.Next(&key, &value) {
			out[string(key)] = string(value)
		}
		return out, it.Err()
	}
	cpus := cpusOf(m)
	batch := min(int(m.MaxEntries()), objects.SweepBatch)
	keys, keyBytes := rawBatch(m.KeySize(), batch)
	values, valueBytes := rawBatch(m.ValueSize(), batch*cpus)
	keySize, valueSize := int(m.KeySize()), int(m.ValueSize())*cpus
	var array strings.Builder
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, err
		}
		if isArray(m) {
			array.Write(valueBytes[:n*valueSize])
			out[""] = array.String()
		} else {
			for i := range n {
				out[string(keyBytes[i*keySize:][:keySize])] = string(valueBytes[i*valueSize:][:valueSize])
			}
		}
		if err != nil {
			return out, nil
		}
	}
}

// restore writes what differs from want, and reports whether anything did.
func restore(m *ebpf.Map, want mapContent) (changed bool, err error) {
	have, err := contentOf(m)
	if err != nil || maps.Equal(have, want) {
		return false, err
	}
	if m.Type() == ebpf.RingBuf {
		_, err := readRing(m, true)
		return true, err
	}
	if isArray(m) {
		keys, keyBytes := rawBatch(m.KeySize(), int(m.MaxEntries()))
		values, valueBytes := rawBatch(m.ValueSize(), int(m.MaxEntries())*cpusOf(m))
		for i := range m.MaxEntries() {
			binary.NativeEndian.PutUint32(keyBytes[4*i:], i)
		}
		copy(valueBytes, want[""])
		_, err := m.BatchUpdate(keys, values, nil)
		return true, err
	}
	for key := range have {
		if _, wanted := want[key]; !wanted {
			if err := m.Delete([]byte(key)); err != nil {
				return true, err
			}
		}
	}
	for key, value := range want {
		if have[key] != value {
			if err := m.Put([]byte(key), []byte(value)); err != nil { // no agent writes a hash of CPUs
				return true, err
			}
		}
	}
	return true, nil
}

// readRing returns how many bytes of events are unread, and may read them.
func readRing(m *ebpf.Map, empty bool) (unread int, err error) {
	ring, err := ringbuf.NewReader(m)
	if err != nil {
		return 0, err
	}
	defer ring.Close()
	unread = ring.AvailableBytes()
	for empty && err == nil && ring.AvailableBytes() > 0 {
		_, err = ring.Read()
	}
	return unread, err
}

func isArray(m *ebpf.Map) bool { return m.Type() == ebpf.Array || m.Type() == ebpf.PerCPUArray }

// cpusOf is how many values an entry has.
func cpusOf(m *ebpf.Map) int {
	if objects.PerCPU(m.Type()) {
		return ebpf.MustPossibleCPU()
	}
	return 1
}

// rawBatch returns a slice of n arrays of bytes, and all their bytes.
func rawBatch(size uint32, n int) (batch any, all []byte) {
	all = make([]byte, int(size)*n)
	array := reflect.ArrayOf(int(size), reflect.TypeFor[byte]())
	return reflect.SliceAt(array, unsafe.Pointer(unsafe.SliceData(all)), n).Interface(), all
}
