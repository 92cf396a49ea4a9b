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

// instanceLock keeps a second agent away from an instance. The kernel lets go
// of it when the process ends, in whatever way.
type instanceLock struct{ file *os.File }

// lockInstance takes the lock of the instance whose objects are pinned in
// bpffs. A bpf file system cannot hold ordinary files, so the lock is in dir
// under a name made from the path.
func lockInstance(dir, bpffs string) (*instanceLock, error) {
	path := filepath.Clean(bpffs)
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("lock instance: %w", err)
	}
	sum := sha256.Sum256([]byte(path))
	name := filepath.Join(dir, hex.EncodeToString(sum[:8])+".lock")
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, fmt.Errorf("lock instance: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		defer f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock instance: %s: an agent runs already%s: stop it, or give another --bpffs", bpffs, holder(f))
		}
		return nil, fmt.Errorf("lock instance: %s: %w", name, err)
	}
	// For people and for the message above; the lock itself is the kernel's.
	_ = f.Truncate(0)
	_, _ = fmt.Fprintf(f, "%d %s\n", os.Getpid(), path)
	return &instanceLock{file: f}, nil
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

// release lets go of the lock. The file stays: to remove it would let two
// processes hold locks on two files of one name.
func (l *instanceLock) release() { l.file.Close() }
