package stale

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel"
)

// The environment of these tests: a client, a node that translates with manual nft rules,
// and a pod network with two endpoints.
//
//	client 172.30.0.9 ── 172.30.0.1 node 10.244.0.1 ── 10.244.0.2, .3 pods
//	       fd30::9        fd30::1        fd44::1        fd44::2, ::3
type world struct {
	t       *testing.T
	handles map[string]netns.NsHandle
	table   *conntrack.Conn
}

const (
	epA, epB   = "10.244.0.2:53", "10.244.0.3:53"
	epA6, epB6 = "[fd44::2]:53", "[fd44::3]:53"
)

var links = []string{
	"-n NODE link add client type veth peer name eth0 netns CLIENT",
	"-n NODE link add pods type veth peer name eth0 netns PODS",
	"-n NODE addr add 172.30.0.1/24 dev client", "-n NODE addr add fd30::1/64 dev client nodad",
	"-n NODE addr add 10.244.0.1/24 dev pods", "-n NODE addr add fd44::1/64 dev pods nodad",
	"-n CLIENT addr add 172.30.0.9/24 dev eth0", "-n CLIENT addr add fd30::9/64 dev eth0 nodad",
	"-n PODS addr add 10.244.0.2/24 dev eth0", "-n PODS addr add 10.244.0.3/24 dev eth0",
	"-n PODS addr add fd44::2/64 dev eth0 nodad", "-n PODS addr add fd44::3/64 dev eth0 nodad",
	"-n NODE link set lo up", "-n NODE link set client up", "-n NODE link set pods up",
	"-n CLIENT link set eth0 up", "-n PODS link set eth0 up",
	"-n CLIENT route add default via 172.30.0.1", "-n CLIENT route add default via fd30::1",
	"-n PODS route add default via 10.244.0.1", "-n PODS route add default via fd44::1",
	// Untranslated packets go into the pod network and are lost there.
	"-n NODE route add default via 10.244.0.2", "-n NODE route add default via fd44::2",
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, handles: map[string]netns.NsHandle{}}
	name := func(role string) string { return fmt.Sprintf("spw-stale-%d-%s", os.Getpid(), strings.ToLower(role)) }
	names := strings.NewReplacer("CLIENT", name("CLIENT"), "NODE", name("NODE"), "PODS", name("PODS"))
	for _, role := range []string{"CLIENT", "NODE", "PODS"} {
		w.run("", "ip", "netns", "add", name(role))
		t.Cleanup(func() { exec.Command("ip", "netns", "del", name(role)).Run() })
		h, err := kernel.OpenNetns(name(role))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { h.Close() })
		w.handles[role] = h
		// No waiting until link-local addresses are known to be unique.
		w.in(role, func() error { return kernel.WriteSysctl("net.ipv6.conf.default.accept_dad", "0") })
	}
	for _, l := range links {
		w.run("", "ip", strings.Fields(names.Replace(l))...)
	}
	w.in("NODE", func() error {
		if err := kernel.WriteSysctl("net.ipv6.conf.all.forwarding", "1"); err != nil {
			return err
		}
		if err := kernel.WriteSysctl("net.ipv4.ip_forward", "1"); err != nil {
			return err
		}
		var err error
		w.table, err = conntrack.Open()
		return err
	})
	t.Cleanup(w.table.Close)
	// As on any node, something needs conntrack all the time.
	w.nft("table inet tracks {\n\tchain c {\n\t\ttype filter hook forward priority 0\n\t\tct state invalid drop\n\t}\n}\n")
	w.translate()
	for _, ep := range []string{epA, epB, epA6, epB6} {
		w.serve(ep)
	}
	return w
}

// in runs f in a namespace.
func (w *world) in(role string, f func() error) {
	w.t.Helper()
	if err := kernel.Do(w.handles[role], f); err != nil {
		w.t.Fatalf("in %s: %v", role, err)
	}
}

func (w *world) run(stdin, program string, args ...string) {
	w.t.Helper()
	cmd := exec.Command(program, args...)
	cmd.Stdin = strings.NewReader(stdin)
	if out, err := cmd.CombinedOutput(); err != nil {
		w.t.Fatalf("%s %s: %v: %s", program, strings.Join(args, " "), err, out)
	}
}

