package hostile

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

// longer is by how much floods and waits are longer without -short.
func longer() int {
	if testing.Short() {
		return 1
	}
	return 4
}

// TestMain runs 64 scenarios at once: most of them wait.
func TestMain(m *testing.M) { harness.Main(m, 64) }

// The hosts by their part.
const (
	honest   = "client0"
	outsider = "client1" // on the LAN, forges any source
	receiver = "a"       // the node that all packets are sent to
)

// env is a cluster with running agents and the Services that scenarios use.
type env struct {
	*harness.Harness
	file *suite.File
}

// snatPorts is how many source ports a node has for one endpoint; flowEntries is
// the size of its flow table.
const (
	snatPorts   = 1024
	flowEntries = 4096
)

// nodeSysctls leave a node the ports 33792 to 34815 for SNAT, and limit ICMP
// errors as a machine's kernel does by default.
var nodeSysctls = map[string]string{
	"ipv4/ip_local_port_range":     "34816 65000",
	"ipv4/ip_local_reserved_ports": "1024-29999,32768-33791,65001-65535",
	"ipv4/icmp_ratelimit":          "1000",
	"ipv6/icmp/ratelimit":          "1000",
	"ipv4/icmp_msgs_per_sec":       "1000",
	"ipv4/icmp_msgs_burst":         "50",
}

func start(t *testing.T, name string, flags ...string) *env {
	t.Helper()
	return startIn(t, topology.Routed, name, flags...)
}

// startIn is start with a network of pods.
func startIn(t *testing.T, network, name string, flags ...string) *env {
	t.Helper()
	return startOf(t, topology.Spec{Name: name, PodNetwork: network}, flags...)
}

// startOf is start with a network of pods, and with a CNI that masquerades.
func startOf(t *testing.T, cni topology.Spec, flags ...string) *env {
	t.Helper()
	spec := topology.DefaultSpec(cni.Name)
	spec.Clients, spec.PodsPerNode, spec.Conntrack, spec.PodNetwork, spec.Masquerade = 3, 6, true, cni.PodNetwork, cni.Masquerade
	h := harness.Start(t, cluster.Config{
		Spec: spec, NoAgents: true,
		Flags: map[string][]string{"": append(flags, "--conntrack-max-per-core=1", fmt.Sprintf("--conntrack-min=%d", flowEntries))},
	})
	e := &env{Harness: h}
	for _, node := range h.Nodes() {
		e.Do(t, node, setSysctls)
	}
	if err := h.StartAgents(t.Context()); err != nil {
		t.Fatal(err)
	}
	e.file = e.Load(t, services()...)
	e.startLateServers(t)
	e.addDistantAddresses(t)
	return e
}

func setSysctls() error {
	for file, value := range nodeSysctls {
		err := os.WriteFile("/proc/sys/net/"+file, []byte(value), 0)
		if errors.Is(err, os.ErrNotExist) && strings.Contains(file, "icmp_msgs") {
			continue // before 6.11 these are the machine's
		}
		if err != nil {
			return fmt.Errorf("prepare node: %w", err)
		}
	}
	return nil
}

// The Services. Those named late lead to latePort, where a test answers by hand.
const (
	latePort   = 9000
	endpointUp = 8080
)

func services() []flows.Object {
	service := func(name string, target int32, endpoints ...string) flows.Object {
		return flows.Service{
			Name: name, Type: corev1.ServiceTypeNodePort, Endpoints: flows.On(endpoints...),
			Ports: []flows.Port{
				{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 80, Target: target},
				{Name: "udp", Protocol: corev1.ProtocolUDP, Port: 80, Target: target},
			},
		}
	}
	return []flows.Object{
		service("here", endpointUp, "a0"), service("elsewhere", endpointUp, "b0"),
		service("late-here", latePort, "a0"), service("late-elsewhere", latePort, "b0"),
		service("none", endpointUp), service("two", endpointUp, "a0", "a2"),
		service("beside", endpointUp, "a2"),
	}
}

// variant is a family and a place of the endpoint.
type variant struct {
	v6    bool
	place string // also the name of the Service
}

func (v variant) String() string {
	if v.v6 {
		return "IPv6 " + v.place
	}
	return "IPv4 " + v.place
}

var variants = []variant{{false, "here"}, {true, "here"}, {false, "elsewhere"}, {true, "elsewhere"}}

