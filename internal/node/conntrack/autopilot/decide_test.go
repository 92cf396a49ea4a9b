package autopilot

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/node/capacity"
)

const plenty = int64(8 << 30)

func steps(list []step) string {
	var out []string
	for _, s := range list {
		out = append(out, s.String())
	}
	return strings.Join(out, "; ")
}

func TestWhatIsDecided(t *testing.T) {
	one := func(entries int, growth float64) []space {
		return []space{{Netns: 1, Name: "pod", Entries: entries, Growth: growth}}
	}
	machine := func(s []space) measured {
		return measured{Max: 65536, Buckets: 65536, ExpectMax: 1024, Spaces: s}
	}
	waiting := one(10, 0)
	waiting[0].Expectations = 900
	short := one(60_000, 0)
	short[0].Timeouts = map[string]int{timeoutUDP: 30}
	short[0].Ages = map[string]capacity.Ages{timeoutUDP: {Timeout: 30e9, All: 60_000, Fresh: 6000, Early: 6000, Late: 6000}}
	streams := one(60_000, 0)
	streams[0].Timeouts = short[0].Timeouts
	streams[0].Ages = map[string]capacity.Ages{timeoutUDP: {Timeout: 30e9, All: 60_000, Fresh: 60_000}}
	noMax := map[setting]bool{{Sysctl: sizeMax}: true}
	for _, row := range []struct {
		name   string
		m      measured
		bounds bounds
		want   string
	}{
		{"a table with room", machine(one(40_000, 0)), bounds{Memory: plenty}, ""},
		{"a table that is full", machine(one(60_000, 0)), bounds{Memory: plenty},
			"nf_conntrack_buckets 65536 -> 131072; nf_conntrack_max 65536 -> 131072; nf_conntrack_expect_max 1024 -> 2048"},
		{"one that will be in 30 s", machine(one(10_000, 2000)), bounds{Memory: plenty},
			"nf_conntrack_buckets 65536 -> 262144; nf_conntrack_max 65536 -> 262144; nf_conntrack_expect_max 1024 -> 4096"},
		{"one that shrinks", machine(one(40_000, -2000)), bounds{Memory: plenty}, ""},
		{"a full one without memory", machine(one(60_000, 0)), bounds{Memory: 1 << 20}, ""},
		{"a full one with little memory", machine(one(60_000, 0)), bounds{Memory: 392*80_000 + 216*1248},
			"nf_conntrack_buckets 65536 -> 79872; nf_conntrack_max 65536 -> 80000; nf_conntrack_expect_max 1024 -> 1248"},
		{"memory for hardly more is not worth a step", machine(one(60_000, 0)), bounds{Memory: 392*70_000 + 216*1100}, ""},
		{"a size that was asked for", machine(nil), bounds{Memory: plenty, Entries: 100_000}, "nf_conntrack_max 65536 -> 100000"},
		{"one asked for that is hardly more", machine(nil), bounds{Memory: plenty, Entries: 66_000}, "nf_conntrack_max 65536 -> 66000"},
		{"one asked for that is there", machine(nil), bounds{Memory: plenty, Entries: 10_000}, ""},
		{"expectations that wait", machine(waiting), bounds{Memory: plenty}, "nf_conntrack_expect_max 1024 -> 2048"},
		{"short flows, where sizes do", machine(short), bounds{Memory: plenty, Fixed: map[setting]bool{}},
			"nf_conntrack_buckets 65536 -> 131072; nf_conntrack_max 65536 -> 131072; nf_conntrack_expect_max 1024 -> 2048"},
		{"short flows, where sizes cannot be written", machine(short), bounds{Memory: plenty, Fixed: map[setting]bool{
			{Sysctl: sizeMax}: true, {Sysctl: sizeBuckets}: true, {Sysctl: sizeExpectMax}: true}}, "nf_conntrack_udp_timeout of pod 30 -> 15"},
		{"short flows, with little memory", machine(short), bounds{Memory: 392 * 30_000}, "nf_conntrack_udp_timeout of pod 30 -> 10"},
		{"an operator's timeout as a bound", machine(short), bounds{Memory: 392 * 30_000, Timeouts: map[string]int{timeoutUDP: 20}},
			"nf_conntrack_udp_timeout of pod 30 -> 20"},
		{"an operator's longer than now", machine(short), bounds{Memory: 392 * 30_000, Timeouts: map[string]int{timeoutUDP: 60}}, ""},
		{"flows that go on", machine(streams), bounds{Memory: 392 * 30_000, Fixed: noMax}, ""},
	} {
		row.bounds.PageBytes = 4096
		if got := steps(decide(row.m, newMemory(nil), row.bounds)); got != row.want {
			t.Errorf("%s:\n %s\nwant\n %s", row.name, got, row.want)
		}
	}
}

