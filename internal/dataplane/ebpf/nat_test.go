package ebpf

import (
	"bytes"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/must"
)

// fakeNAT reports what a test says.
type fakeNAT struct {
	changed func(bool, string)
	first   bool
	stopped int
	err     error
}

func (f *fakeNAT) watch(changed func(bool, string)) (func(), error) {
	if f.err != nil {
		return nil, f.err
	}
	f.changed = changed
	changed(f.first, "the first answer")
	return func() { f.stopped++ }, nil
}

// The programs ask conntrack exactly while netfilter may translate, whenever that
// changes: before the first Replace, after it, and between two.
func TestProgramsAskWhileNetfilterTranslates(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	state := intent.State{
		Ports: []*intent.ServicePort{objectstest.SimplePort(1, 1)},
		Node:  intent.Node{Name: "node", Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.10")}},
	}
	var log bytes.Buffer
	cfg.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelInfo}))
	nat := &fakeNAT{first: true}
	cfg.WatchNAT = nat.watch
	b, err := New(t.Context(), cfg)
	must.Do(t, err)
	want := func(when string, asks bool) {
		t.Helper()
		var s objects.TCSettings
		must.Do(t, b.m(objects.TCMapNodeSettings).Lookup(uint32(0), &s))
		if got := s.Flags&uint32(objects.TCSettingsFlagsSETTING_ASK_CONNTRACK) != 0; got != asks {
			t.Errorf("%s: the programs ask conntrack: %v, want %v", when, got, asks)
		}
	}
	must.Do(t, b.Replace(t.Context(), state))
	want("a translation from before", true)
	nat.changed(false, "")
	want("it is gone", false)
	nat.changed(true, "hostPort")
	want("a new one", true)
	for range 2 {
		must.Do(t, b.Replace(t.Context(), state))
	}
	want("after full syncs", true)
	nat.changed(false, "")
	must.Do(t, b.Replace(t.Context(), state))
	want("no longer", false)
	nat.changed(true, "hostPort")
	must.Do(t, b.Apply(t.Context(), intent.Changes{Node: &state.Node}))
	want("after a change of the node", true)
	if got := strings.Count(log.String(), "reason=hostPort"); got != 2 {
		t.Errorf("%d lines name the reason, want 2:\n%s", got, log.String())
	}
	must.Do(t, b.Close())
	if nat.stopped != 1 {
		t.Errorf("the watch was stopped %d times", nat.stopped)
	}

	nat.err = errors.New("no netlink")
	b, err = New(t.Context(), cfg)
	must.Do(t, err)
	must.Do(t, b.Replace(t.Context(), state))
	want("rules cannot be followed", true)
	must.Do(t, b.Close())
	if !strings.Contains(log.String(), "no netlink") {
		t.Error("the error is not in the log")
	}
}
