package ebpf

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
)

// loadBalance is a row of the benchmarks of this file.
type loadBalance struct {
	name    string
	counted bool
	balance intent.Balance
}

var loadBalances = []loadBalance{
	{"random", false, intent.Random},
	{"random again (A/A)", false, intent.Random},
	{"random, with --balance-by-load", true, intent.Random},
	{"least", true, intent.LeastConnections},
	{"latency", true, intent.Latency},
}

// BenchmarkPacketBalance reports what the first packet of a flow takes, by the way that its
// Service with ten endpoints chooses, in ns, as a table:
//
//	go test ./internal/dataplane/ebpf -run '^$' -bench PacketBalance -benchtime 30x -v
//
// The method is that of BenchmarkPacket.
func BenchmarkPacketBalance(b *testing.B) {
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	ok(b, err)
	b.Cleanup(func() { stats.Close() })
	p := plans["IPv4"]
	var nodes []*packetNode
	var cases []*packetCase
	balances := append(slices.Clone(loadBalances), loadBalance{"maglev", false, intent.Maglev})
	for _, l := range balances {
		n := newPacketNode(b, func(c *Config) { c.BalanceByLoad, c.MaxEndpoints = l.counted, DefaultMaxEndpoints })
		var endpoints []intent.Endpoint
		for port := range uint16(10) {
			endpoints = append(endpoints, endpoint(p.pod1, 8080+port, here))
		}
		sp := balanced(service(p, protoTCP, endpoints...), l.balance)
		if l.balance == intent.Maglev {
			for slot := range uint32(intent.DefaultMaglevSize) {
				sp.Table = append(sp.Table, slot*slot%uint32(len(endpoints)))
			}
		}
		before := mapMemory(b, n.m(tcMapSlots))
		n.serve(b, sp)
		if l.balance == intent.Maglev {
			b.Logf("a table of %d entries takes %d bytes of the map slots", len(sp.Table), mapMemory(b, n.m(tcMapSlots))-before)
		}
		c := &packetCase{name: l.name, hook: inEth0, code: actRedirect, fresh: true,
			frame: frame{proto: protoTCP, src: ap(p.client, 1000), dst: ap(p.clusterIP, 80), flags: "S", payload: []byte{0}}}
		n.prepare(b, c)
		nodes, cases = append(nodes, n), append(cases, c)
	}
	measure := func(i int) {
		cases[i].row = min(cases[i].row, nodes[i].measure(b, cases[i], 1, benchRow))
		cases[i].apart = min(cases[i].apart, nodes[i].measure(b, cases[i], benchApart, 1))
	}
	for round := 0; b.Loop(); round++ {
		for i := range cases {
			if round%2 == 1 {
				i = len(cases) - 1 - i
			}
			measure(i)
		}
	}
	b.ReportMetric(0, "ns/op")
	var table strings.Builder
	for _, c := range cases {
		fmt.Fprintf(&table, "%-32s %8.0f %8.0f\n", c.name, c.row, c.apart)
	}
	b.Logf("ns a packet, minimum of the rounds\n%-32s %8s %8s\n%s", "", "in a row", "apart", table.String())
}

// mapMemory returns the kernel's memory of a map, in bytes (6.4).
func mapMemory(b *testing.B, m *ebpf.Map) uint64 {
	b.Helper()
	info, err := m.Info()
	ok(b, err)
	n, _ := info.Memlock()
	return n
}

// The servers of BenchmarkSlowEndpoint each answer one connection at a time. The clients
// connect, wait for the answer, and connect again.
const (
	slowServers  = 10
	slowClients  = 20
	slowAnswer   = 50 * time.Millisecond // of the first server
	fastAnswer   = time.Millisecond
	slowMeasured = 2 * time.Second // in each round
)

// BenchmarkSlowEndpoint reports how long clients wait for the answer of a Service with ten
// endpoints, one of which is slow, as a table. Their sockets choose the endpoints.
//
//	go test ./internal/dataplane/ebpf -run '^$' -bench SlowEndpoint -benchtime 4x -v
func BenchmarkSlowEndpoint(b *testing.B) {
	p := plans["IPv4"]
	n := newPacketNode(b, func(c *Config) { c.BalanceByLoad = true })
	before := ownCgroup(b)
	hooks := n.attachSockets(b, "slow")
	join(b, hooks)
	b.Cleanup(func() { join(b, before) }) // before the cgroup is removed
	var endpoints []intent.Endpoint
	for i := range slowServers {
		at := ap(p.eth0, uint16(8080+i))
		endpoints = append(endpoints, endpoint(at.Addr(), at.Port(), here))
		answer := fastAnswer
		if i == 0 {
			answer = slowAnswer
		}
		go serveSlowly(n.tcpSocket(b, at), answer)
	}
	took := make([][]time.Duration, len(loadBalances))
	for round := 0; b.Loop(); round++ {
		for i := range loadBalances {
			if round%2 == 1 {
				i = len(loadBalances) - 1 - i
			}
			n.serve(b, balanced(service(p, protoTCP, endpoints...), loadBalances[i].balance))
			took[i] = append(took[i], n.askForAWhile(b, ap(p.clusterIP, 80))...)
		}
	}
	b.ReportMetric(0, "ns/op")
	var table strings.Builder
	for i, l := range loadBalances {
		list := took[i]
		slices.Sort(list)
		at := func(q float64) float64 {
			return list[int(math.Ceil(q*float64(len(list))))-1].Seconds() * 1000
		}
		fmt.Fprintf(&table, "%-32s %8d %8.1f %8.1f %8.1f\n", l.name, len(list), at(0.5), at(0.99), at(1))
	}
	b.Logf("ms until the answer\n%-32s %8s %8s %8s %8s\n%s", "", "answers", "median", "p99", "max", table.String())
}

// tcpSocket returns a socket in the node's network namespace, which listens at an address if
// that is valid.
func (n *packetNode) tcpSocket(b *testing.B, at netip.AddrPort) (fd int) {
	var err error
	n.do(func() { fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0) })
	ok(b, err)
	if at.IsValid() {
		ok(b, unix.Bind(fd, sockaddr(at)))
		ok(b, unix.Listen(fd, 128))
		b.Cleanup(func() { _ = unix.Shutdown(fd, unix.SHUT_RDWR) }) // ends serveSlowly
	}
	return fd
}

// serveSlowly answers one connection after the other until the socket is shut down.
func serveSlowly(listener int, answer time.Duration) {
	defer unix.Close(listener)
	for {
		fd, _, err := unix.Accept4(listener, unix.SOCK_CLOEXEC)
		if err != nil {
			return
		}
		time.Sleep(answer)
		_, _ = unix.Write(fd, []byte{1})
		_ = unix.Close(fd)
	}
}

// askForAWhile returns how long each answer took.
func (n *packetNode) askForAWhile(b *testing.B, to netip.AddrPort) (all []time.Duration) {
	var mu sync.Mutex
	var clients sync.WaitGroup
	end := time.Now().Add(slowMeasured)
	for range slowClients {
		clients.Go(func() {
			for time.Now().Before(end) {
				fd, began := n.tcpSocket(b, netip.AddrPort{}), time.Now()
				if err := unix.Connect(fd, sockaddr(to)); err != nil {
					b.Error(err)
				}
				if size, err := unix.Read(fd, make([]byte, 1)); size != 1 {
					b.Error(size, err)
				}
				took := time.Since(began)
				_ = unix.Close(fd)
				mu.Lock()
				all = append(all, took)
				mu.Unlock()
			}
		})
	}
	clients.Wait()
	return all
}
