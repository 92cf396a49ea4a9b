package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/reconcile"
)

func TestExitCodes(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		name string
		args []string
		code int
		says string
	}{
		{"no command", nil, 2, "no command given"},
		{"an unknown command", []string{"agnet"}, 2, `unknown command "agnet"`},
		{"an unknown flag", []string{"agent", "--nope"}, 2, "unknown flag: --nope: see 'spillway agent --help'"},
		{"an argument too many", []string{"version", "x"}, 2, "spillway: "},
		{"a word for a number", []string{"agent", "--conntrack-max-per-core", "x"}, 2, `spillway: --conntrack-max-per-core "x": a whole number is expected: see 'spillway agent --help'`},
		{"a number out of range", []string{"agent", "--conntrack-min", "9999999999"}, 2, `--conntrack-min "9999999999": a whole number in range is expected`},
		{"a number for a duration", []string{"agent", "--iptables-sync-period", "30"}, 2, `--iptables-sync-period "30": a duration such as 30s or 2m is expected`},
		{"a word for a switch", []string{"agent", "--masquerade-all=maybe"}, 2, `--masquerade-all "maybe": true or false is expected`},
		{"a word for a part", []string{"plan", "--head-room", "much"}, 2, `--head-room "much": a number is expected: see 'spillway plan --help'`},
		{"an unknown mode", []string{"agent", "--proxy-mode", "ipvs"}, 2, `--proxy-mode "ipvs": not a proxy mode: use ebpf, nftables, iptables`},
		{"a range that is none", []string{"agent", "--cluster-cidr", "10.0.0.0"}, 2, `--cluster-cidr "10.0.0.0": not an address range`},
		{"a range with host bits", []string{"agent", "--cluster-cidr", "fd00::/8,10.244.1.5/16"}, 2, `--cluster-cidr "10.244.1.5/16": not how this address range is written: write 10.244.0.0/16`},
		{"a NodePort range with host bits", []string{"agent", "--nodeport-addresses", "fd00:1::5/64"}, 2, `--nodeport-addresses "fd00:1::5/64": not how this address range is written: write fd00:1::/64`},
		{"a range of mapped addresses", []string{"agent", "--cluster-cidr", "::ffff:10.1.0.0/104"}, 2, `write 10.0.0.0/8`},
		{"a proxy name that no label has", []string{"agent", "--service-proxy-name", "a,b"}, 2, `--service-proxy-name "a,b": no label can have this value`},
		{"a proxy name that is too long", []string{"agent", "--service-proxy-name", strings.Repeat("a", 64)}, 2, "no more than 63"},
		{"a bad bind address", []string{"agent", "--healthz-bind-address", "here"}, 2, `--healthz-bind-address "here": not an address`},
		{"a bad period", []string{"agent", "--iptables-sync-period", "0s"}, 2, "must be longer than 0"},
		{"a node name that no Node has", []string{"agent", "--hostname-override", "a b"}, 2, `--hostname-override "a b": no Node can have this name`},
		{"a node name in upper case", []string{"agent", "--hostname-override", "Node1"}, 2, `--hostname-override "Node1": no Node can have this name`},
		{"flows beyond the kernel's limit", []string{"agent", "--conntrack-max-per-core", "2000000000"}, 2, "--conntrack-max-per-core 2000000000 on "},
		{"too many flows at least", []string{"agent", "--conntrack-min", "2000000000"}, 2,
			"--conntrack-min 2000000000: a table of 2000000000 flows, which takes 1061.7 GiB of kernel memory; the kernel allows 53687088 flows: give less"},
		{"a bad autopilot", []string{"agent", "--conntrack-autopilot", "yes"}, 2, `--conntrack-autopilot "yes": not a choice: use off, advise, on`},
		{"more memory than there is", []string{"agent", "--conntrack-autopilot-memory", "120%"}, 2, `--conntrack-autopilot-memory "120%": must be more than nothing and no more than the machine's`},
		{"memory that is no number", []string{"agent", "--conntrack-autopilot-memory", "much"}, 2, `--conntrack-autopilot-memory "much": not a quantity`},
		{"an InfluxDB that is no address", []string{"agent", "--influx-url", "db:8086"}, 2, `--influx-url: "db:8086": not an address`},
		{"a password in the address of an InfluxDB", []string{"agent", "--influx-url", "http://me:hunter2@db:8086"}, 2, `--influx-url: "...@db:8086": has a password, which every user of the machine can read: write it to a file and set --influx-password-file`},
		{"a password among its parameters", []string{"agent", "--influx-url", "http://db:8086/write?db=x&u=me&p=hunter2"}, 2, `--influx-url: "http://db:8086/write": has a parameter other than db, `},
		{"a user without a password", []string{"agent", "--influx-url", "http://me@db:8086"}, 2, "--influx-url names a user: give --influx-password-file too"},
		{"a password without a user", []string{"agent", "--influx-url", "http://db:8086", "--influx-password-file", "p"}, 2, "--influx-password-file: --influx-url names no user"},
		{"a password and a token", []string{"agent", "--influx-url", "http://me@db:8086", "--influx-password-file", "p", "--influx-token-file", "t"}, 2, "give one of the two"},
		{"a password for nobody", []string{"agent", "--influx-password-file", "p"}, 2, "--influx-password-file without --influx-url"},
		{"a token for nobody", []string{"agent", "--influx-token-file", "t"}, 2, "--influx-token-file without --influx-url"},
		{"a bad choice", []string{"agent", "--verify-partial-sync", "often"}, 2, `--verify-partial-sync "often": not a choice: use off, sampled, always`},
		{"two sources", []string{"agent", "--manifests", dir, "--kubeconfig", "k"}, 2, "--kubeconfig and --manifests: two sources"},
		{"a kubeconfig that is not there", []string{"agent", "--bpffs", dir, "--kubeconfig", "/nonexistent"}, 1, "/nonexistent"},
		{"no cluster to be a Pod of", []string{"agent", "--bpffs", dir}, 1, "set --kubeconfig, or --manifests DIR"},
		{"a KubeProxyConfiguration that is not there", []string{"agent", "--config", "/nonexistent"}, 1, "read --config: open /nonexistent"},
		{"an unknown local mode", []string{"agent", "--detect-local-mode", "x"}, 2, `--detect-local-mode "x": not a mode`},
		{"a bridge without a name", []string{"agent", "--detect-local-mode", "BridgeInterface"}, 2, "set --pod-bridge-interface"},
		{"a take-over from another proxy", []string{"agent", "--takeover", "cilium"}, 2, `--takeover "cilium": not a proxy that can be taken over from: use kube-proxy`},
		{"a take-over of some Services only", []string{"agent", "--takeover", "kube-proxy", "--service-proxy-name", "x"}, 2, "--takeover and --service-proxy-name: "},
		{"two flags that exclude each other", []string{"agent", "--masquerade-all", "--bypass", "never"}, 2, "--masquerade-all and --bypass never: "},
		{"a prefix without a name", []string{"agent", "--detect-local-mode", "InterfaceNamePrefix"}, 2, "set --pod-interface-name-prefix"},
		{"a least wait beyond the most", []string{"agent", "--iptables-min-sync-period", "1m"}, 2, "--iptables-min-sync-period"},
		{"a bad format", []string{"version", "-o", "yaml"}, 2, `--output "yaml": not a format`},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out, errs bytes.Buffer
			if code := run(c.args, &out, &errs); code != c.code {
				t.Errorf("exit code %d, want %d", code, c.code)
			}
			line := errs.String()
			if strings.Count(line, "\n") != 1 || !strings.HasPrefix(line, "spillway: ") || !strings.Contains(line, c.says) {
				t.Errorf("stderr is %q, want one line with %q", line, c.says)
			}
		})
	}
}

