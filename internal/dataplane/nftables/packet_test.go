package nftables

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/nft"
	"spillway.dev/spillway/test/await"
)

// machines are the test's namespace as a node, and three others behind devices of
// the node: two pods and a machine of the LAN.
//
//	pod1 10.244.0.2 -- veth1 ┐
//	pod2 10.244.0.3 -- veth2 ├ node 172.30.0.10
//	lan  172.30.0.99 -- lan0 ┘
type machines struct {
	t  *testing.T
	ns map[string]*os.File
}

func newMachines(t *testing.T) *machines {
	enter(t)
	m := &machines{t: t, ns: map[string]*os.File{}}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil { // of the thread's namespace
		t.Fatal(err)
	}
	run(t, "ip", "link", "set", "lo", "up")
	for _, x := range [][4]string{{"pod1", "veth1", "10.244.0.2", "10.244.0.1"}, {"pod2", "veth2", "10.244.0.3", "10.244.0.1"},
		{"lan", "lan0", "172.30.0.99", "172.30.0.10"}} {
		m.add(x[0], x[1], x[2], x[3])
	}
	return m
}

func (m *machines) add(name, device, addr, gateway string) {
	made := make(chan *os.File)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			m.t.Error(err)
		}
		f, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			m.t.Error(err)
		}
		made <- f
	}()
	m.ns[name] = <-made
	m.t.Cleanup(func() { m.ns[name].Close() })
	fd := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), m.ns[name].Fd())
	run(m.t, "ip", "link", "add", device, "type", "veth", "peer", "name", "eth0", "netns", fd)
	run(m.t, "ip", "addr", "add", gateway+"/32", "dev", device)
	run(m.t, "ip", "link", "set", device, "up")
	run(m.t, "ip", "route", "add", addr+"/32", "dev", device)
	m.in(name, func() {
		for _, c := range []string{
			"link set lo up", "link set eth0 up", "addr add " + addr + "/32 dev eth0",
			"route add " + gateway + "/32 dev eth0", "route add default via " + gateway,
		} {
			run(m.t, "ip", strings.Fields(c)...)
		}
	})
}

// in runs f on a thread of a namespace.
func (m *machines) in(name string, f func()) {
	m.t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		if err := unix.Setns(int(m.ns[name].Fd()), unix.CLONE_NEWNET); err != nil {
			m.t.Error(err)
			return
		}
		f()
	}()
	<-done
}

// serve answers on port 8080 of a namespace with its name and the client's address.
func (m *machines) serve(name string) {
	m.in(name, func() {
		l, err := net.Listen("tcp4", ":8080")
		if err != nil {
			m.t.Error(err)
			return
		}
		m.t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				fmt.Fprint(c, name, " ", netip.MustParseAddrPort(c.RemoteAddr().String()).Addr())
				c.Close()
			}
		}()
	})
}

// ask connects from a namespace and returns the answer.
func (m *machines) ask(from, to string) (answer string) {
	m.in(from, func() {
		d := net.Dialer{Timeout: 2 * time.Second}
		c, err := d.DialContext(context.Background(), "tcp4", to)
		if err != nil {
			answer = err.Error()
			return
		}
		defer c.Close()
		b, _ := io.ReadAll(c)
		answer = string(b)
	})
	return answer
}

// send sends one segment from a namespace.
func (m *machines) send(from, src, dst string, tcp *layers.TCP) {
	m.t.Helper()
	ip := &layers.IPv4{SrcIP: net.ParseIP(src), DstIP: net.ParseIP(dst), Protocol: layers.IPProtocolTCP}
	if err := tcp.SetNetworkLayerForChecksum(ip); err != nil {
		m.t.Fatal(err)
	}
	buf := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(buf, gopacket.SerializeOptions{ComputeChecksums: true, FixLengths: true}, tcp); err != nil {
		m.t.Fatal(err)
	}
	m.in(from, func() {
		c, err := net.Dial("ip4:tcp", dst)
		if err != nil {
			m.t.Error(err)
			return
		}
		defer c.Close()
		if _, err := c.Write(buf.Bytes()); err != nil {
			m.t.Error(err)
		}
	})
}

