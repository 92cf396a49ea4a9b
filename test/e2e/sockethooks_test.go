package e2e

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/topology"
)

// connection is what a host's kernel has as the other end of a new connection to a Service.
type connection string

const (
	toService  connection = "the Service"  // a tc program translates its packets
	toEndpoint connection = "the endpoint" // the socket hook has translated it
	refused    connection = "nothing"
)

// connectWithin is how many seconds a SYN may remain without an answer.
const connectWithin = "5"

// connect connects from a host to a Service, and reads the kernel's table of sockets.
func (e *env) connect(t *testing.T, from *topology.Host, s *suite.File, combo flows.Combo) connection {
	t.Helper()
	dst := netip.MustParseAddrPort(s.MustAddress(t, flows.ClusterIP, combo))
	table := combo.Protocol()
	if combo.IPv6() {
		table += "6"
	}
	script := fmt.Sprintf("exec 3<>/dev/%s/%s/%d && cat /proc/self/net/%s", combo.Protocol(), dst.Addr(), dst.Port(), table)
	out, err := from.Command(t.Context(), "timeout", connectWithin, "bash", "-c", script).Output()
	switch text := string(out); {
	case err != nil:
		return refused
	case strings.Contains(text, " "+procAddr(dst)+" 01 "):
		return toService
	case strings.Contains(text, " "+procAddr(netip.AddrPortFrom(e.Addr("b0", combo.IPv6()), 8080))+" 01 "):
		return toEndpoint
	default:
		return connection(text)
	}
}

// procAddr writes an address and port as /proc/net/tcp does: each word in the machine's order.
func procAddr(a netip.AddrPort) string {
	b := a.Addr().AsSlice()
	for i := 0; i < len(b); i += 4 {
		binary.NativeEndian.PutUint32(b[i:], binary.BigEndian.Uint32(b[i:]))
	}
	return fmt.Sprintf("%s:%04X", strings.ToUpper(hex.EncodeToString(b)), a.Port())
}

// wantConnections connects by TCP and UDP.
func (e *env) wantConnections(t *testing.T, when string, from *topology.Host, s *suite.File, want connection) {
	t.Helper()
	for _, combo := range []flows.Combo{flows.TCP4, flows.TCP6, flows.UDP4, flows.UDP6} {
		if got := e.connect(t, from, s, combo); got != want {
			t.Errorf("%s: %s from %s is to %s, want %s", when, combo, from.Name, got, want)
		}
	}
}

