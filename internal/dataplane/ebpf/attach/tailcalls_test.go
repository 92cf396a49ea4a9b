package attach

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/test/must"
)

// tailCallArray returns an array with a program, which both end with their file descriptors.
func tailCallArray(t *testing.T) *ebpf.Map {
	t.Helper()
	p := classifier(t, tcxNext)
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1,
		Contents: []ebpf.MapKV{{Key: uint32(0), Value: p}}})
	must.Do(t, err)
	must.Do(t, p.Close())
	t.Cleanup(func() { m.Close() })
	return m
}

// calledFrom returns the pins of arrays whose program the kernel has kept.
func calledFrom(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(tailCallsDir(dir))
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	var kept []string
	for _, e := range entries {
		m, err := ebpf.LoadPinnedMap(filepath.Join(tailCallsDir(dir), e.Name()), nil)
		must.Do(t, err)
		var id ebpf.ProgramID
		if err := m.Lookup(uint32(0), &id); err == nil && id != 0 {
			kept = append(kept, e.Name())
		}
		m.Close()
	}
	return kept
}

// TestTailCallsOutliveTheAgent: the kernel empties an array that no process and no pin refers to. The
// array of an earlier run stays until no hook has its programs.
func TestTailCallsOutliveTheAgent(t *testing.T) {
	for _, clsact := range []bool{false, true} {
		enterNetns(t)
		dir := mountBPF(t)
		addDummyNIC(t, "eth0", "192.0.2.1/24")
		agent := func() *Attacher {
			progs := classifiers(t)
			progs.TailCalls = tailCallArray(t)
			return newAttacher(t, Config{PinDir: dir, Programs: progs, ForceClsact: clsact})
		}
		end := func(a *Attacher) {
			must.Do(t, a.Close())
			must.Do(t, a.cfg.Programs.TailCalls.Close())
		}
		first := agent()
		must.Do(t, first.Sync(context.Background()))
		end(first)
		if kept := calledFrom(t, dir); len(kept) != 1 {
			t.Fatalf("arrays %v after the agent's end, want one", kept)
		}

		second := agent()
		must.Do(t, second.calls.pin())
		must.Do(t, second.hooks.load())
		if second.haveOwnPrograms() {
			t.Error("hooks with programs of the earlier run count as the own")
		}
		must.Do(t, second.Sync(context.Background()))
		if kept := calledFrom(t, dir); len(kept) != 1 || kept[0] != second.calls.name {
			t.Errorf("arrays %v, want that of the running agent, %s", kept, second.calls.name)
		}
		must.Do(t, os.Remove(filepath.Join(tailCallsDir(dir), second.calls.name)))
		must.Do(t, second.Sync(context.Background()))
		end(second)
		if kept := calledFrom(t, dir); len(kept) != 1 {
			t.Errorf("arrays %v after the pin was removed and everything was checked, want one", kept)
		}

		// Programs of a release that calls no others.
		before := newAttacher(t, Config{PinDir: dir, Programs: classifiers(t), ForceClsact: clsact})
		must.Do(t, before.Sync(context.Background()))
		if kept := calledFrom(t, dir); len(kept) != 0 {
			t.Errorf("arrays %v are left for programs that call none", kept)
		}
		must.Do(t, before.Detach())
		if _, err := os.Stat(tailCallsDir(dir)); !os.IsNotExist(err) {
			t.Errorf("directory of arrays: %v, want none", err)
		}
	}
}
