package nftables

import (
	"context"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// enter puts the test's thread into a fresh network namespace.
func enter(t testing.TB) {
	t.Helper()
	netnstest.Enter(t)
}

// open opens the backend.
func open(t testing.TB) *Backend {
	t.Helper()
	b, err := New(t.Context(), Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	return b
}

// run runs a command in the namespace of the calling thread.
func run(t testing.TB, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(context.Background(), name, args...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// runNft runs one command of nft's.
func runNft(command string) (string, error) {
	out, err := exec.CommandContext(context.Background(), "nft", command).CombinedOutput()
	return string(out), err
}

func addrs(list ...string) (out []netip.Addr) {
	for _, a := range list {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

func prefixes(list ...string) (out []netip.Prefix) {
	for _, p := range list {
		out = append(out, netip.MustParsePrefix(p))
	}
	return out
}

// node is the node of most tests.
func node() intent.Node {
	return intent.Node{
		Name: "node0", Addrs: addrs("172.30.0.10", "fd30::a"), NodePortAddrs: addrs("172.30.0.10", "fd30::a"),
		PodCIDRs: prefixes("10.244.0.0/24", "fd44::/64"),
		Local:    intent.LocalTraffic{Sources: prefixes("10.244.0.0/24", "fd44::/64")},
	}
}

// port is a TCP port 80 called http of Service default/NAME.
func port(name string, f model.Family, change ...func(*intent.ServicePort)) *intent.ServicePort {
	p := &intent.ServicePort{ID: intent.PortID{
		Service: model.Name{Namespace: "default", Name: name}, Port: "http", Number: 80, Protocol: model.TCP, Family: f,
	}}
	for _, c := range change {
		c(p)
	}
	return p
}

func clusterIP(addr string, r intent.Route) func(*intent.ServicePort) {
	return func(p *intent.ServicePort) {
		p.Frontends = append(p.Frontends, intent.Frontend{Addr: netip.MustParseAddr(addr), Port: 80, ExternalRoute: r, InternalRoute: r})
	}
}

func nodePort(port uint16, outside, inside intent.Route) func(*intent.ServicePort) {
	return func(p *intent.ServicePort) {
		p.Frontends = append(p.Frontends, intent.Frontend{Kind: intent.NodePort, Port: port, ExternalRoute: outside, InternalRoute: inside})
	}
}

func endpoints(list ...string) func(*intent.ServicePort) {
	return func(p *intent.ServicePort) {
		for _, a := range list {
			p.Endpoints = append(p.Endpoints, intent.Endpoint{Addr: netip.MustParseAddrPort(a), ClusterPolicy: true})
		}
	}
}

func here(list ...string) func(*intent.ServicePort) {
	return func(p *intent.ServicePort) {
		for _, a := range list {
			p.Endpoints = append(p.Endpoints, intent.Endpoint{Addr: netip.MustParseAddrPort(a), ClusterPolicy: true,
				LocalPolicy: true, OnThisNode: true})
		}
	}
}
