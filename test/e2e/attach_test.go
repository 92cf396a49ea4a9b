package e2e

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/flows/suite"
)

// TestAnAgentKilledWhileItAttachesBreaksNothing kills the first agent of a node when
// ever more of its programs are attached. Traffic that concerns no Service must not
// notice, only an endpoint may answer a request to a Service, if any does, and the next
// agent serves.
func TestAnAgentKilledWhileItAttachesBreaksNothing(t *testing.T) {
	e := start(t, "e2e-attach")
	if e.Mode != "ebpf" {
		t.Log("only the eBPF dataplane attaches programs one by one")
		return
	}
	s := e.Load(t, nodePort("a0", "b0"))
	a := e.Agent("a")
	hooks := func() int {
		links, _ := filepath.Glob(filepath.Join(a.BPFFS, "links", "*"))
		sockets, _ := filepath.Glob(filepath.Join(a.BPFFS, "cgroup", "*"))
		return len(links) + len(sockets)
	}
	total := hooks()
	if total < 10 {
		t.Fatalf("%d hooks of a running agent were found: the test is blind", total)
	}
	every := 3
	if testing.Short() {
		every = total / 3
	}
	for at := 1; at <= total; at += every {
		if err := a.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := a.Cleanup(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := a.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(30 * time.Second); hooks() < at; time.Sleep(100 * time.Microsecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%d hooks and no more", hooks())
			}
		}
		if err := a.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		e.checkHalfAttached(t, fmt.Sprintf("killed with %d of %d hooks", hooks(), total), s)
		if err := a.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := a.WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.MustWrite(t, nodePort("a0"))
		s.MustWait(t)
		e.expect(t, "by the next agent", s, "a0")
		if n := hooks(); n != total {
			t.Errorf("%d hooks after a restart, before there were %d", n, total)
		}
	}
}

// checkHalfAttached asks without an agent, with some of the programs in place.
func (e *env) checkHalfAttached(t *testing.T, when string, s *suite.File) {
	t.Helper()
	for _, combo := range flows.AllCombos {
		for _, from := range []string{"a1", "b1", "b"} {
			dst := fmt.Sprintf("%s:8080", e.Addr("a0", false))
			if combo.IPv6() {
				dst = fmt.Sprintf("[%s]:8080", e.Addr("a0", true))
			}
			for _, answer := range ask(t, e.MustProbe(t, from), dst, combo, 2) {
				if answer.Server != "a0" {
					t.Errorf("%s: %s to a pod's own address, %s: %+v", when, from, combo, answer)
				}
			}
		}
		for _, f := range askers {
			p, dst := e.MustProbe(t, f.From), s.MustAddress(t, f.To, combo)
			resp, err := p.Do(t.Context(), probe.Request{Op: probe.Try, Proto: combo.Protocol(), Dst: dst, Tries: 1, TimeoutMS: 200})
			if err != nil {
				t.Fatal(err)
			}
			for _, answer := range resp.Answers {
				if answer.Server != "" && answer.Server != "a0" && answer.Server != "b0" {
					t.Errorf("%s: %s to %s, %s: %+v", when, f.From, f.To, combo, answer)
				}
			}
		}
	}
}

// TestAReadOnlyBPFFSIsSaidInOneLine starts an agent that can pin nothing.
func TestAReadOnlyBPFFSIsSaidInOneLine(t *testing.T) {
	e := start(t, "e2e-readonly")
	if e.Mode != "ebpf" {
		t.Log("only the eBPF dataplane pins anything")
		return
	}
	s := e.Load(t, nodePort("b0"))
	a := e.Agent("a")
	if err := a.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("", a.Mount, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	e.expectReadOnly(t, a)
	e.expect(t, "by what an earlier agent attached", s, "b0")
	if err := unix.Mount("", a.Mount, "", unix.MS_REMOUNT, ""); err != nil {
		t.Fatal(err)
	}
	if err := a.Cleanup(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("", a.Mount, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	e.expectReadOnly(t, a)
	if err := unix.Mount("", a.Mount, "", unix.MS_REMOUNT, ""); err != nil {
		t.Fatal(err)
	}
}

func (e *env) expectReadOnly(t *testing.T, a *cluster.Agent) {
	t.Helper()
	log, err := os.ReadFile(a.Log)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	await.True(t, "the agent ends", func() bool { return a.Ended() != nil })
	_ = a.Signal(syscall.SIGKILL)
	now, err := os.ReadFile(a.Log)
	if err != nil {
		t.Fatal(err)
	}
	var last []string
	for line := range strings.Lines(string(bytes.TrimPrefix(now, log))) {
		if !strings.HasPrefix(line, "time=") {
			last = append(last, line)
		}
	}
	if len(last) != 1 || !strings.HasPrefix(last[0], "spillway: ") || !strings.Contains(last[0], "read-only file system") {
		t.Errorf("the agent says %q, want one line about the read-only file system", last)
	}
}

// TestOffloadsChangeNothing switches the offloads of a node's devices on and off
// under streams: what a device leaves to hardware (checksums, segments) is in the
// packet's metadata, and the programs must keep it right.
func TestOffloadsChangeNothing(t *testing.T) {
	ethtool, err := exec.LookPath("ethtool")
	if err != nil {
		t.Fatal(err)
	}
	e := start(t, "e2e-offload")
	s := e.Load(t, nodePort("a0", "b0"))
	for _, offloads := range [][]string{
		{"tx", "off", "rx", "off"}, {"tso", "off", "gso", "off", "gro", "off"}, {"tx", "on", "rx", "on"}, {"tso", "on", "gso", "on", "gro", "on"},
	} {
		for _, node := range e.Nodes() {
			host, changed := e.MustHost(t, node), 0
			devices := []string{"eth0"}
			for i := range e.Spec.PodsPerNode {
				devices = append(devices, fmt.Sprintf("veth%d", i))
			}
			for _, device := range devices {
				if err := host.Command(t.Context(), append([]string{ethtool, "-K", device}, offloads...)...).Run(); err == nil {
					changed++
				}
			}
			if changed == 0 {
				t.Fatalf("no device of %s takes %v", node, offloads)
			}
		}
		e.startStreams(t, s)
		e.askMore(t, 20)
		e.endStreams(t)
	}
}
