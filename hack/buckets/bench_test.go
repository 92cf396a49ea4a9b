package buckets

import (
	"cmp"
	"flag"
	"fmt"
	"math"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
)

const (
	confirmedMax = 131_072              // --conntrack-min
	slots        = confirmedMax * 5 / 4 // with unconfirmed flows
	fresh        = 1 << 21              // the first of the flows that are not in the table
	freshOfCPU   = 1 << 20
	batch        = 8192
)

// others is memory that each CPU writes to before packets apart. Else the table that was measured
// last would have an advantage.
var others [2][64 << 20]byte

// benchCase is one row of the table. A flow of "in a row" is in the cache, one of "apart" is not.
type benchCase struct {
	name    string
	program string
	flags   uint32
	flood   bool // first packets in a table without a free slot
}

var benchCases = []benchCase{
	{name: "first packet", program: "first"},
	{name: "first packet, SNAT", program: "first", flags: runSNAT},
	{name: "known flow", program: "known"},
	{name: "known flow, first of its second", program: "known", flags: runTick},
	{name: "reply", program: "reply"},
	{name: "reply, first of its second", program: "reply", flags: runTick},
	{name: "reply, SNAT", program: "reply", flags: runSNAT},
	{name: "first packet in a flood", program: "first", flood: true},
}

// tableSlots is the size of the tables with one entry a flow.
var tableSlots = flag.Int("slots", slots, "slots of the tables with one entry a flow")

// BenchmarkFlows prints what the operations of the layouts take, in ns a packet, without what an
// empty program takes. The layout with buckets stands there with two hashes. Each iteration is a
// round: A B C C B A. A figure is the median of the rounds, with the least and the greatest. Ratios
// are those of the LRU's time and the other's, in the same round: above 1, the buckets are faster.
//
//	go -C hack test ./buckets -run '^$' -bench Flows -benchtime 20x -timeout 1h -v
func BenchmarkFlows(b *testing.B) {
	debug.SetGCPercent(-1) // a signal would repeat a run
	lruSpec, bucketSpec := compile(b, "lru"), compile(b, "buckets")
	for _, percent := range []uint32{1, 50, 95} {
		flows := confirmedMax * percent / 100 / 2 * 2
		tables := []*layout{newLRU(b, lruSpec, slots), newBuckets(b, bucketSpec, uint32(*tableSlots/ways), false),
			newBuckets(b, bucketSpec, uint32(*tableSlots/ways), true)}
		for _, l := range tables {
			l.populate(b, flows)
		}
		for _, n := range []int{1, 2} {
			b.Run(fmt.Sprintf("fill=%d%%/cpus=%d", percent, n), func(b *testing.B) {
				benchTables(b, tables, flows, cpus(b, n))
			})
		}
		b.Logf("bytes a confirmed flow, of %d: %s", confirmedMax, bytesOf(b, tables))
		for _, l := range tables {
			l.Close()
		}
	}
}

// populate stores confirmed flows: the first half without SNAT, the second half with it.
func (l *layout) populate(b *testing.B, flows uint32) {
	b.Helper()
	half := flows / 2
	for first := uint32(0); first < flows; {
		flags, end := uint32(0), half
		if first >= half {
			flags, end = runSNAT, flows
		}
		n := min(batch, end-first)
		for _, program := range []string{"first", "confirm"} {
			p := &packets{program: program, run: run{First: first, Flows: n, Flags: flags, Time: 1000}, repeat: int(n)}
			l.atOnce(b, cpus(b, 1), p)
			if p.run.Done < uint64(n-n/100) {
				b.Fatalf("%s: %s of %d flows: %+v", l.name, program, n, p.run)
			}
		}
		first += n
	}
}

// bytesOf returns what the kernel charges for the maps of each table.
func bytesOf(b *testing.B, tables []*layout) string {
	b.Helper()
	var all []string
	for _, l := range tables {
		total := uint64(0)
		for name, m := range l.Maps {
			if info, err := m.Info(); err != nil {
				b.Fatal(err)
			} else if n, ok := info.Memlock(); ok && name != "runs" {
				total += n
			}
		}
		all = append(all, fmt.Sprintf("%s %.0f", l.name, float64(total)/confirmedMax))
	}
	return strings.Join(all, ", ")
}

// figures are the rounds of a case: ns a packet of each table.
type figures [3][]float64

// ratios returns those of the first table's time and another's.
func (f *figures) ratios(other int) (r []float64) {
	for i, ns := range f[other] {
		r = append(r, f[0][i]/ns)
	}
	return r
}

