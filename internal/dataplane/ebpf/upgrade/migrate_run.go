package upgrade

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// previousLayout is a directory of pinned maps whose entries the current maps need, and
// which programs may still use.
type previousLayout struct {
	dir string
	// maps has the maps to migrate, by name, with the conversions of their entries, if
	// any.
	maps map[string][]convert
}

// Migrator copies the entries that programs of earlier runs have written into maps of
// another layout (migrate.go) or another size (migrate_resize.go).
type Migrator struct {
	previous []previousLayout // oldest first
	// made has the maps that this process has created. No program uses them before the
	// hooks switch.
	made     map[string]bool
	timeouts objects.Timeouts
	log      *slog.Logger
	// since is the time of the programs' clock at the last pass before the switch.
	since uint32
}

// RepeatPass calls pass again and again until stop is called, which waits for the last
// call. It makes the time short in which a new flow is known to some hooks alone. Errors
// are left to the pass that follows.
func (c *Migrator) RepeatPass(pass func() error) (stop func()) {
	if c == nil {
		return func() {}
	}
	ended := make(chan struct{})
	var last sync.WaitGroup
	last.Go(func() {
		for pass() == nil {
			select {
			case <-ended:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
	return func() { close(ended); last.Wait() }
}

// Phase is the time of a pass over the older maps.
type Phase int

// The times of passes.
const (
	BeforeSwitch Phase = iota // when the maps are created, and just before the hooks switch
	DuringSwitch              // again and again while they switch
	AfterSwitch               // once
)

// Migrate copies entries that are missing or have changed since the last pass. From the
// switch on, entries of the new programs have precedence unless the older was used later.
//
// One gap remains: a flow that started after a pass had read its bucket is unknown to the
// new programs until the next pass. In that time, some microseconds for every thousand
// entries of the table, a packet may get another SNAT port, or a reply may be left to the
// stack.
func (c *Migrator) Migrate(maps map[string]*ebpf.Map, when Phase) error {
	if c == nil {
		return nil
	}
	if when == BeforeSwitch {
		c.since = objects.BootSeconds()
	}
	for _, f := range c.previous {
		for name, path := range f.maps {
			to := maps[name]
			if to == nil || to.Type() != ebpf.LRUHash {
				continue // the agent has written it
			}
			from, err := ebpf.LoadPinnedMap(filepath.Join(f.dir, name), nil)
			if errors.Is(err, os.ErrNotExist) {
				continue
			} else if err != nil {
				return fmt.Errorf("open older map %s: %w", name, err)
			}
			t := transfer{from: from, to: to, path: path, timeouts: c.timeouts, switched: when != BeforeSwitch, keep: when != BeforeSwitch ||
				!c.made[name], since: c.since}
			err = t.run()
			from.Close()
			if err != nil {
				return fmt.Errorf("migrate map %s: %w", name, err)
			}
			if when == AfterSwitch && t.left > 0 {
				c.log.Warn("Flows that do not fit into the smaller table are lost", "flows", t.left, "entries", to.MaxEntries())
			}
		}
	}
	return nil
}

// transfer is one pass from an older map to a newer one.
type transfer struct {
	from, to *ebpf.Map
	path     []convert
	timeouts objects.Timeouts
	switched bool   // the new programs are active, at some hooks or at all
	keep     bool   // existing entries have precedence; of flows, the later one
	left     int    // flows without room
	since    uint32 // with switched: flows that were last used before are copied
}

// run copies all entries. It may miss entries that change meanwhile.
func (t *transfer) run() error {
	fits, err := t.room()
	if err != nil {
		return err
	}
	return t.each(func(e Entry) error {
		if !fits(e) || t.copied(e) {
			return nil
		}
		// E2BIG: the map is smaller now, and the agent reports that.
		err := t.to.Update(e.key, e.value, ebpf.UpdateNoExist)
		if errors.Is(err, ebpf.ErrKeyExist) && t.replaces(e) {
			err = t.to.Update(e.key, e.value, ebpf.UpdateAny)
		}
		if err != nil && !errors.Is(err, ebpf.ErrKeyExist) && !errors.Is(err, unix.E2BIG) {
			return fmt.Errorf("write entry: %w", err)
		}
		return nil
	})
}

// replaces reports whether an older map's entry replaces the existing one. A killed agent
// may have left a copy that has aged since.
func (t *transfer) replaces(e Entry) bool {
	older, ok := asFlow(t.to, e)
	if !ok {
		return !t.keep
	}
	var there objects.TCFlow
	if t.to.Lookup(e.key, &there) != nil {
		return false // evicted just now: left to the next pass
	}
	// Whole seconds. Within one, the states of a flow only advance. A flow that the new
	// programs have created since has another slot.
	later := int32(older.Seen - there.Seen)
	sameFlow := !t.switched || older.Slot == there.Slot
	return later > 0 || later == 0 && sameFlow && older.State > there.State || !t.keep
}

// asFlow returns the value of an entry of the flow table.
func asFlow(m *ebpf.Map, e Entry) (f objects.TCFlow, ok bool) {
	if len(e.value) != len(objects.Bytes(&f)) || m.KeySize() != uint32(len(objects.Bytes(new(objects.TCTuple)))) {
		return f, false
	}
	copy(objects.Bytes(&f), e.value)
	return f, true
}

// copied reports whether the last pass before the switch has copied an open connection
// that no packet has used since. The clock has whole seconds, and may be late by one.
func (t *transfer) copied(e Entry) bool {
	f, ok := asFlow(t.to, e)
	return ok && t.switched && objects.TCFlowState(f.State) == objects.TCFlowStateFLOW_ESTABLISHED && int32(f.Seen-t.since) < -2
}

// each calls do for all entries after conversion. An entry's memory is valid during the
// call.
func (t *transfer) each(do func(Entry) error) error {
	keys, values := rawSlice(t.from.KeySize()), rawSlice(t.from.ValueSize())
	var cursor ebpf.MapBatchCursor
	for {
		n, batchErr := t.from.BatchLookup(&cursor, keys.Interface(), values.Interface(), nil)
		if batchErr != nil && !errors.Is(batchErr, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read entries: %w", batchErr)
		}
		for i := range n {
			e, keep, err := walk(t.path, Entry{keys.Index(i).Bytes(), values.Index(i).Bytes()})
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

// walk applies all conversions to an entry.
func walk(path []convert, e Entry) (newer Entry, keep bool, err error) {
	for _, step := range path {
		if e, keep, err = step(e); err != nil || !keep {
			return Entry{}, false, err
		}
	}
	return e, true, nil
}

// rawSlice returns a batch of keys or values of a size that is known at run time only.
func rawSlice(size uint32) reflect.Value {
	element := reflect.ArrayOf(int(size), reflect.TypeFor[byte]())
	return reflect.MakeSlice(reflect.SliceOf(element), objects.SweepBatch, objects.SweepBatch)
}
