// Package upgrade takes over from other runs, and leaves to them: layouts and sizes of maps, their
// migration both ways, drain and cleanup.
package upgrade

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// Migrations has the conversions: Migrations[n] converts entries of ABI version n to
// version n+1. A change of a map's layout adds an entry, and raises ABI_VERSION and ABIVersion. An agent applies all
// between the previous version and its own. If one is missing, the maps start empty.
var Migrations = map[int]Migration{
	2: {objects.TCMapFlows: Entries(FlowFromV2)},
}

// Migration has a function for each map whose layout changes, by the map's name. A map
// without one is the same in both versions, and the old and new programs share it.
// Per-CPU maps and socket storage can only be shared.
type Migration map[string]convert

// convert converts an entry to the next version. keep is false if the entry has no
// equivalent there.
type convert func(Entry) (newer Entry, keep bool, err error)

// Entry is a key and a value in the kernel's layout.
type Entry struct{ key, value []byte }

// Entries returns a convert that calls f. The types of f have the layout of the C
// structs, padding included. Those of the newer version are generated. Those of the
// older version are copies of types that were generated for it. The convert copies
// memory, because reflection would take most of an upgrade's time.
func Entries[OldKey, OldValue, Key, Value any](f func(OldKey, OldValue) (k Key, v Value, keep bool)) convert {
	return func(e Entry) (Entry, bool, error) {
		var key OldKey
		var value OldValue
		if len(objects.Bytes(&key)) != len(e.key) || len(objects.Bytes(&value)) != len(e.value) {
			return Entry{}, false, fmt.Errorf("sizes %d and %d do not fit %T and %T", len(e.key), len(e.value), key, value)
		}
		copy(objects.Bytes(&key), e.key)
		copy(objects.Bytes(&value), e.value)
		k, v, keep := f(key, value)
		return Entry{objects.Bytes(&k), objects.Bytes(&v)}, keep, nil
	}
}

// RetireLayouts removes the pins of all ABI versions but one. Their programs must have
// been replaced.
func RetireLayouts(bpffs string, except int) {
	for _, dir := range objects.Layouts(bpffs) {
		if dir != objects.LayoutDir(bpffs, except) {
			_ = removeMaps(dir) // foreign objects stay
		}
	}
}

// predecessor returns the highest other ABI version that has maps, and their directory.
// Its programs ran last. version is -1 if there is none.
func predecessor(bpffs string) (version int, dir string) {
	version = -1
	for _, d := range objects.Layouts(bpffs) {
		n, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(d), objects.LayoutPrefix))
		if err != nil || n == objects.ABIVersion || n <= version {
			continue
		}
		if pins, _ := os.ReadDir(d); len(pins) > 0 {
			version, dir = n, d
		}
	}
	return version, dir
}

// steps returns the conversions of each map from one version to another.
func steps(from, to int) (map[string][]convert, error) {
	if from > to {
		return nil, fmt.Errorf("version %d is newer than this agent's %d", from, to)
	}
	out := map[string][]convert{}
	for v := from; v < to; v++ {
		m, known := Migrations[v]
		if !known {
			return nil, fmt.Errorf("no migration from version %d to %d is known", v, v+1)
		}
		for name, f := range m {
			out[name] = append(out[name], f)
		}
	}
	return out, nil
}

// migrate creates this version's maps from those of an older version. If this version's
// maps exist, an earlier agent stopped before the end of its migration, and migrate uses
// them. It returns the older maps, because programs use them until the hooks switch.
// made reports that this process created the maps, so that no program has used them yet.
// If the migration fails, migrate logs one line, and the agent serves without the old
// flows.
func migrate(specs []*ebpf.CollectionSpec, cfg *objects.Config) (older []previousLayout, made bool) {
	from, dir := predecessor(cfg.BPFFS)
	if from < 0 {
		return nil, false
	}
	changed, err := steps(from, objects.ABIVersion)
	if err == nil {
		older = append(LayoutsSetAside(dir, changed), previousLayout{dir, changed})
		if pins, _ := os.ReadDir(objects.MapsDir(cfg.BPFFS)); len(pins) > 0 {
			return older, false
		}
		err = migrateMaps(specs, older[len(older)-1], cfg)
	}
	if err != nil {
		cfg.Log.Warn("Running flows are forgotten: maps cannot be migrated to this ABI version",
			"from", from, "to", objects.ABIVersion, "reason", err)
		return nil, false
	}
	cfg.Log.Info("Maps are migrated to this ABI version", "from", from, "to", objects.ABIVersion)
	return older, true
}

// migrateMaps creates all maps or none, even if the agent is killed: a rename publishes
// their directory.
func migrateMaps(specs []*ebpf.CollectionSpec, older previousLayout, cfg *objects.Config) error {
	stage := objects.MapsDir(cfg.BPFFS) + "-new"
	_ = os.RemoveAll(stage)
	err := migrateInto(stage, specs, older, cfg)
	if err == nil {
		err = os.Rename(stage, objects.MapsDir(cfg.BPFFS))
	}
	if err != nil {
		_ = os.RemoveAll(stage)
	}
	return err
}

func migrateInto(stage string, specs []*ebpf.CollectionSpec, older previousLayout, cfg *objects.Config) error {
	if err := os.Mkdir(stage, 0o700); err != nil {
		return err
	}
	for _, spec := range specs {
		for name, want := range spec.Maps {
			if _, err := os.Stat(filepath.Join(stage, name)); err == nil || want.Pinning != ebpf.PinByName {
				continue // created for the other object already, or not pinned
			}
			if err := older.migrateMap(stage, want, cfg); err != nil {
				return fmt.Errorf("map %s: %w", name, err)
			}
		}
	}
	return nil
}

// migrateMap pins a map for this version: the older map itself if its layout is the same,
// otherwise a new map with its entries. A map that is new in this version is created
// when the programs are loaded.
func (f *previousLayout) migrateMap(stage string, want *ebpf.MapSpec, cfg *objects.Config) error {
	from, err := ebpf.LoadPinnedMap(filepath.Join(f.dir, want.Name), nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer from.Close()
	path, changed := f.maps[want.Name]
	if !changed {
		return PinAgain(from, filepath.Join(stage, want.Name))
	}
	to, err := ebpf.NewMapWithOptions(want, ebpf.MapOptions{PinPath: stage})
	if err != nil {
		return err
	}
	defer to.Close()
	c := transfer{from: from, to: to, path: path, timeouts: cfg.Timeouts}
	return c.run()
}

// PinAgain adds a second pin to a map. It pins a clone, because Map.Pin of a pinned map
// moves the pin.
func PinAgain(m *ebpf.Map, path string) error {
	c, err := m.Clone()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Pin(path)
}