func TestWhoIsMasqueradedFollowsTheModeThatTellsPods(t *testing.T) {
	m := newMachines(t)
	m.serve("pod1")
	b := open(t)
	p := port("web", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), here("10.244.0.2:8080"))
	for _, row := range []struct {
		local     intent.LocalTraffic
		pod2, lan string // whose address the server sees
	}{
		{intent.LocalTraffic{Sources: prefixes("10.244.0.0/24")}, "10.244.0.3", "10.244.0.1"},
		{intent.LocalTraffic{Prefix: "veth"}, "10.244.0.3", "10.244.0.1"},
		{intent.LocalTraffic{Interface: "veth2"}, "10.244.0.3", "10.244.0.1"},
		{intent.LocalTraffic{Interface: "cni0"}, "10.244.0.1", "10.244.0.1"},
		{intent.LocalTraffic{}, "10.244.0.3", "172.30.0.99"},
	} {
		n := node()
		n.Local = row.local
		replace(t, b, intent.State{Node: n, Ports: []*intent.ServicePort{p}})
		for from, want := range map[string]string{"pod2": row.pod2, "lan": row.lan} {
			if got := m.ask(from, "10.96.0.1:80"); got != "pod1 "+want {
				t.Errorf("%+v: %s hears %q, want %q", row.local, from, got, "pod1 "+want)
			}
		}
	}
}

func TestOnlyPodsOfThisNodeGoRoundPolicyLocal(t *testing.T) {
	m := newMachines(t)
	m.serve("pod1")
	b := open(t)
	external := func(p *intent.ServicePort) {
		p.Frontends = append(p.Frontends, intent.Frontend{Kind: intent.LoadBalancerIP, Addr: netip.MustParseAddr("192.0.2.1"), Port: 80,
			ExternalRoute: intent.Drop, InternalRoute: intent.ToCluster})
	}
	p := port("web", model.IPv4, external, endpoints("10.244.0.2:8080"))
	n := node()
	n.Local = intent.LocalTraffic{Interface: "veth2"}
	replace(t, b, intent.State{Node: n, Ports: []*intent.ServicePort{p}})
	if got := m.ask("pod2", "192.0.2.1:80"); got != "pod1 10.244.0.3" {
		t.Errorf("the pod hears %q", got)
	}
	if got := m.ask("lan", "192.0.2.1:80"); !strings.Contains(got, "timeout") {
		t.Errorf("the LAN hears %q", got)
	}
}

func TestAnEndpointThatIsGoneIsNeverUsedByWhoRemembersIt(t *testing.T) {
	m := newMachines(t)
	m.serve("pod1")
	m.serve("pod2")
	b := open(t)
	web := func(list ...string) intent.State {
		return intent.State{Node: node(), Ports: []*intent.ServicePort{port("web", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster),
			affine(time.Hour), here(list...))}}
	}
	both := web("10.244.0.2:8080", "10.244.0.3:8080")
	for range 20 {
		replace(t, b, both)
		had := m.ask("lan", "10.96.0.1:80")
		for range 5 {
			if got := m.ask("lan", "10.96.0.1:80"); got != had {
				t.Fatalf("%q after %q", got, had)
			}
		}
		gone, other := "10.244.0.2:8080", "10.244.0.3:8080"
		if strings.HasPrefix(had, "pod2") {
			gone, other = other, gone
		}
		replace(t, b, web(other))
		moved := m.ask("lan", "10.96.0.1:80")
		if moved == had || !strings.HasPrefix(moved, "pod") {
			t.Fatalf("%q after %s went", moved, gone)
		}
		replace(t, b, both)
		if got := m.ask("lan", "10.96.0.1:80"); got != moved {
			t.Fatalf("%q after %s came back, and %q before", got, gone, moved)
		}
	}
}

func TestWhereThereIsNoRoomForMoreClientsTheyAreServedAllTheSame(t *testing.T) {
	m := newMachines(t)
	m.serve("pod1")
	m.serve("pod2")
	b := open(t)
	p := port("web", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), affine(time.Hour), here("10.244.0.2:8080", "10.244.0.3:8080"))
	replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{p}})
	fill := map[string]*nft.Value{}
	for i := range clientLimit {
		key := string([]byte{9, byte(i >> 16), byte(i >> 8), byte(i), 0, 0, 0, 9})
		fill[key] = &nft.Value{Data: "\x01\x00\x00\x00"}
	}
	tx := nft.NewTransaction(b.nftTable)
	tx.AddElements(b.table.layout.common[0].clients.Name, maps.All(fill))
	if _, err := b.conn.Commit(t.Context(), tx); err != nil {
		t.Fatal(err)
	}
	heard := map[string]bool{}
	for range 40 {
		heard[m.ask("lan", "10.96.0.1:80")] = true
	}
	if len(heard) != 2 || !heard["pod1 10.244.0.1"] || !heard["pod2 10.244.0.1"] {
		t.Errorf("answers %v", heard)
	}
}

