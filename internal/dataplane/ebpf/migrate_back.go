package ebpf

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/node/kernel"
)

// The release before has another layout, and its agent cannot read this one. So this
// agent carries that release's programs, from the commit in layout2/COMMIT. A change of
// a map's layout replaces them, and this file's constant and converts.
var (
	//go:embed layout2/tc.o
	previousTc []byte
	//go:embed layout2/sock.o
	previousSock []byte
)

// previousVersion is the ABI version of the release before.
const previousVersion = 2

// rollbacks is the inverse of migrations[previousVersion].
var rollbacks = migration{tcMapFlows: entries(flowToV2)}

// rollback has the programs of the release before, with their maps. They replace this
// agent's programs at its end, so that an agent of that release finds the node as one of
// its own would have left it.
type rollback struct {
	cfg  Config
	from map[string]*ebpf.Map // of this version
	to   *objects
	pins []string // names of the maps that the release before pins
	// filter writes the members of port_filter where the release before looks for them.
	filter *portFilter
}

// prepareRollback loads the programs of the release before. It must run before the agent
// drops capabilities. Maps whose layout is the same are shared. The others are created
// and stay empty until leave.
func prepareRollback(cfg *Config, features kernel.Features, own *objects) (*rollback, error) {
	r := &rollback{cfg: *cfg, from: own.maps, to: &objects{maps: map[string]*ebpf.Map{}, programs: map[string]*ebpf.Program{}}, pins: []string{idsMap}}
	tc, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(previousTc))
	if err != nil {
		return nil, fmt.Errorf("read eBPF objects of the release before: %w", err)
	}
	sock, err := ebpf.LoadCollectionSpecFromReader(bytes.NewReader(previousSock))
	if err != nil {
		return nil, fmt.Errorf("read eBPF objects of the release before: %w", err)
	}
	specs := []*ebpf.CollectionSpec{tc, sock}
	if err := configure(specs, cfg, features); err != nil {
		return nil, err
	}
	if err := setSeed(specs, own.seed); err != nil {
		return nil, err
	}
	r.filter = &portFilter{words: own.filter.words, mask: own.filter.mask, seed: own.seed, ungrouped: true}
	for _, spec := range specs {
		if err := r.load(spec); err != nil {
			r.close()
			return nil, fmt.Errorf("load eBPF programs of the release before: %w", oneLine(err))
		}
	}
	return r, nil
}

// load loads an object with the maps that exist already.
func (r *rollback) load(spec *ebpf.CollectionSpec) error {
	shared := share(spec, func(name string) *ebpf.Map {
		r.pins = append(r.pins, name)
		if m := r.to.maps[name]; m != nil || rollbacks[name] != nil {
			return m
		}
		return r.from[name]
	})
	coll, err := newCollection(spec, ebpf.CollectionOptions{MapReplacements: shared})
	if err != nil {
		return err
	}
	for name, m := range coll.Maps {
		if old := r.to.maps[name]; old != nil {
			old.Close()
		}
		r.to.maps[name] = m
	}
	maps.Copy(r.to.programs, coll.Programs)
	return nil
}

// close closes the programs and maps. r may be nil.
func (r *rollback) close() {
	if r != nil {
		r.to.close()
	}
}

// leave copies the flows to the maps of the release before, pins these maps, puts the
// programs on the hooks, copies what changed meanwhile, and removes the maps of this
// version. If it is killed, the next agent of this version continues with both.
// attached says that this agent has put its programs on the hooks.
func (r *rollback) leave(attached bool) error {
	if due, err := r.due(attached); err != nil || !due {
		return err
	}
	return r.leaveBy(r.attach)
}

