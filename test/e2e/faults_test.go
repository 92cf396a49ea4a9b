package e2e

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/topology"
)

// fault is something wrong on the way of node a to an endpoint.
type fault struct {
	name   string
	plant  func(t *testing.T) (s *suite.File, dst string)
	remove func(t *testing.T)             // nil: the cleanup of the test does it
	again  func(t *testing.T, dst string) // plants it once more, since the agent may repair it; nil: it may not
	client string                         // sends packets
	combo  flows.Combo
	tries  int // connections between two runs of doctor; 0: 1
	// says holds, by command, words that the command prints while the fault lasts. A command
	// that is missing here cannot know of the fault: docs/how-to/find-a-fault.md.
	says map[string]string
	// probed says that trace runs for a pod of node a and the cluster IP: trace cannot send
	// packets of a client outside.
	probed bool
}

// TestCommandsShowFaults: every fault shows in the commands that the how-to names for it. The
// commands ask the agent for its present state, so what they print is at most as old as the
// packets of the test.
func TestCommandsShowFaults(t *testing.T) {
	t.Parallel()
	spec := topology.DefaultSpec("e2e-faults")
	spec.Conntrack, spec.Clients = true, 2
	e := &env{Harness: harness.Start(t, cluster.Config{Spec: spec,
		Flags: map[string][]string{"": {"--flow-events", "all", "--service-metrics", "all"}}})}
	if e.Mode != "ebpf" {
		t.Skip("the commands show the programs of eBPF")
	}
	for _, f := range e.faults() {
		t.Run(f.name, func(t *testing.T) { e.showsFault(t, f) })
	}
}

func (e *env) showsFault(t *testing.T, f fault) {
	s, dst := f.plant(t)
	if f.remove != nil {
		defer f.remove(t)
	}
	from, asked := e.Addr(f.client, false).String(), dst
	said := map[string]string{}
	if f.says["drops"] != "" {
		said["drops"] = e.dropsWhileAsking(t, f, dst)
	} else {
		ask(t, e.MustProbe(t, f.client), dst, f.combo, 1)
	}
	name := e.nameOfService(s)
	protocol := f.combo.Protocol()
	for command, argv := range map[string][]string{
		"status":   {"status", "-o", "wide"},
		"services": {"services", name},
		"flows":    {"flows", "--service", name},
		"events":   {"flows", "--service", name, "--since", "10m"},
	} {
		said[command] = e.spillway(t, "a", argv...)
	}
	if f.probed {
		from, dst = e.Addr("a1", false).String(), s.MustAddress(t, flows.ClusterIP, f.combo)
		e.MustProbe(t, "a1") // a process in the pod's cgroup
	}
	if f.again != nil {
		f.again(t, asked)
	}
	said["trace"] = e.run(t, "trace", "--bpffs", e.Agent("a").BPFFS, "--from", from, "--to", dst, "--protocol", protocol)
	said["doctor"] = e.doctorWhileAsking(t, f, asked)
	for command, text := range said {
		t.Logf("%s:\n%s", command, text)
	}
	for command, want := range f.says { // after the texts: the end of a long log is read first
		if !strings.Contains(oneLine(said[command]), want) {
			t.Errorf("%s does not say %q", command, want)
		}
	}
}

// oneLine joins wrapped lines.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }

// run runs a command, whatever its exit code. doctor runs on node a; the others read what the
// kernel and the agent have, from anywhere.
func (e *env) run(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	run := exec.CommandContext(ctx, e.Binary, args...).CombinedOutput
	if args[0] == "doctor" {
		run = e.MustHost(t, "a").Command(ctx, append([]string{e.Binary}, args...)...).CombinedOutput
	}
	out, err := run()
	if ctx.Err() != nil {
		t.Fatalf("spillway %q: %v: %s", args, err, out)
	}
	return string(out)
}

// doctorWhileAsking asks until doctor says what it should, and returns what it printed last.
func (e *env) doctorWhileAsking(t *testing.T, f fault, dst string) string {
	t.Helper()
	for began := time.Now(); ; {
		if f.again != nil {
			f.again(t, dst)
		}
		text := e.run(t, "doctor", "--netns", "here", "--sample", "0", "--api-socket", e.Agent("a").Socket())
		if took := time.Since(began); strings.Contains(oneLine(text), f.says["doctor"]) || took > time.Minute {
			t.Logf("doctor: %q after %v", f.says["doctor"], took.Round(time.Millisecond))
			return text
		}
		askFor(t, e.MustProbe(t, f.client), dst, f.combo, max(f.tries, 1), silenceMS)
	}
}

// dropsWhileAsking asks until `spillway drops` has shown what it should, or nothing of it for
// a minute, and returns what it printed. Drops of other tests may come first: their machines
// have the same addresses.
func (e *env) dropsWhileAsking(t *testing.T, f fault, dst string) string {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	cmd := exec.CommandContext(ctx, e.Binary, "drops", "--bpffs", e.Agent("a").BPFFS,
		"--address", e.Addr(f.client, false).String(), "--protocol", f.combo.Protocol())
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	must.Do(t, err)
	must.Do(t, cmd.Start())
	shown := make(chan string, 1)
	go func() {
		var text strings.Builder
		for lines := bufio.NewScanner(out); lines.Scan() && !strings.Contains(oneLine(text.String()), f.says["drops"]); {
			text.WriteString(lines.Text() + "\n")
		}
		shown <- text.String()
	}()
	for {
		ask(t, e.MustProbe(t, f.client), dst, f.combo, 1) // the command may not follow the first one yet
		select {
		case text := <-shown:
			stop()
			t.Logf("drops: %v: %s", cmd.Wait(), &stderr) // killed, unless it ended by itself
			return text
		default:
		}
	}
}

