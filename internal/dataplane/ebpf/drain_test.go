package ebpf

import (
	"context"
	"errors"
	"testing"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

func TestDrainedWaitsForTCPConnectionsAndForNothingElse(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	b, err := New(t.Context(), cfg)
	noError(t, err)
	defer b.Close()
	noError(t, b.Replace(t.Context(), intent.State{}))
	maps := b.objects.maps
	flows, now := maps[tcMapFlows], bootSeconds()
	put := func(n uint32, proto model.Protocol, state tcFlowState, seen uint32) [2]tcTuple {
		keys, values := testFlow(n, proto, state, seen)
		for i := range keys {
			noError(t, flows.Put(keys[i], values[i]))
		}
		return keys
	}
	running := put(1, model.TCP, tcFlowStateFLOW_ESTABLISHED, now)
	put(2, model.TCP, tcFlowStateFLOW_CLOSED, now)
	put(3, model.TCP, tcFlowStateFLOW_NEW, now-600)
	udp := put(4, model.UDP, tcFlowStateFLOW_ESTABLISHED, now)
	endpoint := tcFrontendKey{Port: 80, Proto: uint8(model.TCP), Family: uint8(model.IPv4)}
	noError(t, maps[tcMapFrontends].Put(endpoint, tcFrontend{Flags: uint8(tcFrontendFlagsFRONTEND_ENDPOINT)}))

	backend := uint32(7)
	noError(t, maps[tcMapBackends].Put(backend, tcBackend{Service: 1}))

	_, err = Drain(cfg)
	noError(t, err)
	if err := maps[tcMapBackends].Lookup(backend, new(tcBackend)); err == nil {
		t.Error("datagrams still follow a flow to its endpoint")
	}
	var fe tcFrontend
	if err := maps[tcMapFrontends].Lookup(endpoint, &fe); err != nil {
		t.Errorf("an endpoint is forgotten while answers are under way: %v", err)
	}
	stopped, stop := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer stop()
	if err := Drained(stopped, cfg); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("while a connection runs: %v", err)
	}
	var f tcFlow
	if flows.Lookup(udp[0], &f) == nil || flows.Lookup(udp[1], &f) == nil {
		t.Error("a UDP flow is left")
	}
	if err := maps[tcMapFrontends].Lookup(endpoint, &fe); err == nil {
		t.Error("packets of an endpoint still pass by netfilter")
	}
	noError(t, flows.Lookup(running[0], &f))
	for _, key := range running {
		noError(t, flows.Delete(key))
	}
	noError(t, Drained(t.Context(), cfg))
	noError(t, Cleanup(cfg))
	noError(t, Drained(t.Context(), cfg)) // nothing is there
}

// While new packets belong to another dataplane, MASQUERADE may choose the port of a UDP
// flow. The programs give the packet another port then, and must stay for its reply.
func TestRepliesToChangedPortsOutliveUDPFlows(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	cfg.Linger = time.Hour
	b, err := New(t.Context(), cfg)
	noError(t, err)
	defer b.Close()
	flows, now := b.objects.maps[tcMapFlows], bootSeconds()
	put := func(n uint32, helper tcFlowHelper) [2]tcTuple {
		keys, values := testFlow(n, model.UDP, tcFlowStateFLOW_NEW, now)
		for i := range keys {
			values[i].Helper = uint8(helper)
			noError(t, flows.Put(keys[i], values[i]))
		}
		return keys
	}
	service, node := put(1, tcFlowHelperHELPER_NONE), put(2, tcFlowHelperHELPER_NODE)

	begun, stop := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer stop()
	if err := Drained(begun, cfg); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Drained does not wait for replies: %v", err)
	}
	for i := range service {
		if flows.Lookup(service[i], new(tcFlow)) == nil {
			t.Error("a flow of a Service still makes packets change their ports")
		}
		if err := flows.Lookup(node[i], new(tcFlow)); err != nil {
			t.Errorf("the reply to a packet with a changed port is lost: %v", err)
		}
	}
	cfg.Linger = 0
	noError(t, Cleanup(cfg))
}
