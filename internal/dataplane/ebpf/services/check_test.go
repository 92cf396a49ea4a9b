package services

import (
	"errors"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/must"
)

func inOneStep(step func()) bool { step(); return true }

// wantAgreement wants the maps to hold what the table has written, no more and no less.
func wantAgreement(t *testing.T, table *portTable, m map[string]*ebpf.Map) {
	t.Helper()
	read, err := readMaps(m)
	must.Do(t, err)
	if d, _ := table.compare(read, inOneStep); d.Any() {
		t.Errorf("the maps are not what the table has written: %+v", d)
	}
}

// A check finds and reports what another program changed in the maps, and the next Replace
// repairs it.
func TestReplaceRepairsWhatACheckFound(t *testing.T) {
	m, fresh := newPortMaps(t, 64, 64), newPortMaps(t, 64, 64)
	b := &Writer{objects: &objects.Objects{Maps: m}, table: &portTable{}, drifted: make(chan struct{}, 1)}
	ports := []*intent.ServicePort{objectstest.SimplePort(1, 3), objectstest.SimplePort(2, 3)}
	replace := func() {
		t.Helper()
		must.Do(t, b.reread())
		failed, err := b.table.replace(t.Context(), ports)
		must.Do(t, errors.Join(err, dataplane.PortErrorsOf(failed)))
	}
	replace()
	writeFresh(t, fresh, ports)
	must.Do(t, b.Check())
	if !b.known || len(b.drifted) > 0 || b.Repaired().Any() {
		t.Error("a check without a finding costs the next Replace a reading")
	}
	for _, c := range []struct {
		what   string
		change func()
		found  string
	}{
		{"an address gone", func() { deleteAny(t, m[objects.TCMapFrontends]) }, "frontends: entry"},
		{"a Service gone", func() { deleteAny(t, m[objects.TCMapServices]) }, "services: entry"},
		{"a slot gone", func() { deleteAny(t, m[objects.TCMapSlots]) }, "slots: entry"},
		{"an endpoint gone", func() { deleteAny(t, m[objects.TCMapBackends]) }, "backends: entry"},
		{"another endpoint in a slot", func() { must.Do(t, m[objects.TCMapSlots].Put(slotKey(1, objects.ClusterSet, 0), uint32(99))) },
			"was changed"},
		{"an endpoint of no port", func() { must.Do(t, m[objects.TCMapBackends].Put(uint32(4711), objects.TCBackend{Service: 77})) },
			"belongs to no object"},
		{"a range of no port", func() {
			must.Do(t, m[objects.TCMapSourceRanges].Put(objects.TCRangeKey{Prefixlen: 64, Scope: 77}, uint8(1)))
		}, "belongs to no object"},
	} {
		c.change()
		must.Do(t, b.Check())
		if b.known || len(b.drifted) != 1 {
			t.Fatalf("%s: not found", c.what)
		}
		<-b.drifted
		if b.Repaired().Any() {
			t.Errorf("%s: told before it was put right", c.what)
		}
		replace()
		if r := b.Repaired(); r.Missing+r.Foreign != 1 || !strings.Contains(r.Found, c.found) {
			t.Errorf("%s: told is %+v", c.what, r)
		}
		wantSameContents(t, m, fresh)
		must.Do(t, b.Check())
		if !b.known {
			t.Errorf("%s: found again after it was put right", c.what)
		}
	}
}

// What is written while the maps are read is in the reading or not, and is no
// difference either way.
func TestWritesBesideACheckAreNoDifference(t *testing.T) {
	for seed := range uint64(3) {
		m := newPortMaps(t, 1<<10, 1<<10)
		w := newPortWorld(seed)
		b := &Writer{objects: &objects.Objects{Maps: m}, table: openPorts(t, m)}
		writeAll(t, b.table, w.state())
		seen := 0
		for range 40 {
			b.table.notes.begin()
			read, err := readMaps(m)
			must.Do(t, err)
			again, err := readMaps(m)
			must.Do(t, err)
			steps := 0
			d, done := b.table.compare(read, func(step func()) bool {
				if steps++; steps == 1 || steps == 3 {
					must.Do(t, apply(t.Context(), b, w.step()))
				}
				step()
				return true
			})
			if d.Any() || !done || steps < 3 {
				t.Fatalf("a change of ours counts as one of somebody else's: %+v", d)
			}
			b.table.notes.end()
			if d, _ := b.table.compare(again, inOneStep); d.Any() {
				seen++
			}
		}
		if seen == 0 {
			t.Error("no change was written beside a reading: the test is blind")
		}
	}
}
