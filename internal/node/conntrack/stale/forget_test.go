package stale

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// TestOnlyWhatIsNeitherSeenNorTranslatedIsForgotten has an entry to delete, and one of
// every kind that must stay.
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
		with(func(e *conntrack.Entry) { e.Zone = 1 }), with(func(e *conntrack.Entry) { e.Orig.Zone = 1 }),
		with(func(e *conntrack.Entry) { e.Reply.Zone = 1 }),
		with(func(e *conntrack.Entry) { e.Protocol = unix.IPPROTO_ICMP }),
		with(func(e *conntrack.Entry) { e.Orig.Dst, e.Reply.Src = other, other }),
	}
	f := &fakeTable{entries: append([]conntrack.Entry{plain}, stay...)}
	unseen := func(p model.Protocol, from, to netip.AddrPort) bool { return from == a && to == b }
	cut := with(func(e *conntrack.Entry) { e.Status, e.Orig.Dst = conntrack.DstNAT, other })
	cut.Reply.Dst = netip.MustParseAddrPort("10.0.0.4:40000")
	denied := func(p model.Protocol, from, to netip.AddrPort) bool { return from == b && to == cut.Reply.Dst }
	f.entries = append(f.entries, cut)
	n, more, err := onFake(t, f).Forget(t.Context(), unseen, denied)
	if n != 2 || more || err != nil || len(f.entries) != len(stay) {
		t.Errorf("deleted %d, more %v, %v; left %v", n, more, err, f.entries)
	}
	f = &fakeTable{entries: []conntrack.Entry{plain}, delErr: errors.New("no")}
	if _, _, err := onFake(t, f).Forget(t.Context(), unseen, denied); err == nil {
		t.Error("an entry that cannot be deleted is no error")
	}
	f = &fakeTable{dumpErr: conntrack.ErrUnsupported}
	if _, _, err := onFake(t, f).Forget(t.Context(), unseen, denied); err != nil {
		t.Errorf("without conntrack: %v", err)
	}
}

// TestBothDirectionsOfWhatIsTranslatedAreGiven checks the tuples of packets before
// translation.
func TestBothDirectionsOfWhatIsTranslatedAreGiven(t *testing.T) {
	client, service, pod, node := netip.MustParseAddrPort("10.0.0.1:40000"), netip.MustParseAddrPort("10.96.0.1:80"),
		netip.MustParseAddrPort("10.0.0.2:11211"), netip.MustParseAddrPort("10.0.0.9:1024")
	entry := func(status conntrack.Status, orig, reply conntrack.Tuple, state uint8) conntrack.Entry {
		return conntrack.Entry{Protocol: unix.IPPROTO_TCP, Status: status, Orig: orig, Reply: reply, TCPState: state}
	}
	asked, answered := conntrack.Tuple{Src: client, Dst: service}, conntrack.Tuple{Src: pod, Dst: client}
	node2pod := conntrack.Tuple{Src: node, Dst: pod}
	left, back := conntrack.Tuple{Src: client, Dst: pod}, conntrack.Tuple{Src: pod, Dst: node}
	ended := conntrack.Tuple{Src: node, Dst: service}
	f := &fakeTable{entries: []conntrack.Entry{
		entry(conntrack.DstNAT, asked, answered, 3), entry(conntrack.SrcNAT, left, back, 3), entry(0, node2pod, node2pod, 3),
		entry(conntrack.DstNAT, ended, ended, tcpTimeWait), entry(conntrack.SrcNAT, ended, ended, tcpClose),
		entry(conntrack.DstNAT, asked, left, tcpTimeWait),
	}}
	elsewhere := entry(conntrack.DstNAT, ended, ended, tcpTimeWait)
	elsewhere.Zone = 1
	f.entries = append(f.entries, elsewhere)
	given := map[string]bool{}
	each := func(p model.Protocol, from, to netip.AddrPort) bool {
		given[fmt.Sprint(p, from, to)] = true
		return from == node && to == service
	}
	if err := onFake(t, f).Translated(t.Context(), each); err != nil {
		t.Fatal(err)
	}
	want := map[string]bool{}
	for _, tuple := range []conntrack.Tuple{asked, answered, left, back, ended} {
		want[fmt.Sprint(model.TCP, tuple.Src, tuple.Dst)] = true
	}
	if !maps.Equal(given, want) {
		t.Errorf("given %v, want %v", given, want)
	}
	if len(f.entries) != 5 || !slices.Contains(f.entries, elsewhere) {
		t.Errorf("left are %v", f.entries)
	}
	for err, bad := range map[error]bool{conntrack.ErrUnsupported: false, errors.New("no"): true} {
		if got := onFake(t, &fakeTable{dumpErr: err}).Translated(t.Context(), each); (got != nil) != bad {
			t.Errorf("%v: %v", err, got)
		}
	}
}
