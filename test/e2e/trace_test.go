package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/diagnosis/trace"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/topology"
)

// trace traces a connection from a host's IPv4 address through node a.
func (e *env) trace(t *testing.T, from, to string, more ...string) *trace.Report {
	t.Helper()
	return e.traceWith(t, append([]string{"--from", e.Addr(from, false).String(), "--to", to}, more...)...)
}

// traceWith runs `spillway trace` for node a, and returns its report. With another dataplane
// than eBPF, the command must run on the node.
func (e *env) traceWith(t *testing.T, args ...string) *trace.Report {
	t.Helper()
	argv := append([]string{e.Binary, "trace", "--bpffs", e.Agent("a").BPFFS, "-o", "json"}, args...)
	var out []byte
	var err error
	if e.Mode == "ebpf" {
		out, err = exec.CommandContext(t.Context(), argv[0], argv[1:]...).Output()
	} else {
		out, err = e.MustHost(t, "a").Command(t.Context(), argv...).Output()
	}
	if err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(argv, " "), err, out)
	}
	r := trace.Report{Probe: &trace.Probe{}}
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return &r
}

// step returns the step of a name; the zero Step if there is none.
func step(r *trace.Report, name string) trace.Step {
	i := slices.IndexFunc(r.Steps, func(s trace.Step) bool { return s.Name == name })
	if i < 0 {
		return trace.Step{}
	}
	return r.Steps[i]
}

// TestTraceShowsPlantedFaults plants a fault, and wants the report to name its step or
// where the probe ended. The healthy cases come first.
func TestTraceShowsPlantedFaults(t *testing.T) {
	spec := topology.DefaultSpec("e2e-trace")
	spec.Conntrack, spec.Clients = true, 2
	e := startSpec(t, spec)
	if e.Mode != "ebpf" {
		e.traceByNetfilter(t)
		return
	}
	t.Run("Healthy", e.traceHealthy)
	t.Run("Names", e.traceNames)
	t.Run("DeadEndpoint", e.traceDeadEndpoint)
	t.Run("NothingListens", e.traceNothingListens)
	t.Run("SourceRange", e.traceSourceRange)
	t.Run("LocalPolicy", e.traceLocalPolicy)
	t.Run("NoEndpoint", e.traceNoEndpoint)
	t.Run("RuleInPod", e.traceRuleInPod)
	t.Run("PolicyDenies", e.tracePolicyDenies)
	t.Run("StaleEntry", e.traceStaleEntry)
	if kernel.HaveTCX() { // older kernels have no order of programs
		t.Run("ProgramInFront", e.traceProgramInFront)
	}
	t.Run("PortsExhausted", e.tracePortsExhausted)
}

func (e *env) traceHealthy(t *testing.T) {
	s := e.Load(t, nodePort("a0", "b0"))
	for _, from := range []string{"a1", "a"} {
		e.MustProbe(t, from) // a process in the pod's cgroup
		r := e.trace(t, from, s.MustAddress(t, flows.ClusterIP, flows.TCP4))
		if r.Refused || r.Endpoint == "" || len(r.Sets) != 2 || r.Sets[0].Share != 0.5 || r.Probe.Result != "connected" || len(r.Notes) > 0 ||
			!slices.Contains(r.Verdicts, "socket_translated") {
			t.Errorf("from %s: %+v, probe %+v", from, r, r.Probe)
		}
		if u := e.trace(t, from, s.MustAddress(t, flows.ClusterIP, flows.UDP4), "--protocol", "udp"); u.Refused || u.Probe.Result != "answered" {
			t.Errorf("from %s by UDP: %+v, probe %+v", from, u, u.Probe)
		}
	}
	r := e.trace(t, "client0", s.MustAddress(t, flows.NodePort("a"), flows.TCP4))
	if r.Refused || !slices.Contains(r.Verdicts, "flow_created") || r.Probe.Skipped == "" || step(r, "program").State != trace.Passed {
		t.Errorf("from client0: %+v", r)
	}
}