func TestAllWaysToAServicePortLeadAClientToOneEndpoint(t *testing.T) {
	m := newMachines(t)
	m.serve("pod1")
	m.serve("pod2")
	b := open(t)
	two := here("10.244.0.2:8080", "10.244.0.3:8080")
	ways := []string{"10.96.0.1:80", "172.30.0.10:30080", "192.0.2.1:80"}
	for range 12 {
		replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{port("web", model.IPv4,
			clusterIP("10.96.0.1", intent.ToCluster), nodePort(30080, intent.ToCluster, intent.ToCluster),
			loadBalancer("192.0.2.1", intent.ToCluster, intent.ToCluster), affine(time.Hour), two)}})
		had := m.ask("lan", ways[0])
		if !strings.HasPrefix(had, "pod") {
			t.Fatalf("the client hears %q", had)
		}
		for _, way := range ways {
			if got := m.ask("lan", way); got != had {
				t.Errorf("%s leads to %q, and %s to %q", ways[0], had, way, got)
			}
		}
		ways = append(ways[1:], ways[0])
		replace(t, b, intent.State{Node: node()}) // forgets the client
	}
}

// With policy Local, the ways have different endpoints: what a client has by one
// counts on another only where that has it too.
func TestAWayThatLacksTheRememberedEndpointChoosesAnotherForAllWays(t *testing.T) {
	m := newMachines(t)
	m.serve("pod1")
	m.serve("pod2")
	b := open(t)
	n := node()
	n.Local = intent.LocalTraffic{Prefix: "veth"}
	p := port("web", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster),
		nodePort(30080, intent.ToLocal, intent.ToCluster), affine(time.Hour),
		here("10.244.0.2:8080"), endpoints("10.244.0.3:8080"))
	for range 6 {
		replace(t, b, intent.State{Node: n, Ports: []*intent.ServicePort{p}})
		m.ask("lan", "10.96.0.1:80")
		for _, way := range []string{"172.30.0.10:30080", "10.96.0.1:80", "172.30.0.10:30080"} {
			if got := m.ask("lan", way); !strings.HasPrefix(got, "pod1") {
				t.Errorf("%s leads to %q", way, got)
			}
		}
		replace(t, b, intent.State{Node: n})
	}
}

func TestAClientIsForgottenAfterTheTimeOut(t *testing.T) {
	m := newMachines(t)
	m.serve("pod1")
	m.serve("pod2")
	b := open(t)
	p := port("web", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), affine(time.Second), here("10.244.0.2:8080", "10.244.0.3:8080"))
	replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{p}})
	first := m.ask("lan", "10.96.0.1:80")
	for range 30 { // the same one by chance: 1 of 10⁹
		await.True(t, "no client is remembered", func() bool {
			return !strings.Contains(run(t, "nft", "list map inet spillway clients4"), "elements")
		})
		if got := m.ask("lan", "10.96.0.1:80"); got != first {
			return
		}
	}
	t.Errorf("only %q answers", first)
}

// A number goes with a connection's first packet through the node, and no farther.
// What an application asked for itself counts for all others.
func TestOnlyTheFirstPacketWithAffinityLosesItsPriorityAndNoneLeavesWithANumber(t *testing.T) {
	m := newMachines(t)
	m.serve("pod1")
	b := open(t)
	sticky := port("sticky", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), nodePort(30080, intent.ToCluster, intent.ToCluster),
		affine(time.Hour), here("10.244.0.2:8080"))
	plain := port("plain", model.IPv4, clusterIP("10.96.0.2", intent.ToCluster), here("10.244.0.2:8080"))
	replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{sticky, plain}})
	run(t, "ip", "route", "add", "10.96.0.0/16", "dev", "veth1")
	file := filepath.Join(t.TempDir(), "probe.nft")
	if err := os.WriteFile(file, []byte(`table inet probe {
	set seen { typeof ct state . meta priority; size 100; flags dynamic; }
	chain last { type filter hook postrouting priority 300; tcp dport 8080 add @seen { ct state . meta priority }; }
}`), 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, "nft", "-f", file)
	for _, row := range []struct {
		to   string
		new  string // priority of the first packet
		what string
	}{{"10.96.0.2:80", "0:6", "without affinity"}, {"10.96.0.1:80", "none", "new"}, {"10.96.0.1:80", "none", "remembered"},
		{"172.30.0.10:30080", "none", "by NodePort"}} {
		run(t, "nft", "flush", "set", "inet", "probe", "seen")
		askWithPriority(t, row.to, 6)
		got := run(t, "nft", "list", "set", "inet", "probe", "seen")
		if !strings.Contains(got, "new . "+row.new) || !strings.Contains(got, "established . 0:6") || strings.Count(got, " . ") != 3 {
			t.Errorf("%s, the packets had\n%s", row.what, got)
		}
	}
	run(t, "nft", "flush", "set", "inet", "probe", "seen")
	for range 2 {
		m.ask("lan", "10.96.0.1:80")
	}
	if got := run(t, "nft", "list", "set", "inet", "probe", "seen"); !strings.Contains(got, "new . none") ||
		strings.Count(got, " . ") != strings.Count(got, " . none")+1 {
		t.Errorf("packets of another machine had\n%s", got)
	}
}

