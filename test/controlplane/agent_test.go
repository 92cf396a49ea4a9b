package controlplane

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/testbed/controlplane"
	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// node is one node of a lab cluster whose agent watches an API server that runs
// on a machine of its own, the lab's client.
type node struct {
	t       *testing.T
	lab     *topology.Cluster
	host    *topology.Host
	cp      *controlplane.ControlPlane
	k       *kubernetes.Clientset
	argv    []string
	env     []string // nil: that of the test
	dir     string
	log     string
	said    []byte // log of agents that have ended
	cmd     *topology.Cmd
	service string // address of the Service web
}

// startNode builds a cluster of one node and starts its agent.
func startNode(t *testing.T) *node {
	t.Helper()
	n := newNode(t)
	n.start()
	return n
}

// clusters numbers the clusters of this package.
var clusters atomic.Int32

// newNode builds a cluster of one node with a Service of one pod, web. It makes the test
// parallel: agents and tests mostly wait.
func newNode(t *testing.T) *node {
	t.Helper()
	t.Parallel()
	spec := topology.DefaultSpec(fmt.Sprint("kube-", clusters.Add(1)))
	spec.Nodes, spec.PodsPerNode = 1, 2
	if err := topology.Down(spec.Name); err != nil {
		t.Fatal(err)
	}
	n := &node{t: t, lab: must[*topology.Cluster](t)(topology.Up(t.Context(), spec))}
	t.Cleanup(func() {
		if err := n.lab.Down(); err != nil {
			t.Error(err)
		}
	})
	n.host = n.lab.Node(0)
	dir := must[string](t)(makeDir())
	n.dir = dir
	removeAtEnd(t, dir)
	n.cp = must[*controlplane.ControlPlane](t)(controlplane.Up(t.Context(), controlplane.Config{Dir: dir, Host: n.lab.Client(0)}))
	t.Cleanup(n.cp.Down)
	n.k = client(t, n.cp)

	bpf := filepath.Join(dir, "bpf")
	if err := os.Mkdir(bpf, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("bpf", bpf, "bpf", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(bpf, unix.MNT_DETACH) })
	n.log = filepath.Join(dir, "agent.log")
	n.argv = []string{must[string](t)(binary()), "agent", "--hostname-override", n.host.Name,
		"--kubeconfig", must[string](t)(n.cp.AdminKubeconfig()),
		"--cgroup-root", n.host.CgroupRoot, "--bpffs", filepath.Join(bpf, "spillway")}

	namespace(t, n.k, "default")
	n.serve(n.lab.Pod(0, 0), "web")
	must[*corev1.Node](t)(n.k.CoreV1().Nodes().Create(t.Context(), n.lab.NodeObjects()[0], create))
	t.Cleanup(func() {
		n.signal(syscall.SIGKILL)
		if t.Failed() {
			text, _ := os.ReadFile(n.log)
			t.Logf("the agent says:\n%s", text)
		}
	})
	return n
}

// serve starts a server in a pod and creates a Service for it.
func (n *node) serve(pod *topology.Host, name string) {
	n.t.Helper()
	must[*topology.Cmd](n.t)(workload.Start(context.Background(), pod, workload.Config{Kind: "tcp", Listen: ":8080", Name: name}))
	n.service = createService(n.t, n.k, "default", service(name, nil)).Spec.ClusterIP + ":80"
	s := slice(name, name, pod.IPv4.String())
	s.Annotations = map[string]string{corev1.EndpointsLastChangeTriggerTime: time.Now().Format(time.RFC3339Nano)}
	s.Endpoints[0].NodeName = &n.host.Name
	createSlice(n.t, n.k, "default", s)
}

func (n *node) start() {
	n.t.Helper()
	log := must[*os.File](n.t)(os.OpenFile(n.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600))
	defer log.Close()
	n.cmd = n.host.Command(context.Background(), n.argv...)
	if n.env != nil {
		n.cmd.Env = n.env
	}
	n.cmd.Stdout, n.cmd.Stderr = log, log
	if err := n.cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) signal(s syscall.Signal) {
	if n.cmd != nil {
		_ = n.cmd.Process.Signal(s)
		_ = n.cmd.Wait()
		n.cmd = nil
	}
}

// get sends a request to the agent's health server.
func (n *node) get(path string) (code int, body string) { return n.fetch("10256", path) }

// fetch sends a request to one of the agent's servers.
func (n *node) fetch(port, path string) (code int, body string) {
	c := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DialContext: n.host.Dial, DisableKeepAlives: true}}
	resp, err := c.Get("http://" + net.JoinHostPort("127.0.0.1", port) + path)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text)
}

