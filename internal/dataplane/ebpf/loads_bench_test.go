package ebpf

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/must"
)

// balances are the rows of BenchmarkPacketBalance.
var balances = []struct {
	name    string
	counted bool
	balance intent.Balance
}{
	{"random", false, intent.Random},
	{"random again (A/A)", false, intent.Random},
	{"random, with --balance-by-load", true, intent.Random},
	{"least", true, intent.LeastConnections},
	{"latency", true, intent.Latency},
	{"maglev", false, intent.Maglev},
}

// BenchmarkPacketBalance reports what the first packet of a flow takes, by the way that its
// Service with ten endpoints chooses, in ns, as a table:
//
//	go test ./internal/dataplane/ebpf -run '^$' -bench PacketBalance -benchtime 30x -v
//
// The method is that of BenchmarkPacket.
func BenchmarkPacketBalance(b *testing.B) {
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	must.Do(b, err)
	b.Cleanup(func() { stats.Close() })
	p := plans["IPv4"]
	var nodes []*packetNode
	var cases []*packetCase
	for _, l := range balances {
		n := newPacketNode(b, func(c *Config) { c.BalanceByLoad, c.MaxEndpoints = l.counted, objects.DefaultMaxEndpoints })
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
		before := mapMemory(b, n.m(objects.TCMapSlots))
		n.serve(b, sp)
		if l.balance == intent.Maglev {
			b.Logf("a table of %d entries takes %d bytes of the map slots", len(sp.Table), mapMemory(b, n.m(objects.TCMapSlots))-before)
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
	must.Do(b, err)
	n, _ := info.Memlock()
	return n
}
