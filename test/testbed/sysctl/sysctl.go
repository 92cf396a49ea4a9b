// Package sysctl changes values of the whole machine for the time of an
// experiment and restores them on any exit, also after SIGKILL:
//
//	Begin ── lock ── start a keeper (this program again) ── journal of old values
//	Set   ── old value into the journal, then the new one into /proc/sys
//	End   ── old values back, journal away; the keeper ends with its input
//	kill  ── the keeper's input ends: it restores the values in the journal
//
// If the keeper is killed as well, the next owner of the lock restores the values.
package sysctl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Dir contains the lock and the journal.
const Dir = "/run/spillway-sysctl"

// Guard is the right to change values until End.
type Guard struct {
	dir, root string
	lock      *os.File
	keeper    *exec.Cmd
	pipe      io.WriteCloser
	old       map[string]string // key: "net.netfilter.nf_conntrack_max"
	order     []string
}

// Begin acquires the lock. keeper is the command line of a process that calls Keep; nil
// starts none.
func Begin(keeper []string) (*Guard, error) { return begin(Dir, "/proc/sys", keeper) }

func begin(dir, root string, keeper []string) (*Guard, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("lock values of the machine: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock values of the machine: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, fmt.Errorf("lock values of the machine: another experiment changes them now, or a test goes by them (%s): wait for its end",
			dir)
	}
	g := &Guard{dir: dir, root: root, lock: lock, old: map[string]string{}}
	if err := restore(dir, root); err != nil {
		lock.Close()
		return nil, err
	}
	if keeper != nil {
		if err := g.startKeeper(keeper); err != nil {
			lock.Close()
			return nil, err
		}
	}
	return g, nil
}

// Exclude waits for the end of an experiment, and keeps any from beginning until
// release is called: for tests that go by the machine's values. Any number of
// tests may do so at a time.
func Exclude() (release func(), err error) { return exclude(Dir) }

func exclude(dir string) (release func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("exclude experiments: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("exclude experiments: %w", err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_SH); err != nil {
		lock.Close()
		return nil, fmt.Errorf("exclude experiments: %w", err)
	}
	return func() { lock.Close() }, nil
}

// Share is Exclude for an experiment that changes nothing itself, but must not run under
// another's values. It waits until ctx ends, and calls waiting once if it has to wait.
func Share(ctx context.Context, waiting func()) (release func(), err error) {
	return share(ctx, Dir, waiting)
}

func share(ctx context.Context, dir string, waiting func()) (release func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("lock values of the machine: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock values of the machine: %w", err)
	}
	for told := false; ; told = true {
		if err = unix.Flock(int(lock.Fd()), unix.LOCK_SH|unix.LOCK_NB); err == nil {
			return func() { lock.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			lock.Close()
			return nil, fmt.Errorf("lock values of the machine: %w", err)
		}
		if !told {
			waiting()
		}
		select {
		case <-ctx.Done():
			lock.Close()
			return nil, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// startKeeper starts a process that may outlive this one to restore the values. It holds
// the lock until then.
func (g *Guard) startKeeper(argv []string) (err error) {
	g.keeper = exec.Command(argv[0], argv[1:]...)
	// Signals that a terminal sends to this program do not reach it.
	g.keeper.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	g.keeper.ExtraFiles = []*os.File{g.lock}
	g.keeper.Stderr = os.Stderr
	if g.pipe, err = g.keeper.StdinPipe(); err == nil {
		err = g.keeper.Start()
	}
	if err != nil {
		return fmt.Errorf("start keeper of the machine's values: %w", err)
	}
	return nil
}

// Keep waits until its input ends, and restores the remaining values.
func Keep(in io.Reader) error { return keep(in, Dir, "/proc/sys") }

func keep(in io.Reader, dir, root string) error {
	if _, err := io.Copy(io.Discard, in); err != nil {
		return fmt.Errorf("keep values of the machine: %w", err)
	}
	return restore(dir, root)
}

// Set changes a value, such as "net.netfilter.nf_conntrack_max".
func (g *Guard) Set(key, value string) error {
	if g == nil {
		return errors.New("set values of the machine: not begun")
	}
	path := file(g.root, key)
	was, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("set %s: %w", key, err)
	}
	if _, known := g.old[key]; !known {
		g.old[key] = strings.TrimSpace(string(was))
		g.order = append(g.order, key)
		if err := g.writeJournal(); err != nil {
			return err
		}
	}
	if err := os.WriteFile(path, []byte(value), 0o644); err != nil {
		return fmt.Errorf("set %s to %s: %w: is this a container? these values belong to the whole machine", key, value, err)
	}
	return nil
}

// Restore restores all values and keeps the lock.
func (g *Guard) Restore() error {
	g.old, g.order = map[string]string{}, nil
	return restore(g.dir, g.root)
}

// End restores all values and releases the lock. A second call does nothing.
func (g *Guard) End() error {
	if g == nil || g.lock == nil {
		return nil
	}
	err := g.Restore()
	if g.keeper != nil {
		g.pipe.Close()
		err = errors.Join(err, g.keeper.Wait())
	}
	g.lock.Close()
	g.lock = nil
	return err
}

func file(root, key string) string {
	return filepath.Join(root, strings.ReplaceAll(key, ".", "/"))
}

// entry is a line of the journal, in the order in which values were changed.
type entry struct {
	Key string `json:"key"`
	Old string `json:"old"`
}

func (g *Guard) writeJournal() error {
	var all []entry
	for _, key := range g.order {
		all = append(all, entry{key, g.old[key]})
	}
	text, err := json.Marshal(all)
	if err != nil {
		return err
	}
	// Replaced by a rename: half a journal would be useless.
	path := filepath.Join(g.dir, "journal")
	if err := os.WriteFile(path+".new", text, 0o600); err != nil {
		return fmt.Errorf("note values of the machine: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("note values of the machine: %w", err)
	}
	return nil
}

// restore writes the values of the journal, each once, and removes the journal.
func restore(dir, root string) error {
	path := filepath.Join(dir, "journal")
	text, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	var all []entry
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	if err != nil {
		return fmt.Errorf("restore values of the machine: %w", err)
	}
	failed := map[string]error{}
	for _, e := range all {
		if err := os.WriteFile(file(root, e.Key), []byte(e.Old), 0o644); err != nil {
			failed[e.Key] = fmt.Errorf("restore %s to %s: %w", e.Key, e.Old, err)
		}
	}
	if len(failed) > 0 {
		return errors.Join(slices.Collect(maps.Values(failed))...)
	}
	return os.Remove(path)
}
