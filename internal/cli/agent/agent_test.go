package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/dataplane/iptables"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/instance"
	"spillway.dev/spillway/internal/node/takeover"
	"spillway.dev/spillway/internal/proxymode"
	"spillway.dev/spillway/internal/reconcile"
	"spillway.dev/spillway/test/await"
)

func TestBindAddressMayLeaveOutThePort(t *testing.T) {
	for in, want := range map[string]string{
		"": "", "127.0.0.1": "127.0.0.1:10256", "::1": "[::1]:10256", "0.0.0.0:1": "0.0.0.0:1", ":80": ":80",
	} {
		if got, err := bindAddress("--x", in, 10256); got != want || err != nil {
			t.Errorf("%q gives %q, %v, want %q", in, got, err, want)
		}
	}
}

// memory is a dataplane that stores the state that it receives.
type memory struct {
	mu     sync.Mutex
	ports  map[intent.PortID]*intent.ServicePort
	closed bool
}

func (m *memory) Name() string                       { return "ebpf" }
func (m *memory) CanCarry(*intent.ServicePort) error { return nil }

func (m *memory) Apply(_ context.Context, c intent.Changes) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range c.Upserts {
		m.ports[p.ID] = p
	}
	for _, id := range c.Deletes {
		delete(m.ports, id)
	}
	return nil
}

func (m *memory) Replace(ctx context.Context, s intent.State) error {
	m.mu.Lock()
	clear(m.ports)
	m.mu.Unlock()
	return m.Apply(ctx, intent.Changes{Upserts: s.Ports})
}

func (m *memory) Drifted() <-chan struct{}       { return nil }
func (m *memory) Repaired() (r dataplane.Repair) { return r }

func (m *memory) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	return nil
}

func (m *memory) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.ports)
}

// serves names the Services that are served on an address, or on a NodePort.
func (m *memory) serves(frontend string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for id, p := range m.ports {
		for _, f := range p.Frontends {
			if f.Addr.String() == frontend || f.Kind == intent.NodePort && fmt.Sprint(f.Port) == frontend {
				out = append(out, id.Service.Name)
			}
		}
	}
	return strings.Join(out, " ")
}

const service = `apiVersion: v1
kind: Service
metadata: {name: NAME, namespace: default}
spec:
  clusterIP: ADDR
  clusterIPs: [ADDR]
  selector: {app: web}
  ports: [{port: 80, protocol: TCP}]
`