func benchTables(b *testing.B, tables []*layout, flows uint32, numbers []int) {
	b.Helper()
	rows := make(map[string]*figures)
	var order []string
	round := uint32(0)
	for b.Loop() {
		for _, c := range benchCases {
			if c.flood {
				continue // afterwards: the table stays full
			}
			for _, apart := range []bool{false, true} {
				order = benchRound(b, c, apart, tables, flows, numbers, &round, rows, order)
			}
		}
	}
	for _, l := range tables {
		l.flood(b, numbers[0])
	}
	for range b.N {
		for _, c := range benchCases {
			if c.flood {
				order = benchRound(b, c, true, tables, flows, numbers, &round, rows, order)
			}
		}
	}
	for _, l := range tables {
		l.endFlood(b)
	}
	var table strings.Builder
	for _, name := range order {
		f := rows[name]
		fmt.Fprintf(&table, "%-42s %-20s %-19s %-19s %-20s %s\n", name, spread(f[0], "%.0f"), spread(f[1], "%.0f"), spread(f[2], "%.0f"),
			spread(f.ratios(1), "%.2f"), spread(f.ratios(2), "%.2f"))
	}
	b.ReportMetric(0, "ns/op")
	b.Logf("ns a packet: median (least to greatest)\n%-42s %-20s %-19s %-19s %-20s %s\n%s",
		"", "lru", "siphash", "multiply", "lru / siphash", "lru / multiply", table.String())
}

// benchRound measures one case twice with each table: A B C C B A.
func benchRound(b *testing.B, c benchCase, apart bool, tables []*layout, flows uint32, numbers []int, round *uint32,
	rows map[string]*figures, order []string) []string {
	b.Helper()
	name := c.name + map[bool]string{false: ", in a row", true: ", apart"}[apart]
	if rows[name] == nil {
		rows[name] = &figures{}
		order = append(order, name)
	}
	var ns [3]float64
	for _, which := range []int{0, 1, 2, 2, 1, 0} {
		l := tables[which]
		*round++
		ns[which] += (l.measure(b, c, apart, flows, numbers, *round) - l.empty(b, c, apart, flows, numbers)) / 2
	}
	for which := range ns {
		rows[name][which] = append(rows[name][which], ns[which])
	}
	return order
}

// work returns what a CPU does in a case.
func (c benchCase) work(apart bool, flows uint32, cpu int, round uint32) *packets {
	p := &packets{program: c.program, run: run{Flags: c.flags, Time: 1000}, repeat: batch}
	switch {
	case c.program == "first":
		p.run.Flows = batch
		p.run.First = fresh + uint32(cpu)*freshOfCPU + round*batch%(freshOfCPU-batch)
		if !apart {
			p.run.Flows, p.repeat = 64, 64
		}
	case apart:
		p.run.Flows = flows / 2
		p.run.Next = uint64(round) << 32
		p.run.Flags |= runRandom
	default:
		p.run.First, p.run.Flows = uint32(cpu), 1
	}
	if c.program != "first" && c.flags&runSNAT != 0 {
		p.run.First += flows / 2
	}
	return p
}

// measure returns the ns a packet, the mean of the CPUs.
func (l *layout) measure(b *testing.B, c benchCase, apart bool, flows uint32, numbers []int, round uint32) float64 {
	b.Helper()
	times, total := 1, 0.0
	if c.program == "first" && !apart {
		times = 16 // a run of 64 packets is short
	}
	for range times {
		var all []*packets
		for cpu := range numbers {
			p := c.work(apart, flows, cpu, round)
			if apart {
				p.others = others[cpu][:]
			}
			all = append(all, p)
		}
		l.atOnce(b, numbers, all...)
		for i, p := range all {
			if p.run.Done < uint64(p.repeat-p.repeat/10) {
				b.Fatalf("%s: %s on CPU %d of %d: %+v", l.name, c.name, i, len(numbers), p.run)
			}
			total += float64(p.perPacket) / float64(len(all)*times)
			if c.program == "first" && !c.flood {
				l.atOnce(b, numbers, &packets{program: "forget", run: p.run, repeat: p.repeat})
			}
		}
	}
	return total
}

// empty returns what a packet of the case takes without a table.
func (l *layout) empty(b *testing.B, c benchCase, apart bool, flows uint32, numbers []int) float64 {
	b.Helper()
	least := math.MaxFloat64
	for range 3 {
		p := c.work(apart, flows, 0, 0)
		p.program, p.repeat = "empty", batch
		l.atOnce(b, numbers, p)
		least = min(least, float64(p.perPacket))
	}
	return least
}

// flood fills the table with unconfirmed flows.
func (l *layout) flood(b *testing.B, cpu int) {
	b.Helper()
	for i := range uint32(3 * max(slots, *tableSlots) / batch) {
		p := &packets{program: "first", run: run{First: 2*fresh + i*batch, Flows: batch, Time: 1000}, repeat: batch}
		l.atOnce(b, []int{cpu}, p)
	}
}

// endFlood deletes unconfirmed flows: those of the flood, and of the measurement in it.
func (l *layout) endFlood(b *testing.B) {
	b.Helper()
	for first := uint32(fresh); first < uint32(2*fresh+3*max(slots, *tableSlots)); first += batch {
		l.atOnce(b, cpus(b, 1), &packets{program: "forget", run: run{First: first, Flows: batch}, repeat: batch})
	}
}

// spread returns the median of numbers, with the least and the greatest.
func spread(numbers []float64, format string) string {
	sorted := slices.SortedFunc(slices.Values(numbers), cmp.Compare)
	return fmt.Sprintf(format+" ("+format+"–"+format+")", sorted[len(sorted)/2], sorted[0], sorted[len(sorted)-1])
}