// nameOfService is the name of the Service of a file.
func (e *env) nameOfService(s *suite.File) string { return s.Scope.Namespace + "/web" }

func (e *env) faults() []fault {
	return []fault{
		{
			name: "DeadEndpoint", client: "client0", combo: flows.TCP4,
			plant: func(t *testing.T) (*suite.File, string) {
				s := e.Load(t, nodePort("b1"))
				e.Output(t, "b1", "nft", "table inet dead { chain in { type filter hook prerouting priority raw; drop; }; }")
				t.Cleanup(func() { e.Output(t, "b1", "nft", "delete table inet dead") })
				return s, s.MustAddress(t, flows.NodePort("a"), flows.TCP4)
			},
			says: map[string]string{"flows": "b1:8080 new", "events": "opened", "trace": e.Addr("b1", false).String() + ":8080, and dropped in",
				"doctor": "/b1 (" + e.Addr("b1", false).String() + ":8080) does not answer"}, probed: true,
		},
		{
			name: "Refuses", client: "client0", combo: flows.TCP4, tries: 3, // the flow table keeps them for 10 s
			plant: func(t *testing.T) (*suite.File, string) {
				const silentPort = 8099 // no process listens on it
				s := e.Load(t, flows.Service{Type: corev1.ServiceTypeNodePort, Endpoints: flows.On("b1"),
					Ports: []flows.Port{{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: 80, Target: silentPort}}})
				return s, s.MustAddress(t, flows.NodePort("a"), flows.TCP4)
			},
			says: map[string]string{"events": "RST", "trace": "refused", "doctor": "refuses them"}, probed: true, // two cases name its pod
		},
		{
			name: "SourceRange", client: "client0", combo: flows.TCP4,
			plant: func(t *testing.T) (*suite.File, string) {
				s := e.Load(t, flows.Service{Type: corev1.ServiceTypeLoadBalancer, Via: []string{"a"}, AllowFrom: []string{"client1"},
					Endpoints: flows.On("b0")})
				return s, s.MustAddress(t, flows.LoadBalancer("a"), flows.TCP4)
			},
			says: map[string]string{"services": "REFUSED", "events": "drop_source_range", "drops": "drop_source_range", "trace": "source range",
				"doctor": "/web:tcp refuses 1 client by loadBalancerSourceRanges"},
		},
		{
			name: "PolicyLocal", client: "client0", combo: flows.TCP4,
			plant: func(t *testing.T) (*suite.File, string) {
				s := e.Load(t, flows.Service{Type: corev1.ServiceTypeNodePort, ExternalLocal: true, Endpoints: flows.On("b0")})
				return s, s.MustAddress(t, flows.NodePort("a"), flows.TCP4)
			},
			says: map[string]string{"services": "reasons: spillway flows", "events": "drop_policy_local", "drops": "drop_policy_local",
				"trace": "policy Local without an endpoint here"},
		},
		{
			name: "PolicyDeny", client: "a1", combo: flows.TCP4,
			plant: func(t *testing.T) (*suite.File, string) {
				e.writeAll(t, "faults-pods.yaml", e.podsYAML(policyPods{"a2": "cache", "a1": "other"}))
				e.writeAll(t, "faults-policy.yaml", strings.ReplaceAll(policyYAML("only-clients", "  deny: others\n", clientPods),
					fmt.Sprint(cachePort), "8080"))
				s := e.Load(t, nodePort("a2"))
				return s, s.MustAddress(t, flows.ClusterIP, flows.TCP4)
			},
			remove: func(t *testing.T) {
				e.writeAll(t, "faults-policy.yaml", "")
				e.writeAll(t, "faults-pods.yaml", "")
			},
			says: map[string]string{"drops": "only-clients", "trace": "only-clients", "doctor": "DoNotTrackPolicy only-clients denies packets"},
		},
		{
			name: "StaleEntry", client: "client0", combo: flows.UDP4,
			plant: func(t *testing.T) (*suite.File, string) {
				s := e.Load(t, nodePort("b0"))
				to := s.MustAddress(t, flows.NodePort("a"), flows.UDP4)
				e.traceBesideEntry(t, to, "40124")
				return s, to
			},
			again: e.plantEntry,
			says:  map[string]string{"trace": "stale", "doctor": "/web:udp does not have it"},
		},
		{
			name: "PortsExhausted", client: "client1", combo: flows.TCP4, // the last: the node keeps seven ports
			plant: func(t *testing.T) (*suite.File, string) {
				s := e.Load(t, nodePort("b0"))
				to := s.MustAddress(t, flows.NodePort("a"), flows.TCP4)
				e.exhaustPorts(t, to)
				s.MustWait(t)
				return s, to
			},
			says: map[string]string{"services": "DROPPED", "events": "drop_snat_ports", "drops": "drop_snat_ports", "trace": "7 of 7 ports",
				"doctor": "this node has no free SNAT port towards " + e.Addr("b0", false).String() + ":8080"},
		},
	}
}

// exhaustPorts leaves node a seven ports for SNAT, and keeps a connection on each.
func (e *env) exhaustPorts(t *testing.T, to string) {
	t.Helper()
	e.Output(t, "a", "sysctl", "-qw", "net.ipv4.ip_local_reserved_ports=1024-29999,61000-65527")
	e.restart(t, "a", syscall.SIGTERM)
	e.waitReady(t)
	for range 7 {
		conn, err := e.MustHost(t, "client0").Dial(t.Context(), "tcp4", to)
		must.Do(t, err)
		t.Cleanup(func() { _ = conn.Close() })
	}
}
