package instance

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestAReleasedLockLeavesNoFile(t *testing.T) {
	dir := t.TempDir()
	for _, bpffs := range []string{"/a", "/b", "/a"} {
		l, err := Acquire(dir, bpffs)
		if err != nil {
			t.Fatal(err)
		}
		l.Release()
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestAReadOnlyDirectoryIsNamedWithTheRemedy(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, 0) })
	for _, path := range []string{dir, filepath.Join(dir, "new")} {
		_, err := Acquire(path, "/a")
		if err == nil || !strings.Contains(err.Error(), "read-only file system: mount "+path+" writable on the node") {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// Many processes lock and release as fast as they can. Files appear and disappear
// meanwhile, and one process at a time holds the lock.
func TestOneHolderAtATimeWhileTheLockFileComesAndGoes(t *testing.T) {
	dir := t.TempDir()
	var holders, held atomic.Int32
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 4000 {
				l, err := Acquire(dir, "/a")
				if err != nil {
					continue
				}
				if n := holders.Add(1); n != 1 {
					t.Errorf("%d holders at once", n)
				}
				held.Add(1)
				time.Sleep(10 * time.Microsecond) // for another agent to come in
				holders.Add(-1)
				l.Release()
			}
		})
	}
	wg.Wait()
	if held.Load() == 0 {
		t.Error("no process ever had the lock: the test proves nothing")
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

// An unprivileged user that could open the lock could hold it, and no agent would start.
func TestOnlyRootCanOpenTheLocks(t *testing.T) {
	dir := t.TempDir()
	old := File(dir, filepath.Join(dir, "bpffs"), ".lock")
	if err := os.WriteFile(old, nil, 0o644); err != nil { // of an older agent
		t.Fatal(err)
	}
	lock, err := Acquire(dir, filepath.Join(dir, "bpffs"))
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Release()
	if len(lock.files) != 2 {
		t.Fatalf("%d locks", len(lock.files))
	}
	for _, f := range lock.files {
		if info, err := f.Stat(); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: mode %v (%v)", f.Name(), info.Mode(), err)
		}
	}
}

func TestANetworkNamespaceHasOneAgent(t *testing.T) {
	dir := t.TempDir()
	lock, err := Acquire(dir, "/a")
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Release()
	if _, err := Acquire(dir, "/b"); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d", os.Getpid())) {
		t.Errorf("a second one, with pins of its own: %v", err)
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		other, err := Acquire(dir, "/b")
		if err == nil {
			other.Release()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Errorf("one in another network namespace: %v", err)
	}
}

// An agent that was killed leaves its files, and its network namespace may be gone. A file of a
// running agent stays.
func TestTheNextAgentRemovesFilesOfKilledOnes(t *testing.T) {
	dir := t.TempDir()
	killed, other := filepath.Join(dir, "netns-1.lock"), filepath.Join(dir, "notes-1.lock")
	for _, name := range []string{killed, other} {
		if err := os.WriteFile(name, []byte("1 /gone\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	running, err := AcquireFile(filepath.Join(dir, "netns-2.lock"), "x", "y")
	if err != nil {
		t.Fatal(err)
	}
	defer running.Release()
	own, err := Acquire(dir, "/a")
	if err != nil {
		t.Fatal(err)
	}
	defer own.Release()
	if _, err := os.Stat(killed); !os.IsNotExist(err) {
		t.Errorf("the file of a killed agent: %v", err)
	}
	for _, f := range append(running.files, own.files...) {
		if !isNamed(f, f.Name()) {
			t.Errorf("%s of a running agent was removed", f.Name())
		}
	}
	if _, err := os.Stat(other); err != nil {
		t.Errorf("a file of something else: %v", err)
	}
}

// Between a look's open and its lock, the file may have been removed, and another agent may have
// made the next one of its name.
func TestALookRemovesOnlyTheFileThatItOpened(t *testing.T) {
	name := filepath.Join(t.TempDir(), "netns-1.lock")
	opened, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	_ = os.Remove(name)
	next, err := AcquireFile(name, "x", "y")
	if err != nil {
		t.Fatal(err)
	}
	defer next.Release()
	if removeUnlocked(opened, name); !isNamed(next.files[0], name) {
		t.Error("the next agent's file was removed")
	}
}

// Agents start while others look for stale files: none takes such a look for a running agent.
func TestALookForStaleFilesKeepsNoAgentAway(t *testing.T) {
	dir := t.TempDir()
	end := make(chan bool)
	var looks sync.WaitGroup
	for range 2 {
		looks.Go(func() {
			for {
				select {
				case <-end:
					return
				default:
					removeStale(dir)
				}
			}
		})
	}
	for range 500 {
		l, err := Acquire(dir, "/a")
		if err != nil {
			t.Fatal(err)
		}
		if name := l.files[1].Name(); !isNamed(l.files[1], name) {
			t.Fatalf("%s was removed while its agent ran", name)
		}
		for _, f := range l.files {
			f.Close() // as when the agent is killed: the files stay
		}
	}
	close(end)
	looks.Wait()
}
