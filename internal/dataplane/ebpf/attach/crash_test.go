package attach

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/must"
)

// The steps of attaching one hook after which a process can be killed. A link
// without a pin vanishes with the process.
var crashes = []struct {
	name string
	// do makes the step with a link that the killed process has attached.
	do func(l link.Link, path string) error
}{
	{"attached", func(link.Link, string) error { return nil }},
	{"pinned under the passing name", func(l link.Link, path string) error { return l.Pin(path + newNameSuffix) }},
	{"pinned", pinOver},
}

// TestCrashBetweenTwoStepsOfADeviceHook has a process end between any two steps, with
// and without the link of an earlier run: the next one leaves one program at each hook.
func TestCrashBetweenTwoStepsOfADeviceHook(t *testing.T) {
	needsTCX(t)
	for _, c := range crashes {
		for _, before := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, a link before: %v", c.name, before), func(t *testing.T) {
				enterNetns(t)
				dir, killed, progs := mountBPF(t), classifier(t, tcxNext), classifiers(t)
				eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
				if before {
					first := newAttacher(t, Config{PinDir: dir, Programs: classifiers(t)})
					must.Do(t, first.Sync(context.Background()))
					must.Do(t, first.Close())
				}
				must.Do(t, os.MkdirAll(linksDir(dir), 0o700))
				l, err := link.AttachTCX(link.TCXOptions{Interface: eth0, Program: killed, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
				must.Do(t, err)
				must.Do(t, c.do(l, filepath.Join(linksDir(dir), fmt.Sprintf("%d_ingress", eth0))))
				must.Do(t, l.Close())
				if n := len(attached(t, eth0, ingress)); n > 2 {
					t.Errorf("%d programs after the crash", n)
				}

				a := newAttacher(t, Config{PinDir: dir, Programs: progs})
				must.Do(t, a.Sync(context.Background()))
				await.NoError(t, func() error { // the kernel detaches a link that nothing holds a little later
					if err := samePrograms(t, eth0, ingress, progs.FromNetwork); err != nil {
						return err
					}
					return samePrograms(t, eth0, egress, progs.ToNetwork)
				})
				for _, pin := range pins(t, dir) {
					if strings.HasSuffix(pin, newNameSuffix) {
						t.Errorf("pin %s is left", pin)
					}
				}
			})
		}
	}
}

// TestCrashBetweenTwoStepsOfASocketHook is the same for the cgroup.
func TestCrashBetweenTwoStepsOfASocketHook(t *testing.T) {
	const connect4, sendmsg4 = ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupUDP4Sendmsg
	for i, c := range crashes {
		for j, before := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, a link before: %v", c.name, before), func(t *testing.T) {
				cgroup, dir := newCgroup(t, fmt.Sprintf("crash%d%d", i, j)), mountBPF(t)
				progs := func() map[ebpf.AttachType]*ebpf.Program {
					return map[ebpf.AttachType]*ebpf.Program{connect4: sockAddrProgram(t, connect4), sendmsg4: sockAddrProgram(t, sendmsg4)}
				}
				if before {
					must.Do(t, AttachCgroup(dir, cgroup, progs()))
				}
				must.Do(t, os.MkdirAll(cgroupPins(dir), 0o700))
				l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: connect4, Program: sockAddrProgram(t, connect4)})
				must.Do(t, err)
				must.Do(t, c.do(l, filepath.Join(cgroupPins(dir), cgroupHookName(connect4))))
				must.Do(t, l.Close())

				want := progs()
				must.Do(t, AttachCgroup(dir, cgroup, want))
				await.NoError(t, func() error {
					for typ, p := range want {
						if got := atCgroup(t, cgroup, typ); len(got) != 1 || got[0] != programID(t, p) {
							return fmt.Errorf("%s: programs %v, want %d", typ, got, programID(t, p))
						}
					}
					return nil
				})
				entries, err := os.ReadDir(cgroupPins(dir))
				if err != nil || len(entries) != len(want) {
					t.Errorf("%d pins (%v), want %d", len(entries), err, len(want))
				}
				must.Do(t, DetachCgroup(dir))
			})
		}
	}
}

// TestAReadOnlyBPFFSIsOneClearError remounts the BPF file system before anything is
// attached, and while links of an earlier run are pinned.
func TestAReadOnlyBPFFSIsOneClearError(t *testing.T) {
	needsTCX(t)
	for _, before := range []bool{false, true} {
		t.Run(fmt.Sprintf("links before: %v", before), func(t *testing.T) {
			enterNetns(t)
			dir, cgroup := mountBPF(t), newCgroup(t, fmt.Sprintf("readonly%v", before))
			eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
			const connect4 = ebpf.AttachCGroupInet4Connect
			old, sock := classifiers(t), map[ebpf.AttachType]*ebpf.Program{connect4: sockAddrProgram(t, connect4)}
			if before {
				a := newAttacher(t, Config{PinDir: dir, Programs: old})
				must.Do(t, a.Sync(context.Background()))
				must.Do(t, a.Close())
				must.Do(t, AttachCgroup(dir, cgroup, sock))
			}
			must.Do(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
			progs := classifiers(t)
			a := newAttacher(t, Config{PinDir: dir, Programs: progs})
			err := a.Sync(context.Background())
			// One line for each hook that cannot be served, each with the reason.
			for line := range strings.Lines(fmt.Sprint(err)) {
				if !errors.Is(err, unix.EROFS) || !strings.Contains(line, "read-only file system") {
					t.Errorf("error %q, want the read-only file system in each line", line)
				}
			}
			if err := AttachCgroup(dir, cgroup, sock); !errors.Is(err, unix.EROFS) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %v, want one line about the read-only file system", err)
			}
			if before { // what served goes on
				wantPrograms(t, eth0, old.FromNetwork, old.ToNetwork)
			} else {
				wantPrograms(t, eth0, nil, nil)
			}
			must.Do(t, unix.Mount("", dir, "", unix.MS_REMOUNT, ""))
			must.Do(t, a.Sync(context.Background()))
			wantPrograms(t, eth0, progs.FromNetwork, progs.ToNetwork)
			must.Do(t, DetachCgroup(dir))
		})
	}
}

// TestAForeignProgramInFrontThatEndsTheWalk shows what Spillway does not prevent: a
// program that another attaches in front later, and that accepts packets instead of
// passing them on (TC_ACT_OK, not TCX_NEXT), hides ours. Ours stay attached and in
// their order.
func TestAForeignProgramInFrontThatEndsTheWalk(t *testing.T) {
	needsTCX(t)
	enterNetns(t)
	dir, progs := mountBPF(t), classifiers(t)
	eth0 := addDummyNIC(t, "eth0", "192.0.2.1/24")
	a := newAttacher(t, Config{PinDir: dir, Programs: progs})
	must.Do(t, a.Sync(context.Background()))
	front, behind := classifier(t, 0), classifier(t, tcxNext)
	for p, anchor := range map[*ebpf.Program]link.Anchor{front: link.Head(), behind: link.Tail()} {
		l, err := link.AttachTCX(link.TCXOptions{Interface: eth0, Program: p, Attach: ebpf.AttachTCXIngress, Anchor: anchor})
		must.Do(t, err)
		t.Cleanup(func() { l.Close() })
	}
	for range 2 { // a resync, and a restart
		must.Do(t, a.Sync(context.Background()))
		must.Do(t, samePrograms(t, eth0, ingress, front, progs.FromNetwork, behind))
		must.Do(t, a.Close())
		a = newAttacher(t, Config{PinDir: dir, Programs: progs})
	}
}
