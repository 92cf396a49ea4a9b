package upgrade

import (
	"bytes"
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/node/kernel"
)

// The release before has another layout, and its agent cannot read this one. So this
// agent carries that release's programs, from the commit in layout2/COMMIT. A change of
// a map's layout replaces them, and this file's constant and converts.
var (
	//go:embed layout2/tc.o
	PreviousTc []byte
	//go:embed layout2/sock.o
	PreviousSock []byte
)

// PreviousVersion is the ABI version of the release before.
const PreviousVersion = 2

// Rollbacks is the inverse of migrations[PreviousVersion].
var Rollbacks = Migration{objects.TCMapFlows: Entries(FlowToV2)}

// Rollback has the programs of the release before, with their maps. They replace this
// agent's programs at its end, so that an agent of that release finds the node as one of
// its own would have left it.
type Rollback struct {
	cfg  objects.Config
	from map[string]*ebpf.Map // of this version
	To   *objects.Objects
	pins []string // names of the maps that the release before pins
	// Filter writes the members of port_filter where the release before looks for them.
	Filter *objects.PortFilter
}

// PrepareRollback loads the programs of the release before. It must run before the agent
// drops capabilities. Maps whose layout is the same are shared. The others are created
// and stay empty until leave.
func PrepareRollback(cfg *objects.Config, features kernel.Features, own *objects.Objects) (*Rollback, error) {
	r := &Rollback{cfg: *cfg, from: own.Maps, To: &objects.Objects{Maps: map[string]*ebpf.Map{}, Programs: map[string]*ebpf.Program{}},
		pins: []string{objects.IDsMap}}
	tc, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(PreviousTc))
	if err != nil {
		return nil, fmt.Errorf("read eBPF objects of the release before: %w", err)
	}
	sock, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(PreviousSock))
	if err != nil {
		return nil, fmt.Errorf("read eBPF objects of the release before: %w", err)
	}
	specs := []*ebpf.CollectionSpec{tc, sock}
	if err := objects.Configure(specs, cfg, features); err != nil {
		return nil, err
	}
	if err := objects.SetSeed(specs, own.Seed); err != nil {
		return nil, err
	}
	r.Filter = own.Filter.Layout2()
	for _, spec := range specs {
		if err := r.load(spec); err != nil {
			r.Close()
			return nil, fmt.Errorf("load eBPF programs of the release before: %w", objects.ShortError(err))
		}
	}
	return r, nil
}

// load loads an object with the maps that exist already.
func (r *Rollback) load(spec *ebpf.CollectionSpec) error {
	shared := objects.ShareMaps(spec, func(name string) *ebpf.Map {
		r.pins = append(r.pins, name)
		if m := r.To.Maps[name]; m != nil || Rollbacks[name] != nil {
			return m
		}
		return r.from[name]
	})
	coll, err := objects.NewCollection(spec, ebpf.CollectionOptions{MapReplacements: shared})
	if err != nil {
		return err
	}
	for name, m := range coll.Maps {
		if old := r.To.Maps[name]; old != nil {
			old.Close()
		}
		r.To.Maps[name] = m
	}
	maps.Copy(r.To.Programs, coll.Programs)
	return nil
}

// Close closes the programs and maps. r may be nil.
func (r *Rollback) Close() {
	if r != nil {
		r.To.Close()
	}
}

// Leave copies the flows to the maps of the release before, pins these maps, puts the
// programs on the hooks, copies what changed meanwhile, and removes the maps of this
// version. If it is killed, the next agent of this version continues with both.
// attached says that this agent has put its programs on the hooks, and attach puts others there.
func (r *Rollback) Leave(attached bool, attach func(previous *objects.Objects) error) error {
	if due, err := r.due(attached); err != nil || !due {
		return err
	}
	return r.LeaveBy(func() error { return attach(r.To) })
}

// LeaveBy is Leave, whether or not it is due. attach puts the programs of the release before on the hooks.
func (r *Rollback) LeaveBy(attach func() error) error {
	created := objects.FlowsCreated(r.from[objects.TCMapVerdicts])
	m := &Migrator{}
	if err := r.copy(m, BeforeSwitch); err != nil {
		return err
	}
	if err := r.mergeRanges(); err != nil {
		return err
	}
	if err := r.pin(); err != nil {
		return err
	}
	stop := m.RepeatPass(func() error { return r.copy(m, DuringSwitch) })
	err := attach()
	stop()
	if err := errors.Join(err, r.copy(m, AfterSwitch)); err != nil {
		return err
	}
	RetireLayouts(r.cfg.BPFFS, PreviousVersion)
	r.cfg.Log.Info("Maps and programs are left as the release before has them", "version", PreviousVersion, "openedMeanwhile",
		objects.FlowsCreated(r.from[objects.TCMapVerdicts])-created)
	return nil
}

// due reports whether programs of this version are on the hooks: those of this agent, or
// of one that was killed. If maps of the release before are pinned, its programs may be
// on some hooks, and an agent of either version continues with those maps.
func (r *Rollback) due(attached bool) (bool, error) {
	if pins, _ := os.ReadDir(objects.LayoutDir(r.cfg.BPFFS, PreviousVersion)); len(pins) > 0 {
		return false, nil
	}
	if attached {
		return true, nil
	}
	return serves(objects.MapsDir(r.cfg.BPFFS))
}

// copy makes one pass over the maps whose layout differs.
func (r *Rollback) copy(m *Migrator, when Phase) error {
	if when == BeforeSwitch {
		m.since = objects.BootSeconds()
	}
	for name, f := range Rollbacks {
		t := transfer{from: r.from[name], to: r.To.Maps[name], path: []convert{f}, timeouts: r.cfg.Timeouts, switched: when != BeforeSwitch,
			keep: when != BeforeSwitch, since: m.since}
		if err := t.run(); err != nil {
			return fmt.Errorf("convert map %s: %w", name, err)
		}
	}
	if when == DuringSwitch {
		return nil // AfterSwitch adds the members of flows that open meanwhile
	}
	return r.Filter.Fill(r.To.Maps)
}

// mergeRanges copies the cluster's prefixes to source_ranges, where programs of the release before
// look for them.
func (r *Rollback) mergeRanges() error {
	ranges, err := objects.ReadClusterRanges(r.from[objects.TCMapClusterRanges])
	for key := range ranges {
		if err := r.To.Maps[objects.TCMapSourceRanges].Put(key, uint8(1)); err != nil {
			return fmt.Errorf("write prefixes for the release before: %w", err)
		}
	}
	return err
}

// pin pins all maps of the release before or none, as migrateMaps does.
func (r *Rollback) pin() error {
	dir := objects.LayoutDir(r.cfg.BPFFS, PreviousVersion)
	stage := dir + "-new"
	_ = os.RemoveAll(stage)
	if err := os.Mkdir(stage, 0o700); err != nil {
		return fmt.Errorf("pin maps of the release before: %w", err)
	}
	for _, name := range r.pins {
		m := r.To.Maps[name]
		if name == objects.IDsMap {
			m = r.from[name] // no program uses it
		}
		path := filepath.Join(stage, name)
		if _, err := os.Stat(path); err == nil {
			continue // both objects have it
		}
		if err := PinAgain(m, path); err != nil {
			_ = os.RemoveAll(stage)
			return fmt.Errorf("pin map %s of the release before: %w", name, err)
		}
	}
	if err := os.Rename(stage, dir); err != nil {
		return fmt.Errorf("pin maps of the release before: %w", err)
	}
	return nil
}