// traceByNetfilter is for the other dataplanes, whose rules are shown.
func (e *env) traceByNetfilter(t *testing.T) {
	s := e.Load(t, nodePort("b0"))
	for _, from := range []string{"a1", "a"} {
		r := e.trace(t, from, s.MustAddress(t, flows.ClusterIP, flows.TCP4))
		if r.Dataplane != e.Mode || r.Refused || r.Probe.Result != "connected" {
			t.Errorf("from %s: %+v, probe %+v", from, r, r.Probe)
		}
		if e.Mode == "nftables" && r.Endpoint != e.Addr("b0", false).String()+":8080" {
			t.Errorf("from %s: endpoint %s", from, r.Endpoint)
		}
	}
	if r := e.trace(t, "client0", s.MustAddress(t, flows.NodePort("a"), flows.TCP4)); r.Dataplane != e.Mode || r.Refused {
		t.Errorf("from client0: %+v", r)
	}
	if e.Mode == "nftables" {
		none := e.Load(t, nodePort())
		if r := e.trace(t, "a1", none.MustAddress(t, flows.ClusterIP, flows.TCP4)); !r.Refused || r.Probe.Result != "refused" {
			t.Errorf("without an endpoint: %+v, probe %+v", r, r.Probe)
		}
	}
}

// traceNames looks up names, and traces by IPv6 and from a container's cgroup namespace.
func (e *env) traceNames(t *testing.T) {
	e.writeAll(t, "trace-pods.yaml", e.podsYAML(policyPods{"a1": "client"}))
	defer e.writeAll(t, "trace-pods.yaml", "")
	s := e.Load(t, nodePort("b0"))
	from, service := []string{"--from", "clients/a1"}, []string{"--to", s.Scope.Namespace + "/web"}
	names := []string{"--manifests", e.Agent("a").Manifests}
	if r := e.traceWith(t, slices.Concat(from, service, names)...); r.Probe.Result != "connected" ||
		!strings.Contains(r.Source, "clients/a1") || r.Endpoint != e.Addr("b0", false).String()+":8080" {
		t.Errorf("by names: %+v, probe %+v", r, r.Probe)
	}
	r := e.traceWith(t, "--from", e.Addr("a1", true).String(), "--to", s.MustAddress(t, flows.ClusterIP, flows.TCP6))
	if r.Refused || r.Probe.Result != "connected" || !slices.Contains(r.Verdicts, "socket_translated") {
		t.Errorf("by IPv6: %+v, probe %+v", r, r.Probe)
	}
	for _, wrong := range [][]string{{"--to", s.Scope.Namespace + "/none"}, {"--to", s.Scope.Namespace + "/web:81"}} {
		argv := slices.Concat([]string{"trace", "--bpffs", e.Agent("a").BPFFS}, from, wrong, names)
		if out, err := exec.CommandContext(t.Context(), e.Binary, argv...).CombinedOutput(); err == nil || strings.Count(string(out), "\n") != 1 {
			t.Errorf("%v: %v, %s", wrong, err, out)
		}
	}
	argv := []string{"-C", e.Binary, "trace", "--bpffs", e.Agent("a").BPFFS, "-o", "json", "--from", e.Addr("a1", false).String(), "--to",
		s.MustAddress(t, flows.ClusterIP, flows.TCP4)}
	out, err := exec.CommandContext(t.Context(), "unshare", argv...).CombinedOutput()
	if err != nil || !strings.Contains(string(out), `"socket_translated"`) || !strings.Contains(string(out), `"connected"`) {
		t.Errorf("in a cgroup namespace: %v, %s", err, out)
	}
}

func (e *env) traceDeadEndpoint(t *testing.T) {
	s := e.Load(t, nodePort("b1"))
	e.Output(t, "b1", "ip", "link", "set", "eth0", "down")
	t.Cleanup(func() {
		e.Output(t, "b1", "sh", "-c", "ip link set eth0 up; ip route replace default via "+e.podGateway("b1"))
	})
	for _, from := range []string{"a1", "a"} {
		r := e.trace(t, from, s.MustAddress(t, flows.ClusterIP, flows.TCP4))
		if r.Refused || r.Probe.Result == "connected" || !strings.Contains(r.Probe.Conclusion, e.Addr("b1", false).String()) {
			t.Errorf("from %s: probe %+v", from, r.Probe)
		}
	}
}

// podGateway is the first address of a pod's CIDR.
func (e *env) podGateway(short string) string {
	return netip.PrefixFrom(e.Addr(short, false), 24).Masked().Addr().Next().String()
}

