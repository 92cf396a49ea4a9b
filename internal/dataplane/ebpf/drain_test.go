package ebpf

import (
	"context"
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

func TestDrainedWaitsForTCPConnectionsAndForNothingElse(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	b, err := New(t.Context(), cfg)
	must.Do(t, err)
	defer b.Close()
	must.Do(t, b.Replace(t.Context(), intent.State{}))
	maps := b.objects.Maps
	flows, now := maps[objects.TCMapFlows], objects.BootSeconds()
	put := func(n uint32, proto model.Protocol, state objects.TCFlowState, seen uint32) [2]objects.TCTuple {
		keys, values := objectstest.Flow(n, proto, state, seen)
		for i := range keys {
			must.Do(t, flows.Put(keys[i], values[i]))
		}
		return keys
	}
	running := put(1, model.TCP, objects.TCFlowStateFLOW_ESTABLISHED, now)
	put(2, model.TCP, objects.TCFlowStateFLOW_CLOSED, now)
	put(3, model.TCP, objects.TCFlowStateFLOW_NEW, now-600)
	udp := put(4, model.UDP, objects.TCFlowStateFLOW_ESTABLISHED, now)
	endpoint := objects.TCFrontendKey{Port: 80, Proto: uint8(model.TCP), Family: uint8(model.IPv4)}
	must.Do(t, maps[objects.TCMapFrontends].Put(endpoint, objects.TCFrontend{Flags: uint8(objects.TCFrontendFlagsFRONTEND_ENDPOINT)}))

	backend := uint32(7)
	must.Do(t, maps[objects.TCMapBackends].Put(backend, objects.TCBackend{Service: 1}))

	_, err = upgrade.Drain(cfg)
	must.Do(t, err)
	if err := maps[objects.TCMapBackends].Lookup(backend, new(objects.TCBackend)); err == nil {
		t.Error("datagrams still follow a flow to its endpoint")
	}
	var fe objects.TCFrontend
	if err := maps[objects.TCMapFrontends].Lookup(endpoint, &fe); err != nil {
		t.Errorf("an endpoint is forgotten while answers are under way: %v", err)
	}
	stopped, stop := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer stop()
	if err := upgrade.Drained(stopped, cfg); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("while a connection runs: %v", err)
	}
	var f objects.TCFlow
	if flows.Lookup(udp[0], &f) == nil || flows.Lookup(udp[1], &f) == nil {
		t.Error("a UDP flow is left")
	}
	if err := maps[objects.TCMapFrontends].Lookup(endpoint, &fe); err == nil {
		t.Error("packets of an endpoint still pass by netfilter")
	}
	must.Do(t, flows.Lookup(running[0], &f))
	for _, key := range running {
		must.Do(t, flows.Delete(key))
	}
	must.Do(t, upgrade.Drained(t.Context(), cfg))
	must.Do(t, upgrade.Cleanup(cfg))
	must.Do(t, upgrade.Drained(t.Context(), cfg)) // nothing is there
}

// TestConnectionsWithoutReservationGoOn has an agent that conntrack refuses.
func TestConnectionsWithoutReservationGoOn(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	b, err := New(t.Context(), cfg)
	must.Do(t, err)
	defer b.Close()
	must.Do(t, b.Replace(t.Context(), intent.State{}))
	keys, values := objectstest.Flow(1, model.TCP, objects.TCFlowStateFLOW_ESTABLISHED, objects.BootSeconds())
	for i := range keys {
		must.Do(t, b.objects.Maps[objects.TCMapFlows].Put(keys[i], values[i]))
	}
	dropNetAdmin(t)
	if _, err := upgrade.Drain(cfg); !errors.Is(err, unix.EPERM) {
		t.Errorf("drain: %v, want what conntrack says", err)
	}
	stopped, stop := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer stop()
	if err := upgrade.Drained(stopped, cfg); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while a connection runs: %v", err)
	}
}

// dropNetAdmin takes CAP_NET_ADMIN from the test's thread until the test ends.
func dropNetAdmin(t *testing.T) {
	t.Helper()
	header := &unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var had [2]unix.CapUserData
	must.Do(t, unix.Capget(header, &had[0]))
	without := had
	without[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	must.Do(t, unix.Capset(header, &without[0]))
	t.Cleanup(func() { must.Do(t, unix.Capset(header, &had[0])) })
}

// While new packets belong to another dataplane, MASQUERADE may choose the port of a UDP
// flow. The programs give the packet another port then, and must stay for its reply.
func TestRepliesToChangedPortsOutliveUDPFlows(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	cfg.Linger = time.Hour
	b, err := New(t.Context(), cfg)
	must.Do(t, err)
	defer b.Close()
	flows, now := b.objects.Maps[objects.TCMapFlows], objects.BootSeconds()
	put := func(n uint32, helper objects.TCFlowHelper) [2]objects.TCTuple {
		keys, values := objectstest.Flow(n, model.UDP, objects.TCFlowStateFLOW_NEW, now)
		for i := range keys {
			values[i].Helper = uint8(helper)
			must.Do(t, flows.Put(keys[i], values[i]))
		}
		return keys
	}
	service, node := put(1, objects.TCFlowHelperHELPER_NONE), put(2, objects.TCFlowHelperHELPER_NODE)

	begun, stop := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer stop()
	if err := upgrade.Drained(begun, cfg); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Drained does not wait for replies: %v", err)
	}
	for i := range service {
		if flows.Lookup(service[i], new(objects.TCFlow)) == nil {
			t.Error("a flow of a Service still makes packets change their ports")
		}
		if err := flows.Lookup(node[i], new(objects.TCFlow)); err != nil {
			t.Errorf("the reply to a packet with a changed port is lost: %v", err)
		}
	}
	cfg.Linger = 0
	must.Do(t, upgrade.Cleanup(cfg))
}

// An instance that drained has no Services. A socket that it translated must not be refused
// for that when eBPF is back: see decide in bpf/lib/serve/first_packet.h.
func TestDrainingEndsWhenServicesAreWritten(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	first, err := New(t.Context(), cfg)
	must.Do(t, err)
	must.Do(t, first.Replace(t.Context(), intent.State{}))
	must.Do(t, first.Close())
	_, err = upgrade.Drain(cfg)
	must.Do(t, err)

	b, err := New(t.Context(), cfg)
	must.Do(t, err)
	defer b.Close()
	drains := func() bool {
		var s objects.TCSettings
		must.Do(t, b.m(objects.TCMapNodeSettings).Lookup(uint32(0), &s))
		return s.Flags&uint32(objects.TCSettingsFlagsSETTING_DRAINS) != 0
	}
	must.Do(t, b.node.Write(&intent.Node{}))
	if !drains() {
		t.Error("the settings say that Services are there before they are written")
	}
	must.Do(t, b.Replace(t.Context(), intent.State{}))
	if drains() {
		t.Error("it drains on when the Services are written")
	}
}