// askWithPriority has the node itself connect and say something, with SO_PRIORITY.
func askWithPriority(t *testing.T, to string, priority int) {
	t.Helper()
	d := net.Dialer{Timeout: 5 * time.Second, Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			if err := unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PRIORITY, priority); err != nil {
				t.Error(err)
			}
		})
	}}
	c, err := d.DialContext(t.Context(), "tcp4", to)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, _ = io.ReadAll(c)
}

// TestNoPacketMeetsHalfOfABatch changes the number of endpoints while new connections
// arrive. nf_tables shows a batch to a packet between two of its lookups. Without the order of
// deletions in table.go, some hundred changes are enough for a packet to be lost. Without -short
// there are more, for rarer faults.
func TestNoPacketMeetsHalfOfABatch(t *testing.T) {
	atLeast := 3000
	if testing.Short() {
		atLeast = 1000
	}
	m := newMachines(t)
	// Untranslated datagrams go to pod2.
	run(t, "ip", "route", "add", "10.96.0.0/16", "dev", "veth2")
	run(t, "ip", "neigh", "add", "10.96.0.1", "lladdr", "02:00:00:00:00:01", "dev", "veth2")
	run(t, "nft", `table ip lost {
		chain untranslated { type filter hook forward priority 200; ip daddr 10.96.0.1 counter; }
		chain refused { type filter hook output priority 200; meta l4proto icmp counter; }
	}`)
	b := open(t)
	with := func(count int) *intent.ServicePort {
		var list []string
		for i := range count {
			list = append(list, fmt.Sprintf("10.244.0.2:%d", 8080+i))
		}
		p := port("web", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), endpoints(list...))
		p.ID.Protocol = model.UDP
		return p
	}
	if err := b.Replace(t.Context(), intent.State{Node: node(), Ports: []*intent.ServicePort{with(4)}}); err != nil {
		t.Fatal(err)
	}
	var asking sync.WaitGroup
	var stop atomic.Bool
	var sent atomic.Int64
	defer func() {
		stop.Store(true)
		asking.Wait()
	}()
	asking.Go(func() {
		m.in("lan", func() {
			for !stop.Load() {
				c, err := net.Dial("udp4", "10.96.0.1:80")
				if err == nil {
					_, err = c.Write([]byte("first datagram of a socket"))
					c.Close()
				}
				if err != nil && !errors.Is(err, unix.ECONNREFUSED) {
					t.Error(err)
					return
				}
				sent.Add(1)
			}
		})
	})
	for _, counts := range [][2]int{{5, 4}, {2, 1}, {16, 17}} {
		changes, before := 0, sent.Load()
		for ; (changes < atLeast || sent.Load()-before < int64(atLeast)) && !t.Failed(); changes++ {
			if err := b.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{with(counts[changes%2])}}); err != nil {
				t.Fatal(err)
			}
			if changes%50 == 0 { // a full table would drop
				if err := netlink.ConntrackTableFlush(netlink.ConntrackTable); err != nil {
					t.Fatal(err)
				}
			}
		}
		lost := run(t, "nft", "list", "table", "ip", "lost")
		if strings.Count(lost, "counter packets 0 ") != 2 {
			t.Fatalf("%d changes between %d and %d endpoints:\n%s", changes, counts[0], counts[1], lost)
		}
	}
}
