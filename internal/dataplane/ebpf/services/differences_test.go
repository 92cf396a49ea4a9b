package services

import (
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/must"
)

// TestDifferencesAreOfOnePort changes entries of one port, and no other shows it.
func TestDifferencesAreOfOnePort(t *testing.T) {
	m := newPortMaps(t, 64, 64)
	b := New(&objects.Objects{Maps: m}, slog.New(slog.DiscardHandler))
	ports := []*intent.ServicePort{objectstest.SimplePort(1, 3), objectstest.SimplePort(2, 3)}
	ports[0].Frontends[0].SourceRanges = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	replace := func() {
		t.Helper()
		b.known = false
		must.Do(t, b.reread())
		failed, err := b.table.replace(t.Context(), ports)
		must.Do(t, errors.Join(err, dataplane.PortErrorsOf(failed)))
	}
	replace()
	differences := func(i int) []string {
		t.Helper()
		found, err := b.Differences(t.Context(), ports[i].ID, 20)
		must.Do(t, err)
		return found
	}
	if found := append(differences(0), differences(1)...); len(found) > 0 {
		t.Fatalf("differences without a change: %q", found)
	}
	p := b.table.byID[ports[0].ID]
	have := p.current()
	frontend := objects.FrontendKey(ports[0].ID, ports[0].Frontends[0])
	for _, c := range []struct {
		what   string
		change func()
		want   string
	}{
		{"the Service is gone", func() { must.Do(t, m[objects.TCMapServices].Delete(p.service)) },
			"the Service port: eBPF map services has no entry"},
		{"the Service has no endpoints", func() { must.Do(t, m[objects.TCMapServices].Put(p.service, objects.TCService{})) },
			"0 endpoints for policy Cluster"},
		{"the address is gone", func() { must.Do(t, m[objects.TCMapFrontends].Delete(frontend)) },
			"address " + frontendText(frontend) + ": eBPF map frontends has no entry"},
		{"the address leads elsewhere", func() { must.Do(t, m[objects.TCMapFrontends].Put(frontend, objects.TCFrontend{Service: 99})) },
			"has Service 99 with routes"},
		{"the endpoint is gone", func() { must.Do(t, m[objects.TCMapBackends].Delete(have.backends[0].id)) },
			"endpoint " + have.backends[0].addr.String()},
		{"the endpoint is another", func() {
			v := have.backends[0].value
			v.Port = objects.ToPort(1)
			must.Do(t, m[objects.TCMapBackends].Put(have.backends[0].id, v))
		}, "has " + have.backends[0].addr.Addr().String() + ":1, not " + have.backends[0].addr.String()},
		{"a slot leads nowhere", func() { must.Do(t, m[objects.TCMapSlots].Put(slotKey(p.service, objects.ClusterSet, 1), uint32(4711))) },
			"has unknown endpoint 4711"},
		{"the source range is gone", func() {
			must.Do(t, m[objects.TCMapSourceRanges].Delete(objects.RangeKey(p.service, ports[0].Frontends[0].SourceRanges[0])))
		}, "source range 192.0.2.0/24"},
	} {
		c.change()
		found := differences(0)
		if len(found) != 1 || !strings.Contains(found[0], c.want) {
			t.Errorf("%s: %q, want one with %q", c.what, found, c.want)
		}
		if other := differences(1); len(other) > 0 {
			t.Errorf("%s: the other port shows %q", c.what, other)
		}
		replace()
		if found := differences(0); len(found) > 0 {
			t.Fatalf("%s: after the repair: %q", c.what, found)
		}
		p, have = b.table.byID[ports[0].ID], b.table.byID[ports[0].ID].current()
	}
	if found, err := b.Differences(t.Context(), intent.PortID{Number: 9}, 20); err != nil || len(found) > 0 {
		t.Errorf("a port that is not written: %q, %v", found, err)
	}
	for i := range have.backends {
		must.Do(t, m[objects.TCMapBackends].Delete(have.backends[i].id))
	}
	found, err := b.Differences(t.Context(), ports[0].ID, 2)
	if must.Do(t, err); len(found) != 2 {
		t.Errorf("a limit of 2 gives %d", len(found))
	}
}

// TestAWriteIsNoDifference: an entry that a write changes between the two readings is as
// wanted in the second.
func TestAWriteIsNoDifference(t *testing.T) {
	m := newPortMaps(t, 64, 64)
	b := New(&objects.Objects{Maps: m}, slog.New(slog.DiscardHandler))
	must.Do(t, b.reread())
	write := func(p *intent.ServicePort) {
		t.Helper()
		failed, err := b.table.replace(t.Context(), []*intent.ServicePort{p})
		must.Do(t, errors.Join(err, dataplane.PortErrorsOf(failed)))
	}
	old, fresh := objectstest.SimplePort(1, 3), objectstest.SimplePort(1, 2)
	write(old)
	list := b.expectedOf(old.ID)
	write(fresh)
	suspects, err := suspectsOf(t.Context(), list, 20)
	if must.Do(t, err); len(suspects) == 0 {
		t.Fatal("the write changed nothing: the test proves nothing")
	}
	found, err := b.confirm(old.ID, suspects)
	if must.Do(t, err); len(found) > 0 {
		t.Errorf("found %q", found)
	}
}
