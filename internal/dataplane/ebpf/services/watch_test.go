package services

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

var errKilled = errors.New("killed by the test")

// endpointName is what an id stands for.
type endpointName struct {
	service uint32
	addr    netip.AddrPort
}

// mapWatch looks at the maps after each write of a table, and can make writes
// fail.
type mapWatch struct {
	t        *testing.T
	maps     map[string]*ebpf.Map
	writes   int
	failFrom int // this write fails, and all that follow
	failOnce int // only this one
	// given are all ids ever seen, and have those of the last look.
	given map[uint32]endpointName
	have  map[uint32]bool
	// lost says that a UDP flow may have lost its endpoint or its address since counted changed.
	lost    bool
	counted uint32
	last    contents // of the last look
	// members are all addresses that the filter lets pass: a writer adds each key first.
	members map[objects.TCFrontendKey]bool
	// before and after are the addresses of the two states. An address of both is
	// found at any moment, and allows no client that neither state allows.
	before, after map[objects.TCFrontendKey]intent.Frontend
}

// open begins a new run.
func (w *mapWatch) open() *portTable {
	table := openPorts(w.t, w.maps)
	if w.members == nil {
		w.members = map[objects.TCFrontendKey]bool{}
	}
	for key := range readContents(w.t, w.maps).frontends {
		w.members[key] = true
	}
	for _, m := range []*objects.Map{&table.frontends, &table.services, &table.slots, &table.backends, &table.ranges, &table.ids} {
		*m = watchedMap{*m, w}
	}
	return table
}

// between says which states the writes to come lie between.
func (w *mapWatch) between(before, after []*intent.ServicePort) {
	w.before, w.after = byKey(before), byKey(after)
}

func byKey(ports []*intent.ServicePort) map[objects.TCFrontendKey]intent.Frontend {
	keys := map[objects.TCFrontendKey]intent.Frontend{}
	for _, p := range ports {
		for _, f := range p.Frontends {
			keys[objects.FrontendKey(p.ID, f)] = f
		}
	}
	return keys
}

type watchedMap struct {
	objects.Map
	w *mapWatch
}

func (m watchedMap) Put(key, value any) error {
	if member, ok := key.(objects.TCFrontendKey); ok {
		m.w.members[member] = true
	}
	return m.w.write(func() error { return m.Map.Put(key, value) })
}

func (m watchedMap) Delete(key any) error {
	return m.w.write(func() error { return m.Map.Delete(key) })
}

// A batch is written one entry after the other, as the kernel does it.
func (m watchedMap) BatchUpdate(keys, values any, _ *ebpf.BatchOptions) (int, error) {
	k, v := reflect.ValueOf(keys), reflect.ValueOf(values)
	for i := range k.Len() {
		if err := m.Put(k.Index(i).Interface(), v.Index(i).Interface()); err != nil {
			return i, err
		}
	}
	return k.Len(), nil
}

func (m watchedMap) BatchDelete(keys any, _ *ebpf.BatchOptions) (int, error) {
	k := reflect.ValueOf(keys)
	for i := range k.Len() {
		if err := m.Delete(k.Index(i).Interface()); err != nil {
			return i, err
		}
	}
	return k.Len(), nil
}

func (w *mapWatch) write(f func() error) error {
	w.writes++
	if w.failFrom > 0 && w.writes >= w.failFrom || w.writes == w.failOnce {
		return errKilled
	}
	err := f()
	if err == nil {
		w.look()
	}
	return err
}

// noteLosses notes what a UDP flow may lose by a write.
func (w *mapWatch) noteLosses(before, after contents) {
	n := w.changes()
	w.lost = w.lost && n == w.counted
	w.counted = n
	udp := map[uint32]bool{}
	for key, f := range before.frontends {
		if model.Protocol(key.Proto) != model.UDP || !objects.IsService(&f) {
			continue
		}
		udp[f.Service] = true
		w.lost = w.lost || after.frontends[key].Service != f.Service
	}
	for id, b := range before.backends {
		_, there := after.backends[id]
		w.lost = w.lost || udp[b.Service] && !there
	}
}

