package controlplane

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/kube"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/proxymode"
	"spillway.dev/spillway/internal/reconcile"
	"spillway.dev/spillway/internal/telemetry"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/testbed/controlplane"
)

// startWith ends the agent and starts it again with additional flags after the usual
// ones; the last of a kind counts. It starts a new log.
func (n *node) startWith(flags ...string) {
	n.t.Helper()
	n.signal(syscall.SIGTERM)
	n.keepLog()
	usual := n.argv
	n.argv = slices.Concat(usual, flags)
	n.start()
	n.argv = usual
}

// keepLog appends the agent's log to its earlier logs.
func (n *node) keepLog() {
	n.t.Helper()
	text, err := os.ReadFile(n.log)
	if err != nil {
		n.t.Fatal(err)
	}
	n.said = append(n.said, text...)
	if err := os.Truncate(n.log, 0); err != nil {
		n.t.Fatal(err)
	}
}

// lines returns the lines of the log that contain all of the words.
func (n *node) lines(words ...string) (found []string) {
	text, _ := os.ReadFile(n.log)
	for line := range strings.Lines(string(text)) {
		has := true
		for _, w := range words {
			has = has && strings.Contains(line, w)
		}
		if has {
			found = append(found, line)
		}
	}
	return found
}

// awaitAttempts waits until the agent has sent some requests to API servers, or has synced.
func (n *node) awaitAttempts() {
	n.t.Helper()
	attempts := func() (sum float64) {
		_, text := n.fetch("10249", "/metrics")
		for _, m := range attemptsMetric.FindAllStringSubmatch(text, -1) {
			count, err := strconv.ParseFloat(m[1], 64)
			if err != nil {
				n.t.Fatal(err)
			}
			sum += count
		}
		return sum
	}
	before := attempts()
	n.until("more attempts", func() bool { return attempts() >= before+4 })
}

var attemptsMetric = regexp.MustCompile(`(?m)^(?:rest_client_requests_total|kubeproxy_sync_proxy_rules_duration_seconds_count)(?:{.*})? (.*)$`)

// saysOnce waits for a line, and checks that it is logged only once over several
// attempts, and that Services keep working.
func (n *node) saysOnce(words ...string) {
	n.t.Helper()
	n.until(fmt.Sprintf("a line with %q", words), func() bool { return len(n.lines(words...)) > 0 })
	n.awaitAttempts()
	if got := n.lines(words...); len(got) != 1 {
		n.t.Errorf("%d lines with %q, want one: %q", len(got), words, got)
	}
	if text, _ := os.ReadFile(n.log); bytes.Count(text, []byte("\n")) > 20 {
		n.t.Errorf("a flood of lines:\n%s", text)
	}
	if !n.answered(n.service, "web")() {
		n.t.Errorf("what was written does not serve any more (%q)", words)
	}
}

