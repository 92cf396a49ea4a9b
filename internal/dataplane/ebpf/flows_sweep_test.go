package ebpf

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

var testTimeouts = Timeouts{
	TCPNew: 60 * time.Second, TCPEstablished: 600 * time.Second, TCPClosing: 120 * time.Second,
	TCPClosed: 100 * time.Second, UDPNew: 70 * time.Second, UDP: 80 * time.Second,
}

// testFlow is the n-th flow, as the programs make it: both directions.
func testFlow(n uint32, proto model.Protocol, state tcFlowState, seen uint32) (keys [2]tcTuple, flows [2]tcFlow) {
	client, service, node, endpoint := tcAddr{W: [4]uint32{n}}, tcAddr{W: [4]uint32{1}}, tcAddr{W: [4]uint32{2}}, tcAddr{W: [4]uint32{3, n}}
	keys[0] = tcTuple{Saddr: client, Daddr: service, Sport: 1, Dport: 2, Proto: uint8(proto), Family: uint8(model.IPv6)}
	flows[0] = tcFlow{Saddr: node, Daddr: endpoint, Sport: 3, Dport: 4, State: uint8(state), Seen: seen, Flags: uint16(tcFlowFlagsFLOW_SNAT)}
	keys[1] = tcTuple{Saddr: endpoint, Daddr: node, Sport: 4, Dport: 3, Proto: uint8(proto), Family: uint8(model.IPv6)}
	flows[1] = tcFlow{Saddr: service, Daddr: client, Sport: 2, Dport: 1, State: uint8(state), Seen: seen,
		Flags: uint16(tcFlowFlagsFLOW_SNAT | tcFlowFlagsFLOW_REPLY)}
	return keys, flows
}

func TestSweep(t *testing.T) {
	ownPlace(t)
	b := newMapsBackend(t, Config{Timeouts: testTimeouts, FlowTableSize: 1024})
	limits := []struct {
		proto   model.Protocol
		state   tcFlowState
		seconds uint32
	}{
		{model.TCP, tcFlowStateFLOW_NEW, 60},
		{model.TCP, tcFlowStateFLOW_ESTABLISHED, 600},
		{model.TCP, tcFlowStateFLOW_CLOSING, 120},
		{model.TCP, tcFlowStateFLOW_CLOSED, 100},
		{model.UDP, tcFlowStateFLOW_NEW, 70},
		{model.UDP, tcFlowStateFLOW_ESTABLISHED, 80},
	}
	keep := map[tcTuple]string{}
	sweep := map[tcTuple]string{}
	n, now := uint32(0), bootSeconds()
	for _, l := range limits {
		for _, age := range []uint32{0, l.seconds - 10, l.seconds, l.seconds + sweepMargin + 1, l.seconds * 50, ^uint32(0)} {
			n++
			keys, flows := testFlow(n, l.proto, l.state, now-age) // the last is ahead of our clock
			for i := range keys {
				noError(t, b.m(tcMapFlows).Put(keys[i], flows[i]))
				name := fmt.Sprintf("%s, state %d, %d s old, direction %d", l.proto, l.state, int32(age), i)
				if age == l.seconds+sweepMargin+1 || age == l.seconds*50 {
					sweep[keys[i]] = name
				} else {
					keep[keys[i]] = name
				}
			}
		}
	}
	for range 2 {
		noError(t, b.sweep(t.Context()))
		left := readAll[tcTuple, tcFlow](t, b.m(tcMapFlows))
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
		if tcp, udp, swept := b.flows.tcp.Load(), b.flows.udp.Load(), b.flows.swept.Load(); tcp != 16 || udp != 8 || swept != 12 {
			t.Errorf("counted %d TCP, %d UDP, %d swept; want 16, 8, 12", tcp, udp, swept)
		}
	}
}

// A first packet may put a new flow under a dead one's key just when the sweeper
// is about to delete that.
func TestSweepKeepsWhatIsRevived(t *testing.T) {
	ownPlace(t)
	b := newMapsBackend(t, Config{Timeouts: testTimeouts, FlowTableSize: 1024})
	flows, now := b.m(tcMapFlows), bootSeconds()
	keys, alive := testFlow(1, model.TCP, tcFlowStateFLOW_ESTABLISHED, now)
	_, dead := testFlow(1, model.TCP, tcFlowStateFLOW_ESTABLISHED, now-10_000)

	// Between the sweeper's look and its delete.
	noError(t, flows.Put(keys[0], alive[0]))
	noError(t, b.deleteDead(keys[0], now, nil))
	var f tcFlow
	if err := flows.Lookup(keys[0], &f); err != nil || f != alive[0] {
		t.Fatalf("the revived entry is %+v, %v", f, err)
	}
	// Another agent was faster.
	noError(t, flows.Delete(keys[0]))
	noError(t, b.deleteDead(keys[0], now, nil))
	if n := b.flows.swept.Load(); n != 0 {
		t.Errorf("%d swept", n)
	}

	// At any moment: both at once, again and again.
	for i := range 10_000 {
		noError(t, flows.Put(keys[0], dead[0]))
		revived := make(chan error, 1)
		go func() { revived <- flows.Put(keys[0], alive[0]) }()
		err := b.sweepOne(keys[0], now, nil)
		noError(t, <-revived)
		noError(t, err)
		if err := flows.Lookup(keys[0], &f); err != nil || f != alive[0] {
			t.Fatalf("round %d: the revived entry is %+v, %v", i, f, err)
		}
	}
}

// wantPairs checks that no flow has lost one of its directions.
func wantPairs(t *testing.T, flows map[tcTuple]tcFlow) {
	t.Helper()
	for key, f := range flows {
		reverse := tcTuple{Saddr: f.Daddr, Daddr: f.Saddr, Sport: f.Dport, Dport: f.Sport, Proto: key.Proto, Family: key.Family}
		if _, ok := flows[reverse]; !ok {
			t.Fatalf("%v has lost its other direction", key)
		}
	}
}

func TestSweepLargeTable(t *testing.T) {
	ownPlace(t)
	b := newMapsBackend(t, Config{Timeouts: testTimeouts, FlowTableSize: 1 << 18})
	const flowsMade = 150_000
	now := bootSeconds()
	var keys []tcTuple
	var values []tcFlow
	for n := range uint32(flowsMade) {
		age := uint32(0)
		if n%3 == 0 {
			age = 10_000
		}
		k, v := testFlow(n, model.TCP, tcFlowStateFLOW_ESTABLISHED, now-age)
		keys, values = append(keys, k[:]...), append(values, v[:]...)
	}
	_, err := b.m(tcMapFlows).BatchUpdate(keys, values, nil)
	noError(t, err)

	stopped, stop := context.WithCancel(t.Context())
	stop()
	if err := b.sweep(stopped); !errors.Is(err, context.Canceled) || b.flows.swept.Load() != 0 {
		t.Errorf("a sweep that is stopped: error %v, %d swept", err, b.flows.swept.Load())
	}
	noError(t, b.sweep(t.Context()))
	if tcp, swept := b.flows.tcp.Load(), b.flows.swept.Load(); tcp != flowsMade*2/3 || swept != flowsMade/3 {
		t.Errorf("%d flows and %d swept, want %d and %d", tcp, swept, flowsMade*2/3, flowsMade/3)
	}
	left := 0
	noError(t, each(b.m(tcMapFlows), func(tcTuple, tcFlow) { left++ }))
	if left != flowsMade*4/3 {
		t.Errorf("%d entries left, want %d", left, flowsMade*4/3)
	}
}