func writeService(t *testing.T, dir, name, addr string) {
	t.Helper()
	text := strings.NewReplacer("NAME", name, "ADDR", addr).Replace(service)
	if err := os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func testAgent(t *testing.T, m *memory) *agent {
	a := newAgent(Config{
		NodeName: "n1", ProxyMode: "ebpf", Manifests: t.TempDir(), LogFormat: "text",
		EBPF:     ebpf.Config{Bypass: "auto", SocketHooks: "all", XDP: "off", FlowEvents: "off", BPFFS: filepath.Join(t.TempDir(), "pins")},
		IPTables: iptables.Config{VerifyPartialSync: "off"},
		Egress:   "off", Forwarding: "snat", MaglevSize: intent.DefaultMaglevSize, HealthzAddr: "127.0.0.1:0", MetricsAddr: "127.0.0.1:0",
		SyncPeriod: 30 * time.Second, MinSyncPeriod: time.Millisecond, AllowExternalIPs: true,
		Conntrack: ConntrackConfig{Autopilot: "off", AutopilotMemory: "5%"},
	}, io.Discard)
	a.euid = func() int { return 0 }
	a.lockDir = t.TempDir()
	a.backends = func(context.Context, proxymode.Config, proxymode.Register) ([]dataplane.Backend, error) {
		return []dataplane.Backend{m}, nil
	}
	a.unused = func(context.Context, proxymode.Config, []dataplane.Backend, proxymode.Retirement) {}
	a.takeOver = func(context.Context, *takeover.Takeover) {}
	// The table of the machine's own network is not a test's to change.
	a.entries = func(Config, *slog.Logger, func(prometheus.Collector) error) (reconcile.StaleEntries, func(), error) {
		return nil, func() {}, nil
	}
	return a
}

// started waits until an agent serves, and returns its addresses of health and metrics.
func started(t *testing.T, addrs <-chan [2]string, done <-chan error) [2]string {
	t.Helper()
	select {
	case at := <-addrs:
		return at
	case err := <-done:
		t.Fatalf("the agent ended before it served: %v", err)
		return [2]string{}
	}
}

func TestAgentServesADirectory(t *testing.T) {
	m := &memory{ports: map[intent.PortID]*intent.ServicePort{}}
	a := testAgent(t, m)
	writeService(t, a.cfg.Manifests, "web", "10.96.0.1")
	addrs := make(chan [2]string, 1)
	a.serving = func(healthz, metrics string) { addrs <- [2]string{healthz, metrics} }
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.run(ctx) }()
	at := started(t, addrs, done)
	await.True(t, "one port is written", func() bool { return m.count() == 1 })
	writeService(t, a.cfg.Manifests, "dns", "10.96.0.2")
	await.True(t, "the second port is written", func() bool { return m.count() == 2 })
	for url, want := range map[string]string{
		"http://" + at[0] + "/healthz":   `"nodeEligible": true`,
		"http://" + at[1] + "/proxyMode": "ebpf",
		"http://" + at[1] + "/metrics":   `spillway_service_ports{dataplane="ebpf"}`,
		"http://" + at[1] + "/metrics?":  `kubernetes_feature_enabled{name="AllowServiceExternalIPs",stage=""} 1`,
	} {
		r, err := http.Get(url)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(r.Body)
		r.Body.Close()
		if r.StatusCode != 200 || !strings.Contains(string(body), want) {
			t.Errorf("%s: %d %s", url, r.StatusCode, body)
		}
	}
	soon, cancel := context.WithTimeout(ctx, await.Limit)
	defer cancel()
	if err := testAgentOn(a).run(soon); err == nil || !strings.Contains(err.Error(), "an agent runs already (process ") {
		t.Errorf("a second agent of the instance: %v", err)
	}
	stop()
	if err := <-done; err != nil {
		t.Errorf("agent ended with %v", err)
	}
	if !m.closed || m.count() != 2 {
		t.Errorf("closed %v, %d ports left in the kernel", m.closed, m.count())
	}
}

