package ebpf

import (
	"bytes"
	"errors"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

// flowOffsets are the places of the fields of struct flow in an object, in bytes.
func flowOffsets(t *testing.T, spec *ebpf.CollectionSpec) map[string]uint32 {
	t.Helper()
	var flow *btf.Struct
	must.Do(t, spec.Types.TypeByName("flow", &flow))
	out := map[string]uint32{"size": flow.Size}
	var add func(at uint32, members []btf.Member)
	add = func(at uint32, members []btf.Member) {
		for _, m := range members {
			at := at + m.Offset.Bytes()
			if m.Name != "" {
				out[m.Name] = at
				continue
			}
			switch inner := m.Type.(type) {
			case *btf.Union:
				add(at, inner.Members)
			case *btf.Struct:
				add(at, inner.Members)
			}
		}
	}
	add(0, flow.Members)
	return out
}

// What transfer reads of an entry of either version has the same place, and the Go types
// are those of the objects.
func TestMigrationKnowsTheLayouts(t *testing.T) {
	before, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(upgrade.PreviousTc))
	must.Do(t, err)
	now, err := objects.LoadTC()
	must.Do(t, err)
	v2, v3 := flowOffsets(t, before), flowOffsets(t, now)
	for _, name := range []string{"size", "saddr", "daddr", "sport", "dport", "seen", "flags", "state", "end", "helper", "next_hop_kind",
		"next_hop_macs", "in_ifindex", "tcp", "backend", "service", "slot"} {
		if at, known := v2[name]; !known || at != v3[name] {
			t.Errorf("%s is at %d in version 2, at %d now", name, at, v3[name])
		}
	}
	var old upgrade.FlowV2
	var f objects.TCFlow
	for what, is := range map[string][2]uint32{
		"size of version 2":        {v2["size"], uint32(unsafe.Sizeof(old))},
		"helper_port of version 2": {v2["helper_port"], uint32(unsafe.Offsetof(old.HelperPort))},
		"answers of version 2":     {v2["answers"], uint32(unsafe.Offsetof(old.Answers))},
		"slot of version 2":        {v2["slot"], uint32(unsafe.Offsetof(old.Slot))},
		"helper_port":              {v3["helper_port"], uint32(unsafe.Offsetof(f.Tcp) + unsafe.Offsetof(objects.FlowUDP{}.HelperPort))},
		"answers":                  {v3["answers"], uint32(unsafe.Offsetof(f.Tcp) + unsafe.Offsetof(objects.FlowUDP{}.Answers))},
		"checked":                  {v3["checked"], uint32(unsafe.Offsetof(f.Tcp) + unsafe.Offsetof(objects.FlowUDP{}.Checked))},
	} {
		if is[0] != is[1] {
			t.Errorf("%s: %d in the object, %d in Go", what, is[0], is[1])
		}
	}
	for name, layout := range before.Maps {
		current := now.Maps[name]
		if current == nil || layout.Pinning != ebpf.PinByName || upgrade.Rollbacks[name] != nil {
			continue
		}
		if layout.KeySize != current.KeySize || layout.ValueSize != current.ValueSize || layout.Type != current.Type ||
			layout.Flags != current.Flags {
			t.Errorf("map %s cannot be shared with version 2: %v, now %v", name, layout, current)
		}
	}
}

// randomFlowV2 is a flow as the programs of version 2 write it: only TCP has sequence
// numbers, and only UDP has helpers.
func randomFlowV2(r *rand.Rand, proto model.Protocol) (k objects.TCTuple, f upgrade.FlowV2) {
	for _, mem := range [][]byte{objects.Bytes(&k), objects.Bytes(&f)} {
		for i := range mem {
			mem[i] = byte(r.Uint32())
		}
	}
	k.Proto = uint8(proto)
	if proto == model.TCP {
		f.HelperPort, f.Answers = 0, 0
	} else {
		f.Tcp = objects.TCTcpSide{}
	}
	return k, f
}

func TestMigrationUpAndDownKeepsAFlow(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for n := range 1000 {
		proto := []model.Protocol{model.TCP, model.UDP}[n%2]
		k, old := randomFlowV2(r, proto)
		up, f, keep := upgrade.FlowFromV2(k, old)
		if !keep || up != k || f.Opened != 0 {
			t.Fatalf("%v: up gives %v, %+v, %v", k, up, f, keep)
		}
		if f.Slot != old.Slot || f.Service != old.Service || f.Backend != old.Backend ||
			!bytes.Equal(objects.Bytes(&f)[:len(old.Head)], old.Head[:]) {
			t.Fatalf("up gives %+v of %+v", f, old)
		}
		down, again, keep := upgrade.FlowToV2(up, f)
		if !keep || down != k || again != old {
			t.Fatalf("up and down give\n%+v of\n%+v", again, old)
		}
		f.Opened = r.Uint32() | 1
		_, opened, _ := upgrade.FlowToV2(up, f)
		_, back, _ := upgrade.FlowFromV2(up, opened)
		f.Opened = 0
		if back != f {
			t.Fatalf("down and up give\n%+v of\n%+v", back, f)
		}
	}
}

