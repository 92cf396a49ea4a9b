package upgrade

import (
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// setAsideSuffix follows the directory of an ABI version and precedes a number: maps of
// that version with a size that is no longer wanted.
const setAsideSuffix = "-size-"

// LayoutsSetAside returns the directories of maps that were created again in another size,
// with the conversions of their entries. There are several if agents were killed before
// they had migrated them.
func LayoutsSetAside(dir string, paths map[string][]convert) []previousLayout {
	var out []previousLayout
	dirs, _ := filepath.Glob(dir + setAsideSuffix + "*")
	for _, d := range dirs {
		f := previousLayout{d, map[string][]convert{}}
		pins, _ := os.ReadDir(d)
		for _, pin := range pins {
			f.maps[pin.Name()] = paths[pin.Name()]
		}
		out = append(out, f)
	}
	return out
}

// SetPinsAside moves the pins of maps to a new directory beside dir. The programs of the
// earlier run continue with them. If this agent is killed, the next one migrates them.
func SetPinsAside(dir string, names []string) error {
	for n := 0; len(names) > 0; n++ {
		aside := fmt.Sprintf("%s%s%03d", dir, setAsideSuffix, n)
		if err := os.Mkdir(aside, 0o700); errors.Is(err, os.ErrExist) {
			continue
		} else if err != nil {
			return fmt.Errorf("put maps of another size aside: %w", err)
		}
		for _, name := range names {
			if err := os.Rename(filepath.Join(dir, name), filepath.Join(aside, name)); err != nil {
				return fmt.Errorf("put map of another size aside: %w", err)
			}
		}
		return nil
	}
	return nil
}

// onlySizeDiffers reports whether a map differs from want in its size alone.
func onlySizeDiffers(want *ebpf.MapSpec, m *ebpf.Map) bool {
	same := *want
	same.MaxEntries = m.MaxEntries()
	return want.Type == ebpf.LRUHash && same.Compatible(m) == nil
}

// room returns a function that decides whether an entry fits into the newer map. A
// larger map takes all entries, and so does any map other than flows, because it
// evicts. A smaller flow table keeps the answered connections, the latest first, and
// then the latest of the others. An eighth stays free: the kernel assigns elements to
// each CPU in advance, and would evict entries just written.
func (t *transfer) room() (fits func(Entry) bool, err error) {
	all := func(Entry) bool { return true }
	if t.to.MaxEntries() >= t.from.MaxEntries() {
		return all, nil
	}
	now := objects.BootSeconds()
	var ranks []uint64
	err = t.each(func(e Entry) error {
		if r := t.rank(e, now); r > 0 {
			ranks = append(ranks, r)
		}
		return nil
	})
	free := int(t.to.MaxEntries() - t.to.MaxEntries()/8)
	if err != nil || len(ranks) <= free {
		return all, err
	}
	slices.Sort(ranks)
	least := ranks[len(ranks)-free]
	return func(e Entry) bool {
		f, isFlow := asFlow(t.to, e)
		r := t.rank(e, now)
		if isFlow && r > 0 && r < least && objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_REPLY == 0 {
			t.left++
		}
		return !isFlow || r >= least
	}, nil
}

// rank orders flows by their value. 0 is a dead flow, or not a flow. Both entries of a
// flow have the same rank.
func (t *transfer) rank(e Entry, now uint32) uint64 {
	f, ok := asFlow(t.to, e)
	if !ok {
		return 0
	}
	var key objects.TCTuple
	copy(objects.Bytes(&key), e.key)
	if t.timeouts.Dead(&key, &f, now) {
		return 0
	}
	worth := uint64(1)
	switch objects.TCFlowState(f.State) {
	case objects.TCFlowStateFLOW_ESTABLISHED, objects.TCFlowStateFLOW_CLOSING:
		worth = 3
	case objects.TCFlowStateFLOW_CLOSED:
	default:
		worth = 2
	}
	// Seen may be ahead of this clock by a second. The rest distinguishes flows of one
	// second: a sum over both ends, which is the same for both entries.
	ends := end(f.Saddr, f.Sport) + end(f.Daddr, f.Dport) + end(key.Saddr, key.Sport) + end(key.Daddr, key.Dport)
	return worth<<62 | uint64(f.Seen-now+1<<31)<<30 | uint64(ends)>>2
}

func end(a objects.TCAddr, port uint16) uint32 {
	return crc32.ChecksumIEEE(append(objects.Bytes(&a), byte(port), byte(port>>8)))
}
