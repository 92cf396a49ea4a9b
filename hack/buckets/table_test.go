package buckets

import (
	"math/rand/v2"
	"testing"
)

// one runs a program for one flow, at a time in seconds, and returns the counters.
func (l *layout) one(t testing.TB, program string, flow, time uint32) run {
	t.Helper()
	p := &packets{program: program, run: run{First: flow, Flows: 1, Time: time}, repeat: 1}
	l.atOnce(t, cpus(t, 1), p)
	return p.run
}

// has reports whether packets of both directions find the flow, and fails if only one does.
func (l *layout) has(t testing.TB, flow uint32) bool {
	t.Helper()
	check := func(program string) bool {
		p := &packets{program: program, run: run{First: flow, Flows: 1, Flags: runCheck}, repeat: 1}
		l.atOnce(t, cpus(t, 1), p)
		if p.run.Torn != 0 {
			t.Errorf("flow %d: %s read another flow", flow, program)
		}
		return p.run.Done == 1
	}
	there, back := check("known"), check("reply")
	if there != back {
		t.Errorf("flow %d: found there: %v, back: %v", flow, there, back)
	}
	return there
}

// TestOneCPUStoresAFlow has two CPUs store the same flows at once.
func TestOneCPUStoresAFlow(t *testing.T) {
	const flows = 4000
	l := newBuckets(t, compile(t, "buckets"), 1024, false)
	both := 0
	for round := range 50 {
		work := run{Flows: flows, Time: 1}
		one, two := &packets{program: "first", run: work, repeat: flows}, &packets{program: "first", run: work, repeat: flows}
		l.atOnce(t, cpus(t, 2), one, two)
		if done := one.run.Done + two.run.Done; done != flows {
			t.Fatalf("round %d: two CPUs have stored %d flows, want %d: %+v, %+v", round, done, flows, one.run, two.run)
		}
		if one.run.Done > 0 && two.run.Done > 0 {
			both++
		}
		l.do(t, "forget", 0, flows, 0)
		again := &packets{program: "forget", run: work, repeat: flows}
		l.atOnce(t, cpus(t, 1), again)
		if again.run.Done != 0 {
			t.Fatalf("round %d: %d flows were stored twice", round, again.run.Done)
		}
	}
	if both == 0 {
		t.Error("the CPUs never ran at once")
	}
}

// TestOneFlowGetsAPort has two CPUs store flows with SNAT, pairs of which want one port.
func TestOneFlowGetsAPort(t *testing.T) {
	const endpoints = 7919 // of bpf/common.h
	l := newBuckets(t, compile(t, "buckets"), 4096, false)
	for round := range 10 {
		work := run{Flows: endpoints, Flags: runSNAT | runOnePort, Time: 1}
		one, two := &packets{program: "first", run: work, repeat: endpoints}, &packets{program: "first", run: work, repeat: endpoints}
		two.run.First = endpoints
		l.atOnce(t, cpus(t, 2), one, two)
		if done := one.run.Done + two.run.Done; done != endpoints {
			t.Fatalf("round %d: %d flows have the port of %d endpoints: %+v, %+v", round, done, endpoints, one.run, two.run)
		}
		gone := &packets{program: "forget", run: run{Flows: 2 * endpoints, Flags: runSNAT | runOnePort}, repeat: 2 * endpoints}
		l.atOnce(t, cpus(t, 1), gone)
		if gone.run.Done != endpoints {
			t.Fatalf("round %d: %d flows were deleted, want %d", round, gone.run.Done, endpoints)
		}
	}
}

// TestFullBucketsKeepConfirmedFlows stores flows in a table of one or two buckets.
func TestFullBucketsKeepConfirmedFlows(t *testing.T) {
	spec := compile(t, "buckets")
	for _, buckets := range []uint32{1, 2} {
		l := newBuckets(t, spec, buckets, false)
		slots := buckets * ways
		var clock uint32
		next := func(flow uint32) run { clock++; return l.one(t, "first", flow, clock) }
		confirmed := slots / 2
		for flow := range confirmed {
			next(flow)
			if r := l.one(t, "confirm", flow, clock); r.Done != 1 {
				t.Fatalf("%d buckets: flow %d is not confirmed: %+v", buckets, flow, r)
			}
		}
		for flow := confirmed; flow < 10*slots; flow++ {
			if r := next(flow); r.Done != 1 && r.Refused == 0 {
				t.Errorf("%d buckets: flow %d: %+v, want it stored or refused", buckets, flow, r)
			} else if buckets == 1 && (r.Done != 1 || (r.Replaced == 1) != (flow >= slots)) {
				t.Errorf("one bucket: flow %d: %+v, want it stored, and an older one replaced once the bucket is full", flow, r)
			}
		}
		for flow := range confirmed {
			if !l.has(t, flow) {
				t.Errorf("%d buckets: confirmed flow %d was evicted", buckets, flow)
			}
		}
		if buckets > 1 {
			continue // which of them are stored depends on the hash
		}
		for flow := confirmed; flow < 10*slots; flow++ {
			if got, want := l.has(t, flow), flow >= 10*slots-(slots-confirmed); got != want {
				t.Errorf("unconfirmed flow %d is in the table: %v, want %v: the oldest are replaced first", flow, got, want)
			}
			if r := l.one(t, "confirm", flow, clock); (r.Done == 1) != (flow >= 10*slots-(slots-confirmed)) {
				t.Errorf("flow %d: %+v", flow, r)
			}
		}
		if r := next(1000); r.Refused != 1 || r.Done != 0 {
			t.Errorf("a flow in a bucket of confirmed ones: %+v, want it refused", r)
		}
	}
}

