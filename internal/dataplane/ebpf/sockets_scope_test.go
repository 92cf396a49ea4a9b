package ebpf

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

const (
	uidA = "6f1d3c1e-0c0b-4c4e-9a55-2f6f1a1b0001"
	uidB = "6f1d3c1e-0c0b-4c4e-9a55-2f6f1a1b0002"
)

// kernelPeer has a process of a cgroup connect a UDP socket, and returns whether the kernel
// has the address itself as the other end. A pod has a network namespace of its own.
func kernelPeer(t *testing.T, cgroup string, pod bool, dst netip.AddrPort) (same bool) {
	t.Helper()
	dir, err := os.Open(cgroup)
	must.Do(t, err)
	defer dir.Close()
	cmd := exec.CommandContext(t.Context(), "bash", "-c", fmt.Sprintf(`ip link set lo up && ip route replace local 0.0.0.0/0 dev lo &&
		exec 3<>/dev/udp/%s/%d && cat /proc/thread-self/net/udp`, dst.Addr(), dst.Port()))
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	if pod {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
	}
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), " 01 ") {
		t.Fatalf("connect to %s in %s: %v: %s", dst, cgroup, err, out)
	}
	b := dst.Addr().As4()
	binary.NativeEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:]))
	return strings.Contains(string(out), fmt.Sprintf(" %s:%04X 01 ", strings.ToUpper(hex.EncodeToString(b[:])), dst.Port()))
}

// TestScopeOfSocketHooks connects sockets of the node and of pods to a Service, for each
// value of Config.SocketHooks, and with a pod that is excluded.
func TestScopeOfSocketHooks(t *testing.T) {
	cfg := ownPlace(t)
	state := intent.State{Ports: []*intent.ServicePort{objectstest.SimplePort(1, 1)},
		Node: intent.Node{Name: "node", UnhookedPods: []string{uidA}}}
	service := objectstest.SimplePort(1, 1).Frontends[0]
	dst := netip.AddrPortFrom(service.Addr, service.Port)
	state.Ports[0].ID.Protocol = model.UDP
	other := filepath.Join(cfg.CgroupRoot, "pod"+uidB)
	parent := filepath.Join(cfg.CgroupRoot, "pod"+uidA)
	excluded := filepath.Join(parent, "container")
	for _, dir := range []string{other, parent, excluded} {
		must.Do(t, os.Mkdir(dir, 0o755))
		defer os.Remove(dir)
	}
	for _, step := range []struct {
		scope                 string
		node, other, excluded bool // the kernel's socket is connected to the Service
		links                 int
	}{
		{HooksAll, false, false, true, 9},
		{HooksHost, false, true, true, 9},
		{HooksOff, true, true, true, 0},
	} {
		cfg.SocketHooks = step.scope
		b, err := New(t.Context(), cfg)
		must.Do(t, err)
		must.Do(t, b.Replace(t.Context(), state))
		for _, socket := range []struct {
			what   string
			cgroup string
			pod    bool
			want   bool
		}{
			{"node", other, false, step.node}, {"node, excluded cgroup", excluded, false, step.node},
			{"pod", other, true, step.other}, {"excluded pod", excluded, true, step.excluded},
		} {
			if got := kernelPeer(t, socket.cgroup, socket.pod, dst); got != socket.want {
				t.Errorf("%s: %s: the socket is connected to the Service: %t, want %t", step.scope, socket.what, got, socket.want)
			}
		}
		if links, _ := filepath.Glob(filepath.Join(cfg.BPFFS, "cgroup", "*")); len(links) != step.links {
			t.Errorf("%s: links %v, want %d", step.scope, links, step.links)
		}
		must.Do(t, b.Close())
	}
	must.Do(t, upgrade.Cleanup(Config{BPFFS: cfg.BPFFS, Log: quietLog()}))
}