// changes returns service_changes.
func (w *mapWatch) changes() (n uint32) {
	w.t.Helper()
	must.Do(w.t, w.maps[objects.TCMapServiceChanges].Lookup(uint32(0), &n))
	return n
}

// wantCounted fails if no change was counted after the last loss.
func (w *mapWatch) wantCounted() {
	w.t.Helper()
	if w.lost && w.changes() == w.counted {
		w.t.Errorf("after write %d: a UDP flow may have lost its endpoint or address, and service_changes is still %d", w.writes, w.counted)
	}
}

// look checks all that the programs rely on.
func (w *mapWatch) look() {
	w.t.Helper()
	c := readContents(w.t, w.maps)
	w.noteLosses(w.last, c)
	w.last = c
	for _, fault := range append(c.faults(), c.unfiltered(w.members)...) {
		w.t.Errorf("after write %d: %s", w.writes, fault)
	}
	for key, after := range w.after {
		before, both := w.before[key]
		if !both {
			continue
		}
		f, ok := c.frontends[key]
		if !ok || f.Service == 0 {
			w.t.Errorf("after write %d: %s is not served", w.writes, keyText(key))
		}
		for _, fault := range c.rangeFaults(f, before.SourceRanges, after.SourceRanges) {
			w.t.Errorf("after write %d: %s %s", w.writes, keyText(key), fault)
		}
	}
	have := map[uint32]bool{}
	for id, v := range c.backends {
		have[id] = true
		name := endpointName{v.Service, objects.EndpointOf(v)}
		if old, ok := w.given[id]; ok && (old != name || !w.have[id]) {
			w.t.Errorf("after write %d: id %d was given to %v and again to %v", w.writes, id, old, name)
		}
		w.given[id] = name
	}
	w.have = have
	if w.t.Failed() {
		w.t.FailNow()
	}
}

// contents is what the maps of Services hold.
type contents struct {
	frontends map[objects.TCFrontendKey]objects.TCFrontend
	services  map[uint32]objects.TCService
	slots     map[objects.TCSlotKey]uint32
	backends  map[uint32]objects.TCBackend
	ranges    map[objects.TCRangeKey]uint8
}

func readContents(t *testing.T, m map[string]*ebpf.Map) contents {
	t.Helper()
	return contents{
		frontends: objectstest.ReadAll[objects.TCFrontendKey, objects.TCFrontend](t, m[objects.TCMapFrontends]),
		services:  objectstest.ReadAll[uint32, objects.TCService](t, m[objects.TCMapServices]),
		slots:     objectstest.ReadAll[objects.TCSlotKey, uint32](t, m[objects.TCMapSlots]),
		backends:  objectstest.ReadAll[uint32, objects.TCBackend](t, m[objects.TCMapBackends]),
		ranges:    objectstest.ReadAll[objects.TCRangeKey, uint8](t, m[objects.TCMapSourceRanges]),
	}
}

func (c contents) size() int {
	return len(c.frontends) + len(c.services) + len(c.slots) + len(c.backends) + len(c.ranges)
}

// faults are what a program could stumble over.
func (c contents) faults() []string {
	var out []string
	for key, f := range c.frontends {
		for _, r := range []intent.Route{intent.Route(f.InternalRoute), intent.Route(f.ExternalRoute)} {
			set, ok := map[intent.Route]int{intent.ToCluster: objects.ClusterSet, intent.ToLocal: objects.LocalSet}[r]
			if s, there := c.services[f.Service]; ok && (!there || s.Count[set] == 0) {
				out = append(out, fmt.Sprintf("%s leads to Service %d, whose set %d has no endpoint", keyText(key), f.Service, set))
			}
		}
	}
	for id, s := range c.services {
		for set, member := range []objects.TCBackendFlags{objects.ClusterSet: objects.TCBackendFlagsBACKEND_CLUSTER_POLICY,
			objects.LocalSet: objects.TCBackendFlagsBACKEND_LOCAL_POLICY} {
			for i := range int(s.Count[set]) {
				b, ok := c.backends[c.slots[slotKey(id, set, i)]]
				if !ok || b.Service != id || objects.TCBackendFlags(b.Flags)&member == 0 {
					out = append(out, fmt.Sprintf("slot %d of Service %d, set %d, names no endpoint of it: %v", i, id, set, b))
				}
			}
		}
	}
	return out
}