func TestVersion(t *testing.T) {
	var out, errs bytes.Buffer
	if code := run([]string{"version", "-o", "json"}, &out, &errs); code != 0 {
		t.Fatal(code, errs.String())
	}
	var got map[string]string
	if err := json.Unmarshal(out.Bytes(), &got); err != nil || got["version"] == "" || got["goVersion"] == "" {
		t.Errorf("%v: %s", err, out.String())
	}
}

func TestBindAddressMayLeaveOutThePort(t *testing.T) {
	for in, want := range map[string]string{
		"": "", "127.0.0.1": "127.0.0.1:10256", "::1": "[::1]:10256", "0.0.0.0:1": "0.0.0.0:1", ":80": ":80",
	} {
		if got, err := bindAddress("--x", in, 10256); got != want || err != nil {
			t.Errorf("%q gives %q, %v, want %q", in, got, err, want)
		}
	}
}

// memory is a dataplane that keeps what it is given.
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

func (m *memory) Applied(context.Context) (intent.State, error) { return intent.State{}, nil }

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
	a := newAgent(agentConfig{
		NodeName: "n1", ProxyMode: "ebpf", Manifests: t.TempDir(), Bypass: "auto", LogFormat: "text",
		HealthzAddr: "127.0.0.1:0", MetricsAddr: "127.0.0.1:0", BPFFS: filepath.Join(t.TempDir(), "pins"), VerifyPartialSync: "off",
		SyncPeriod: 30 * time.Second, MinSyncPeriod: time.Millisecond, AllowExternalIPs: true,
		Conntrack: conntrackConfig{Autopilot: "off", AutopilotMemory: "5%"},
	}, io.Discard)
	a.euid = func() int { return 0 }
	a.lockDir = t.TempDir()
	a.backends = func(context.Context, agentConfig, *slog.Logger, func(prometheus.Collector) error) ([]dataplane.Backend, error) {
		return []dataplane.Backend{m}, nil
	}
	a.unused = func(context.Context, agentConfig, []dataplane.Backend, retirement) {}
	a.takeOver = func(context.Context, *takeover) {}
	// The table of the machine's own network is not a test's to change.
	a.entries = func(agentConfig, *slog.Logger, func(prometheus.Collector) error) (reconcile.StaleEntries, func(), error) {
		return nil, func() {}, nil
	}
	return a
}

