package intent

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

// maglevPort has n endpoints from 10.0.0.1 on; weights nil: equal shares.
func maglevPort(n int, weights []uint16) *ServicePort {
	p := &ServicePort{Balance: Maglev, Weights: weights}
	for i := range n {
		a := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		p.Endpoints = append(p.Endpoints, Endpoint{Addr: netip.AddrPortFrom(a, 8080), ClusterPolicy: true})
	}
	return p
}

// target is the address that a slot leads to.
func target(p *ServicePort, slot int) netip.AddrPort { return p.Endpoints[p.Table[slot]].Addr }

func checksum(table []uint32) uint32 {
	h := crc32.NewIEEE()
	for _, i := range table {
		_ = binary.Write(h, binary.BigEndian, i) // never fails
	}
	return h.Sum32()
}

// TestTablesAreTheSameInAllReleases: nodes of two releases, and of two processors, must agree.
func TestTablesAreTheSameInAllReleases(t *testing.T) {
	six := maglevPort(3, nil)
	six.Endpoints[2].Addr = netip.MustParseAddrPort("[fd00::3]:53")
	for _, c := range []struct {
		name string
		port *ServicePort
		want uint32
	}{
		{"equal", maglevPort(40, nil), 0x8c1a7d07},
		{"weights", maglevPort(5, []uint16{1, 50, 3, 0, 9}), 0x512610b1},
		{"both families", six, 0x6cff2916},
	} {
		if got := checksum(spread(4093, c.port, nil)); got != c.want {
			t.Errorf("%s: checksum %#x, want %#x: nodes of different releases would disagree", c.name, got, c.want)
		}
	}
}

func TestTablesFollowFromTheEndpointsAlone(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	all := maglevPort(30, nil).Endpoints
	var before *ServicePort
	for step := range 300 {
		p := &ServicePort{Balance: Maglev}
		for _, e := range all {
			if r.IntN(4) > 0 {
				e.Ejected, e.ClusterPolicy = r.IntN(6) == 0, r.IntN(6) > 0
				p.Endpoints = append(p.Endpoints, e)
			}
		}
		if r.IntN(10) == 0 {
			for range p.Endpoints {
				p.Weights = append(p.Weights, uint16(r.IntN(4)))
			}
		}
		p.Table = spread(251, p, before)
		if whole := spread(251, p, nil); !slices.Equal(p.Table, whole) {
			t.Fatalf("step %d: the table made from the one before differs from a new one", step)
		}
		before = p
	}
}

// TestOnlyNecessarySlotsMove removes and adds endpoints, and changes weights.
func TestOnlyNecessarySlotsMove(t *testing.T) {
	moved := func(a, b *ServicePort, lost, won func(netip.AddrPort) bool) (n int) {
		a.Table, b.Table = spread(4093, a, nil), spread(4093, b, nil)
		for slot := range a.Table {
			from, to := target(a, slot), target(b, slot)
			if from == to {
				continue
			}
			n++
			if !lost(from) && !won(to) {
				t.Fatalf("slot %d moved from %s to %s, whose shares are unchanged", slot, from, to)
			}
		}
		return n
	}
	none := func(netip.AddrPort) bool { return false }
	a, b := maglevPort(100, nil), maglevPort(100, nil)
	gone := a.Endpoints[17].Addr
	b.Endpoints = slices.Delete(b.Endpoints, 17, 18)
	is := func(x netip.AddrPort) bool { return x == gone }
	if out, back := moved(a, b, is, none), moved(b, a, none, is); out == 0 || out != back {
		t.Errorf("%d slots move when an endpoint goes, %d when it returns", out, back)
	}
	light, heavy := maglevPort(3, []uint16{2, 2, 1}), maglevPort(3, []uint16{2, 2, 4})
	third := light.Endpoints[2].Addr
	if n := moved(light, heavy, none, func(x netip.AddrPort) bool { return x == third }); n == 0 {
		t.Error("no slot moves when a weight grows")
	}
}

