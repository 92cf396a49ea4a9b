package ebpf

import (
	"bytes"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

// putFlows writes as the programs of a run would.
func putFlows(t *testing.T, m *ebpf.Map, flows map[objects.TCTuple]objects.TCFlow) {
	t.Helper()
	for k, f := range flows {
		must.Do(t, m.Put(k, f))
	}
}

// wantOnlyOwnMaps checks that nothing is left of former sizes.
func wantOnlyOwnMaps(t *testing.T, cfg Config) {
	t.Helper()
	if dirs := objects.Layouts(cfg.BPFFS); !slices.Equal(dirs, []string{objects.MapsDir(cfg.BPFFS)}) {
		t.Errorf("there are %v", dirs)
	}
}

func TestAnotherSizeOfTheFlowTableKeepsItsFlows(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	addOutward(t, "spw-eth0", "192.0.2.10/24")
	before := runBackend(t, cfg, upgradeState(), nil)
	flows := flowsV4(1, 300)
	putFlows(t, pinnedFlows(t, cfg.BPFFS), flows)
	for i, size := range []uint32{4096, 512} {
		cfg.FlowTableSize = size
		older := pinnedFlows(t, cfg.BPFFS)
		late := flowsV4(uint32(1000*(i+1)), uint32(1000*(i+1)+10))
		after := runBackend(t, cfg, upgradeState(), func() {
			objectstest.WantSame(t, "flows before Replace",
				objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, pinnedFlows(t, cfg.BPFFS)), flows)
			objectstest.WantSame(t, "programs before Replace", programIDs(t, cfg), before.programs)
			// The old programs go on until then.
			closeOne(flows, late)
			putFlows(t, older, late)
		})
		maps.Copy(flows, late)
		objectstest.WantSame(t, fmt.Sprintf("flows in a table of %d", size),
			objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, pinnedFlows(t, cfg.BPFFS)), flows)
		objectstest.WantSame(t, "links", after.links, before.links)
		objectstest.WantSame(t, "endpoints", after.endpoints, before.endpoints)
		wantChanged(t, after.maps, before.maps, objects.TCMapFlows, objects.TCMapUnconfirmed)
		wantUses(t, cfg, after.maps)
		wantOnlyOwnMaps(t, cfg)
		before = after
	}
}

// An agent that is killed at any step leaves the rest to the next one, which may
// want yet another size. What counts of a flow is the entry that was used last.
func TestAnotherSizeGoesOnAfterKills(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	addOutward(t, "spw-eth0", "192.0.2.10/24")
	_ = runBackend(t, cfg, upgradeState(), nil)
	flows := flowsV4(1, 100)
	putFlows(t, pinnedFlows(t, cfg.BPFFS), flows)
	use := func(m *ebpf.Map, from, to uint32) { // both new flows, and those of before
		t.Helper()
		for k, f := range flows {
			f.Seen++
			flows[k] = f
		}
		maps.Copy(flows, flowsV4(from, to))
		putFlows(t, m, flows)
	}
	first := pinnedFlows(t, cfg.BPFFS)

	// Killed when the map was put aside and there was no other.
	must.Do(t, upgrade.SetPinsAside(objects.MapsDir(cfg.BPFFS), []string{objects.TCMapFlows}))
	use(first, 200, 210)

	// Killed when there was one.
	cfg.FlowTableSize = 2048
	killed, err := New(t.Context(), cfg)
	must.Do(t, err)
	must.Do(t, killed.Close())
	use(first, 300, 310)

	// Killed when programs were at work with it.
	killed, err = New(t.Context(), cfg)
	must.Do(t, err)
	second := pinnedFlows(t, cfg.BPFFS)
	must.Do(t, killed.attacher.Sync(t.Context()))
	use(first, 400, 410) // by hooks that had no turn yet
	must.Do(t, killed.Close())
	stale := flowsV4(500, 510)
	putFlows(t, first, stale)
	for k, f := range stale {
		f.Seen++
		f.State = uint8(objects.TCFlowStateFLOW_CLOSED)
		flows[k] = f
		must.Do(t, second.Put(k, f))
	}

	// Killed with a third size.
	cfg.FlowTableSize = 4096
	killed, err = New(t.Context(), cfg)
	must.Do(t, err)
	must.Do(t, killed.attacher.Sync(t.Context()))
	must.Do(t, attach.AttachCgroup(cfg.BPFFS, cfg.CgroupRoot, killed.objects.SocketPrograms()))
	must.Do(t, killed.Close())
	if left := upgrade.LayoutsSetAside(objects.MapsDir(cfg.BPFFS), nil); len(left) != 2 {
		t.Errorf("%d maps are aside before anybody has done without them, want 2", len(left))
	}

	_ = runBackend(t, cfg, upgradeState(), nil)
	objectstest.WantSame(t, "flows", objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, pinnedFlows(t, cfg.BPFFS)), flows)
	wantOnlyOwnMaps(t, cfg)
}

func TestASmallerTableKeepsAnsweredAndLateFlows(t *testing.T) {
	cfg := ownPlace(t)
	stubPrograms(t)
	addOutward(t, "spw-eth0", "192.0.2.10/24")
	cfg.FlowTableSize, cfg.Timeouts = 8192, objectstest.Timeouts
	_ = runBackend(t, cfg, upgradeState(), nil)
	older, now := pinnedFlows(t, cfg.BPFFS), objects.BootSeconds()
	n := uint32(0)
	put := func(count int, state objects.TCFlowState, age uint32) (out map[objects.TCTuple]objects.TCFlow) {
		out = map[objects.TCTuple]objects.TCFlow{}
		for range count {
			n++
			keys, flows := objectstest.Flow(n, model.TCP, state, now-age)
			for i := range keys {
				out[keys[i]] = flows[i]
			}
		}
		putFlows(t, older, out)
		return out
	}
	// By worth; 1,280 flows have room, less an eighth.
	answered, late := put(600, objects.TCFlowStateFLOW_ESTABLISHED, 300), put(200, objects.TCFlowStateFLOW_NEW, 1)
	put(3000, objects.TCFlowStateFLOW_NEW, 30)
	put(500, objects.TCFlowStateFLOW_CLOSED, 0)
	put(500, objects.TCFlowStateFLOW_ESTABLISHED, 5000) // dead

	var log bytes.Buffer
	cfg.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelWarn}))
	cfg.FlowTableSize = 1024
	_ = runBackend(t, cfg, upgradeState(), nil)
	have := objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, pinnedFlows(t, cfg.BPFFS))
	for what, flows := range map[string]map[objects.TCTuple]objects.TCFlow{"answered": answered, "late": late} {
		lost := 0
		for k := range flows {
			if _, ok := have[k]; !ok {
				lost++
			}
		}
		if lost > 0 {
			t.Errorf("%d of %d entries of %s flows are lost", lost, len(flows), what)
		}
	}
	objectstest.WantPairs(t, have)
	if len(have) != 2560-320 {
		t.Errorf("%d entries, want all that have room", len(have))
	}
	if said := strings.TrimSpace(log.String()); strings.Contains(said, "\n") || !strings.Contains(said, "Flows that do not fit") ||
		!strings.Contains(said, "flows=3180") {
		t.Errorf("said %q, want one line with 3180 flows", said)
	}
}