// TestFaultsAreSaidOnceAndTheRestGoesOn tests faults of an agent's access to its API
// server, and of the objects that it finds there.
func TestFaultsAreSaidOnceAndTheRestGoesOn(t *testing.T) {
	n := startNode(t)
	n.until("the Service", n.answered(n.service, "web"))

	second := n.host.Command(context.Background(), n.argv...)
	out, err := second.CombinedOutput()
	if line := string(out); err == nil || second.ProcessState.ExitCode() != 1 || strings.Count(line, "\n") != 1 ||
		!strings.Contains(line, fmt.Sprintf("an agent runs already (process %d)", n.cmd.Process.Pid)) {
		t.Errorf("a second agent of the instance ends with %v and %q", err, out)
	}

	const token = "top-secret-of-the-cluster"
	late := controlplane.User{Name: "late", Groups: []string{"system:masters"}, Until: time.Now().Add(-time.Hour)}
	for what, kubeconfig := range map[string]string{
		"token":       must[string](t)(n.cp.TokenKubeconfig(token)),
		"certificate": must[string](t)(n.cp.Kubeconfig(late)),
	} {
		t.Logf("a wrong %s", what)
		n.startWith("--kubeconfig", kubeconfig, "--iptables-sync-period", "1s", "--v", "4", "--bypass", "never")
		n.until("the refusal", func() bool { return len(n.lines("level=WARN", "rejects the credentials")) > 0 })
		n.until("an unhealthy agent", func() bool { code, _ := n.get("/healthz"); return code == 503 })
		n.awaitAttempts()
		if got := n.lines("level=WARN", "rejects the credentials"); len(got) != 1 {
			t.Errorf("%d lines about the %s, want one: %q", len(got), what, got)
		}
		if !n.answered(n.service, "web")() {
			t.Errorf("what was written does not serve any more with a wrong %s", what)
		}
	}

	n.startWith("--master", "https://172.30.0.254:6443", "--iptables-sync-period", "1s") // an unassigned address
	n.saysOnce("level=WARN", "API server 172.30.0.254:6443")
	n.until("an unhealthy agent", func() bool { code, _ := n.get("/healthz"); return code == 503 })
	if code, body := n.get("/livez"); code != 200 {
		t.Errorf("/livez of an agent that waits for the API server: %d %s", code, body)
	}

	n.startWith("--hostname-override", "nobody", "--iptables-sync-period", "1s")
	n.saysOnce("level=WARN", "Node nobody", "is not among the Nodes known")
	n.until("a node that is gone", func() bool {
		code, body := n.get("/healthz")
		return code == 503 && strings.Contains(body, `"nodeEligible": false`)
	})

	if err := n.k.CoreV1().Nodes().Delete(t.Context(), n.host.Name, remove); err != nil {
		t.Fatal(err)
	}
	bare := n.lab.NodeObjects()[0]
	bare.Spec.PodCIDR, bare.Spec.PodCIDRs = "", nil
	must[*corev1.Node](t)(n.k.CoreV1().Nodes().Create(t.Context(), bare, create))
	n.startWith("--detect-local-mode", "NodeCIDR", "--iptables-sync-period", "1s")
	n.saysOnce("level=WARN", "spec.podCIDRs", "--detect-local-mode NodeCIDR")

	n.signal(syscall.SIGTERM)
	n.keepLog()
	n.expectNoSecrets(token)
}

// expectNoSecrets searches the logs of all agents for tokens and keys.
func (n *node) expectNoSecrets(token string) {
	n.t.Helper()
	secrets := []string{token, "PRIVATE KEY"}
	files, err := filepath.Glob(filepath.Join(filepath.Dir(n.log), "kubeconfig-*"))
	if err != nil || len(files) < 3 {
		n.t.Fatalf("kubeconfigs %v, %v", files, err)
	}
	for _, file := range files {
		cfg, err := clientcmd.LoadFromFile(file)
		if err != nil {
			n.t.Fatal(err)
		}
		for _, u := range cfg.AuthInfos {
			if len(u.ClientKeyData) > 0 {
				// Any line of it, and its beginning as in the file.
				body := strings.Split(string(u.ClientKeyData), "\n")[1]
				secrets = append(secrets, body, base64.StdEncoding.EncodeToString(u.ClientKeyData)[:40])
			}
		}
	}
	if len(n.said) < 2000 {
		n.t.Errorf("the agents have said %d bytes only: the test is blind", len(n.said))
	}
	for _, s := range secrets {
		if bytes.Contains(n.said, []byte(s)) {
			n.t.Errorf("a secret is in the log: %.12s...", s)
		}
	}
}

// alone is a dataplane like eBPF in a kernel without nftables as the second backend; this
// machine has nftables. It stores the names of ports.
type alone struct {
	mu    sync.Mutex
	ports map[string]bool
}

func (w *alone) Name() string { return "ebpf" }

func (w *alone) CanCarry(p *intent.ServicePort) error {
	if p.ID.Protocol == model.SCTP {
		return errors.New("SCTP is not served by the eBPF dataplane")
	}
	return nil
}