// toV2 and fromV2 are the flows in the two layouts.
func toV2(flows map[objects.TCTuple]objects.TCFlow) map[objects.TCTuple]upgrade.FlowV2 {
	out := map[objects.TCTuple]upgrade.FlowV2{}
	for k, f := range flows {
		_, out[k], _ = upgrade.FlowToV2(k, f)
	}
	return out
}

func fromV2(flows map[objects.TCTuple]upgrade.FlowV2) map[objects.TCTuple]objects.TCFlow {
	out := map[objects.TCTuple]objects.TCFlow{}
	for k, f := range flows {
		_, out[k], _ = upgrade.FlowFromV2(k, f)
	}
	return out
}

// An agent that leaves the previous layout leaves programs, maps and links as that
// release has them, with all flows, and the next agent of this version takes them over.
func TestMigrationDownAndUpAgain(t *testing.T) {
	cfg := ownPlace(t)
	addOutward(t, "spw-eth0", "192.0.2.10/24")
	first := runBackend(t, cfg, upgradeState(), nil)
	const sockOps = "sockops" // the release before loads it with some flags alone
	delete(first.links, sockOps)
	flows := flowsV4(1, 300)
	putFlows(t, pinnedFlows(t, cfg.BPFFS), flows)
	prefixes := clusterRangesIn(t, objects.MapsDir(cfg.BPFFS), objects.TCMapClusterRanges)
	if len(prefixes) == 0 {
		t.Fatal("the cluster has no prefix: the test is blind")
	}

	leaving := cfg
	leaving.LeavePrevious = true
	left := runBackend(t, leaving, upgradeState(), func() {
		if dirs := objects.Layouts(cfg.BPFFS); len(dirs) != 1 || dirs[0] != objects.MapsDir(cfg.BPFFS) {
			t.Errorf("there are %v before the agent ends", dirs)
		}
	})
	dir := objects.LayoutDir(cfg.BPFFS, upgrade.PreviousVersion)
	if dirs := objects.Layouts(cfg.BPFFS); len(dirs) != 1 || dirs[0] != dir {
		t.Fatalf("there are %v, want %s alone", dirs, dir)
	}
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, objects.TCMapFlows), nil)
	must.Do(t, err)
	defer m.Close()
	wantFlows(t, "flows in the previous layout", objectstest.ReadAll[objects.TCTuple, upgrade.FlowV2](t, m), toV2(flows))
	objectstest.WantSame(t, "links", left.links, first.links)
	wantProgramsOf(t, cfg, dir)
	wantPinsOfV2(t, dir)
	objectstest.WantSame(t, "the cluster's prefixes for the release before", clusterRangesIn(t, dir, objects.TCMapSourceRanges), prefixes)

	// The programs of the release before go on.
	late := flowsV4(400, 410)
	for k, f := range toV2(late) {
		must.Do(t, m.Put(k, f))
		flows[k] = late[k]
	}
	again := runBackend(t, cfg, upgradeState(), nil)
	wantFlows(t, "flows again", objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, pinnedFlows(t, cfg.BPFFS)), fromV2(toV2(flows)))
	delete(again.links, sockOps)
	objectstest.WantSame(t, "links again", again.links, first.links)
	objectstest.WantSame(t, "endpoints again", again.endpoints, first.endpoints)
	wantOnlyOwnMaps(t, cfg)
	objectstest.WantSame(t, "the cluster's prefixes again",
		clusterRangesIn(t, objects.MapsDir(cfg.BPFFS), objects.TCMapClusterRanges), prefixes)
	objectstest.WantSame(t, "the cluster's prefixes among those of Services",
		clusterRangesIn(t, objects.MapsDir(cfg.BPFFS), objects.TCMapSourceRanges), map[objects.TCRangeKey]bool{})
	// Layout 2 has no maps of the cluster's prefixes, of changes, of events and of pods without hooks: they went with their pins.
	wantChanged(t, again.maps, first.maps, objects.TCMapFlows, objects.TCMapClusterRanges, objects.TCMapServiceChanges, objects.TCMapEvents,
		objects.TCMapEventCounts, objects.TCMapReportedServices, objects.TCMapEventRates, objects.TCMapFlowBytes, objects.TCMapOutcomes,
		objects.TCMapDsrPaths, objects.TCMapDsrEncapsulations, objects.TCMapOneWayNext, objects.TCMapEgressPorts, objects.TCMapEgressAddresses,
		objects.TCMapXdpDevices, objects.TCMapRouteMtus, objects.TCMapSynProofs, objects.TCMapSynRates,
		objects.TCMapHandshakes, objects.TCMapServiceCounters, objects.TCMapServiceRefusals, objects.TCMapSocketBackends,
		objects.TCMapSocketFlows, objects.TCMapLoads, objects.TCMapUnhookedCgroups)
}

