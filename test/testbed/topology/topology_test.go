package topology_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

func TestMain(m *testing.M) {
	workload.RunIfAsked()
	os.Exit(m.Run())
}

// name gives each test run clusters of its own.
func name(suffix string) string { return fmt.Sprintf("t%d%s", os.Getpid(), suffix) }

// up brings a cluster up for the length of a test.
func up(t *testing.T, spec topology.Spec) *topology.Cluster {
	t.Helper()
	if err := topology.RequireRoot(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := topology.Down(spec.Name); err != nil {
			t.Error(err)
		}
	})
	c, err := topology.Up(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func serve(t *testing.T, h *topology.Host, kind, listen string) {
	t.Helper()
	if _, err := workload.Start(t.Context(), h, workload.Config{Kind: kind, Listen: listen}); err != nil {
		t.Fatal(err)
	}
}

// wantAnswer sends a request and expects an answer from the server that saw the client's
// own address.
func wantAnswer(t *testing.T, from, server *topology.Host, to, client netip.Addr) {
	t.Helper()
	for _, kind := range []string{workload.TCP, workload.UDP} {
		got, err := workload.Ask(t.Context(), from, workload.Question{Kind: kind, To: netip.AddrPortFrom(to, 7000).String()})
		if err != nil {
			t.Fatal(err)
		}
		if got.Outcome != workload.Answered || got.Server != server.Name || got.Client.Addr() != client {
			t.Errorf("%s from %s to %s: got %+v, want an answer from %s that saw %s", kind, from.Name, to, got, server.Name, client)
		}
	}
}

func TestPodsReachEachOther(t *testing.T) {
	for _, network := range []string{topology.Routed, topology.VXLAN} {
		t.Run(network, func(t *testing.T) {
			spec := topology.DefaultSpec(name(network[:1]))
			spec.PodNetwork = network
			c := up(t, spec)
			server := c.Pod(1, 2)
			serve(t, server, workload.TCP, ":7000")
			serve(t, server, workload.UDP, ":7000")
			for _, to := range server.Addrs() {
				for _, from := range []*topology.Host{c.Pod(1, 0), c.Pod(0, 0), server} {
					wantAnswer(t, from, server, to, from.Addr(to))
				}
				// A client has no route to a pod.
				got, err := workload.Ask(t.Context(), c.Client(0), workload.Question{Kind: workload.TCP, To: netip.AddrPortFrom(to, 7000).String()})
				if err != nil {
					t.Fatal(err)
				}
				if got.Outcome != workload.Failed || !strings.Contains(got.Error, "unreachable") {
					t.Errorf("client to pod %s: got %+v, want network unreachable", to, got)
				}
			}
		})
	}
}

func TestClientsReachNodes(t *testing.T) {
	c := up(t, topology.DefaultSpec(name("c")))
	node, client := c.Node(1), c.Client(0)
	serve(t, node, workload.TCP, ":7000")
	serve(t, node, workload.UDP, ":7000")
	for _, to := range node.Addrs() {
		wantAnswer(t, client, node, to, client.Addr(to))
		wantAnswer(t, c.Node(0), node, to, c.Node(0).Addr(to))
		wantAnswer(t, c.Pod(0, 0), node, to, c.Pod(0, 0).Addr(to))
	}
}

func TestClientsRouteExternalRangesToNode0(t *testing.T) {
	c := up(t, topology.DefaultSpec(name("e")))
	for _, ip := range []string{"203.0.113.7", "2001:db8:ff::7"} {
		addr := netip.MustParseAddr(ip)
		cmd := c.Client(0).Command(t.Context(), "ip", "route", "get", ip)
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		if want := "via " + c.Node(0).Addr(addr).String(); !strings.Contains(string(out), want) {
			t.Errorf("route to %s: got %q, want %q", ip, out, want)
		}
	}
}

func TestTwoClustersSideBySide(t *testing.T) {
	a, b := up(t, topology.DefaultSpec(name("a"))), up(t, topology.DefaultSpec(name("a-b")))
	for _, c := range []*topology.Cluster{a, b} {
		serve(t, c.Pod(0, 0), workload.TCP, ":7000")
		serve(t, c.Pod(0, 0), workload.UDP, ":7000")
	}
	if err := a.Down(); err != nil {
		t.Fatal(err)
	}
	// The other one has the same addresses, and a name with the same beginning.
	to := b.Pod(0, 0).IPv4
	wantAnswer(t, b.Pod(1, 0), b.Pod(0, 0), to, b.Pod(1, 0).IPv4)
}

func TestUpTwiceKeepsWhatRuns(t *testing.T) {
	spec := topology.DefaultSpec(name("i"))
	spec.PodNetwork = topology.VXLAN
	c := up(t, spec)
	serve(t, c.Pod(0, 0), workload.TCP, ":7000")
	serve(t, c.Pod(0, 0), workload.UDP, ":7000")
	again, err := topology.Up(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	wantAnswer(t, again.Pod(1, 0), again.Pod(0, 0), c.Pod(0, 0).IPv6, c.Pod(1, 0).IPv6)
	spec.Nodes = 3
	_, err = topology.Up(t.Context(), spec)
	if err == nil || !strings.Contains(err.Error(), "spillway-lab lab down --name "+spec.Name) {
		t.Errorf("Up with another spec: got error %v, want one that says to run down first", err)
	}
}

func TestUpRepairs(t *testing.T) {
	spec := topology.DefaultSpec(name("r"))
	c := up(t, spec)
	for _, argv := range [][]string{
		{"ip", "link", "del", "cni0"},
		{"ip", "link", "del", "veth1"},
		{"ip", "link", "del", "eth0"},
		{"ip", "route", "flush", "table", "main"},
	} {
		if out, err := c.Node(0).Command(t.Context(), argv...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", argv, err, out)
		}
	}
	if _, err := topology.Up(t.Context(), spec); err != nil {
		t.Fatal(err)
	}
	serve(t, c.Pod(0, 1), workload.TCP, ":7000")
	serve(t, c.Pod(0, 1), workload.UDP, ":7000")
	for _, to := range c.Pod(0, 1).Addrs() {
		wantAnswer(t, c.Pod(1, 0), c.Pod(0, 1), to, c.Pod(1, 0).Addr(to))
	}
}

func TestCommandRunsInNamespaceAndCgroup(t *testing.T) {
	c := up(t, topology.DefaultSpec(name("n")))
	for _, h := range []*topology.Host{c.Node(0), c.Pod(1, 1), c.Client(0)} {
		out, err := h.Command(t.Context(), "cat", "/proc/self/cgroup").Output()
		if err != nil {
			t.Fatal(err)
		}
		_, want, _ := strings.Cut(h.Cgroup, "/spillway-lab/")
		if !strings.Contains(string(out), "/spillway-lab/"+want+"\n") {
			t.Errorf("%s: cgroup is %q, want %s", h.Name, out, h.Cgroup)
		}
		inside, err := h.Command(t.Context(), "readlink", "/proc/self/ns/net").Output()
		if err != nil {
			t.Fatal(err)
		}
		var done string
		if err := h.Do(func() (err error) { done, err = os.Readlink("/proc/thread-self/ns/net"); return err }); err != nil {
			t.Fatal(err)
		}
		here, _ := os.Readlink("/proc/thread-self/ns/net")
		if strings.TrimSpace(string(inside)) != done || done == here {
			t.Errorf("%s: Command ran in %s, Do in %s, the test in %s", h.Name, inside, done, here)
		}
	}
}

func TestConntrackOnlyWhenAskedFor(t *testing.T) {
	for _, test := range []struct {
		name             string
		masquerade, hook bool
		entries          bool
	}{
		{"plain", false, false, false},
		{"masquerade", true, false, true},
		{"hook", false, true, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			spec := topology.DefaultSpec(name(test.name[:1]))
			spec.Masquerade, spec.Conntrack = test.masquerade, test.hook
			c := up(t, spec)
			serve(t, c.Pod(1, 0), workload.TCP, ":7000")
			serve(t, c.Pod(1, 0), workload.UDP, ":7000")
			wantAnswer(t, c.Pod(0, 0), c.Pod(1, 0), c.Pod(1, 0).IPv4, c.Pod(0, 0).IPv4)
			n, err := c.Node(0).ConntrackCount()
			if err != nil {
				t.Fatal(err)
			}
			if (n > 0) != test.entries {
				t.Errorf("conntrack entries on node0: %d, want some: %v", n, test.entries)
			}
			before := ruleset(t, c.Node(0))
			if _, err := topology.Up(t.Context(), spec); err != nil {
				t.Errorf("second Up: %v", err)
			}
			if after := ruleset(t, c.Node(0)); after != before {
				t.Errorf("after a second Up the rules are\n%s\nand were\n%s", after, before)
			}
		})
	}
}

func ruleset(t *testing.T, h *topology.Host) string {
	t.Helper()
	out, err := h.Command(t.Context(), "nft", "list", "ruleset").Output()
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func TestMasqueradeGivesTheNodesAddress(t *testing.T) {
	spec := topology.DefaultSpec(name("m"))
	spec.Masquerade = true
	c := up(t, spec)
	serve(t, c.Client(0), workload.TCP, ":7000")
	serve(t, c.Client(0), workload.UDP, ":7000")
	for _, to := range c.Client(0).Addrs() {
		wantAnswer(t, c.Pod(1, 0), c.Client(0), to, c.Node(1).Addr(to))
	}
}

func TestDownEndsOnlyTheClustersProcesses(t *testing.T) {
	c := up(t, topology.DefaultSpec(name("d")))
	// A process that ends at SIGTERM, one that ignores it, and one elsewhere.
	quick := c.Pod(0, 0).Command(context.Background(), "sleep", "60")
	stubborn := c.Node(0).Command(context.Background(), "sh", "-c", `trap "" TERM; echo; while :; do sleep 1; done`)
	out, err := stubborn.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	for _, cmd := range []*topology.Cmd{quick, stubborn} {
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	outside, err := os.StartProcess("/bin/sleep", []string{"sleep", "60"}, &os.ProcAttr{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = outside.Kill(); _, _ = outside.Wait() }()
	if err := c.Down(); err != nil {
		t.Fatal(err)
	}
	for cmd, want := range map[*topology.Cmd]string{quick: "terminated", stubborn: "killed"} {
		if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: ended with %v, want %s", cmd.Args, err, want)
		}
	}
	if err := outside.Signal(syscall.Signal(0)); err != nil {
		t.Error("a process outside the cluster was ended")
	}
}

func TestUpStopsWithItsContext(t *testing.T) {
	if err := topology.RequireRoot(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	spec := topology.DefaultSpec(name("x"))
	_, err := topology.Up(ctx, spec, topology.WithProgress(func(step string) {
		if step == "connect pods" {
			cancel()
		}
	}))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Up: got %v, want context canceled", err)
	}
	if _, err := topology.Load(spec.Name); !errors.Is(err, topology.ErrNoCluster) {
		t.Errorf("Load after a canceled Up: got %v, want no cluster", err)
		_ = topology.Down(spec.Name)
	}
}