func (e *env) traceNothingListens(t *testing.T) {
	s := e.Load(t, flows.Service{Ports: []flows.Port{{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 80, Target: 9}},
		Endpoints: flows.On("b0")})
	r := e.trace(t, "a1", s.MustAddress(t, flows.ClusterIP, flows.TCP4))
	if r.Refused || r.Probe.Result != "refused" || !strings.Contains(r.Probe.Conclusion, e.Addr("b0", false).String()) {
		t.Errorf("%+v, probe %+v", r, r.Probe)
	}
}

func (e *env) traceSourceRange(t *testing.T) {
	s := e.Load(t, flows.Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, AllowFrom: []string{"client1"},
		Endpoints: flows.On("b0")})
	to := s.MustAddress(t, flows.LoadBalancer("a"), flows.TCP4)
	if r := e.trace(t, "client0", to); !r.Refused || step(r, "source ranges").State != trace.Refused ||
		!strings.Contains(step(r, "source ranges").Found, e.Addr("client1", false).String()) {
		t.Errorf("%+v", r)
	}
	if r := e.trace(t, "client1", to); r.Refused || step(r, "source ranges").State != trace.Passed {
		t.Errorf("an allowed client: %+v", r)
	}
}

func (e *env) traceLocalPolicy(t *testing.T) {
	s := e.Load(t, flows.Service{Type: corev1.ServiceTypeNodePort, ExternalLocal: true, InternalLocal: true, Endpoints: flows.On("b0")})
	r := e.trace(t, "client0", s.MustAddress(t, flows.NodePort("a"), flows.TCP4))
	if !r.Refused || step(r, "traffic policy").State != trace.Refused || !slices.Contains(r.Verdicts, "drop_policy_local") {
		t.Errorf("%+v", r)
	}
	r = e.trace(t, "a", s.MustAddress(t, flows.ClusterIP, flows.TCP4))
	if !r.Refused || !slices.Contains(r.Verdicts, "socket_timed_out") || r.Probe.Result != "no answer" {
		t.Errorf("%+v, probe %+v", r, r.Probe)
	}
	// The hook leaves a pod's socket to the program at its device.
	r = e.trace(t, "a1", s.MustAddress(t, flows.ClusterIP, flows.TCP4))
	if !r.Refused || !slices.Contains(r.Verdicts, "drop_policy_local") || r.Probe.Result != "no answer" {
		t.Errorf("%+v, probe %+v", r, r.Probe)
	}
}

func (e *env) traceNoEndpoint(t *testing.T) {
	s := e.Load(t, nodePort())
	r := e.trace(t, "client0", s.MustAddress(t, flows.NodePort("a"), flows.TCP4))
	if !r.Refused || step(r, "traffic policy").State != trace.Refused || !slices.Contains(r.Verdicts, "rejected_rst") {
		t.Errorf("%+v", r)
	}
	r = e.trace(t, "a1", s.MustAddress(t, flows.ClusterIP, flows.TCP4))
	if !r.Refused || r.Probe.Result != "refused" {
		t.Errorf("%+v, probe %+v", r, r.Probe)
	}
}

// traceRuleInPod drops in the endpoint's namespace, as a sidecar or a CNI does.
func (e *env) traceRuleInPod(t *testing.T) {
	s := e.Load(t, nodePort("a0"))
	e.Output(t, "a0", "nft", "table inet theirs { chain in { type filter hook input priority 0; tcp dport 8080 drop; }; }")
	t.Cleanup(func() { e.Output(t, "a0", "nft", "delete table inet theirs") })
	r := e.trace(t, "a1", s.MustAddress(t, flows.ClusterIP, flows.TCP4))
	if r.Refused || r.Probe.Result != "no answer" || len(r.Probe.Drops) == 0 || r.Probe.Drops[0].Reason != "NETFILTER_DROP" ||
		r.Probe.Drops[0].Hook != "INPUT" {
		t.Errorf("%+v, probe %+v", r, r.Probe)
	}
}

// tracePolicyDenies has a do-not-track policy deny others, on the node of the endpoint.
func (e *env) tracePolicyDenies(t *testing.T) {
	e.writeAll(t, "trace-pods.yaml", e.podsYAML(policyPods{"a2": "cache", "a1": "other"}))
	e.writeAll(t, "trace-policy.yaml", strings.ReplaceAll(policyYAML("only-clients", "  deny: others\n", clientPods),
		fmt.Sprint(cachePort), "8080"))
	defer func() {
		e.writeAll(t, "trace-policy.yaml", "")
		e.writeAll(t, "trace-pods.yaml", "")
	}()
	s := e.Load(t, nodePort("a2"))
	r := e.trace(t, "a1", s.MustAddress(t, flows.ClusterIP, flows.TCP4))
	if r.Refused || r.Probe.Result != "no answer" || len(r.Probe.Drops) == 0 || !strings.Contains(r.Probe.Conclusion, "only-clients") {
		t.Errorf("%+v, probe %+v", r, r.Probe)
	}
}

