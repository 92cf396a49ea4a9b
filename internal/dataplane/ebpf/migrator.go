package ebpf

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// former is a directory of pinned maps whose entries are wanted in the maps of
// now, and which programs may still be working with.
type previousLayout struct {
	dir string
	// maps are those to be carried over, by name, with what makes an entry one of
	// now; that may be nothing.
	maps map[string][]convert
}

// carrier brings over what the programs of earlier runs have written: into maps
// of another layout (migrate.go) or another size (resize.go).
type migrator struct {
	previous []previousLayout // oldest first
	// made are maps of this process, with which no program has worked before the
	// links change hands.
	made     map[string]bool
	timeouts Timeouts
	log      *slog.Logger
}

// carry copies what is missing or has changed since. It runs when the maps are
// made, just before the links change hands, and once more after that (switched),
// when an entry that the new programs have made is the one that counts, unless
// the older was used after it.
//
// What remains: a flow that began after the second pass had read its bucket is not
// known to the new programs until the third has. Each of its packets in that time,
// some microseconds for every thousand entries of the table, may be given another
// SNAT port, or, being an answer, is left to the stack.
func (c *migrator) migrate(maps map[string]*ebpf.Map, switched bool) error {
	if c == nil {
		return nil
	}
	for _, f := range c.previous {
		for name, path := range f.maps {
			to := maps[name]
			if to == nil || to.Type() != ebpf.LRUHash {
				continue // the agent writes it, and has done so
			}
			from, err := ebpf.LoadPinnedMap(filepath.Join(f.dir, name), nil)
			if errors.Is(err, os.ErrNotExist) {
				continue
			} else if err != nil {
				return fmt.Errorf("open older map %s: %w", name, err)
			}
			t := transfer{from: from, to: to, path: path, timeouts: c.timeouts, switched: switched, keep: switched || !c.made[name]}
			err = t.run()
			from.Close()
			if err != nil {
				return fmt.Errorf("carry over map %s: %w", name, err)
			}
			if switched && t.left > 0 {
				c.log.Warn("Flows that do not fit into the smaller table are forgotten", "flows", t.left, "entries", to.MaxEntries())
			}
		}
	}
	return nil
}

// transfer is one pass from an older map to a newer.
type transfer struct {
	from, to *ebpf.Map
	path     []convert
	timeouts Timeouts
	switched bool // the new programs are at work, the old ones no longer
	keep     bool // an entry that is there counts more; of flows the later one does
	left     int  // flows that had no room
}

// run copies all there is. Entries that come or go meanwhile may be missed.
func (t *transfer) run() error {
	fits, err := t.room()
	if err != nil {
		return err
	}
	return t.each(func(e entry) error {
		if !fits(e) {
			return nil
		}
		// E2BIG: the map was made smaller, and the agent will say so.
		err := t.to.Update(e.key, e.value, ebpf.UpdateNoExist)
		if errors.Is(err, ebpf.ErrKeyExist) && t.wins(e) {
			err = t.to.Update(e.key, e.value, ebpf.UpdateAny)
		}
		if err != nil && !errors.Is(err, ebpf.ErrKeyExist) && !errors.Is(err, unix.E2BIG) {
			return fmt.Errorf("write entry: %w", err)
		}
		return nil
	})
}

// wins reports whether an older map's entry counts more than the one that is
// there. An agent that was killed may have left a copy that has aged since.
func (t *transfer) wins(e entry) bool {
	older, ok := asFlow(t.to, e)
	if !ok {
		return !t.keep
	}
	var there tcFlow
	if t.to.Lookup(e.key, &there) != nil {
		return false // evicted just now: the next pass
	}
	// Whole seconds. Within one, and before new programs run, states only advance.
	later := int32(older.Seen - there.Seen)
	return later > 0 || later == 0 && !t.switched && older.State > there.State || !t.keep
}

// asFlow gives the value of an entry of the flow table.
func asFlow(m *ebpf.Map, e entry) (f tcFlow, ok bool) {
	if len(e.value) != len(memory(&f)) || m.KeySize() != uint32(len(memory(new(tcTuple)))) {
		return f, false
	}
	copy(memory(&f), e.value)
	return f, true
}

// each gives all entries as they are to be. Memory of an entry is valid within
// the call.
func (t *transfer) each(do func(entry) error) error {
	keys, values := rawSlice(t.from.KeySize()), rawSlice(t.from.ValueSize())
	var cursor ebpf.MapBatchCursor
	for {
		n, batchErr := t.from.BatchLookup(&cursor, keys.Interface(), values.Interface(), nil)
		if batchErr != nil && !errors.Is(batchErr, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read entries: %w", batchErr)
		}
		for i := range n {
			e, keep, err := walk(t.path, entry{keys.Index(i).Bytes(), values.Index(i).Bytes()})
			if err != nil {
				return fmt.Errorf("convert entry: %w", err)
			}
			if !keep {
				continue
			}
			if err := do(e); err != nil {
				return err
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
