package node

import (
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/must"
)

const (
	uidA      = "6f1d3c1e-0c0b-4c4e-9a55-2f6f1a1b0001"
	uidASlice = "6f1d3c1e_0c0b_4c4e_9a55_2f6f1a1b0001"
	uidB      = "6f1d3c1e-0c0b-4c4e-9a55-2f6f1a1b0002"
	uidStatic = "0123456789abcdef0123456789abcdef"
)

// TestPodCgroups finds cgroups by the names that the kubelet gives them, and no cgroup that a
// container has named so.
func TestPodCgroups(t *testing.T) {
	for name, test := range map[string]struct {
		dirs []string
		want map[string]string // UID to directory
	}{
		"cgroupfs": {
			[]string{"kubepods/burstable/pod" + uidA + "/c1", "kubepods/pod" + uidB, "kubepods/besteffort/pod" + uidStatic},
			map[string]string{uidA: "kubepods/burstable/pod" + uidA, uidB: "kubepods/pod" + uidB, uidStatic: "kubepods/besteffort/pod" + uidStatic},
		},
		"systemd": {
			[]string{"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + uidASlice + ".slice/cri-containerd-1.scope"},
			map[string]string{uidA: "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + uidASlice + ".slice"},
		},
		"below a directory whose name begins with pod": {
			[]string{"pods/kubepods/pod" + uidA, "podruntime.slice"},
			map[string]string{uidA: "pods/kubepods/pod" + uidA},
		},
		"a container's own": {
			[]string{"kubepods/pod" + uidB + "/c1/pod" + uidA},
			map[string]string{uidB: "kubepods/pod" + uidB},
		},
		"another pod": {[]string{"kubepods/pod" + uidA + "0"}, map[string]string{}},
	} {
		root := t.TempDir()
		for _, dir := range test.dirs {
			must.Do(t, os.MkdirAll(filepath.Join(root, dir), 0o755))
		}
		want := map[string]uint64{}
		for uid, dir := range test.want {
			want[uid] = inodeOf(t, filepath.Join(root, dir))
		}
		got, err := podCgroups(root, []string{uidA, uidB, uidStatic})
		must.Do(t, err)
		if !maps.Equal(got, want) {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	if got, err := podCgroups("/nowhere", []string{uidA}); err != nil || len(got) > 0 {
		t.Errorf("missing root: %v, %v", got, err)
	}
}

func inodeOf(t *testing.T, dir string) uint64 {
	t.Helper()
	info, err := os.Stat(dir)
	must.Do(t, err)
	return info.Sys().(*syscall.Stat_t).Ino
}

// TestUnhookedCgroups follows a pod without socket hooks from before its cgroup exists until
// the pod is deleted.
func TestUnhookedCgroups(t *testing.T) {
	b := newWriter(t, objects.Config{})
	b.cfg.CgroupRoot = t.TempDir()
	check := func(when string, want ...uint64) {
		t.Helper()
		var got []uint64
		must.Do(t, objects.Each(b.m(objects.TCMapUnhookedCgroups), func(id uint64, _ uint8) { got = append(got, id) }))
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("%s: cgroups %v, want %v", when, got, want)
		}
	}
	node := intent.Node{UnhookedPods: []string{uidA}}
	must.Do(t, b.Write(&node))
	check("before the pod's cgroup")
	if missing, err := b.writeUnhooked(); err != nil || !slices.Equal(missing, []string{uidA}) {
		t.Errorf("missing %v, %v; want %s", missing, err, uidA)
	}
	dir := filepath.Join(b.cfg.CgroupRoot, "kubepods", "pod"+uidA)
	must.Do(t, os.MkdirAll(dir, 0o755))
	if missing, err := b.writeUnhooked(); err != nil || len(missing) > 0 {
		t.Errorf("missing %v, %v; want none", missing, err)
	}
	check("pod", inodeOf(t, dir))
	if s := b.settings(&node); s.Flags&uint32(objects.TCSettingsFlagsSETTING_HOOKS_EXCEPT) == 0 {
		t.Error("the programs do not read the map")
	}
	must.Do(t, b.Write(&intent.Node{}))
	check("pod deleted")
}
