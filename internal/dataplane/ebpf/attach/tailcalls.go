package attach

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"github.com/cilium/ebpf"
)

// The kernel empties a program array as soon as neither a file descriptor nor a pin refers to it
// (prog_array_map_clear in kernel/bpf/arraymap.c): the programs of an agent that has
// ended would call nothing. So an agent pins the array of its programs, as DIR/tailcalls/ID, before
// it attaches them. It removes the arrays of earlier runs when no hook has their programs.

func tailCallsDir(pinDir string) string { return filepath.Join(pinDir, "tailcalls") }

// tailCalls is the pinned array of the own programs.
type tailCalls struct {
	dir  string
	m    *ebpf.Map // nil: the programs call no others
	name string    // of the pin: the array's kernel id
	left bool      // earlier runs may have left theirs
}

func openTailCalls(pinDir string, m *ebpf.Map) (*tailCalls, error) {
	t := &tailCalls{dir: tailCallsDir(pinDir), m: m, left: true}
	if m == nil {
		return t, nil
	}
	info, err := m.Info()
	if err != nil {
		return nil, fmt.Errorf("read program array: %w", err)
	}
	id, ok := info.ID()
	if !ok {
		return nil, errors.New("read program array: it has no ID (needs Linux 4.13)")
	}
	t.name = strconv.FormatUint(uint64(id), 10)
	return t, nil
}

// pin pins the array unless its pin exists.
func (t *tailCalls) pin() error {
	if t.m == nil {
		return nil
	}
	path := filepath.Join(t.dir, t.name)
	_, err := os.Stat(path)
	if err == nil {
		return nil
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = os.MkdirAll(t.dir, 0o700)
	}
	if err == nil {
		err = t.m.Unpin() // or the library takes it for pinned
	}
	if err == nil {
		err = t.m.Pin(path)
	}
	if err != nil {
		return fmt.Errorf("pin program array: %w", err)
	}
	return nil
}

// dropOthers removes the arrays of earlier runs, whose programs no hook may have.
func (t *tailCalls) dropOthers() error {
	entries, err := os.ReadDir(t.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("list program arrays: %w", err)
	}
	for _, e := range entries {
		if e.Name() == t.name {
			continue
		}
		if err := os.Remove(filepath.Join(t.dir, e.Name())); err != nil {
			return fmt.Errorf("unpin program array of an earlier run: %w", err)
		}
	}
	t.left = false
	return nil
}
