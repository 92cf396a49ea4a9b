package flows

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

// newTable returns a Table with all maps and no program. Of no Service anything is known.
func newTable(t testing.TB, cfg objects.Config) *Table {
	t.Helper()
	c, o := objectstest.Objects(t, cfg)
	return New(c, o, nil)
}

func TestSweep(t *testing.T) {
	b := newTable(t, objects.Config{Timeouts: objectstest.Timeouts, FlowTableSize: 1024})
	limits := []struct {
		proto   model.Protocol
		state   objects.TCFlowState
		seconds uint32
	}{
		{model.TCP, objects.TCFlowStateFLOW_NEW, 60},
		{model.TCP, objects.TCFlowStateFLOW_ESTABLISHED, 600},
		{model.TCP, objects.TCFlowStateFLOW_CLOSING, 120},
		{model.TCP, objects.TCFlowStateFLOW_CLOSED, 100},
		{model.UDP, objects.TCFlowStateFLOW_NEW, 70},
		{model.UDP, objects.TCFlowStateFLOW_ESTABLISHED, 80},
		{model.ICMP, objects.TCFlowStateFLOW_NEW, 70},
		{model.ICMPv6, objects.TCFlowStateFLOW_ESTABLISHED, 70},
	}
	keep := map[objects.TCTuple]string{}
	sweep := map[objects.TCTuple]string{}
	n, now := uint32(0), objects.BootSeconds()
	for _, l := range limits {
		for _, age := range []uint32{0, l.seconds - 10, l.seconds, l.seconds + objects.SweepMargin + 1, l.seconds * 50, ^uint32(0)} {
			n++
			keys, flows := objectstest.Flow(n, l.proto, l.state, now-age) // the last is ahead of our clock
			for i := range keys {
				must.Do(t, b.m(objects.TCMapFlows).Put(keys[i], flows[i]))
				name := fmt.Sprintf("%s, state %d, %d s old, direction %d", l.proto, l.state, int32(age), i)
				if age == l.seconds+objects.SweepMargin+1 || age == l.seconds*50 {
					sweep[keys[i]] = name
				} else {
					keep[keys[i]] = name
				}
			}
		}
	}
	for range 2 {
		must.Do(t, b.Sweep(t.Context()))
		left := objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, b.m(objects.TCMapFlows))
		for key, name := range keep {
			if _, ok := left[key]; !ok {
				t.Errorf("%s: swept", name)
			}
		}
		for key, name := range sweep {
			if _, ok := left[key]; ok {
				t.Errorf("%s: not swept", name)
			}
		}
		objectstest.WantPairs(t, left)
		tcp, udp, icmp, swept := b.counts.tcp.Load(), b.counts.udp.Load(), b.counts.icmp.Load(), b.counts.swept.Load()
		if tcp != 16 || udp != 8 || icmp != 8 || swept != 16 {
			t.Errorf("counted %d TCP, %d UDP, %d ICMP, %d swept; want 16, 8, 8, 16", tcp, udp, icmp, swept)
		}
	}
}

// TestFlowsOfALaterVersionEnd: after a rollback the table may have a protocol that this version does not know. No packet
// uses its entries, and they end as unanswered datagrams do.
func TestFlowsOfALaterVersionEnd(t *testing.T) {
	b := newTable(t, objects.Config{Timeouts: objectstest.Timeouts, FlowTableSize: 1024})
	const unknown = 200
	for i, age := range []uint32{60, 70 + objects.SweepMargin + 1} {
		keys, flows := objectstest.Flow(uint32(i), unknown, objects.TCFlowStateFLOW_ESTABLISHED, objects.BootSeconds()-age)
		for j := range keys {
			must.Do(t, b.m(objects.TCMapFlows).Put(keys[j], flows[j]))
		}
	}
	must.Do(t, b.Sweep(t.Context()))
	left := objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, b.m(objects.TCMapFlows))
	if len(left) != 2 {
		t.Errorf("%d entries are left, want those of the flow that is not over", len(left))
	}
}

// A first packet may put a new flow under a dead one's key just when the sweeper
// is about to delete that.
func TestSweepKeepsWhatIsRevived(t *testing.T) {
	b := newTable(t, objects.Config{Timeouts: objectstest.Timeouts, FlowTableSize: 1024})
	flows, now := b.m(objects.TCMapFlows), objects.BootSeconds()
	keys, alive := objectstest.Flow(1, model.TCP, objects.TCFlowStateFLOW_ESTABLISHED, now)
	_, dead := objectstest.Flow(1, model.TCP, objects.TCFlowStateFLOW_ESTABLISHED, now-10_000)

	// Between the sweeper's look and its delete.
	must.Do(t, flows.Put(keys[0], alive[0]))
	must.Do(t, b.deleteDead(keys[0], now, nil))
	var f objects.TCFlow
	if err := flows.Lookup(keys[0], &f); err != nil || f != alive[0] {
		t.Fatalf("the revived entry is %+v, %v", f, err)
	}
	// Another agent was faster.
	must.Do(t, flows.Delete(keys[0]))
	must.Do(t, b.deleteDead(keys[0], now, nil))
	if n := b.counts.swept.Load(); n != 0 {
		t.Errorf("%d swept", n)
	}

	// At any moment: both at once, again and again.
	for i := range 10_000 {
		must.Do(t, flows.Put(keys[0], dead[0]))
		revived := make(chan error, 1)
		go func() { revived <- flows.Put(keys[0], alive[0]) }()
		err := b.sweepOne(keys[0], now, nil)
		must.Do(t, <-revived)
		must.Do(t, err)
		if err := flows.Lookup(keys[0], &f); err != nil || f != alive[0] {
			t.Fatalf("round %d: the revived entry is %+v, %v", i, f, err)
		}
	}
}

func TestSweepLargeTable(t *testing.T) {
	b := newTable(t, objects.Config{Timeouts: objectstest.Timeouts, FlowTableSize: 1 << 18})
	const flowsMade = 150_000
	now := objects.BootSeconds()
	var keys []objects.TCTuple
	var values []objects.TCFlow
	for n := range uint32(flowsMade) {
		age := uint32(0)
		if n%3 == 0 {
			age = 10_000
		}
		k, v := objectstest.Flow(n, model.TCP, objects.TCFlowStateFLOW_ESTABLISHED, now-age)
		keys, values = append(keys, k[:]...), append(values, v[:]...)
	}
	_, err := b.m(objects.TCMapFlows).BatchUpdate(keys, values, nil)
	must.Do(t, err)

	stopped, stop := context.WithCancel(t.Context())
	stop()
	if err := b.Sweep(stopped); !errors.Is(err, context.Canceled) || b.counts.swept.Load() != 0 {
		t.Errorf("a sweep that is stopped: error %v, %d swept", err, b.counts.swept.Load())
	}
	must.Do(t, b.Sweep(t.Context()))
	if tcp, swept := b.counts.tcp.Load(), b.counts.swept.Load(); tcp != flowsMade*2/3 || swept != flowsMade/3 {
		t.Errorf("%d flows and %d swept, want %d and %d", tcp, swept, flowsMade*2/3, flowsMade/3)
	}
	left := 0
	must.Do(t, objects.Each(b.m(objects.TCMapFlows), func(objects.TCTuple, objects.TCFlow) { left++ }))
	if left != flowsMade*4/3 {
		t.Errorf("%d entries left, want %d", left, flowsMade*4/3)
	}
}