// asks sends one request to a Service from a pod.
func (n *node) ask(to string) workload.Answer {
	n.t.Helper()
	return must[workload.Answer](n.t)(workload.Ask(n.t.Context(), n.lab.Pod(0, 1), workload.Question{Kind: "tcp", To: to}))
}

func (n *node) until(what string, holds func() bool) {
	n.t.Helper()
	await.True(n.t, what, holds)
}

func (n *node) answered(to, name string) func() bool {
	return func() bool { a := n.ask(to); return a.Outcome == workload.Answered && a.Server == name }
}

// TestAnAgentServesWhatTheAPIServerSays tests a node's life with an API server that
// becomes unavailable and available again.
func TestAnAgentServesWhatTheAPIServerSays(t *testing.T) {
	n := startNode(t)
	web := n.service
	n.until("the Service", n.answered(web, "web"))
	// The agent listens for load balancers' health checks, and on this node alone for
	// metrics; nothing else.
	if got := n.listens(); !slices.Equal(got, []string{"*:10256", "127.0.0.1:10249"}) {
		t.Errorf("the agent listens on %q", got)
	}

	// Without the API server, and after a kill and restart of the agent, the Services
	// keep working.
	n.cp.StopAPIServer()
	n.until("a line about the server", func() bool {
		text, _ := os.ReadFile(n.log)
		return strings.Contains(string(text), "cannot be reached")
	})
	n.signal(syscall.SIGKILL)
	if !n.answered(web, "web")() {
		t.Error("no answer while there is neither agent nor API server")
	}
	n.start()
	n.until("the agent", func() bool { code, _ := n.get("/livez"); return code == http.StatusOK })
	n.until("another line about the server", func() bool { return len(n.lines("cannot be reached")) > 1 })
	if !n.answered(web, "web")() {
		t.Fatal("no answer from a restarted agent without an API server")
	}
	if err := n.cp.StartAPIServer(t.Context()); err != nil {
		t.Fatal(err)
	}
	n.serve(n.lab.Pod(0, 1), "late")
	n.until("a Service made after the server came back", n.answered(n.service, "late"))
	n.until("its way from the cluster's clock to the kernel among the metrics", func() bool {
		_, text := n.fetch("10249", "/metrics")
		// The first Service is older than this agent, and shows nothing of its speed.
		return strings.Contains(text, "\nkubeproxy_network_programming_duration_seconds_count 1\n")
	})
	if code, mode := n.fetch("10249", "/proxyMode"); code != http.StatusOK || mode != "ebpf" {
		t.Errorf("/proxyMode: %d %q", code, mode)
	}
	if !n.answered(web, "web")() {
		t.Error("the first Service does not answer any more")
	}

	n.drain()
}

// listens lists the addresses at which processes in the node's network accept connections
// or datagrams. The agent is the only one there.
func (n *node) listens() (all []string) {
	n.t.Helper()
	out := must[[]byte](n.t)(n.host.Command(n.t.Context(), "ss", "-Hlntu").Output())
	for line := range strings.Lines(string(out)) {
		if fields := strings.Fields(line); len(fields) > 4 {
			all = append(all, fields[4])
		}
	}
	slices.Sort(all)
	return all
}

// drain taints the node for removal and removes the taint again (KEP-3836).
func (n *node) drain() {
	taint := func(taints ...corev1.Taint) {
		n.t.Helper()
		node := must[*corev1.Node](n.t)(n.k.CoreV1().Nodes().Get(n.t.Context(), n.host.Name, metav1.GetOptions{}))
		node.Spec.Taints = taints
		must[*corev1.Node](n.t)(n.k.CoreV1().Nodes().Update(n.t.Context(), node, update))
	}
	healthz := func(code int, eligible string) func() bool {
		return func() bool {
			got, body := n.get("/healthz")
			return got == code && strings.Contains(body, `"nodeEligible": `+eligible)
		}
	}
	n.until("a healthy node", healthz(http.StatusOK, "true"))
	taint(corev1.Taint{Key: "ToBeDeletedByClusterAutoscaler", Effect: corev1.TaintEffectNoSchedule})
	n.until("a node that drains", healthz(http.StatusServiceUnavailable, "false"))
	if code, body := n.get("/livez"); code != http.StatusOK {
		n.t.Errorf("/livez of a node that drains: %d %s", code, body)
	}
	taint()
	n.until("a node that stays", healthz(http.StatusOK, "true"))
	if err := n.k.CoreV1().Nodes().Delete(n.t.Context(), n.host.Name, remove); err != nil {
		n.t.Fatal(err)
	}
	n.until("a node that is gone", healthz(http.StatusServiceUnavailable, "false"))
}