// serve answers every datagram to an endpoint with the endpoint's name.
func (w *world) serve(endpoint string) {
	w.in("PODS", func() error {
		s, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(endpoint)))
		if err != nil {
			return err
		}
		w.t.Cleanup(func() { s.Close() })
		go func() {
			b := make([]byte, 64)
			for {
				n, from, err := s.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				s.WriteToUDPAddrPort(append([]byte(endpoint+" "), b[:n]...), from)
			}
		}()
		return nil
	})
}

// serveLate receives datagrams to an endpoint. Each answer waits until the received
// function is called.
func (w *world) serveLate(endpoint string) <-chan func() {
	asked := make(chan func())
	w.in("PODS", func() error {
		s, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort(endpoint)))
		if err != nil {
			return err
		}
		w.t.Cleanup(func() { s.Close() })
		go func() {
			b := make([]byte, 64)
			for {
				n, from, err := s.ReadFromUDPAddrPort(b)
				if err != nil {
					return
				}
				asked <- func() { s.WriteToUDPAddrPort(append([]byte(endpoint+" "), b[:n]...), from) }
			}
		}()
		return nil
	})
	return asked
}

// translate replaces the node's translations by the given ones: from a frontend to an
// endpoint, "frontend>endpoint". A frontend of "*:port" is the node itself.
func (w *world) translate(pairs ...string) {
	w.t.Helper()
	var rules strings.Builder
	for _, p := range pairs {
		from, to, _ := strings.Cut(p, ">")
		addr, port, _ := strings.Cut(from, " ")
		family := "ip"
		if strings.HasPrefix(to, "[") {
			family = "ip6"
		}
		match := family + " daddr " + addr
		if addr == "*" {
			match = "fib daddr type local meta nfproto " + map[string]string{"ip": "ipv4", "ip6": "ipv6"}[family]
		}
		fmt.Fprintf(&rules, "\t\t%s udp dport %s dnat %s to %s\n", match, port, family, to)
	}
	w.nft("table inet byhand\ndelete table inet byhand\ntable inet byhand {\n\tchain pre {\n\t\ttype nat hook prerouting priority dstnat\n" +
		rules.String() + "\t}\n}\n")
}

func (w *world) nft(script string) {
	w.t.Helper()
	w.in("NODE", func() error {
		cmd := exec.Command("nft", "-f", "-")
		cmd.Stdin = strings.NewReader(script)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("nft: %w: %s\n%s", err, out, script)
		}
		return nil
	})
}

// flow is a client's socket that keeps its port.
type flow struct {
	w  *world
	s  *net.UDPConn
	to netip.AddrPort
	n  int
}

func (w *world) flow(to string) *flow {
	f := &flow{w: w, to: netip.MustParseAddrPort(to)}
	network := "udp4"
	if f.to.Addr().Is6() {
		network = "udp6"
	}
	w.in("CLIENT", func() (err error) {
		f.s, err = net.ListenUDP(network, nil)
		return err
	})
	w.t.Cleanup(func() { f.s.Close() })
	return f
}

// ask sends a request and returns the endpoint that answered, "" for none.
func (f *flow) ask() string { return f.askFor(3) }

// askFor sends a request up to a number of times.
func (f *flow) askFor(tries int) string {
	f.w.t.Helper()
	f.n++
	question := fmt.Sprint(f.n)
	b := make([]byte, 64)
	for range tries {
		if _, err := f.s.WriteToUDPAddrPort([]byte(question), f.to); err != nil {
			f.w.t.Fatal(err)
		}
		f.s.SetReadDeadline(time.Now().Add(150 * time.Millisecond))
		for {
			n, err := f.s.Read(b)
			if err != nil {
				break
			}
			if name, q, _ := strings.Cut(string(b[:n]), " "); q == question {
				return name
			}
		}
	}
	return ""
}

