package stale

import (
	"slices"
	"testing"

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