// eventually waits for what another goroutine brings about.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 1000 {
		if ok() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("never: %s", what)
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
	at := <-addrs
	eventually(t, "one port is written", func() bool { return m.count() == 1 })
	writeService(t, a.cfg.Manifests, "dns", "10.96.0.2")
	eventually(t, "the second port is written", func() bool { return m.count() == 2 })
	for url, want := range map[string]string{
		"http://" + at[0] + "/healthz":   `"nodeEligible": true`,
		"http://" + at[1] + "/proxyMode": "ebpf",
		"http://" + at[1] + "/metrics":   `spillway_service_ports{dataplane="ebpf"}`,
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
	soon, cancel := context.WithTimeout(ctx, 10*time.Second)
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

// TestAFileThatComesLaterTakesNothing runs the whole way from files to a
// dataplane: two Services without timestamps claim a NodePort and an externalIP.
func TestAFileThatComesLaterTakesNothing(t *testing.T) {
	m := &memory{ports: map[intent.PortID]*intent.ServicePort{}}
	a := testAgent(t, m)
	a.cfg.SyncPeriod = time.Hour // a full sync empties this dataplane for a moment
	path := func(name string) string { return filepath.Join(a.cfg.Manifests, name+".yaml") }
	write := func(file, name, addr, comment string) {
		t.Helper()
		text := strings.NewReplacer("NAME", name, "ADDR", addr).Replace(service)
		text = strings.Replace(text, "ports: [{port: 80,", "type: NodePort\n  externalIPs: [198.51.100.1]\n  ports: [{port: 80, nodePort: 30080,", 1)
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
	serves := "z" // who has the addresses that both claim
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
		// Who reads this file has read the others as they are now.
		marker := fmt.Sprintf("10.96.1.%d", i)
		writeService(t, a.cfg.Manifests, fmt.Sprintf("marker%d", i), marker)
		eventually(t, step.name+": the step is taken", func() bool { return m.serves(marker) != "" })
		if step.want != serves {
			// A file that goes is waited for before it counts as gone.
			eventually(t, step.name+": the other takes over", func() bool {
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
	a.cfg.Influx = influxConfig{URL: influx.URL, Interval: time.Second}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.run(ctx) }()
	for _, name := range []string{"spillway_conntrack_autopilot_entries_in_budget", "spillway_influx_waiting_bytes", "spillway_build_info"} {
		eventually(t, name+" is pushed", func() bool { _, ok := pushed.Load(name); return ok })
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
		{"not root", func(a *agent) { a.euid = func() int { return 1000 } }, "not root: start it as root"},
		{"healthz address in use", func(a *agent) { a.cfg.HealthzAddr = busy.Addr().String() }, "address already in use: give another --healthz-bind-address"},
		{"metrics address in use", func(a *agent) { a.cfg.MetricsAddr = busy.Addr().String() }, "address already in use: give another --metrics-bind-address"},
		{"no manifest directory", func(a *agent) { a.cfg.Manifests = filepath.Join(a.cfg.Manifests, "gone") }, "gone"},
		{"the dataplane does not load", func(a *agent) {
			a.backends = func(context.Context, agentConfig, *slog.Logger, func(prometheus.Collector) error) ([]dataplane.Backend, error) {
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

func TestAnAgentThatTakesOverWaitsForKubeProxysAddress(t *testing.T) {
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	m := &memory{ports: map[intent.PortID]*intent.ServicePort{}}
	a := testAgent(t, m)
	a.cfg.Takeover, a.cfg.HealthzAddr = "kube-proxy", busy.Addr().String()
	writeService(t, a.cfg.Manifests, "web", "10.96.0.1")
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- a.run(ctx) }()
	eventually(t, "one port is written", func() bool { return m.count() == 1 })
	busy.Close()
	eventually(t, "health is served", func() bool {
		r, err := http.Get("http://" + busy.Addr().String() + "/healthz")
		if err == nil {
			r.Body.Close()
		}
		return err == nil && r.StatusCode == http.StatusOK
	})
	stop()
	if err := <-done; err != nil {
		t.Errorf("agent ended with %v", err)
	}
}

func TestCleanupTakesTheLockAndNeedsNoSource(t *testing.T) {
	a := testAgent(t, &memory{})
	a.cfg.Cleanup, a.cfg.Manifests = true, ""
	cleaned := 0
	a.cleanup = func(context.Context, agentConfig, *slog.Logger) error { cleaned++; return nil }
	for range 2 {
		if err := a.run(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	lock, err := lockInstance(a.lockDir, a.cfg.BPFFS)
	if err != nil {
		t.Fatal(err)
	}
	if err := a.run(t.Context()); err == nil || cleaned != 2 {
		t.Errorf("cleaned %d times beside a running agent: %v", cleaned, err)
	}
	lock.release()
}

func TestANetworkNamespaceHasOneAgent(t *testing.T) {
	dir := t.TempDir()
	lock, err := lockInstance(dir, "/a")
	if err != nil {
		t.Fatal(err)
	}
	defer lock.release()
	if _, err := lockInstance(dir, "/b"); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d", os.Getpid())) {
		t.Errorf("a second one, with pins of its own: %v", err)
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		other, err := lockInstance(dir, "/b")
		if err == nil {
			other.release()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Errorf("one in another network namespace: %v", err)
	}
}

func TestAFlowTableMustFitIntoMemory(t *testing.T) {
	c := conntrackConfig{MaxPerCore: 1, Min: 1 << 20} // 570 MiB
	if err := c.validateFlows(1<<26, 570<<20); err != nil {
		t.Errorf("a table that just fits: %v", err)
	}
	want := "--conntrack-min 1048576: a table of 1048576 flows, which takes 0.6 GiB of kernel memory; this machine has 0.2 GiB: give less"
	if err := c.validateFlows(1<<26, 256<<20); err == nil || err.Error() != want {
		t.Errorf("error %v, want %s", err, want)
	}
}

func TestTheMachinesSocketsAreServedOnlyFromItsOwnNetwork(t *testing.T) {
	for _, test := range []struct {
		own, pid1 string
		may       bool
	}{
		{"net:[1]", "net:[1]", true},
		{"net:[2]", "net:[1]", false},
		{"net:[2]", "", false}, // pid 1 cannot be seen
		{firstNetns, "", true},
		{"", "net:[1]", false},
		{"", "", false},
	} {
		if err := mayDefaultCgroup(test.own, test.pid1); (err == nil) != test.may {
			t.Errorf("agent in %q, pid 1 in %q: error %v", test.own, test.pid1, err)
		}
	}
}

// TestAnAgentThatWaitsForTheAPIServerIsAliveAndNotReady: a kubelet that restarts it
// would only have it wait longer, and nobody is to rely on it.
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
	at := <-addrs
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
	eventually(t, "the metric of an API server that has not answered", func() bool {
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
		time.Sleep(10 * time.Millisecond)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
