// Package instance separates instances of the agent: it locks an agent's kernel objects
// against a second agent, and names the files of an instance.
package instance

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Lock is the lock of a running agent. The kernel releases it when the process ends for
// any reason.
type Lock struct{ files []*os.File }

// Acquire locks the pins below bpffs, and the network namespace of the calling thread:
// tables and chains of every agent have the same names there. A bpf file system cannot
// contain ordinary files, so the lock files are in dir. Their names contain the path and
// the number of the namespace. The error names the process that holds a lock. The caller
// must call Release.
func Acquire(dir, bpffs string) (*Lock, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("lock instance: %w", readOnly(dir, err))
	}
	var netns unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &netns); err != nil {
		return nil, fmt.Errorf("lock instance: find the network namespace: %w", err)
	}
	path := resolve(bpffs)
	l := &Lock{}
	for _, what := range []struct {
		name, of, hint string
		patience       time.Duration
	}{
		{File(dir, bpffs, ".lock"), bpffs, "stop it, or give another --bpffs and another network namespace", 0},
		{filepath.Join(dir, fmt.Sprintf("netns-%d.lock", netns.Ino)), "this network namespace",
			"stop it; its rules and those of a second one would have the same names", stalePatience},
	} {
		f, err := lockFile(what.name, what.of, what.hint, what.patience)
		if err != nil {
			l.Release()
			return nil, fmt.Errorf("lock instance: %w", err)
		}
		l.add(f, path)
	}
	removeStale(dir)
	return l, nil
}

// stalePatience is longer than removeStale of another agent holds a lock.
const stalePatience = 100 * time.Millisecond

// removeStale removes the files of network namespaces whose agents were killed. A namespace of a
// pod or a test never gets another agent, so its file would stay.
func removeStale(dir string) {
	names, _ := filepath.Glob(filepath.Join(dir, "netns-*.lock")) // the pattern is valid
	for _, name := range names {
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		if err != nil {
			continue
		}
		removeUnlocked(f, name)
	}
}

// removeUnlocked closes a file, and removes it if no agent has its lock. While removeUnlocked has
// the lock, no agent can. The name may be another file's by now, which an agent has locked.
func removeUnlocked(f *os.File, name string) {
	defer f.Close()
	if unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil && isNamed(f, name) {
		_ = os.Remove(name)
	}
}

// AcquireFile locks a file, which it creates. of is what the file stands for, and hint is what
// an operator does about the process that has the lock; the error has both. The caller must
// call Release.
func AcquireFile(name, of, hint string) (*Lock, error) {
	f, err := lockFile(name, of, hint, 0)
	if err != nil {
		return nil, err
	}
	l := &Lock{}
	l.add(f, of)
	return l, nil
}

// add takes a locked file and writes this process into it: for operators, and for the error
// of a second agent. The kernel holds the lock itself.
func (l *Lock) add(f *os.File, path string) {
	_ = f.Truncate(0)
	_, _ = fmt.Fprintf(f, "%d %s\n", os.Getpid(), path)
	l.files = append(l.files, f)
}

// File names a file in dir that belongs to the instance with pins below bpffs.
func File(dir, bpffs, suffix string) string {
	sum := sha256.Sum256([]byte(resolve(bpffs)))
	return filepath.Join(dir, hex.EncodeToString(sum[:8])+suffix)
}

// resolve returns one path for all spellings of it.
func resolve(bpffs string) string {
	path := filepath.Clean(bpffs)
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	return path
}

// lockFile creates the file and locks it. Release removes the file, so a file that
// was opened may have lost its name before it was locked. A lock on such a file
// keeps no other agent away, so lockFile opens the next file of that name. flock
// libraries do not check this. While another process has the lock, lockFile tries for patience.
func lockFile(name, of, hint string, patience time.Duration) (*os.File, error) {
	for began := time.Now(); ; {
		// A process that can open the file for reading can lock it, and so keep the
		// agent from starting: only root may.
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, readOnly(filepath.Dir(name), err)
		}
		_ = f.Chmod(0o600) // a file of an older agent
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			if errors.Is(err, unix.EWOULDBLOCK) && time.Since(began) < patience {
				f.Close()
				time.Sleep(patience / 20)
				continue
			}
			defer f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				return nil, fmt.Errorf("%s: an agent runs already%s: %s", of, holder(f), hint)
			}
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		if isNamed(f, name) {
			return f, nil
		}
		f.Close()
	}
}

// readOnly adds the remedy to an error of a read-only file system.
func readOnly(dir string, err error) error {
	if errors.Is(err, unix.EROFS) {
		return fmt.Errorf("%w: mount %s writable on the node", err, dir)
	}
	return err
}

// isNamed reports whether name still leads to the open file.
func isNamed(f *os.File, name string) bool {
	opened, err := f.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(name)
	return err == nil && os.SameFile(opened, named)
}

// holder returns the process whose id is in the lock file.
func holder(f *os.File) string {
	buf := make([]byte, 32)
	n, _ := f.ReadAt(buf, 0)
	pid, _, ok := strings.Cut(string(buf[:n]), " ")
	if !ok {
		return ""
	}
	return " (process " + pid + ")"
}

// Release removes the files and then releases the locks. While a file is locked no other
// process can have a lock on a file of its name.
func (l *Lock) Release() {
	for _, f := range l.files {
		_ = os.Remove(f.Name())
		f.Close()
	}
}