// Apply serves a port that needs a helper without it, as netfilter's dataplanes do on a
// kernel without helpers.
func (w *alone) Apply(_ context.Context, c intent.Changes) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	failed := map[intent.PortID]error{}
	for _, p := range c.Upserts {
		w.ports[p.ID.Service.Name+"/"+p.ID.Port] = true
		if p.Helper != intent.NoHelper {
			failed[p.ID] = errors.New("served without help: load nf_conntrack_" + p.Helper.String())
		}
	}
	if len(failed) > 0 {
		return &dataplane.PortErrors{Errors: failed}
	}
	return nil
}

func (w *alone) Replace(ctx context.Context, s intent.State) error {
	return w.Apply(ctx, intent.Changes{Upserts: s.Ports})
}

func (w *alone) Drifted() <-chan struct{}       { return nil }
func (w *alone) Repaired() (r dataplane.Repair) { return r }
func (w *alone) Close() error                   { return nil }

func (w *alone) has(port string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ports[port]
}

var _ dataplane.Backend = (*alone)(nil)

func TestAPortThatNoDataplaneCanServeIsAnEventAndCountedAndTheOthersAreServed(t *testing.T) {
	k := client(t, shared)
	namespace(t, k, "sctp")
	s := createService(t, k, "sctp", service("mixed", func(s *corev1.Service) {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "sctp", Port: 81, Protocol: corev1.ProtocolSCTP},
			corev1.ServicePort{Name: "boot", Port: 69, Protocol: corev1.ProtocolUDP})
	}))
	c, server, err := kube.Connect(kube.Access{Kubeconfig: adminKubeconfig(t)})
	if err != nil {
		t.Fatal(err)
	}
	source, err := kube.New(kube.Config{Client: c, Server: server, NodeName: "here"})
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	events := kube.NewEvents(c, "here", source.UID, log)
	metrics, backend := telemetry.NewMetrics(telemetry.Build{}), &alone{ports: map[string]bool{}}
	loop, err := reconcile.New(reconcile.Config{
		Tracker:    decisions.New(intent.Config{NodeName: "here"}, proxymode.DoNotTrackConfig("here", "", "ebpf")),
		Backends:   []dataplane.Backend{backend},
		SyncPeriod: time.Second, OnProblems: events.Emit, Metrics: metrics, Logger: log,
	})
	if err != nil {
		t.Fatal(err)
	}
	loop.SetNodeAddrs([]netip.Addr{netip.MustParseAddr("192.0.2.1")})
	ctx, cancel := context.WithCancel(context.Background())
	var parts sync.WaitGroup
	defer parts.Wait()
	defer cancel()
	for _, part := range []func(context.Context) error{loop.Run, events.Run,
		func(ctx context.Context) error { return source.Run(ctx, loop.Deliver) }} {
		parts.Go(func() { _ = part(ctx) })
	}
	await.True(t, "the other ports, their Events and the metric", func() bool {
		list := must[*corev1.EventList](t)(k.CoreV1().Events("sctp").List(t.Context(), metav1.ListOptions{}))
		told := map[string]bool{}
		for _, want := range []string{"port sctp/SCTP/IPv4: not served on this node: SCTP", "served without help: load nf_conntrack_tftp"} {
			for _, e := range list.Items {
				told[want] = told[want] || e.InvolvedObject.UID == s.UID && strings.Contains(e.Message, want)
			}
			if !told[want] {
				return false
			}
		}
		r := httptest.NewRecorder()
		telemetry.MetricsHandler(metrics, "ebpf", false).ServeHTTP(r, httptest.NewRequest("GET", "/metrics", nil))
		return backend.has("mixed/http") && backend.has("mixed/boot") && !backend.has("mixed/sctp") &&
			strings.Contains(r.Body.String(), "\nspillway_unsupported_service_ports 1\n")
	})
}