func (r *rollback) leaveBy(attach func() error) error {
	created := flowsCreated(r.from[tcMapVerdicts])
	m := &migrator{}
	if err := r.copy(m, beforeSwitch); err != nil {
		return err
	}
	if err := r.mergeRanges(); err != nil {
		return err
	}
	if err := r.pin(); err != nil {
		return err
	}
	stop := m.meanwhile(func() error { return r.copy(m, duringSwitch) })
	err := attach()
	stop()
	if err := errors.Join(err, r.copy(m, afterSwitch)); err != nil {
		return err
	}
	retireLayouts(r.cfg.BPFFS, previousVersion)
	r.cfg.Log.Info("Maps and programs are left as the release before has them", "version", previousVersion, "openedMeanwhile", flowsCreated(r.from[tcMapVerdicts])-created)
	return nil
}

// due reports whether programs of this version are on the hooks: those of this agent, or
// of one that was killed. If maps of the release before are pinned, its programs may be
// on some hooks, and an agent of either version continues with those maps.
func (r *rollback) due(attached bool) (bool, error) {
	if pins, _ := os.ReadDir(layoutDir(r.cfg.BPFFS, previousVersion)); len(pins) > 0 {
		return false, nil
	}
	if attached {
		return true, nil
	}
	return serves(mapsDir(r.cfg.BPFFS))
}

// attach replaces this version's programs in their hooks.
func (r *rollback) attach() error {
	a, err := attach.New(attach.Config{PinDir: r.cfg.BPFFS, Programs: r.to.tcPrograms(), ForceClsact: r.cfg.ForceClsact})
	if err != nil {
		return fmt.Errorf("attach programs of the release before: %w", err)
	}
	defer a.Close()
	if err := a.Sync(context.Background()); err != nil {
		// The others are served.
		r.cfg.Log.Error("Attach to interfaces", "err", err)
	}
	if err := attach.AttachCgroup(r.cfg.BPFFS, r.cfg.CgroupRoot, r.to.socketPrograms()); err != nil {
		return fmt.Errorf("attach socket hooks of the release before: %w", err)
	}
	return nil
}

// copy makes one pass over the maps whose layout differs.
func (r *rollback) copy(m *migrator, when phase) error {
	if when == beforeSwitch {
		m.since = bootSeconds()
	}
	for name, f := range rollbacks {
		t := transfer{from: r.from[name], to: r.to.maps[name], path: []convert{f}, timeouts: r.cfg.Timeouts, switched: when != beforeSwitch, keep: when != beforeSwitch, since: m.since}
		if err := t.run(); err != nil {
			return fmt.Errorf("convert map %s: %w", name, err)
		}
	}
	if when == duringSwitch {
		return nil // afterSwitch adds the members of flows that open meanwhile
	}
	return r.filter.fill(r.to.maps)
}

// mergeRanges copies the cluster's prefixes to source_ranges, where programs of the release before
// look for them.
func (r *rollback) mergeRanges() error {
	ranges, err := readClusterRanges(r.from[tcMapClusterRanges])
	for key := range ranges {
		if err := r.to.maps[tcMapSourceRanges].Put(key, uint8(1)); err != nil {
			return fmt.Errorf("write prefixes for the release before: %w", err)
		}
	}
	return err
}

// pin pins all maps of the release before or none, as adoptMaps does.
func (r *rollback) pin() error {
	dir := layoutDir(r.cfg.BPFFS, previousVersion)
	stage := dir + "-new"
	_ = os.RemoveAll(stage)
	if err := os.Mkdir(stage, 0o700); err != nil {
		return fmt.Errorf("pin maps of the release before: %w", err)
	}
	for _, name := range r.pins {
		m := r.to.maps[name]
		if name == idsMap {
			m = r.from[name] // no program uses it
		}
		path := filepath.Join(stage, name)
		if _, err := os.Stat(path); err == nil {
			continue // both objects have it
		}
		if err := pinAgain(m, path); err != nil {
			_ = os.RemoveAll(stage)
			return fmt.Errorf("pin map %s of the release before: %w", name, err)
		}
	}
	if err := os.Rename(stage, dir); err != nil {
		return fmt.Errorf("pin maps of the release before: %w", err)
	}
	return nil
}