// unfiltered returns the endpoints that may get a packet, and whose answers the filter does
// not let pass.
func (c contents) unfiltered(members map[objects.TCFrontendKey]bool) (out []string) {
	for key, f := range c.frontends {
		for set, n := range c.services[f.Service].Count {
			for i := range int(n) {
				answers := endpointKey(model.Protocol(key.Proto), objects.EndpointOf(c.backends[c.slots[slotKey(f.Service, set, i)]]))
				if !members[answers] {
					out = append(out, fmt.Sprintf("%s leads to endpoint %s, whose answers do not pass the filter", keyText(key), keyText(answers)))
				}
			}
		}
	}
	return out
}

// rangeFaults returns clients that are allowed, or refused, unlike before and after.
func (c contents) rangeFaults(f objects.TCFrontend, before, after []netip.Prefix) (out []string) {
	checked := objects.TCFrontendFlags(f.Flags)&objects.TCFrontendFlagsFRONTEND_RANGES != 0
	switch {
	case before == nil && after == nil && checked:
		return []string{"lets only some in"}
	case before == nil || after == nil:
		return nil
	case !checked:
		return []string{"lets everybody in"}
	}
	have := map[netip.Prefix]bool{}
	for key := range c.ranges {
		if key.Scope == f.Service {
			have[objects.RangePrefix(key)] = true
			if p := objects.RangePrefix(key); !slices.Contains(before, p) && !slices.Contains(after, p) {
				out = append(out, fmt.Sprintf("lets in %s", p))
			}
		}
	}
	for _, p := range before {
		if slices.Contains(after, p) && !have[p] {
			out = append(out, fmt.Sprintf("does not let in %s", p))
		}
	}
	return out
}

func keyText(k objects.TCFrontendKey) string {
	return fmt.Sprintf("%s/%d", netip.AddrPortFrom(objects.FromAddr(k.Addr, k.Family), objects.ToPort(k.Port)), k.Proto)
}

// lines describes each Service with all that belongs to it, without the ids.
func (c contents) lines() []string {
	parts := map[uint32][]string{}
	add := func(service uint32, format string, args ...any) {
		parts[service] = append(parts[service], fmt.Sprintf(format, args...))
	}
	for key, f := range c.frontends {
		add(f.Service, "frontend %s outside %d inside %d flags %d", keyText(key), f.ExternalRoute, f.InternalRoute, f.Flags)
	}
	for id, s := range c.services {
		add(id, "header %d %d %d", s.Count, s.Affinity, s.Flags)
	}
	for key, id := range c.slots {
		add(key.Service, "slot %t %s", key.Slot&objects.SlotLocal != 0, objects.EndpointOf(c.backends[id]))
	}
	for _, b := range c.backends {
		add(b.Service, "endpoint %s flags %d", objects.EndpointOf(b), b.Flags)
	}
	for key := range c.ranges {
		add(key.Scope, "range %s", objects.RangePrefix(key))
	}
	var out []string
	for _, p := range parts {
		slices.Sort(p)
		out = append(out, strings.Join(p, ", "))
	}
	slices.Sort(out)
	return out
}

func wantSameContents(t *testing.T, have, want map[string]*ebpf.Map) {
	t.Helper()
	objectstest.WantLines(t, "maps", readContents(t, have).lines(), readContents(t, want).lines())
}

func wantIDsKept(t *testing.T, before, after map[string]uint32) {
	t.Helper()
	for name, id := range after {
		if old, ok := before[name]; ok && old != id {
			t.Errorf("%s had id %d, now %d", name, old, id)
		}
	}
}
