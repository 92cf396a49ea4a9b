package topology

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/await"
)

func crashName() string { return fmt.Sprintf("t%dcrash", os.Getpid()) }

// leftovers lists the objects of a cluster on the machine.
func leftovers(t *testing.T, name string) []string {
	t.Helper()
	root, err := clusterCgroup(name)
	if err != nil {
		t.Fatal(err)
	}
	found, err := Namespaces(name)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{root, stateDir(name)} {
		if _, err := os.Stat(path); err == nil {
			found = append(found, path)
		}
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, namespacePath(namespaceName(name, ""))) {
			found = append(found, line)
		}
	}
	return found
}

// machine dumps links, addresses, routes and neighbors of the test's own namespace, and
// the sysctls that the lab sets in others.
func machine(t *testing.T) []string {
	t.Helper()
	var dump []string
	add := func(err error, format string, args ...any) {
		if err != nil {
			t.Fatal(err)
		}
		dump = append(dump, fmt.Sprintf(format, args...))
	}
	links, err := netlink.LinkList()
	add(err, "%d links", len(links))
	for _, l := range links {
		a := l.Attrs()
		add(nil, "link %d %s %s %d %s %d", a.Index, a.Name, a.HardwareAddr, a.MTU, a.Flags, a.MasterIndex)
		addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
		for _, addr := range addrs {
			dump = append(dump, "address "+addr.IPNet.String()+" "+a.Name)
		}
		add(err, "%d addresses on %s", len(addrs), a.Name)
	}
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	add(err, "%d routes", len(routes))
	for _, r := range routes {
		dump = append(dump, "route "+r.String())
	}
	for _, pattern := range []string{"ipv4/conf/*/rp_filter", "ipv4/ip_forward", "ipv6/conf/*/forwarding", "ipv6/conf/*/accept_dad",
		"ipv6/conf/*/accept_ra"} {
		files, _ := filepath.Glob("/proc/sys/net/" + pattern)
		for _, f := range files {
			text, err := os.ReadFile(f)
			add(err, "%s %s", f, text)
		}
	}
	slices.Sort(dump)
	return dump
}

func crashSpec(network string) Spec {
	s := DefaultSpec(crashName())
	s.PodNetwork, s.PodsPerNode, s.Conntrack = network, 1, true
	return s
}

// upTo runs only the first steps of Up, and leaves everything as a killed process does.
func upTo(t *testing.T, spec Spec, steps int) {
	t.Helper()
	if err := RequireRoot(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = Down(spec.Name) })
	c, _, err := prepare(spec.withDefaults())
	if err != nil {
		t.Fatal(err)
	}
	b := newBuilder(c)
	defer b.close()
	if err := b.run(t.Context(), b.steps()[:steps]); err != nil {
		t.Fatal(err)
	}
}

func TestDownAfterACrashAtAnyStep(t *testing.T) {
	before := machine(t)
	all := len(newBuilder(&Cluster{}).steps())
	for steps := 1; steps <= all; steps++ {
		upTo(t, crashSpec(VXLAN), steps)
		c, err := Load(crashName())
		if err != nil {
			t.Fatalf("after %d steps: %v", steps, err)
		}
		if want := map[bool]string{true: StatusUp, false: StatusCreating}[steps == all]; c.Status != want {
			t.Errorf("after %d steps: status %q, want %q", steps, c.Status, want)
		}
		if during := machine(t); !slices.Equal(before, during) {
			t.Errorf("after %d steps the machine's own network differs:\n%s\nbefore:\n%s", steps,
				strings.Join(during, "\n"), strings.Join(before, "\n"))
		}
		if err := c.Down(); err != nil {
			t.Errorf("after %d steps: %v", steps, err)
		}
		if left := leftovers(t, crashName()); len(left) > 0 {
			t.Errorf("after %d steps and Down there is left: %v", steps, left)
		}
	}
	if after := machine(t); !slices.Equal(before, after) {
		t.Errorf("the machine's own network differs:\n%s\nbefore:\n%s", strings.Join(after, "\n"), strings.Join(before, "\n"))
	}
}

// connect opens a connection from one host to another, over IPv6.
func connect(ctx context.Context, from, to *Host) error {
	l, err := to.Listen(ctx, "tcp6", "[::]:7000")
	if err != nil {
		return err
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(ctx, await.Limit)
	defer cancel()
	conn, err := from.Dial(ctx, "tcp6", netip.AddrPortFrom(to.IPv6, 7000).String())
	if err != nil {
		return err
	}
	return conn.Close()
}

func TestUpFinishesAfterACrashAtAnyStep(t *testing.T) {
	all := len(newBuilder(&Cluster{}).steps())
	for steps := 1; steps < all; steps++ {
		upTo(t, crashSpec(Routed), steps)
		c, err := Up(t.Context(), crashSpec(Routed))
		if err != nil {
			t.Fatalf("after %d steps: %v", steps, err)
		}
		for i, node := range c.nodes {
			if err := connect(t.Context(), node, c.Pod(1-i, 0)); err != nil {
				t.Errorf("after %d steps: %v", steps, err)
			}
		}
		if err := c.Down(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestDownWithoutState(t *testing.T) {
	for name, spoil := range map[string]func(string) error{
		"lost":   func(name string) error { return os.RemoveAll(stateDir(name)) },
		"broken": func(name string) error { return os.WriteFile(stateFile(name), []byte("{"), 0o644) },
	} {
		t.Run(name, func(t *testing.T) {
			spec := crashSpec(Routed)
			upTo(t, spec, 6)
			if err := spoil(spec.Name); err != nil {
				t.Fatal(err)
			}
			if names, err := List(); err != nil || !slices.Contains(names, spec.Name) {
				t.Errorf("List: got %v, %v, want %s among them", names, err, spec.Name)
			}
			if err := Down(spec.Name); err != nil {
				t.Error(err)
			}
			if left := leftovers(t, spec.Name); len(left) > 0 {
				t.Errorf("left: %v", left)
			}
			if err := Down(spec.Name); err != nil {
				t.Errorf("second Down: %v", err)
			}
		})
	}
}

func TestDownRefusesToEndItself(t *testing.T) {
	c, err := Up(t.Context(), crashSpec(Routed))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Down() })
	// The program that must refuse is this one, run again inside the cluster.
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := c.Node(0).Command(t.Context(), exe, "-test.run=^TestDownFromInside$", "-test.v")
	cmd.Env = append(cmd.Env, insideVariable+"="+c.Spec.Name)
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "PASS: TestDownFromInside") {
		t.Errorf("%v\n%s", err, out)
	}
}

// insideVariable names the cluster in which TestDownFromInside runs.
const insideVariable = "SPILLWAY_TEST_INSIDE"

func TestDownFromInside(t *testing.T) {
	name := os.Getenv(insideVariable)
	if name == "" {
		return // run by TestDownRefusesToEndItself
	}
	if err := Down(name); err == nil || !strings.Contains(err.Error(), "must not end") {
		t.Errorf("got %v, want a refusal", err)
	}
}

func TestLoadWithoutCluster(t *testing.T) {
	if _, err := Load("none-of-that-name"); !errors.Is(err, ErrNoCluster) {
		t.Errorf("got %v, want ErrNoCluster", err)
	}
}
