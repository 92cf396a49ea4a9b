package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"spillway.dev/spillway/test/testbed/topology"
)

// cgroupHooks are the attach points that an agent may use on its cgroup.
var cgroupHooks = []ebpf.AttachType{
	ebpf.AttachCGroupInet4Connect, ebpf.AttachCGroupInet6Connect,
	ebpf.AttachCGroupUDP4Sendmsg, ebpf.AttachCGroupUDP6Sendmsg,
	ebpf.AttachCGroupUDP4Recvmsg, ebpf.AttachCGroupUDP6Recvmsg,
	ebpf.AttachCgroupInet4GetPeername, ebpf.AttachCgroupInet6GetPeername,
	ebpf.AttachCgroupInet4GetSockname, ebpf.AttachCgroupInet6GetSockname,
	ebpf.AttachCGroupInet4PostBind, ebpf.AttachCGroupInet6PostBind,
	ebpf.AttachCGroupInet4Bind, ebpf.AttachCGroupInet6Bind,
	ebpf.AttachCGroupInetSockCreate, ebpf.AttachCgroupInetSockRelease,
	ebpf.AttachCGroupSockOps, ebpf.AttachCGroupInetIngress, ebpf.AttachCGroupInetEgress,
}

// residue lists what an agent has in a node's kernel.
func (e *env) residue(t *testing.T, node string) []string {
	t.Helper()
	host, err := e.Host(node)
	if err != nil {
		t.Fatal(err)
	}
	found, err := pins(e.Agent(node).Mount)
	if err != nil {
		t.Fatal(err)
	}
	more, err := cgroupPrograms(host.CgroupRoot)
	if err != nil {
		t.Fatal(err)
	}
	found = append(found, more...)
	if more, err = devicePrograms(host); err != nil {
		t.Fatal(err)
	}
	return append(found, more...)
}

// pins lists everything below a bpffs mount but what the kernel puts there
// itself (bpf_preload, Linux 5.10).
func pins(mount string) ([]string, error) {
	var found []string
	err := filepath.WalkDir(mount, func(path string, _ fs.DirEntry, err error) error {
		if name := filepath.Base(path); err == nil && path != mount && name != "maps.debug" && name != "progs.debug" {
			found = append(found, path)
		}
		return err
	})
	return found, err
}

// cgroupPrograms lists the programs attached to a cgroup or below it.
func cgroupPrograms(root string) ([]string, error) {
	var found []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		dir, err := os.Open(path)
		if err != nil {
			return err
		}
		defer dir.Close()
		for _, hook := range cgroupHooks {
			r, err := link.QueryPrograms(link.QueryOptions{Target: int(dir.Fd()), Attach: hook})
			if err != nil {
				return fmt.Errorf("query %s of %s: %w", hook, path, err)
			}
			if len(r.Programs) > 0 {
				found = append(found, fmt.Sprintf("%s on %s", hook, path))
			}
		}
		return nil
	})
	return found, err
}

// devicePrograms lists tcx programs and clsact qdiscs on a node's devices.
func devicePrograms(host *topology.Host) ([]string, error) {
	var found []string
	err := host.Do(func() error {
		devices, err := net.Interfaces()
		if err != nil {
			return err
		}
		for _, d := range devices {
			for _, hook := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				r, err := link.QueryPrograms(link.QueryOptions{Target: d.Index, Attach: hook})
				if errors.Is(err, ebpf.ErrNotSupported) || errors.Is(err, syscall.EINVAL) {
					continue // a kernel before 6.6 has clsact alone
				}
				if err != nil {
					return fmt.Errorf("query %s of %s: %w", hook, d.Name, err)
				}
				if len(r.Programs) > 0 {
					found = append(found, fmt.Sprintf("%s on %s", hook, d.Name))
				}
			}
		}
		qdiscs, err := netlink.QdiscList(nil)
		for _, q := range qdiscs {
			if q.Type() == "clsact" {
				found = append(found, fmt.Sprintf("clsact on device %d", q.Attrs().LinkIndex))
			}
		}
		return err
	})
	return found, err
}

func TestCleanupLeavesNothing(t *testing.T) {
	e := start(t, "e2e-cleanup")
	before := map[string][]string{}
	s := e.Load(t, nodePort("a0"))
	e.expect(t, "while the agents run", s, "a0")
	for _, node := range e.Nodes() {
		if before[node] = e.residue(t, node); len(before[node]) == 0 && e.Mode == "ebpf" {
			t.Fatalf("nothing of a running agent was found on %s: the test is blind", node)
		}
		if err := e.Agent(node).Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
	}
	e.expect(t, "after the agents have ended", s, "a0")
	for _, node := range e.Nodes() {
		for range 2 { // the second time there is nothing to do
			if err := e.Agent(node).Cleanup(t.Context()); err != nil {
				t.Fatal(err)
			}
			if left := e.residue(t, node); len(left) > 0 {
				t.Errorf("clean-up left on %s: %v", node, slices.Sorted(slices.Values(left)))
			}
		}
	}
	e.expect(t, "after clean-up", s, "")
	if err := e.StartAgents(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.MustWrite(t, nodePort("b0"))
	s.MustWait(t)
	e.expect(t, "after a new start", s, "b0")
}
