package scale

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/dataplane/iptables"
	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/decisions/intent"
	spwkernel "spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// reader is a dataplane that can read back what the kernel serves.
type reader interface {
	dataplane.Backend
	Applied(context.Context) (intent.State, error)
}

// opened closes the backend when the test ends.
func opened(t *testing.T, b dataplane.Backend, err error) reader {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = b.Close() })
	return b.(reader)
}

// applied lists the endpoints that a backend reads from the kernel.
func applied(t *testing.T, b reader) []string {
	t.Helper()
	s, err := b.Applied(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, p := range s.Ports {
		for _, e := range p.Endpoints {
			out = append(out, e.Addr.String())
		}
	}
	slices.Sort(out)
	return out
}

// openEBPF opens an eBPF dataplane for so many map entries of Services.
func openEBPF(t *testing.T, entries uint32) *kernel {
	netnstest.Enter(t)
	mount, err := spwkernel.Cgroup2Mount()
	if err != nil {
		t.Fatal(err)
	}
	cgroup := filepath.Join(mount, fmt.Sprintf("spw-test-%d-scale", os.Getpid()))
	if err := os.Mkdir(cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Remove(cgroup); err != nil {
			t.Error(err)
		}
	})
	dir := t.TempDir()
	if err := unix.Mount("bpf", dir, "bpf", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, 0) })
	cfg := ebpf.Config{
		BPFFS: filepath.Join(dir, "spillway"), CgroupRoot: cgroup, Log: quiet(),
		FlowTableSize: 1024, MaxFrontends: entries, MaxEndpoints: entries,
	}
	t.Cleanup(func() {
		if err := upgrade.Cleanup(cfg); err != nil {
			t.Error(err)
		}
	})
	be, err := ebpf.New(t.Context(), cfg)
	b := opened(t, be, err)
	return &kernel{b, func(t *testing.T) []string { return applied(t, b) }} // Applied reads the maps
}

func openNftables(t *testing.T) *kernel {
	netnstest.Enter(t)
	open := func(t *testing.T) reader {
		b, err := nftables.New(t.Context(), nftables.Config{Log: quiet()})
		return opened(t, b, err)
	}
	// One that has written nothing must read the table.
	return &kernel{open(t), func(t *testing.T) []string { return applied(t, open(t)) }}
}

var destination = regexp.MustCompile(`--to-destination (\S+)`)

func openIptables(t *testing.T, variant string) *kernel {
	netnstest.Enter(t)
	hint := exec.Command("iptables-"+variant, "-t", "mangle", "-N", "KUBE-KUBELET-CANARY") // has it chosen
	if out, err := hint.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(hint.Args, " "), err, out)
	}
	be, err := iptables.New(t.Context(), iptables.Config{Log: quiet()})
	return &kernel{opened(t, be, err), func(t *testing.T) []string {
		dump, err := exec.Command("iptables-"+variant+"-save", "-t", "nat").Output()
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for line := range bytes.Lines(dump) {
			if m := destination.FindSubmatch(line); m != nil {
				out = append(out, string(m[1]))
			}
		}
		slices.Sort(out)
		return slices.Compact(out)
	}}
}