// wantAnswers sends a request in every flow.
func wantAnswers(t *testing.T, when string, flows map[string]*flow, v4, v6 string) {
	t.Helper()
	for name, f := range flows {
		want := v4
		if f.to.Addr().Is6() {
			want = v6
		}
		tries := 3
		if want != "" {
			tries = 100 // on a busy machine an answer takes longer
		}
		if got := f.askFor(tries); got != want {
			t.Errorf("%s: %s was answered by %q, want %q", when, name, got, want)
		}
	}
}

// entries lists the node's UDP entries to a destination, "" for all.
func (w *world) entries(to string) []string {
	w.t.Helper()
	var out []string
	err := w.table.Dump(context.Background(), conntrack.Filter{Protocol: protocol}, func(e *conntrack.Entry) bool {
		if to == "" || e.Orig.Dst == netip.MustParseAddrPort(to) {
			out = append(out, fmt.Sprintf("%s zone %d", e, e.Zone))
		}
		return true
	})
	if err != nil {
		w.t.Fatal(err)
	}
	slices.Sort(out)
	return out
}

func node() *intent.Node {
	addrs := []netip.Addr{netip.MustParseAddr("172.30.0.1"), netip.MustParseAddr("fd30::1")}
	return &intent.Node{Name: "node", Addrs: addrs, NodePortAddrs: addrs}
}

func portID(f model.Family) intent.PortID {
	return intent.PortID{Service: model.Name{Namespace: "ns", Name: "dns"}, Number: 53, Protocol: model.UDP, Family: f}
}

// port4 and port6 are the two ports of the Service in these tests.
func port4(endpoints ...string) *intent.ServicePort {
	return &intent.ServicePort{ID: portID(model.IPv4), Endpoints: endpointsOf(endpoints), Frontends: []intent.Frontend{
		{Kind: intent.ClusterIP, Addr: netip.MustParseAddr("10.96.0.10"), Port: 53},
		{Kind: intent.NodePort, Port: 30053},
		{Kind: intent.ExternalIP, Addr: netip.MustParseAddr("203.0.113.10"), Port: 53},
		{Kind: intent.LoadBalancerIP, Addr: netip.MustParseAddr("198.51.100.10"), Port: 53},
	}}
}

func port6(endpoints ...string) *intent.ServicePort {
	return &intent.ServicePort{ID: portID(model.IPv6), Endpoints: endpointsOf(endpoints), Frontends: []intent.Frontend{
		{Kind: intent.ClusterIP, Addr: netip.MustParseAddr("fd96::10"), Port: 53},
		{Kind: intent.NodePort, Port: 30053},
	}}
}

func endpointsOf(list []string) (out []intent.Endpoint) {
	for _, e := range list {
		out = append(out, intent.Endpoint{Addr: netip.MustParseAddrPort(e), ClusterPolicy: true})
	}
	return out
}

// everyFrontend returns the manual rules for the Service.
func everyFrontend(v4, v6 string) []string {
	return []string{"10.96.0.10 53>" + v4, "* 30053>" + v4, "203.0.113.10 53>" + v4, "198.51.100.10 53>" + v4,
		"fd96::10 53>" + v6, "* 30053>" + v6}
}

func (w *world) flowToEveryFrontend() map[string]*flow {
	return map[string]*flow{
		"ClusterIP":      w.flow("10.96.0.10:53"),
		"NodePort":       w.flow("172.30.0.1:30053"),
		"ExternalIP":     w.flow("203.0.113.10:53"),
		"LoadBalancerIP": w.flow("198.51.100.10:53"),
		"IPv6 ClusterIP": w.flow("[fd96::10]:53"),
		"IPv6 NodePort":  w.flow("[fd30::1]:30053"),
	}
}

func (w *world) reconciler() *Reconciler {
	r, err := New(Config{Table: w.table})
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

func apply(t *testing.T, r *Reconciler, c intent.Changes) {
	t.Helper()
	if err := r.Apply(t.Context(), c); err != nil {
		t.Fatal(err)
	}
}

func upserts(ports ...*intent.ServicePort) intent.Changes {
	return intent.Changes{Upserts: ports, Node: node()}
}