// TestTableShares compares the slots of endpoints with their shares.
func TestTableShares(t *testing.T) {
	for _, weights := range [][]uint16{nil, {1, 2, 3, 4, 10, 80, 0, 100, 1, 7}} {
		p := maglevPort(10, weights)
		p.Table = spread(65521, p, nil)
		slots, sum, chi2, used := make([]int, 10), 0, 0.0, 0
		for _, i := range p.Table {
			slots[i]++
		}
		for _, s := range p.Shares(ToCluster) {
			sum += s
		}
		for i, s := range p.Shares(ToCluster) {
			if s == 0 {
				if slots[i] > 0 {
					t.Errorf("endpoint %d has weight 0 and %d slots", i, slots[i])
				}
				continue
			}
			want := float64(len(p.Table)) * float64(s) / float64(sum)
			chi2 += math.Pow(float64(slots[i])-want, 2) / want
			used++
		}
		// Above it are 0.1 % of random outcomes with 9 degrees of freedom.
		if chi2 > 27.9 {
			t.Errorf("weights %v: slots %v, χ² %.1f of %d endpoints", weights, slots, chi2, used)
		}
	}
}

func TestNegativeLog(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	scores := []uint64{1, 2, 3, 255, 1 << 32, 1<<63 - 1, 1 << 63, math.MaxUint64}
	for range 10_000 {
		scores = append(scores, r.Uint64()>>r.IntN(64))
	}
	slices.Sort(scores)
	last := negativeLog(0)
	for _, s := range scores {
		got := negativeLog(s)
		if got > last {
			t.Fatalf("negativeLog(%#x) is above that of a smaller score", s)
		}
		last = got
		if s == 0 {
			continue
		}
		if want := 64 - math.Log2(float64(s)); math.Abs(float64(got)/(1<<logBits)-want) > 3e-6 {
			t.Fatalf("negativeLog(%#x) is %g, want %g", s, float64(got)/(1<<logBits), want)
		}
	}
}

func TestMaglevProblems(t *testing.T) {
	svc := web(clusterIPs("10.96.0.1"))
	svc.Annotations = map[string]string{BalanceAnnotation: "maglev"}
	tr := New(Config{NodeName: here, MaglevSize: 251})
	var many []model.Endpoint
	for i := range 250 {
		many = append(many, at(netip.AddrFrom4([4]byte{10, 1, 1, byte(i)}).String(), there))
	}
	tr.Apply(whole(delta(svc, sliceOf("s", many...))))
	problems := tr.Problems()
	if len(problems) != 1 || !strings.Contains(problems[0].What, "maglev leaves out") {
		t.Errorf("problems %v, want one about endpoints without a slot", problems)
	}
	if n := len(tr.State().Ports[0].Table); n != 251 {
		t.Errorf("a table of %d", n)
	}
}

// BenchmarkMaglevTable makes a table of 16,381 slots anew, and after one endpoint went or came.
func BenchmarkMaglevTable(b *testing.B) {
	for _, n := range []int{10, 100, 1000} {
		p, less := maglevPort(n, nil), maglevPort(n, nil)
		less.Endpoints = slices.Delete(less.Endpoints, n/2, n/2+1)
		p.Table, less.Table = spread(DefaultMaglevSize, p, nil), spread(DefaultMaglevSize, less, nil)
		weights := make([]uint16, n)
		for i := range weights {
			weights[i] = uint16(1 + i%3)
		}
		for _, c := range []struct {
			name     string
			to, from *ServicePort
		}{{"new", p, nil}, {"weighted", maglevPort(n, weights), nil}, {"endpoint-gone", less, p}, {"endpoint-added", p, less}} {
			b.Run(fmt.Sprintf("%s/%d", c.name, n), func(b *testing.B) {
				var table []uint32
				for b.Loop() {
					table = spread(DefaultMaglevSize, c.to, c.from)
				}
				slots := make([]int, n)
				for _, i := range table {
					slots[i]++
				}
				if c.from == nil && c.to.Weights == nil {
					mean := float64(len(table)) / float64(n)
					b.ReportMetric(float64(slices.Min(slots))/mean, "least-share")
					b.ReportMetric(float64(slices.Max(slots))/mean, "most-share")
				}
			})
		}
	}
}
