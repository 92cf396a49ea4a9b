package ebpf

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
)

// migrations[n] makes entries of ABI version n+1 out of those of version n. Who
// changes the layout of a map adds one, and raises ABI_VERSION and abiVersion; an
// agent goes through as many of them as it needs. Where a step is missing, the
// maps begin empty.
var migrations = map[int]migration{
	1: {tcMapFlows: entries(flowFromV1), tcMapNodeSettings: settingsFromV1},
}

// renamedMaps[n] has, by their present names, the names that maps had in ABI
// version n. An agent looks for a map under all of them.
var renamedMaps = map[int]map[string]string{
	1: {tcMapFeaturesSeen: "stack_flows"},
}

// migration has a function for each map whose layout changes, by the map's name.
// A map that it does not name is the same in both versions: old and new programs
// then share it. Per-CPU maps and socket storage can only be shared.
type migration map[string]convert

// convert makes an entry one version newer. keep is false for one that has no
// place there.
type convert func(entry) (newer entry, keep bool, err error)

// entry is a key and a value as they are in the kernel.
type entry struct{ key, value []byte }

// entries is a convert by Go types that are laid out like the C structs, padding
// and all: the generated ones for the newer version, copies of former ones for
// the older. Their memory is copied: reflection would take the better part of an
// upgrade's time.
func entries[OldKey, OldValue, Key, Value any](f func(OldKey, OldValue) (k Key, v Value, keep bool)) convert {
	return func(e entry) (entry, bool, error) {
		var key OldKey
		var value OldValue
		if len(memory(&key)) != len(e.key) || len(memory(&value)) != len(e.value) {
			return entry{}, false, fmt.Errorf("sizes %d and %d do not fit %T and %T", len(e.key), len(e.value), key, value)
		}
		copy(memory(&key), e.key)
		copy(memory(&value), e.value)
		k, v, keep := f(key, value)
		return entry{memory(&k), memory(&v)}, keep, nil
	}
}

// memory is what a value without pointers consists of.
func memory[T any](v *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))
}

const layoutPrefix = "maps-v"

func mapsDir(bpffs string) string {
	return filepath.Join(bpffs, layoutPrefix+strconv.Itoa(abiVersion))
}

// layouts are the directories of pinned maps, of all ABI versions.
func layouts(bpffs string) []string {
	dirs, _ := filepath.Glob(filepath.Join(bpffs, layoutPrefix+"*"))
	return dirs
}

// retireLayouts removes the maps of other ABI versions. By now no program uses
// them.
func retireLayouts(bpffs string) {
	for _, dir := range layouts(bpffs) {
		if dir != mapsDir(bpffs) {
			_ = removeMaps(dir) // what is not ours stays
		}
	}
}

// predecessor is the version, other than this one, whose programs have run last:
// the highest that has maps. -1: there is none.
func predecessor(bpffs string) (version int, dir string) {
	version = -1
	for _, d := range layouts(bpffs) {
		n, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(d), layoutPrefix))
		if err != nil || n == abiVersion || n <= version {
			continue
		}
		if pins, _ := os.ReadDir(d); len(pins) > 0 {
			version, dir = n, d
		}
	}
	return version, dir
}

// steps are the functions on the way of each map from a version to another.
func steps(from, to int) (map[string][]convert, error) {
	if from > to {
		return nil, fmt.Errorf("version %d is newer than this agent's %d", from, to)
	}
	out := map[string][]convert{}
	for v := from; v < to; v++ {
		m, known := migrations[v]
		if !known {
			return nil, fmt.Errorf("no migration from version %d to %d is known", v, v+1)
		}
		for name, f := range m {
			out[name] = append(out[name], f)
		}
	}
	return out, nil
}

// migrate makes this version's maps out of an older one's, unless there are some
// (an agent was ended between this and the last carry). The older maps stay:
// programs work with them until the links change hands, so they are returned as
// previous; made says that this process has made the maps, and no program has
// worked with them yet. What cannot be carried over is said in one line, and the
// agent serves without it.
func migrate(specs []*ebpf.CollectionSpec, cfg *Config) (older []previousLayout, made bool) {
	from, dir := predecessor(cfg.BPFFS)
	if from < 0 {
		return nil, false
	}
	changed, err := steps(from, abiVersion)
	if err == nil {
		older = append(setAside(dir, changed), previousLayout{dir, changed})
		if pins, _ := os.ReadDir(mapsDir(cfg.BPFFS)); len(pins) > 0 {
			return older, false
		}
		err = take(specs, older[len(older)-1], cfg)
	}
	if err != nil {
		cfg.Log.Warn("Running flows are forgotten: maps cannot be carried over to this ABI version",
			"from", from, "to", abiVersion, "reason", err)
		return nil, false
	}
	cfg.Log.Info("Maps are carried over to this ABI version", "from", from, "to", abiVersion)
	return older, true
}

// take makes the maps, all or none, also for somebody who is killed here: they
// get their place by a rename.
func take(specs []*ebpf.CollectionSpec, older previousLayout, cfg *Config) error {
	stage := mapsDir(cfg.BPFFS) + "-new"
	_ = os.RemoveAll(stage)
	err := takeInto(stage, specs, older, cfg)
	if err == nil {
		err = os.Rename(stage, mapsDir(cfg.BPFFS))
	}
	if err != nil {
		_ = os.RemoveAll(stage)
	}
	return err
}

func takeInto(stage string, specs []*ebpf.CollectionSpec, older previousLayout, cfg *Config) error {
	if err := os.Mkdir(stage, 0o700); err != nil {
		return err
	}
	for _, spec := range specs {
		for name, want := range spec.Maps {
			if _, err := os.Stat(filepath.Join(stage, name)); err == nil || want.Pinning != ebpf.PinByName {
				continue // both objects name it, or nobody keeps it
			}
			if err := older.takeMap(stage, want, cfg); err != nil {
				return fmt.Errorf("map %s: %w", name, err)
			}
		}
	}
	return nil
}

// takeMap pins what an older map becomes. One that is new in this version is left
// to whoever loads the programs.
func (f *previousLayout) takeMap(stage string, want *ebpf.MapSpec, cfg *Config) error {
	from, err := f.open(want.Name)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer from.Close()
	path, changed := f.maps[want.Name]
	if !changed {
		return pinAgain(from, filepath.Join(stage, want.Name))
	}
	to, err := ebpf.NewMapWithOptions(want, ebpf.MapOptions{PinPath: stage})
	if err != nil {
		return err
	}
	defer to.Close()
	c := transfer{from: from, to: to, path: path, timeouts: cfg.Timeouts}
	return c.run()
}

// open opens a map of this layout by its present name.
func (f *previousLayout) open(name string) (*ebpf.Map, error) {
	for _, old := range renamedMaps {
		if old[name] == "" {
			continue
		}
		m, err := ebpf.LoadPinnedMap(filepath.Join(f.dir, old[name]), nil)
		if !errors.Is(err, os.ErrNotExist) {
			return m, err
		}
	}
	return ebpf.LoadPinnedMap(filepath.Join(f.dir, name), nil)
}

// pinAgain gives a map a second pin; Map.Pin alone would move the first.
func pinAgain(m *ebpf.Map, path string) error {
	c, err := m.Clone()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Pin(path)
}
