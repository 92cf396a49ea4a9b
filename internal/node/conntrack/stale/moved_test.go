package stale

import (
	"slices"
	"testing"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/conntrack"
)

// A NodePort moves to another Service while the second scan for the first one is due. The handshake
// stays with its endpoint, which still serves its Service.
func TestAHandshakeStaysWhenItsFrontendMoves(t *testing.T) {
	f := &fakeTable{}
	r := onFake(t, f)
	first, second := ofTCP(port4(epA)), ofTCP(port4(epB))
	second.ID.Service.Name = "second"
	frontends := first.Frontends
	second.Frontends = nil
	apply(t, r, upserts(first, second))
	f.entries = []conntrack.Entry{handshakeEntry("10.96.0.10:53", epA)}
	want := slices.Clone(f.entries)
	moved, owner := *first, *second
	moved.Frontends, owner.Frontends = nil, frontends
	apply(t, r, upserts(&moved, &owner))
	lookAgain(t, r)
	if !slices.Equal(f.entries, want) {
		t.Errorf("left: %v, want %v", f.entries, want)
	}
}

// A deleted Service's address goes to one that is there already, and has its endpoint.
func TestAHandshakeStaysWhenAnotherServiceGetsItsFrontend(t *testing.T) {
	f := &fakeTable{}
	first, second := ofTCP(port4(epA)), ofTCP(port4(epA))
	second.ID.Service.Name = "second"
	frontends := second.Frontends
	second.Frontends = nil
	r := rested(t, f, first, second)
	f.entries = []conntrack.Entry{handshakeEntry("10.96.0.10:53", epA)}
	want := slices.Clone(f.entries)
	owner := *second
	owner.Frontends = frontends
	change := upserts(&owner)
	change.Deletes = []intent.PortID{first.ID}
	apply(t, r, change)
	lookAgain(t, r)
	if !slices.Equal(f.entries, want) {
		t.Errorf("left: %v, want %v", f.entries, want)
	}
}