// TestSocketHooks excludes a pod from the socket hooks by its annotation, and then all pods,
// or the node too, by --socket-hooks. Pods have the Service in any case. Without hooks, the
// node's own processes have none.
func TestSocketHooks(t *testing.T) {
	const uid = "6f1d3c1e-0c0b-4c4e-9a55-2f6f1a1b0001"
	t.Parallel()
	e := &env{Harness: harness.Start(t, cluster.Config{Spec: topology.DefaultSpec("e2e-hooks"), NoAgents: true})}
	must.Do(t, e.Agent("a").Start(t.Context()))
	must.Do(t, e.Agent("a").WaitReady(t.Context()))
	s := e.NewFile()
	s.MustWrite(t, nodePort("b0"))
	must.Do(t, s.WaitOn(t.Context(), "a"))
	neighbor, node := e.MustHost(t, "a0"), e.MustHost(t, "a")
	pod := *e.MustHost(t, "a1")
	pod.Cgroup = filepath.Join(pod.Cgroup, "kubepods-pod"+strings.ReplaceAll(uid, "-", "_")+".slice", "container")
	must.Do(t, os.MkdirAll(pod.Cgroup, 0o755))
	e.wantConnections(t, "without annotation", &pod, s, toEndpoint)
	e.startSidecar(t, &pod)
	e.wantMeshFinding(t, "without annotation", &pod, true)

	annotate := func(value string) {
		t.Helper()
		must.Do(t, e.Agent("a").Write("pod.yaml", fmt.Appendf(nil, `apiVersion: v1
kind: Pod
metadata: {name: a1, namespace: default, uid: %s, annotations: {spillway.dev/socket-hooks: "%s"}}
spec: {nodeName: %s}
status: {podIP: %s}
`, uid, value, e.NodeName("a1"), e.Addr("a1", false))))
	}
	annotate("off")
	await.True(t, "the pod is excluded", func() bool { return e.connect(t, &pod, s, flows.TCP4) == toService })
	e.wantConnections(t, "excluded", &pod, s, toService)
	e.wantMeshFinding(t, "excluded", &pod, false)
	e.wantConnections(t, "beside an excluded pod", neighbor, s, toEndpoint)
	annotate("on")
	await.True(t, "the pod is served again", func() bool { return e.connect(t, &pod, s, flows.TCP4) == toEndpoint })

	for _, step := range []struct {
		flag  string
		node  connection
		links int
	}{{"off", refused, 0}, {"host", toEndpoint, 10}} {
		e.Flags = map[string][]string{"": {"--socket-hooks", step.flag}}
		e.restart(t, "a", syscall.SIGTERM)
		must.Do(t, e.Agent("a").WaitReady(t.Context()))
		e.wantConnections(t, step.flag, neighbor, s, toService)
		e.wantMeshFinding(t, step.flag, &pod, false)
		if got := e.connect(t, node, s, flows.TCP4); got != step.node {
			t.Errorf("%s: a process of the node is connected to %s, want %s", step.flag, got, step.node)
		}
		for _, combo := range flows.UDP {
			for _, got := range ask(t, e.MustProbe(t, "a1"), s.MustAddress(t, flows.ClusterIP, combo), combo, 2) {
				if got.Server != "b0" {
					t.Errorf("%s: %s: answer %+v, want server b0", step.flag, combo, got)
				}
			}
		}
		if links, _ := filepath.Glob(filepath.Join(e.Agent("a").BPFFS, "cgroup", "*")); len(links) != step.links {
			t.Errorf("%s: links %v, want %d", step.flag, links, step.links)
		}
	}
}

// startSidecar adds rules to a pod as a mesh has them, which redirect a port that no test uses.
// It moves the pod's processes into its cgroup, as all processes of a real pod are in one.
func (e *env) startSidecar(t *testing.T, pod *topology.Host) {
	t.Helper()
	pids, err := e.MustHost(t, "a1").Processes()
	must.Do(t, err)
	for _, pid := range pids {
		must.Do(t, os.WriteFile(filepath.Join(pod.Cgroup, "cgroup.procs"), []byte(fmt.Sprint(pid)), 0))
	}
	for _, rule := range []string{"-N MESH_OUTPUT", "-A OUTPUT -p tcp -j MESH_OUTPUT",
		"-A MESH_OUTPUT -p tcp --dport 9 -j REDIRECT --to-ports 15001"} {
		out, err := pod.Command(t.Context(), append([]string{"iptables", "-w", "-t", "nat"}, strings.Fields(rule)...)...).CombinedOutput()
		if err != nil {
			t.Fatalf("iptables %s: %v: %s", rule, err, out)
		}
	}
}

// wantMeshFinding runs doctor for a pod.
func (e *env) wantMeshFinding(t *testing.T, when string, pod *topology.Host, want bool) {
	t.Helper()
	text := oneLine(e.run(t, "doctor", "--netns", pod.Namespace, "--sample", "0", "--bpffs", e.Agent("a").BPFFS, "--finding",
		"mesh-with-socket-hooks"))
	if found := strings.Contains(text, "hide the Services from a sidecar") &&
		strings.Contains(text, "MESH_OUTPUT 1 redirects"); found != want {
		t.Errorf("%s: doctor finds a mesh: %t, want %t:\n%s", when, found, want, text)
	}
}