// clusterRangesIn reads the cluster's prefixes from a pinned map.
func clusterRangesIn(t *testing.T, dir, name string) map[objects.TCRangeKey]bool {
	t.Helper()
	m, err := ebpf.LoadPinnedMap(filepath.Join(dir, name), nil)
	must.Do(t, err)
	defer m.Close()
	found, err := objects.ReadClusterRanges(m)
	must.Do(t, err)
	return found
}

// switchMeanwhile gives flows as programs leave them in the older map while the
// hooks switch: new ones, one that has advanced, and one that was used.
func switchMeanwhile(known map[objects.TCTuple]objects.TCFlow, from uint32) map[objects.TCTuple]objects.TCFlow {
	out := flowsV4(from, from+10)
	n := 0
	for k, f := range known {
		switch n++; n {
		case 1:
			f.State = uint8(objects.TCFlowStateFLOW_CLOSING)
		case 2:
			f.Seen = objects.BootSeconds()
		case 3:
			return out
		}
		out[k] = f
	}
	return out
}

// What the older programs write after the last pass before the switch is copied after it,
// in both directions.
func TestMigrationCopiesWhatChangesDuringTheSwitch(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	addOutward(t, "spw-eth0", "192.0.2.10/24")
	_ = runBackend(t, cfg, upgradeState(), nil)
	flows := flowsV4(1, 100)
	putFlows(t, pinnedFlows(t, cfg.BPFFS), flows)

	cfg.LeavePrevious = true
	b, err := New(t.Context(), cfg)
	must.Do(t, err)
	must.Do(t, b.Replace(t.Context(), upgradeState()))
	down := switchMeanwhile(flows, 200)
	wantMembers := func(when string, flows map[objects.TCTuple]objects.TCFlow) {
		for k, f := range flows {
			if !b.rollback.Filter.Has(objects.FlowMember(&k, &f)) {
				t.Fatalf("%s: the programs of the release before take flow %+v for none of theirs", when, k)
			}
		}
	}
	must.Do(t, b.rollback.LeaveBy(func() error {
		wantMembers("at the switch", flows)
		putFlows(t, b.m(objects.TCMapFlows), down)
		return b.attachPrevious(b.rollback.To)
	}))
	wantMembers("after it", down)
	must.Do(t, b.Close())
	maps.Copy(flows, down)
	older, err := ebpf.LoadPinnedMap(filepath.Join(objects.LayoutDir(cfg.BPFFS, upgrade.PreviousVersion), objects.TCMapFlows), nil)
	must.Do(t, err)
	defer older.Close()
	wantFlows(t, "flows in the previous layout", objectstest.ReadAll[objects.TCTuple, upgrade.FlowV2](t, older), toV2(flows))

	cfg.LeavePrevious = false
	b, err = New(t.Context(), cfg)
	must.Do(t, err)
	must.Do(t, b.attacher.Close())
	up := switchMeanwhile(flows, 300)
	b.attacher, err = attach.New(attach.Config{PinDir: cfg.BPFFS, Programs: programsOf(b.objects), OnPods: b.node.OnPods, Facts: b.node.Fact,
		OnUplinks: func(ups map[int]attach.Uplink) {
			for k, f := range toV2(up) {
				must.Do(t, older.Put(k, f))
			}
			b.node.OnUplinks(ups)
		}})
	must.Do(t, err)
	must.Do(t, b.Replace(t.Context(), upgradeState()))
	must.Do(t, b.Close())
	maps.Copy(flows, up)
	wantFlows(t, "flows again", objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, pinnedFlows(t, cfg.BPFFS)), fromV2(toV2(flows)))
}

