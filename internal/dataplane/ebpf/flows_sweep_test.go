package ebpf

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

var testTimeouts = Timeouts{
	TCPNew: 60 * time.Second, TCPEstablished: 600 * time.Second, TCPClosing: 120 * time.Second,
	TCPClosed: 100 * time.Second, UDPNew: 70 * time.Second, UDP: 80 * time.Second,
}

// testFlow is the n-th flow, as the programs make it: both directions.
func testFlow(n uint32, proto model.Protocol, state objects.TCFlowState, seen uint32) (keys [2]objects.TCTuple, flows [2]objects.TCFlow) {
	client, service, node, endpoint := objects.TCAddr{W: [4]uint32{n}}, objects.TCAddr{W: [4]uint32{1}}, objects.TCAddr{W: [4]uint32{2}}, objects.TCAddr{W: [4]uint32{3, n}}
	keys[0] = objects.TCTuple{Saddr: client, Daddr: service, Sport: 1, Dport: 2, Proto: uint8(proto), Family: uint8(model.IPv6)}
	flows[0] = objects.TCFlow{Saddr: node, Daddr: endpoint, Sport: 3, Dport: 4, State: uint8(state), Seen: seen, Flags: uint16(objects.TCFlowFlagsFLOW_SNAT)}
	keys[1] = objects.TCTuple{Saddr: endpoint, Daddr: node, Sport: 4, Dport: 3, Proto: uint8(proto), Family: uint8(model.IPv6)}
	flows[1] = objects.TCFlow{Saddr: service, Daddr: client, Sport: 2, Dport: 1, State: uint8(state), Seen: seen,
		Flags: uint16(objects.TCFlowFlagsFLOW_SNAT | objects.TCFlowFlagsFLOW_REPLY)}
	return keys, flows
}

func TestSweep(t *testing.T) {
	ownPlace(t)
	b := newMapsBackend(t, Config{Timeouts: testTimeouts, FlowTableSize: 1024})
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
	}
	keep := map[objects.TCTuple]string{}
	sweep := map[objects.TCTuple]string{}
	n, now := uint32(0), objects.BootSeconds()
	for _, l := range limits {
		for _, age := range []uint32{0, l.seconds - 10, l.seconds, l.seconds + objects.SweepMargin + 1, l.seconds * 50, ^uint32(0)} {
			n++
			keys, flows := testFlow(n, l.proto, l.state, now-age) // the last is ahead of our clock
			for i := range keys {
				noError(t, b.m(objects.TCMapFlows).Put(keys[i], flows[i]))
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
		noError(t, b.flows.sweep(t.Context()))
		left := readAll[objects.TCTuple, objects.TCFlow](t, b.m(objects.TCMapFlows))
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
		wantPairs(t, left)
		if tcp, udp, swept := b.flows.counts.tcp.Load(), b.flows.counts.udp.Load(), b.flows.counts.swept.Load(); tcp != 16 || udp != 8 || swept != 12 {
			t.Errorf("counted %d TCP, %d UDP, %d swept; want 16, 8, 12", tcp, udp, swept)
		}
	}
}

// A first packet may put a new flow under a dead one's key just when the sweeper
// is about to delete that.
func TestSweepKeepsWhatIsRevived(t *testing.T) {
	ownPlace(t)
	b := newMapsBackend(t, Config{Timeouts: testTimeouts, FlowTableSize: 1024})
	flows, now := b.m(objects.TCMapFlows), objects.BootSeconds()
	keys, alive := testFlow(1, model.TCP, objects.TCFlowStateFLOW_ESTABLISHED, now)
	_, dead := testFlow(1, model.TCP, objects.TCFlowStateFLOW_ESTABLISHED, now-10_000)

	// Between the sweeper's look and its delete.
	noError(t, flows.Put(keys[0], alive[0]))
	noError(t, b.flows.deleteDead(keys[0], now, nil))
	var f objects.TCFlow
	if err := flows.Lookup(keys[0], &f); err != nil || f != alive[0] {
		t.Fatalf("the revived entry is %+v, %v", f, err)
	}
	// Another agent was faster.
	noError(t, flows.Delete(keys[0]))
	noError(t, b.flows.deleteDead(keys[0], now, nil))
	if n := b.flows.counts.swept.Load(); n != 0 {
		t.Errorf("%d swept", n)
	}

	// At any moment: both at once, again and again.
	for i := range 10_000 {
		noError(t, flows.Put(keys[0], dead[0]))
		revived := make(chan error, 1)
		go func() { revived <- flows.Put(keys[0], alive[0]) }()
		err := b.flows.sweepOne(keys[0], now, nil)
		noError(t, <-revived)
		noError(t, err)
		if err := flows.Lookup(keys[0], &f); err != nil || f != alive[0] {
			t.Fatalf("round %d: the revived entry is %+v, %v", i, f, err)
		}
	}
}

// wantPairs checks that no flow has lost one of its directions.
func wantPairs(t *testing.T, flows map[objects.TCTuple]objects.TCFlow) {
	t.Helper()
	for key, f := range flows {
		reverse := objects.TCTuple{Saddr: f.Daddr, Daddr: f.Saddr, Sport: f.Dport, Dport: f.Sport, Proto: key.Proto, Family: key.Family}
		if _, ok := flows[reverse]; !ok {
			t.Fatalf("%v has lost its other direction", key)
		}
	}
}

func TestSweepLargeTable(t *testing.T) {
	ownPlace(t)
	b := newMapsBackend(t, Config{Timeouts: testTimeouts, FlowTableSize: 1 << 18})
	const flowsMade = 150_000
	now := objects.BootSeconds()
	var keys []objects.TCTuple
	var values []objects.TCFlow
	for n := range uint32(flowsMade) {
		age := uint32(0)
		if n%3 == 0 {
			age = 10_000
		}
		k, v := testFlow(n, model.TCP, objects.TCFlowStateFLOW_ESTABLISHED, now-age)
		keys, values = append(keys, k[:]...), append(values, v[:]...)
	}
	_, err := b.m(objects.TCMapFlows).BatchUpdate(keys, values, nil)
	noError(t, err)

	stopped, stop := context.WithCancel(t.Context())
	stop()
	if err := b.flows.sweep(stopped); !errors.Is(err, context.Canceled) || b.flows.counts.swept.Load() != 0 {
		t.Errorf("a sweep that is stopped: error %v, %d swept", err, b.flows.counts.swept.Load())
	}
	noError(t, b.flows.sweep(t.Context()))
	if tcp, swept := b.flows.counts.tcp.Load(), b.flows.counts.swept.Load(); tcp != flowsMade*2/3 || swept != flowsMade/3 {
		t.Errorf("%d flows and %d swept, want %d and %d", tcp, swept, flowsMade*2/3, flowsMade/3)
	}
	left := 0
	noError(t, objects.Each(b.m(objects.TCMapFlows), func(objects.TCTuple, objects.TCFlow) { left++ }))
	if left != flowsMade*4/3 {
		t.Errorf("%d entries left, want %d", left, flowsMade*4/3)
	}
}
