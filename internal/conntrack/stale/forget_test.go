package stale

import (
	"errors"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/conntrack"
	"spillway.dev/spillway/internal/model"
)

// TestOnlyWhatIsNeitherSeenNorTranslatedIsForgotten gives every kind of entry that must
// stay beside one that must go.
func TestOnlyWhatIsNeitherSeenNorTranslatedIsForgotten(t *testing.T) {
	a, b, other := netip.MustParseAddrPort("10.0.0.1:40000"), netip.MustParseAddrPort("10.0.0.2:11211"), netip.MustParseAddrPort("10.0.0.3:1")
	plain := conntrack.Entry{Protocol: unix.IPPROTO_TCP, Orig: conntrack.Tuple{Src: a, Dst: b}, Reply: conntrack.Tuple{Src: b, Dst: a}}
	with := func(change func(e *conntrack.Entry)) conntrack.Entry {
		e := plain
		change(&e)
		return e
	}
	stay := []conntrack.Entry{
		with(func(e *conntrack.Entry) { e.Status = conntrack.DstNAT }), with(func(e *conntrack.Entry) { e.Status = conntrack.SrcNAT }),
		with(func(e *conntrack.Entry) { e.Reply.Dst = other }), with(func(e *conntrack.Entry) { e.Reply.Src = other }),
		with(func(e *conntrack.Entry) { e.Zone = 1 }), with(func(e *conntrack.Entry) { e.Orig.Zone = 1 }), with(func(e *conntrack.Entry) { e.Reply.Zone = 1 }),
		with(func(e *conntrack.Entry) { e.Protocol = unix.IPPROTO_ICMP }), with(func(e *conntrack.Entry) { e.Orig.Dst, e.Reply.Src = other, other }),
	}
	f := &fakeTable{entries: append([]conntrack.Entry{plain}, stay...)}
	unseen := func(p model.Protocol, from, to netip.AddrPort) bool { return from == a && to == b }
	n, more, err := onFake(t, f).Forget(t.Context(), unseen)
	if n != 1 || more || err != nil || len(f.entries) != len(stay) {
		t.Errorf("deleted %d, more %v, %v; left %v", n, more, err, f.entries)
	}
	f = &fakeTable{entries: []conntrack.Entry{plain}, delErr: errors.New("no")}
	if _, _, err := onFake(t, f).Forget(t.Context(), unseen); err == nil {
		t.Error("an entry that cannot be deleted is no error")
	}
	f = &fakeTable{dumpErr: conntrack.ErrUnsupported}
	if _, _, err := onFake(t, f).Forget(t.Context(), unseen); err != nil {
		t.Errorf("without conntrack: %v", err)
	}
}
