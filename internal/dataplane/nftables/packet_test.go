package nftables

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/intent"
	"spillway.dev/spillway/internal/model"
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
	for _, x := range [][4]string{{"pod1", "veth1", "10.244.0.2", "10.244.0.1"}, {"pod2", "veth2", "10.244.0.3", "10.244.0.1"}, {"lan", "lan0", "172.30.0.99", "172.30.0.10"}} {
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
		p.Frontends = append(p.Frontends, intent.Frontend{Kind: intent.LoadBalancerIP, Addr: netip.MustParseAddr("192.0.2.1"), Port: 80, Outside: intent.Drop, Inside: intent.ToCluster})
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
		return intent.State{Node: node(), Ports: []*intent.ServicePort{port("web", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), affine(time.Hour), here(list...))}}
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
	fill := &elemList{set: b.table.layout.addresses[0].affinity.clients}
	for i := range clientLimit {
		key := string(appendPort(appendProto([]byte{9, byte(i >> 16), byte(i >> 8), byte(i), 10, 96, 0, 9}, model.TCP), 80))
		fill.add(key, &value{data: "\x01\x00\x00\x00"})
	}
	batch := &batch{table: "spillway"}
	fill.write(batch, unix.NFT_MSG_NEWSETELEM)
	if err := b.do(t.Context(), func(s *socket) error { return s.commit(batch, true) }); err != nil {
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