// traceStaleEntry leaves an entry of a client's UDP flow to an endpoint that no longer
// exists.
func (e *env) traceStaleEntry(t *testing.T) {
	s := e.Load(t, nodePort("b0"))
	to := s.MustAddress(t, flows.NodePort("a"), flows.UDP4)
	r := e.traceBesideEntry(t, to, "40123")
	if n := step(r, "netfilter"); !slices.Contains(r.Verdicts, "pass_conntrack") || n.State != trace.Decided ||
		!strings.Contains(n.Found, staleEndpoint) {
		t.Errorf("%+v", r)
	}
	r = e.traceBesideEntry(t, to, "40124")
	if n := step(r, "netfilter"); !slices.Contains(r.Verdicts, "flow_created") || n.State != trace.Doubt ||
		!strings.Contains(n.Found, "stale") {
		t.Errorf("another source port: %+v", r)
	}
}

const staleEndpoint = "10.244.0.250:8080"

// traceBesideEntry traces a datagram while conntrack has a stale entry of the port 40123.
// The agent deletes the entry if it still looks for those of the Service's last change: then
// the entry is made again.
func (e *env) traceBesideEntry(t *testing.T, to, sourcePort string) (r *trace.Report) {
	t.Helper()
	for range 10 {
		e.plantEntry(t, to)
		r = e.trace(t, "client0", to, "--protocol", "udp", "--source-port", sourcePort)
		if e.MustHost(t, "a").Command(t.Context(), append([]string{"conntrack", "-G"}, e.staleEntry(t, to)...)...).Run() == nil {
			return r
		}
	}
	t.Fatal("the agent deletes the entry again and again")
	return nil
}

// staleEntry is the entry to staleEndpoint for a client of a NodePort, as conntrack's arguments.
func (e *env) staleEntry(t *testing.T, to string) []string {
	t.Helper()
	_, port, err := net.SplitHostPort(to)
	must.Do(t, err)
	return []string{"-p", "udp", "-s", e.Addr("client0", false).String(), "-d", e.Addr("a", false).String(), "--sport",
		"40123", "--dport", port}
}

// plantEntry makes a stale entry, unless it is there.
func (e *env) plantEntry(t *testing.T, to string) {
	t.Helper()
	_ = e.MustHost(t, "a").Command(t.Context(), append([]string{"conntrack", "-I", "--dst-nat", staleEndpoint, "-t", "120"},
		e.staleEntry(t, to)...)...).Run()
}

func (e *env) traceProgramInFront(t *testing.T) {
	s := e.Load(t, nodePort("b0"))
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "mirror", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 2), asm.Return()}, // TC_ACT_SHOT
	})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	var l link.Link
	e.Do(t, "a", func() error {
		eth0, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		l, err = link.AttachTCX(link.TCXOptions{Interface: eth0.Index, Program: p, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
		return err
	})
	defer l.Close()
	r := e.trace(t, "client0", s.MustAddress(t, flows.NodePort("a"), flows.TCP4))
	if n := step(r, "program"); n.State != trace.Doubt || !strings.Contains(n.Found, "mirror") {
		t.Errorf("%+v", r)
	}
}

// tracePortsExhausted leaves the node seven ports, all of which have a connection.
func (e *env) tracePortsExhausted(t *testing.T) {
	e.Output(t, "a", "sysctl", "-qw", "net.ipv4.ip_local_reserved_ports=1024-29999,61000-65527")
	e.restart(t, "a", syscall.SIGTERM)
	e.waitReady(t)
	s := e.Load(t, nodePort("b0"))
	to := s.MustAddress(t, flows.NodePort("a"), flows.TCP4)
	for range 7 {
		conn, err := e.MustHost(t, "client0").Dial(t.Context(), "tcp4", to)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
	}
	r := e.trace(t, "client1", to)
	if n := step(r, "source port"); !r.Refused || n.State != trace.Refused || !strings.Contains(n.Found, "7 of 7") ||
		!slices.Contains(r.Verdicts, "drop_snat_ports") {
		t.Errorf("%+v", r)
	}
}
