package upgrade

import (
	"errors"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// TestReservationsLeaveRoom has more connections than there is room for. Handshakes, which anybody
// can begin, get no entry.
func TestReservationsLeaveRoom(t *testing.T) {
	netnstest.Enter(t)
	r := openReservations()
	defer r.close()
	if errors.Is(r.err, conntrack.ErrUnsupported) {
		t.Skip(r.err)
	}
	limits, err := conntrack.ReadLimits()
	if err != nil || r.err != nil || r.room != limits.Max/2 {
		t.Fatalf("room for %d of %d entries, errors %v, %v", r.room, limits.Max, r.err, err)
	}
	add := func(first, last uint16, state objects.TCFlowState, want int) {
		t.Helper()
		for i := first; i <= last; i++ {
			r.add(&objects.TCTuple{Proto: uint8(model.TCP), Family: uint8(model.IPv4), Sport: i, Dport: i}, &objects.TCFlow{State: uint8(state)})
		}
		if n, err := conntrack.ReadCount(); n != want || err != nil || r.err != nil {
			t.Errorf("%d entries, want %d, errors %v, %v", n, want, err, r.err)
		}
	}
	add(1, 3, objects.TCFlowStateFLOW_NEW, 0)
	add(4, 6, objects.TCFlowStateFLOW_SYN_RECV, 0)
	r.room = 4
	add(7, 9, objects.TCFlowStateFLOW_ESTABLISHED, 3)
	add(7, 9, objects.TCFlowStateFLOW_ESTABLISHED, 3) // they have one
	add(10, 15, objects.TCFlowStateFLOW_ESTABLISHED, 4)
}
