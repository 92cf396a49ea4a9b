package attach

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/must"
)

func newCgroup(t *testing.T, name string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes cgroups and loads BPF programs")
	}
	mount, err := kernel.Cgroup2Mount()
	if err != nil {
		t.Skip(err)
	}
	path := filepath.Join(mount, fmt.Sprintf("spw-test-%d-%s", os.Getpid(), name))
	must.Do(t, os.Mkdir(path, 0o755))
	t.Cleanup(func() {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	})
	return path
}

func sockAddrProgram(t *testing.T, typ ebpf.AttachType) *ebpf.Program {
	t.Helper()
	return newProgram(t, &ebpf.ProgramSpec{
		Type: ebpf.CGroupSockAddr, AttachType: typ, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
}

func atCgroup(t *testing.T, path string, typ ebpf.AttachType) []ebpf.ProgramID {
	t.Helper()
	f, err := os.Open(path)
	must.Do(t, err)
	defer f.Close()
	res, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: typ})
	must.Do(t, err)
	var ids []ebpf.ProgramID
	for _, p := range res.Programs {
		ids = append(ids, p.ID)
	}
	return ids
}

func pinnedLinkID(t *testing.T, path string) link.ID {
	t.Helper()
	l, err := link.LoadPinnedLink(path, nil)
	must.Do(t, err)
	defer l.Close()
	info, err := l.Info()
	must.Do(t, err)
	return info.ID
}

func wantAtCgroup(t *testing.T, path string, typ ebpf.AttachType, progs ...*ebpf.Program) {
	t.Helper()
	var want []ebpf.ProgramID
	for _, p := range progs {
		want = append(want, programID(t, p))
	}
	if got := atCgroup(t, path, typ); !slices.Equal(got, want) {
		t.Errorf("%s at %s: programs %v, want %v", typ, path, got, want)
	}
}

func TestCgroupHooks(t *testing.T) {
	const connect4, sendmsg6 = ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupUDP6Sendmsg
	one, two := newCgroup(t, "one"), newCgroup(t, "two")
	dir := mountBPF(t)
	first := map[ebpf.AttachType]*ebpf.Program{connect4: sockAddrProgram(t, connect4), sendmsg6: sockAddrProgram(t, sendmsg6)}
	must.Do(t, AttachCgroup(dir, one, first))
	wantAtCgroup(t, one, connect4, first[connect4])
	wantAtCgroup(t, one, sendmsg6, first[sendmsg6])
	pin := filepath.Join(dir, "cgroup", "connect4")
	before := pinnedLinkID(t, pin)

	// Restart, with one hook less: same link, new program.
	second := map[ebpf.AttachType]*ebpf.Program{connect4: sockAddrProgram(t, connect4)}
	must.Do(t, AttachCgroup(dir, one, second))
	wantAtCgroup(t, one, connect4, second[connect4])
	wantAtCgroup(t, one, sendmsg6)
	if got := pinnedLinkID(t, pin); got != before {
		t.Errorf("link id %d after a restart, want the old link %d", got, before)
	}

	// Attach to another cgroup while a foreign program is attached to the first.
	foreign := sockAddrProgram(t, connect4)
	l, err := link.AttachCgroup(link.CgroupOptions{Path: one, Attach: connect4, Program: foreign})
	must.Do(t, err)
	defer l.Close()
	must.Do(t, AttachCgroup(dir, two, second))
	wantAtCgroup(t, one, connect4, foreign)
	wantAtCgroup(t, two, connect4, second[connect4])

	// The cgroup was removed and made again.
	must.Do(t, os.Remove(two))
	must.Do(t, os.Mkdir(two, 0o755))
	must.Do(t, AttachCgroup(dir, two, second))
	wantAtCgroup(t, two, connect4, second[connect4])

	for range 2 {
		must.Do(t, DetachCgroup(dir))
		wantAtCgroup(t, two, connect4)
		wantAtCgroup(t, one, connect4, foreign)
		if _, err := os.Stat(filepath.Join(dir, "cgroup")); !os.IsNotExist(err) {
			t.Errorf("pins are left (%v)", err)
		}
	}
}

func TestCgroupMissing(t *testing.T) {
	dir := t.TempDir()
	if err := AttachCgroup(dir, filepath.Join(dir, "none"), nil); err == nil {
		t.Error("AttachCgroup succeeded for a missing cgroup")
	}
}

func TestCgroupHookName(t *testing.T) {
	for typ, want := range map[ebpf.AttachType]string{
		ebpf.AttachCGroupInet4Connect: "connect4", ebpf.AttachCGroupUDP6Sendmsg: "sendmsg6",
		ebpf.AttachCGroupUDP4Recvmsg: "recvmsg4", ebpf.AttachCgroupInet6GetPeername: "getpeername6",
		ebpf.AttachCGroupInet4Bind: "bind4",
	} {
		if got := cgroupHookName(typ); got != want {
			t.Errorf("%s: %s, want %s", typ, got, want)
		}
	}
}
