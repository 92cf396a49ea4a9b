package ebpf

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// migrations[n] makes entries of ABI version n+1 out of those of version n. Who
// changes the layout of a map adds one, and raises ABI_VERSION and abiVersion; an
// agent goes through as many of them as it needs. Where a step is missing, the
// maps begin empty.
var migrations = map[int]migration{}

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
			_ = os.RemoveAll(dir)
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

// upgrade is what has to be carried over from an older version's maps.
type upgrade struct {
	older   string // where they are pinned
	changed map[string][]convert
	// took: it was this process that made this version's maps, and no program
	// has worked with them yet.
	took bool
}

// migrate makes this version's maps out of an older one's, unless there are some.
// The older maps stay: programs work with them until the links change hands. What
// cannot be carried over is said in one line, and the agent serves without it.
// The result is nil when there is nothing to carry.
func migrate(specs []*ebpf.CollectionSpec, bpffs string, log *slog.Logger) *upgrade {
	from, older := predecessor(bpffs)
	if from < 0 {
		return nil
	}
	u := &upgrade{older: older}
	var err error
	if u.changed, err = steps(from, abiVersion); err == nil {
		if pins, _ := os.ReadDir(mapsDir(bpffs)); len(pins) > 0 {
			return u // an agent was ended between migrate and the last carry
		}
		err = u.take(specs, bpffs)
	}
	if err != nil {
		log.Warn("Running flows are forgotten: maps cannot be carried over to this ABI version",
			"from", from, "to", abiVersion, "reason", err)
		return nil
	}
	log.Info("Maps are carried over to this ABI version", "from", from, "to", abiVersion)
	return u
}

// take makes the maps, all or none, also for somebody who is killed here: they
// get their place by a rename.
func (u *upgrade) take(specs []*ebpf.CollectionSpec, bpffs string) error {
	stage := mapsDir(bpffs) + "-new"
	_ = os.RemoveAll(stage)
	err := u.takeInto(stage, specs)
	if err == nil {
		err = os.Rename(stage, mapsDir(bpffs))
	}
	if err != nil {
		_ = os.RemoveAll(stage)
		return err
	}
	u.took = true
	return nil
}

func (u *upgrade) takeInto(stage string, specs []*ebpf.CollectionSpec) error {
	if err := os.Mkdir(stage, 0o700); err != nil {
		return err
	}
	for _, spec := range specs {
		for name, want := range spec.Maps {
			if _, err := os.Stat(filepath.Join(stage, name)); err == nil || want.Pinning != ebpf.PinByName {
				continue // both objects name it, or nobody keeps it
			}
			if err := u.takeMap(stage, want); err != nil {
				return fmt.Errorf("map %s: %w", name, err)
			}
		}
	}
	return nil
}

// takeMap pins what an older map becomes. One that is new in this version is left
// to whoever loads the programs.
func (u *upgrade) takeMap(stage string, want *ebpf.MapSpec) error {
	from, err := ebpf.LoadPinnedMap(filepath.Join(u.older, want.Name), nil)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	defer from.Close()
	path := u.changed[want.Name]
	if len(path) == 0 {
		return pinAgain(from, filepath.Join(stage, want.Name))
	}
	to, err := ebpf.NewMapWithOptions(want, ebpf.MapOptions{PinPath: stage})
	if err != nil {
		return err
	}
	defer to.Close()
	return copyEntries(to, from, path, ebpf.UpdateAny)
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

// carry copies what the older programs have written since: just before the links
// change hands, and once more after that (switched), when an entry that the new
// programs have made is the one that counts.
func (u *upgrade) carry(maps map[string]*ebpf.Map, switched bool) error {
	if u == nil {
		return nil
	}
	flag := ebpf.UpdateNoExist
	if u.took && !switched {
		flag = ebpf.UpdateAny
	}
	for name, path := range u.changed {
		to := maps[name]
		if to == nil || to.Type() != ebpf.LRUHash {
			continue // the agent writes it, and has done so
		}
		from, err := ebpf.LoadPinnedMap(filepath.Join(u.older, name), nil)
		if errors.Is(err, os.ErrNotExist) {
			continue
		} else if err != nil {
			return fmt.Errorf("open older map %s: %w", name, err)
		}
		err = copyEntries(to, from, path, flag)
		from.Close()
		if err != nil {
			return fmt.Errorf("carry over map %s: %w", name, err)
		}
	}
	return nil
}

// copyEntries converts and copies all there is. Entries that come or go
// meanwhile may be missed.
func copyEntries(to, from *ebpf.Map, path []convert, flag ebpf.MapUpdateFlags) error {
	keys, values := rawSlice(from.KeySize()), rawSlice(from.ValueSize())
	var cursor ebpf.MapBatchCursor
	for {
		n, batchErr := from.BatchLookup(&cursor, keys.Interface(), values.Interface(), nil)
		if batchErr != nil && !errors.Is(batchErr, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read entries: %w", batchErr)
		}
		for i := range n {
			e, keep, err := walk(path, entry{keys.Index(i).Bytes(), values.Index(i).Bytes()})
			if err != nil {
				return fmt.Errorf("convert entry: %w", err)
			}
			if !keep {
				continue
			}
			// E2BIG: the map was made smaller, and the agent will say so.
			err = to.Update(e.key, e.value, flag)
			if err != nil && !errors.Is(err, ebpf.ErrKeyExist) && !errors.Is(err, unix.E2BIG) {
				return fmt.Errorf("write entry: %w", err)
			}
		}
		if batchErr != nil {
			return nil // ErrKeyNotExist: that was the last batch
		}
	}
}

// walk takes an entry through all steps.
func walk(path []convert, e entry) (newer entry, keep bool, err error) {
	for _, step := range path {
		if e, keep, err = step(e); err != nil || !keep {
			return entry{}, false, err
		}
	}
	return e, true, nil
}

// rawSlice is room for a batch of keys or values of a size known only now.
func rawSlice(size uint32) reflect.Value {
	element := reflect.ArrayOf(int(size), reflect.TypeFor[byte]())
	return reflect.MakeSlice(reflect.SliceOf(element), sweepBatch, sweepBatch)
}
