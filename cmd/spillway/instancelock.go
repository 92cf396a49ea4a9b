package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// instanceLock keeps a second agent away from what an agent keeps in the kernel.
// The kernel lets go of it when the process ends, in whatever way.
type instanceLock struct{ files []*os.File }

// lockInstance takes the lock of the pins below bpffs, and that of the network
// namespace: tables and chains of every agent have the same names there. A bpf file
// system cannot hold ordinary files, so the locks are in dir under names made from
// the path and from the namespace's number.
func lockInstance(dir, bpffs string) (*instanceLock, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("lock instance: %w", err)
	}
	var netns unix.Stat_t
	if err := unix.Stat("/proc/thread-self/ns/net", &netns); err != nil {
		return nil, fmt.Errorf("lock instance: find the network namespace: %w", err)
	}
	path, name := instanceFile(dir, bpffs, ".lock")
	l := &instanceLock{}
	for _, what := range []struct{ name, of, hint string }{
		{name, bpffs, "stop it, or give another --bpffs and another network namespace"},
		{filepath.Join(dir, fmt.Sprintf("netns-%d.lock", netns.Ino)), "this network namespace", "stop it; its rules and those of a second one would have the same names"},
	} {
		f, err := lockFile(what.name, what.of, what.hint)
		if err != nil {
			l.release()
			return nil, fmt.Errorf("lock instance: %w", err)
		}
		// For people and for whoever comes second; the lock itself is the kernel's.
		_ = f.Truncate(0)
		_, _ = fmt.Fprintf(f, "%d %s\n", os.Getpid(), path)
		l.files = append(l.files, f)
	}
	return l, nil
}

// instanceFile is the path of an instance, and the name of a file of its own.
func instanceFile(dir, bpffs, suffix string) (path, name string) {
	path = filepath.Clean(bpffs)
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	sum := sha256.Sum256([]byte(path))
	return path, filepath.Join(dir, hex.EncodeToString(sum[:8])+suffix)
}

// lockFile makes the file and locks it. Whoever releases a lock removes the
// file, so one that was opened may have lost its name before it was locked: a
// lock on it would keep nobody away, and the next one of the name is tried.
func lockFile(name, of, hint string) (*os.File, error) {
	for {
		// Whoever can open the file for reading can lock it, and so keep the agent from
		// starting: only root may.
		f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, err
		}
		_ = f.Chmod(0o600) // one of an older agent
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
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

// isNamed reports whether name still leads to the open file.
func isNamed(f *os.File, name string) bool {
	opened, err := f.Stat()
	if err != nil {
		return false
	}
	named, err := os.Stat(name)
	return err == nil && os.SameFile(opened, named)
}

// holder names the process that wrote itself into the lock file.
func holder(f *os.File) string {
	buf := make([]byte, 32)
	n, _ := f.ReadAt(buf, 0)
	pid, _, ok := strings.Cut(string(buf[:n]), " ")
	if !ok {
		return ""
	}
	return " (process " + pid + ")"
}

// release removes the files and lets go of the locks, in this order: while it is
// locked nobody else has a lock on a file of this name.
func (l *instanceLock) release() {
	for _, f := range l.files {
		_ = os.Remove(f.Name())
		f.Close()
	}
}