// endpoint is the host that serves a variant.
func (v variant) endpoint() string {
	if v.place == "here" {
		return "a0"
	}
	return "b0"
}

func (v variant) combo(proto string) flows.Combo {
	if v.v6 {
		return flows.Combo(proto + "6")
	}
	return flows.Combo(proto + "4")
}

// scenario is one attack.
type scenario struct {
	name string
	// unless tells of what dataplane and variant the scenario says nothing; nil is
	// none.
	unless func(mode string, v variant) bool
	// places restricts the scenario to these; nil is both.
	places []string
	// together has the scenario run at once with others of its kind, in one flow
	// table.
	together bool
	// long scenarios do not run with -short.
	long bool
	run  func(t *testing.T, e *env, v variant)
}

// scenarios are all attacks, by file.
func scenarios() []scenario {
	return slices.Concat(controlScenarios, sequenceScenarios, takeoverScenarios, floodScenarios, linkScenarios, icmpScenarios, policyScenarios)
}

func TestHostile(t *testing.T) {
	t.Parallel() // the three longest wait more than they work
	e := start(t, "hostile")
	e.forgetFlows(t)
	t.Run("Together", func(t *testing.T) {
		for _, s := range scenarios() {
			if s.together {
				e.play(t, s)
			}
		}
	})
	for _, s := range scenarios() {
		if !s.together {
			e.play(t, s)
		}
	}
	e.playCases(t, "Objects", policyCases())
	e.fuzz(t)
	e.spread(t)
}

// play runs a scenario for its variants, each from an empty flow table unless
// they run at once.
func (e *env) play(t *testing.T, s scenario) {
	if s.long && testing.Short() {
		return
	}
	t.Run(s.name, func(t *testing.T) {
		for _, v := range variants {
			if s.places != nil && !slices.Contains(s.places, v.place) || s.unless != nil && s.unless(e.Mode, v) {
				continue // not a skip: there is nothing to ask
			}
			t.Run(v.String(), func(t *testing.T) {
				if s.together {
					t.Parallel()
				} else {
					e.forgetFlows(t)
				}
				s.run(t, e, v)
			})
		}
		if s.together {
			t.Parallel()
		}
	})
}

// forgetFlows empties the flow tables and conntrack of the nodes, and ends the
// half-open connections of the endpoints, so that one scenario does not fail
// for what an earlier one left.
func (e *env) forgetFlows(t *testing.T) {
	t.Helper()
	for _, pod := range []string{"a0", "b0"} {
		e.Output(t, pod, "ss", "-K", "-t", "state", "syn-recv")
	}
	e.forgetMap(t, "flows")
	for _, node := range e.Nodes() {
		e.Do(t, node, func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) })
	}
}

// forgetMap empties a map of the nodes.
func (e *env) forgetMap(t *testing.T, name string) {
	t.Helper()
	for _, node := range e.Nodes() {
		pins, err := filepath.Glob(filepath.Join(e.Agent(node).BPFFS, "maps-v*", name))
		if err != nil {
			t.Fatal(err)
		}
		for _, pin := range pins {
			if err := emptyMap(pin); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func emptyMap(pin string) error {
	m, err := ebpf.LoadPinnedMap(pin, nil)
	if err != nil {
		return fmt.Errorf("open map: %w", err)
	}
	defer m.Close()
	var keys [][]byte
	var key, value []byte
	for it := m.Iterate(); it.Next(&key, &value); {
		keys = append(keys, slices.Clone(key))
	}
	for _, k := range keys {
		if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("empty map: %w", err)
		}
	}
	return nil
}

// nodePort is the NodePort of a Service at the receiving node.
func (e *env) nodePort(t testing.TB, service, proto string, v variant) netip.AddrPort {
	t.Helper()
	return e.target(t, flows.NodePort(receiver).Of(service), proto, v)
}

func (e *env) target(t testing.TB, to flows.Target, proto string, v variant) netip.AddrPort {
	t.Helper()
	return netip.MustParseAddrPort(e.file.MustAddress(t, to, v.combo(proto)))
}

// addr is a host's address of the variant's family.
func (e *env) addr(host string, v variant) netip.Addr { return e.Addr(host, v.v6) }

// backend is what the variant's endpoint listens on.
func (e *env) backend(v variant, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(e.addr(v.endpoint(), v), port)
}

// setTimeout bounds a socket's calls.
func setTimeout(fd, option int, tv unix.Timeval) error {
	return unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, option, &tv)
}