// TestAFileThatComesLaterTakesNothing tests the path from files to a dataplane: two
// Services without timestamps claim a NodePort and an externalIP.
func TestAFileThatComesLaterTakesNothing(t *testing.T) {
	m := &memory{ports: map[intent.PortID]*intent.ServicePort{}}
	a := testAgent(t, m)
	a.cfg.SyncPeriod = time.Hour // a full sync empties this dataplane for a moment
	path := func(name string) string { return filepath.Join(a.cfg.Manifests, name+".yaml") }
	write := func(file, name, addr, comment string) {
		t.Helper()
		text := strings.NewReplacer("NAME", name, "ADDR", addr).Replace(service)
		text = strings.Replace(text, "ports: [{port: 80,",
			"type: NodePort\n  externalIPs: [198.51.100.1]\n  ports: [{port: 80, nodePort: 30080,", 1)
		if err := os.WriteFile(path(file), []byte(text+comment), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	write("z", "z", "10.96.0.26", "")
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.run(ctx) }()
	serves := "z" // the Service that has the addresses that both claim
	for i, step := range []struct {
		name string
		do   func()
		want string
	}{
		{"z alone", func() {}, "z"},
		{"a comes, and its file is the first too", func() { write("a", "a", "10.96.0.1", "") }, "z"},
		{"the file of z is written again", func() { write("z", "z", "10.96.0.26", "") }, "z"},
		{"the file of z is touched", func() { must(os.Chtimes(path("z"), time.Now(), time.Now())) }, "z"},
		{"the file of z is changed", func() { write("z", "z", "10.96.0.27", "# other\n") }, "z"},
		{"the file of z is renamed", func() { must(os.Rename(path("z"), path("0"))) }, "z"},
		{"the file of z is broken", func() { must(os.WriteFile(path("0"), []byte("kind: ["), 0o600)) }, "z"},
		{"z goes", func() { must(os.Remove(path("0"))) }, "a"},
		{"z comes back", func() { write("z", "z", "10.96.0.26", "") }, "a"},
		{"a goes", func() { must(os.Remove(path("a"))) }, "z"},
	} {
		step.do()
		// A reader of this file has read the current versions of the others.
		marker := fmt.Sprintf("10.96.1.%d", i)
		writeService(t, a.cfg.Manifests, fmt.Sprintf("marker%d", i), marker)
		await.True(t, step.name+": the step is taken", func() bool { return m.serves(marker) != "" })
		if step.want != serves {
			// A missing file counts as deleted after a wait.
			await.True(t, step.name+": the other takes over", func() bool {
				return m.serves("30080") == step.want && m.serves("198.51.100.1") == step.want
			})
			serves = step.want
		}
		for _, frontend := range []string{"30080", "198.51.100.1"} {
			if got := m.serves(frontend); got != step.want {
				t.Errorf("%s: %s is served to %q, want %q", step.name, frontend, got, step.want)
			}
		}
	}
	stop()
	if err := <-done; err != nil {
		t.Errorf("agent ended with %v", err)
	}
}

func TestTheAgentAdvisesOnConntrackAndPushesItsMetrics(t *testing.T) {
	var pushed sync.Map
	influx := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		for line := range strings.Lines(string(body)) {
			name, _, _ := strings.Cut(line, ",")
			pushed.Store(name, true)
		}
		w.WriteHeader(http.StatusNoContent)
	}))
	defer influx.Close()
	a := testAgent(t, &memory{ports: map[intent.PortID]*intent.ServicePort{}})
	a.cfg.Conntrack.Autopilot = "advise" // which only looks
	a.cfg.Influx = InfluxConfig{URL: influx.URL, Interval: time.Second}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.run(ctx) }()
	for _, name := range []string{"spillway_conntrack_autopilot_entries_in_budget", "spillway_influx_waiting_bytes", "spillway_build_info"} {
		await.True(t, name+" is pushed", func() bool { _, ok := pushed.Load(name); return ok })
	}
	stop()
	if err := <-done; err != nil {
		t.Errorf("agent ended with %v", err)
	}
}

// testAgentOn is another agent for the same instance.
func testAgentOn(a *agent) *agent {
	b := *a
	b.serving = nil
	return &b
}

func TestAgentFailsWithOneClearLine(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	for _, c := range []struct {
		name   string
		change func(*agent)
		says   string
	}{
		{"not root", func(a *agent) { a.euid = func() int { return 1000 } }, "not root: run it as root"},
		{"healthz address in use", func(a *agent) { a.cfg.HealthzAddr, a.cfg.BindHardFail = busy.Addr().String(), true },
			"address already in use: give another --healthz-bind-address"},
		{"metrics address in use", func(a *agent) { a.cfg.MetricsAddr, a.cfg.BindHardFail = busy.Addr().String(), true },
			"address already in use: give another --metrics-bind-address"},
		{"address of the file in use", func(a *agent) {
			a.cfg.MetricsAddr, a.cfg.BindHardFail = busy.Addr().String(), true
			a.cfg.ConfigFile, a.cfg.fields = "config.yaml", map[string]string{"metrics-bind-address": "metricsBindAddress"}
		}, "address already in use: give another metricsBindAddress in --config"},
		{"no manifest directory", func(a *agent) { a.cfg.Manifests = filepath.Join(a.cfg.Manifests, "gone") }, "gone"},
		{"the dataplane does not load", func(a *agent) {
			a.backends = func(context.Context, proxymode.Config, proxymode.Register) ([]dataplane.Backend, error) {
				return nil, errors.New("load dataplane ebpf: kernel too old")
			}
		}, "kernel too old"},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := testAgent(t, &memory{})
			c.change(a)
			err := a.run(t.Context())
			if err == nil || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %q, want one line with %q", err, c.says)
			}
		})
	}
}

