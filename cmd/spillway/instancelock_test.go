package main

import (
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestAReleasedLockLeavesNoFile(t *testing.T) {
	dir := t.TempDir()
	for _, bpffs := range []string{"/a", "/b", "/a"} {
		l, err := lockInstance(dir, bpffs)
		if err != nil {
			t.Fatal(err)
		}
		l.release()
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

// Many take and release the lock as fast as they can: files appear and vanish
// under each other's hands, and yet there is one holder at a time.
func TestOneHolderAtATimeWhileTheLockFileComesAndGoes(t *testing.T) {
	dir := t.TempDir()
	var holders, held atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 4000 {
				l, err := lockInstance(dir, "/a")
				if err != nil {
					continue
				}
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d holders at once", n)
				}
				held.Add(1)
				time.Sleep(10 * time.Microsecond) // for somebody else to come in
				holders.Add(-1)
				l.release()
			}
		})
	}
	wg.Wait()
	if held.Load() == 0 {
		t.Error("nobody ever had the lock: the test is blind")
	}
}

// A process may have opened the file just before its holder removed it.
func TestALockOnARemovedFileDoesNotCount(t *testing.T) {
	name := filepath.Join(t.TempDir(), "x.lock")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if !isNamed(f, name) {
		t.Error("a file is not known by its own name")
	}
	_ = os.Remove(name)
	if isNamed(f, name) {
		t.Error("a removed file counts")
	}
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if isNamed(f, name) {
		t.Error("a removed file counts, now that another has its name")
	}
}
