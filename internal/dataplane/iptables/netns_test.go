package iptables

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// variants lists both variants, for tests that run on each.
var variants = []Variant{Legacy, NFT}

// bench is a fresh network namespace with the objects of a test. The calling goroutine's
// thread stays in it, so a whole test runs on that goroutine.
type bench struct {
	t       testing.TB
	variant Variant
	cfg     Config
	log     *strings.Builder
	lock    string
}

// eachVariant runs a test in a fresh namespace for each variant. A chain of kubelet makes
// the dataplane choose the variant.
func eachVariant(t *testing.T, test func(*bench)) {
	for _, v := range variants {
		t.Run(string(v), func(t *testing.T) {
			b := newBench(t)
			b.use(v)
			test(b)
		})
	}
}

func newBench(t testing.TB) *bench {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("rules need root")
	}
	netnstest.Enter(t)
	b := &bench{t: t, log: &strings.Builder{}, lock: filepath.Join(t.TempDir(), "xtables.lock")}
	// Not the machine's lock: other programs may hold it, and one test holds it too.
	b.cfg = Config{Log: slog.New(slog.NewTextHandler(b.log, nil)), lockFile: b.lock}
	return b
}

// use creates the chain that kubelet creates in the variant that a node uses.
func (b *bench) use(v Variant) {
	b.t.Helper()
	b.variant = v
	b.must("*mangle\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n")
}

// open opens the dataplane.
func (b *bench) open() *Backend {
	b.t.Helper()
	opened, err := New(b.t.Context(), b.cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	be := opened.(*Backend)
	if b.variant != "" && be.variant != b.variant {
		b.t.Fatalf("the dataplane uses %s, want %s", be.variant, b.variant)
	}
	return be
}

// command returns a program of the tested variant, on rules.
func (b *bench) command(name string, args ...string) *exec.Cmd {
	name = strings.Replace(name, "tables", "tables-"+string(b.variant), 1)
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "XTABLES_LOCKFILE="+b.lock)
	return cmd
}

// run runs "iptables -t nat …" of the tested variant, as another program.
func (b *bench) run(line string) error {
	words := strings.Fields(line)
	if out, err := b.command(words[0], words[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", line, err, out)
	}
	return nil
}

func (b *bench) mustRun(lines ...string) {
	b.t.Helper()
	for _, line := range lines {
		if err := b.run(line); err != nil {
			b.t.Fatal(err)
		}
	}
}

// must loads rules of another program.
func (b *bench) must(rules string) {
	b.t.Helper()
	cmd := b.command("iptables-restore", "--noflush")
	cmd.Stdin = strings.NewReader(rules)
	if out, err := cmd.CombinedOutput(); err != nil {
		b.t.Fatalf("restore %q: %v: %s", rules, err, out)
	}
}

// dump returns the agent's rules in both families, chains sorted by name.
func (b *bench) dump() string {
	b.t.Helper()
	var out strings.Builder
	for _, program := range []string{"iptables-save", "ip6tables-save"} {
		for _, table := range tables {
			text, err := b.command(program, "-t", table).Output()
			if err != nil {
				b.t.Fatal(err)
			}
			fmt.Fprintf(&out, "%s -t %s\n%s", program, table, ours(string(text)))
		}
	}
	return out.String()
}

// ours returns the lines of a dump that concern the agent: its chains, each with its
// rules, and the jumps to them.
func ours(dump string) string {
	var jumps []string
	rules := map[string][]string{}
	for line := range strings.Lines(dump) {
		switch {
		case strings.HasPrefix(line, ":"+chainPrefix):
			name, _, _ := strings.Cut(line[1:], " ")
			if rules[name] == nil {
				rules[name] = []string{}
			}
		case strings.HasPrefix(line, "-A "+chainPrefix):
			name, _, _ := strings.Cut(line[3:], " ")
			rules[name] = append(rules[name], line)
		case strings.Contains(line, chainPrefix):
			jumps = append(jumps, line)
		}
	}
	var out strings.Builder
	out.WriteString(strings.Join(jumps, ""))
	for _, name := range sortedKeys(rules) {
		if len(rules[name]) == 0 {
			fmt.Fprintf(&out, ":%s\n", name)
		}
		out.WriteString(strings.Join(rules[name], ""))
	}
	return out.String()
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sortStrings(keys)
	return keys
}

func addr(s string) netip.Addr         { return netip.MustParseAddr(s) }
func addrPort(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }
func prefix(s string) netip.Prefix     { return netip.MustParsePrefix(s) }

// testNode returns the node of the tests.
func testNode() intent.Node {
	return intent.Node{
		Name:          "node-a",
		Addrs:         []netip.Addr{addr("10.244.1.1"), addr("192.0.2.1"), addr("2001:db8::1")},
		NodePortAddrs: []netip.Addr{addr("192.0.2.1"), addr("2001:db8::1")},
		PodCIDRs:      []netip.Prefix{prefix("10.244.1.0/24"), prefix("fd44:1::/64")},
		ClusterCIDRs: []netip.Prefix{
			prefix("10.244.0.0/24"), prefix("10.244.1.0/24"), prefix("10.244.2.0/24"), prefix("fd44:1::/64"), prefix("fd44:2::/64"),
		},
	}
}

// id names a port of Service default/NAME.
func id(name, port string, number uint16, p model.Protocol, f model.Family) intent.PortID {
	return intent.PortID{Service: model.Name{Namespace: "default", Name: name}, Port: port, Number: number, Protocol: p, Family: f}
}

func clusterIP(a string, port uint16, to intent.Route) intent.Frontend {
	return intent.Frontend{Kind: intent.ClusterIP, Addr: addr(a), Port: port, ExternalRoute: to, InternalRoute: to}
}

func nodePort(port uint16, outside, inside intent.Route) intent.Frontend {
	return intent.Frontend{Kind: intent.NodePort, Port: port, ExternalRoute: outside, InternalRoute: inside}
}

// everywhere returns an endpoint on another node that both policies use.
func far(a string) intent.Endpoint { return intent.Endpoint{Addr: addrPort(a), ClusterPolicy: true} }

func near(a string) intent.Endpoint {
	return intent.Endpoint{Addr: addrPort(a), ClusterPolicy: true, LocalPolicy: true, OnThisNode: true}
}

// replace has the backend write a state.
func (b *bench) replace(be *Backend, ports ...*intent.ServicePort) {
	b.t.Helper()
	if err := be.Replace(context.Background(), intent.State{Ports: ports, Node: testNode()}); err != nil {
		b.t.Fatal(err)
	}
}

func sortStrings(s []string) { slices.Sort(s) }