// refusedOnPaper returns how many of n flows find both of their buckets full, by the rule of the table.
func refusedOnPaper(n, buckets int) (refused int) {
	used := make([]int, buckets)
	for range n {
		at := rand.IntN(buckets)
		if other := rand.IntN(buckets); used[other] < used[at] {
			at = other
		}
		if used[at] == ways {
			refused++
		} else {
			used[at]++
		}
	}
	return refused
}

// TestRandomFlowsFit fills tables with confirmed flows, and compares the refused ones with a simulation.
func TestRandomFlowsFit(t *testing.T) {
	const buckets = 1024
	spec := compile(t, "buckets")
	for i, percent := range []int{80, 95, 80, 95} {
		flows := uint32(buckets * ways * percent / 100)
		first := rand.Uint32N(1 << 21)
		l := newBuckets(t, spec, buckets, i > 1)
		var refused uint32
		for flow := first; flow < first+flows; flow++ {
			if r := l.one(t, "first", flow, 1); r.Refused == 1 {
				refused++
			} else if c := l.one(t, "confirm", flow, 1); r.Done != 1 || r.Replaced != 0 || c.Done != 1 {
				t.Fatalf("flow %d: %+v, confirmed: %+v", flow, r, c)
			}
		}
		paper := 0
		for range 20 {
			paper = max(paper, refusedOnPaper(int(flows), buckets))
		}
		t.Logf("%s, %d %% of %d slots: %d of %d flows refused; on paper %d at most in 20 trials", l.name, percent,
			buckets*ways, refused, flows, paper)
		if refused > uint32(2*paper+5) {
			t.Errorf("%d %%: %d flows refused, on paper %d at most: is the hash uneven?", percent, refused, paper)
		}
		for _, program := range []string{"known", "reply"} {
			p := &packets{program: program, run: run{First: first, Flows: flows, Flags: runCheck}, repeat: int(flows)}
			l.atOnce(t, cpus(t, 1), p)
			if p.run.Done != uint64(flows-refused) || p.run.Missed != uint64(refused) || p.run.Torn != 0 {
				t.Errorf("%d %%: %s: %+v, want %d found", percent, program, p.run, flows-refused)
			}
		}
	}
}

// TestReadersSeeWholeEntries reads flows while another CPU replaces them all the time.
func TestReadersSeeWholeEntries(t *testing.T) {
	const flows, want = 24, 200_000
	spec := compile(t, "buckets")
	for _, flags := range []uint32{0, runIPv6, runSNAT} {
		for _, program := range []string{"known", "reply"} {
			l := newBuckets(t, spec, 1, false)
			var found, replaced uint64
			for rounds := 0; found < want; rounds++ {
				writer := &packets{program: "first", run: run{Flows: flows, Flags: flags, Time: 1}, repeat: 100_000}
				reader := &packets{program: program, run: run{Flows: flows, Flags: flags | runCheck | runRandom}, repeat: 200_000}
				l.atOnce(t, cpus(t, 2), writer, reader)
				if reader.run.Torn != 0 {
					t.Fatalf("flags %d: %s saw parts of two flows: %+v", flags, program, reader.run)
				}
				found += reader.run.Done
				replaced += writer.run.Replaced
				if rounds > 100 {
					t.Fatalf("flags %d: %s finds few flows: %+v", flags, program, reader.run)
				}
			}
			if replaced == 0 {
				t.Error("the writer has replaced nothing")
			}
			t.Logf("flags %d: %s: %d found, none torn, while %d were replaced", flags, program, found, replaced)
		}
	}
}