// As kube-proxy does, the agent serves Services meanwhile.
func TestAnAgentWaitsForAddressesThatAnotherProgramHas(t *testing.T) {
	for _, takeover := range []string{"", "kube-proxy"} {
		t.Run("takeover "+takeover, func(t *testing.T) {
			healthz, metrics := listener(t), listener(t)
			m := &memory{ports: map[intent.PortID]*intent.ServicePort{}}
			a := testAgent(t, m)
			a.cfg.Takeover, a.cfg.HealthzAddr, a.cfg.MetricsAddr = takeover, healthz.Addr().String(), metrics.Addr().String()
			writeService(t, a.cfg.Manifests, "web", "10.96.0.1")
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- a.run(ctx) }()
			await.True(t, "one port is written", func() bool { return m.count() == 1 || len(done) > 0 })
			healthz.Close()
			metrics.Close()
			for _, url := range []string{"http://" + healthz.Addr().String() + "/healthz", "http://" + metrics.Addr().String() + "/metrics"} {
				await.True(t, url+" is served", func() bool {
					r, err := http.Get(url)
					if err == nil {
						r.Body.Close()
					}
					return err == nil && r.StatusCode == http.StatusOK || len(done) > 0
				})
			}
			stop()
			if err := <-done; err != nil {
				t.Errorf("agent ended with %v", err)
			}
		})
	}
}

// listener has an address until it is closed.
func listener(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func TestCleanupTakesTheLockAndNeedsNoSource(t *testing.T) {
	a := testAgent(t, &memory{})
	a.cfg.Cleanup, a.cfg.Manifests = true, ""
	cleaned := 0
	a.cleanup = func(context.Context, proxymode.Config) error { cleaned++; return nil }
	for range 2 {
		if err := a.run(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	lock, err := instance.Acquire(a.lockDir, a.cfg.EBPF.BPFFS)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.run(t.Context()); err == nil || cleaned != 2 {
		t.Errorf("cleaned %d times beside a running agent: %v", cleaned, err)
	}
	lock.Release()
}

// TestAnAgentThatWaitsForTheAPIServerIsAliveAndNotReady: a restart by the kubelet would
// only prolong the wait, and no client may rely on the agent yet.
func TestAnAgentThatWaitsForTheAPIServerIsAliveAndNotReady(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	a := testAgent(t, &memory{ports: map[intent.PortID]*intent.ServicePort{}})
	a.cfg.Manifests, a.cfg.Master = "", "http://"+silent.Addr().String()
	a.cfg.SyncPeriod, a.cfg.MinSyncPeriod = time.Millisecond, 0
	addrs := make(chan [2]string, 1)
	a.serving = func(healthz, metrics string) { addrs <- [2]string{healthz, metrics} }
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.run(ctx) }()
	at := started(t, addrs, done)
	ask := func(url string) (int, string) {
		r, err := http.Get("http://" + url)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Fatal(err)
		}
		return r.StatusCode, string(body)
	}
	await.True(t, "the metric of an API server that has not answered", func() bool {
		_, body := ask(at[1] + "/metrics")
		return strings.Contains(body, "\nspillway_api_server_reachable 0\n") && strings.Contains(body, "\nspillway_api_server_silent_seconds ")
	})
	for range 20 {
		if code, body := ask(at[0] + "/livez"); code != http.StatusOK {
			t.Fatalf("/livez: %d %s", code, body)
		}
		if code, body := ask(at[0] + "/healthz"); code != http.StatusServiceUnavailable {
			t.Fatalf("/healthz: %d %s", code, body)
		}
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