func TestALoadComesAndGoesAndSoDoTheValues(t *testing.T) {
	for _, row := range []struct {
		name   string
		memory int64
		fixed  bool
		want   []string // directions, in order
	}{
		{"with memory", plenty, false, []string{"raise", "back"}},
		{"without", 392 * 30_000, false, []string{"shorten", "back"}},
		{"where sizes cannot be written", plenty, true, []string{"shorten", "back"}},
	} {
		w := newWorld(2)
		found := fmt.Sprint(w.max, w.buckets, w.expectMax, w.spaces[0].timeouts)
		if row.fixed {
			for _, sysctl := range []string{sizeMax, sizeBuckets, sizeExpectMax} {
				w.fixed[setting{Sysctl: sysctl}] = true
			}
		}
		mem, b := newMemory(nil), bounds{Memory: row.memory, PageBytes: 4096}
		w.spaces[0].rates[timeoutUDP] = 2500
		done := w.run(mem, b, 300)
		w.spaces[0].rates[timeoutUDP] = 10
		done = append(done, w.run(mem, b, 900)...)
		var got []string
		for _, s := range done {
			got = append(got, s.direction())
		}
		if got = slices.Compact(got); !slices.Equal(got, row.want) {
			t.Errorf("%s: %v, want %v: %s", row.name, got, row.want, steps(done))
		}
		if now := fmt.Sprint(w.max, w.buckets, w.expectMax, w.spaces[0].timeouts); now != found || len(mem.Records) != 0 {
			t.Errorf("%s: left %s, found %s; records %v", row.name, now, found, mem.Records)
		}
	}
}

func TestAnOperatorsChangeStays(t *testing.T) {
	w := newWorld(1)
	mem, b := newMemory(nil), bounds{Memory: plenty, PageBytes: 4096}
	w.spaces[0].rates[timeoutUDP] = 2500
	if w.run(mem, b, 120); w.max <= 65536 {
		t.Fatalf("nf_conntrack_max %d was not raised", w.max)
	}
	w.max = 1 << 22
	w.spaces[0].rates[timeoutUDP] = 0
	if w.run(mem, b, 900); w.max != 1<<22 || w.buckets != 65536 {
		t.Errorf("nf_conntrack_max %d, buckets %d: want the operator's, and those found", w.max, w.buckets)
	}
}

func TestTheNextAgentGoesBack(t *testing.T) {
	w := newWorld(1)
	mem, b := newMemory(nil), bounds{Memory: 392 * 30_000, PageBytes: 4096}
	w.spaces[0].rates[timeoutUDP] = 2500
	w.run(mem, b, 120)
	if w.spaces[0].timeouts[timeoutUDP] != 10 {
		t.Fatalf("timeouts %v: not shortened", w.spaces[0].timeouts)
	}
	next := newMemory(mem.Records) // all that outlives a SIGKILL
	w.spaces[0].rates[timeoutUDP] = 0
	if w.run(next, b, 900); w.spaces[0].timeouts[timeoutUDP] != 30 {
		t.Errorf("timeouts %v: not gone back", w.spaces[0].timeouts)
	}
}

// Under any constant load no value falls below the operator's, sizes stay within the
// memory, timeouts stay above their bounds, and no value oscillates.
func TestUnderAnyConstantLoadItSettlesWithinItsBounds(t *testing.T) {
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 0))
		w := newWorld(1 + r.IntN(3))
		w.max, w.buckets = 1<<(12+r.IntN(4)), 1<<(12+r.IntN(4))
		b := bounds{Memory: int64(1+r.IntN(60)) << 20, Entries: r.IntN(1 << 15), PageBytes: 4096,
			Timeouts: map[string]int{timeoutUDP: r.IntN(40), timeoutTimeWait: r.IntN(150)}}
		for _, sysctl := range []string{sizeMax, sizeBuckets, sizeExpectMax} {
			w.fixed[setting{Sysctl: sysctl}] = r.IntN(3) == 0
		}
		for _, s := range w.spaces {
			for _, sysctl := range slices.Sorted(maps.Keys(shortest)) {
				s.rates[sysctl] = float64(r.IntN(400))
				s.steady[sysctl] = r.IntN(2000)
			}
			s.expect = r.IntN(2000)
		}
		max, buckets, expect := w.max, w.buckets, w.expectMax
		mem := newMemory(nil)
		moved := w.run(mem, b, 600)
		// A need at the very limit may cross it late, but no value oscillates.
		late, often := w.run(mem, b, 1500), map[setting]int{}
		for _, s := range late {
			if often[s.setting]++; often[s.setting] > 1 || s.direction() == "back" {
				t.Errorf("seed %d: moves after 10 minutes: %s (before: %s)", seed, steps(late), steps(moved))
			}
		}
		if w.max < max || w.buckets < buckets || w.expectMax < expect {
			t.Errorf("seed %d: max %d, buckets %d, expect_max %d are below the operator's %d, %d, %d", seed, w.max, w.buckets,
				w.expectMax, max, buckets, expect)
		}
		within := capacity.TableWithin(b.Memory)
		if w.max > max && w.max > within || w.buckets > buckets && w.buckets > within || w.expectMax > expect &&
			w.expectMax > capacity.ExpectMax(within) {
			t.Errorf("seed %d: max %d, buckets %d, expect_max %d do not fit into %d bytes", seed, w.max, w.buckets, w.expectMax, b.Memory)
		}
		for _, s := range w.spaces {
			for sysctl, found := range map[string]int{timeoutUDP: 30, timeoutUDPStream: 120, timeoutTimeWait: 120, timeoutFinWait: 120} {
				if v := s.timeouts[sysctl]; v != found && (v > found || v < shortest[sysctl] || v < b.Timeouts[sysctl]) {
					t.Errorf("seed %d: %s is %d, found %d, at least %d and %d", seed, sysctl, v, found, shortest[sysctl], b.Timeouts[sysctl])
				}
			}
		}
		for _, s := range moved {
			if w.fixed[s.setting] {
				t.Errorf("seed %d: %s cannot be written", seed, s)
			}
		}
	}
}
