package harness

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/testbed/topology"
)

// MustHost returns the host of a short name.
func (h *Harness) MustHost(t testing.TB, short string) *topology.Host {
	t.Helper()
	host, err := h.Host(short)
	if err != nil {
		t.Fatal(err)
	}
	return host
}

// MustProbe returns the probe of a short name.
func (h *Harness) MustProbe(t testing.TB, short string) *probe.Process {
	t.Helper()
	p, err := h.Probe(short)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Do runs a function in a host's network namespace.
func (h *Harness) Do(t testing.TB, host string, fn func() error) {
	t.Helper()
	if err := h.MustHost(t, host).Do(fn); err != nil {
		t.Fatal(err)
	}
}

// Output runs a program on a host to its end, within 10 s, and returns what it printed.
// Cleanups may call it.
func (h *Harness) Output(t testing.TB, host string, argv ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), await.Limit)
	defer cancel()
	out, err := h.MustHost(t, host).Command(ctx, argv...).CombinedOutput()
	if err != nil {
		t.Fatalf("run %v on %s: %v: %s", argv, host, err, out)
	}
	return string(out)
}

// OnLAN runs a command in the network between nodes and clients: a namespace with a bridge,
// which has a port for each of them, with the name of its host.
func (h *Harness) OnLAN(t testing.TB, stdin string, argv ...string) {
	t.Helper()
	lan := *h.MustHost(t, "client0")
	lan.Namespace = "spw-" + h.Spec.Name + "-lan"
	cmd := lan.Command(t.Context(), argv...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("run %v on the LAN: %v: %s", argv, err, out)
	}
}

// Run starts a program on a host, for the rest of the test.
func (h *Harness) Run(t *testing.T, host string, argv ...string) {
	t.Helper()
	cmd := h.MustHost(t, host).Command(context.Background(), argv...)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		_ = cmd.Wait()
		if t.Failed() && said.Len() > 0 {
			t.Logf("%s on %s: %s", argv[0], host, said.String())
		}
	})
}

// WaitListening waits until a host listens on a port of network "udp" or "tcp", with dual
// on both families.
func (h *Harness) WaitListening(t *testing.T, host, network string, port int, dual bool) {
	t.Helper()
	machine := h.MustHost(t, host)
	for _, v6 := range []bool{false, true} {
		if v6 && !dual {
			break
		}
		await.True(t, fmt.Sprintf("a server listens on %s %d of %s (IPv6: %v)", network, port, host, v6), func() (there bool) {
			err := machine.Do(func() (err error) {
				there, err = bound(network, port, v6)
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			return there
		})
	}
}

// bound reports whether a socket of the calling thread's namespace has the port;
// one of IPv6 without an address counts for both families.
func bound(network string, port int, v6 bool) (bool, error) {
	tables := []string{network + "6"}
	if !v6 {
		tables = append(tables, network)
	}
	for _, table := range tables {
		text, err := os.ReadFile("/proc/thread-self/net/" + table)
		if err != nil {
			return false, err
		}
		for line := range strings.Lines(string(text)) {
			f := strings.Fields(line)
			if len(f) < 4 || !strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) || network == "tcp" && f[3] != "0A" {
				continue
			}
			any := strings.Trim(f[1][:len(f[1])-5], "0") == ""
			if v6 || table == network || any {
				return true, nil
			}
		}
	}
	return false, nil
}