// An agent that ends before it has served leaves what is there.
func TestMigrationDownBeforeTheSwitch(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	addOutward(t, "spw-eth0", "192.0.2.10/24")
	cfg.LeavePrevious = true
	idle, err := New(t.Context(), cfg)
	must.Do(t, err)
	must.Do(t, idle.Close())
	wantOnlyOwnMaps(t, cfg) // nothing was served

	// Flows of this version, served by programs of a killed agent.
	kept := cfg
	kept.LeavePrevious = false
	_ = runBackend(t, kept, upgradeState(), nil)
	flows := flowsV4(1, 10)
	putFlows(t, pinnedFlows(t, cfg.BPFFS), flows)
	unready, err := New(t.Context(), cfg)
	must.Do(t, err)
	must.Do(t, unready.Close())
	dir := objects.LayoutDir(cfg.BPFFS, upgrade.PreviousVersion)
	wantProgramsOf(t, cfg, dir)

	// An agent of this version that is stopped before its first Replace leaves the
	// programs of the release before at work.
	unready, err = New(t.Context(), cfg)
	must.Do(t, err)
	must.Do(t, unready.Close())
	wantProgramsOf(t, cfg, dir)
	_ = runBackend(t, kept, upgradeState(), nil)
	wantFlows(t, "flows", objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, pinnedFlows(t, cfg.BPFFS)), fromV2(toV2(flows)))
	wantOnlyOwnMaps(t, cfg)
}

// An agent that is killed in the middle of its end leaves both layouts, and programs of
// both may run. The next agent of this version continues with both.
func TestMigrationDownGoesOnAfterAKill(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	addOutward(t, "spw-eth0", "192.0.2.10/24")
	cfg.LeavePrevious = true
	b, err := New(t.Context(), cfg)
	must.Do(t, err)
	must.Do(t, b.Replace(t.Context(), upgradeState()))
	flows, ofOlder, ofNewer := flowsV4(1, 100), flowsV4(200, 210), flowsV4(300, 310)
	putFlows(t, b.m(objects.TCMapFlows), flows)
	killed := errors.New("killed")
	if err := b.rollback.LeaveBy(func() error {
		must.Do(t, b.attachPrevious(b.rollback.To))
		for k, f := range toV2(ofOlder) {
			must.Do(t, b.rollback.To.Maps[objects.TCMapFlows].Put(k, f))
		}
		putFlows(t, b.m(objects.TCMapFlows), ofNewer)
		return killed
	}); !errors.Is(err, killed) {
		t.Fatal(err)
	}
	must.Do(t, b.Close()) // it finds the older maps, and leaves both
	if dirs := objects.Layouts(cfg.BPFFS); len(dirs) != 2 {
		t.Fatalf("there are %v, want both layouts", dirs)
	}

	cfg.LeavePrevious = false
	_ = runBackend(t, cfg, upgradeState(), nil)
	maps.Copy(flows, ofOlder)
	maps.Copy(flows, ofNewer)
	wantFlows(t, "flows", objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, pinnedFlows(t, cfg.BPFFS)), fromV2(toV2(flows)))
	wantOnlyOwnMaps(t, cfg)
}

// wantFlows names the entries that differ, and not the hundreds that do not.
func wantFlows[V comparable](t *testing.T, what string, have, want map[objects.TCTuple]V) {
	t.Helper()
	for k, f := range want {
		if now, there := have[k]; now != f {
			t.Errorf("%s: entry %v is %v (there: %v), want %v", what, k, now, there, f)
		}
	}
	if len(have) != len(want) {
		t.Errorf("%s: %d entries, want %d", what, len(have), len(want))
	}
}

// wantProgramsOf checks that the programs at all hooks use the maps pinned in dir.
func wantProgramsOf(t *testing.T, cfg Config, dir string) {
	t.Helper()
	ids := map[string]ebpf.MapID{}
	pins, err := os.ReadDir(dir)
	must.Do(t, err)
	for _, pin := range pins {
		m, err := ebpf.LoadPinnedMap(filepath.Join(dir, pin.Name()), nil)
		must.Do(t, err)
		info, err := m.Info()
		must.Do(t, err)
		ids[pin.Name()], _ = info.ID()
		m.Close()
	}
	wantUses(t, cfg, ids)
}

// wantPinsOfV2 checks that an agent of the release before finds all maps that it pins.
func wantPinsOfV2(t *testing.T, dir string) {
	t.Helper()
	for _, object := range [][]byte{upgrade.PreviousTc, upgrade.PreviousSock} {
		spec, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(object))
		must.Do(t, err)
		for name, m := range spec.Maps {
			if _, err := os.Stat(filepath.Join(dir, name)); m.Pinning == ebpf.PinByName && err != nil {
				t.Error(err)
			}
		}
	}
	if _, err := os.Stat(filepath.Join(dir, objects.IDsMap)); err != nil {
		t.Error(err)
	}
}
