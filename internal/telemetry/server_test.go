package telemetry

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/decisions/intent"
)

var quiet = slog.New(slog.DiscardHandler)

func get(t *testing.T, url string) (int, http.Header, string) {
	t.Helper()
	c := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	r, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, r.Header, string(body)
}

func serve(t *testing.T, h http.Handler) string {
	t.Helper()
	s, err := Serve(t.Context(), "127.0.0.1:0", h, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return "http://" + s.Addr()
}

// A load balancer gets no answer of 200 from a node that serves nothing yet: its first sync
// may fail, too.
func TestServing(t *testing.T) {
	now := time.Now()
	for _, c := range []struct {
		name          string
		since, synced time.Time
		serving       bool
	}{
		{"no change has come", time.Time{}, time.Time{}, false},
		{"the first changes wait", now, time.Time{}, false},
		{"all changes are written", time.Time{}, now, true},
		{"a change has waited for a moment", now.Add(-time.Second), now.Add(-time.Minute), true},
		{"a change has waited too long", now.Add(-61 * time.Minute), now.Add(-2 * time.Hour), false},
	} {
		h := Health{Timeout: time.Hour, Pending: func() (time.Time, time.Time) { return c.since, c.synced }}
		if got := h.Serving(); got != c.serving {
			t.Errorf("%s: serving is %v, want %v", c.name, got, c.serving)
		}
	}
}

func TestHealth(t *testing.T) {
	now := time.Now()
	synced := now.Add(-time.Hour)
	for _, c := range []struct {
		name  string
		since time.Time
		code  int
	}{
		{"nothing waits", time.Time{}, 200},
		{"a change has waited for a moment", now.Add(-time.Second), 200},
		{"a change has waited too long", now.Add(-61 * time.Minute), 503},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := NewMetrics(Build{})
			url := serve(t, HealthHandler(Health{
				Timeout: time.Hour,
				Pending: func() (time.Time, time.Time) { return c.since, synced },
			}, m))
			for _, path := range []string{"/healthz", "/livez"} {
				code, header, body := get(t, url+path)
				if code != c.code || header.Get("Content-Type") != "application/json" {
					t.Errorf("%s: code %d, want %d; header %v", path, code, c.code, header)
				}
				var got struct {
					LastUpdated, CurrentTime time.Time
					NodeEligible             *bool
				}
				if err := json.Unmarshal([]byte(body), &got); err != nil {
					t.Fatalf("%s: %v: %s", path, err, body)
				}
				if c.code == 200 && !got.LastUpdated.Equal(got.CurrentTime) {
					t.Errorf("%s: a healthy proxy was updated at %v, not now", path, got.LastUpdated)
				}
				if c.code == 503 && !got.LastUpdated.Equal(synced) {
					t.Errorf("%s: updated at %v, want %v", path, got.LastUpdated, synced)
				}
				if eligible := got.NodeEligible != nil && *got.NodeEligible; eligible != (path == "/healthz") {
					t.Errorf("%s: nodeEligible in %s", path, body)
				}
			}
		})
	}
}

func TestANodeThatLeavesIsUnhealthyButAlive(t *testing.T) {
	leaving := false
	url := serve(t, HealthHandler(Health{
		Timeout: time.Hour,
		Pending: func() (time.Time, time.Time) { return time.Time{}, time.Now() },
		Leaving: func() bool { return leaving },
	}, NewMetrics(Build{})))
	for _, c := range []struct {
		leaving  bool
		healthz  int
		eligible string
	}{{false, 200, `"nodeEligible": true`}, {true, 503, `"nodeEligible": false`}} {
		leaving = c.leaving
		if code, _, body := get(t, url+"/healthz"); code != c.healthz || !strings.Contains(body, c.eligible) {
			t.Errorf("leaving %v: /healthz says %d %s", c.leaving, code, body)
		}
		if code, _, body := get(t, url+"/livez"); code != 200 || strings.Contains(body, "nodeEligible") {
			t.Errorf("leaving %v: /livez says %d %s", c.leaving, code, body)
		}
	}
}

// TestAProxyThatHasWrittenNothingIsAliveAndNotEligible: a restart does not help a proxy
// that waits for the API server, and a load balancer gets no answer from its node.
func TestAProxyThatHasWrittenNothingIsAliveAndNotEligible(t *testing.T) {
	synced := time.Time{}
	url := serve(t, HealthHandler(Health{
		Timeout: time.Hour,
		Pending: func() (time.Time, time.Time) { return time.Time{}, synced },
	}, NewMetrics(Build{})))
	if code, _, body := get(t, url+"/healthz"); code != 503 || !strings.Contains(body, `"nodeEligible": false`) {
		t.Errorf("before the first sync /healthz says %d %s", code, body)
	}
	if code, _, body := get(t, url+"/livez"); code != 200 {
		t.Errorf("before the first sync /livez says %d %s", code, body)
	}
	synced = time.Now()
	if code, _, body := get(t, url+"/healthz"); code != 200 {
		t.Errorf("after the first sync /healthz says %d %s", code, body)
	}
}

func TestMetricsKeepKubeProxysNames(t *testing.T) {
	m := NewMetrics(Build{Version: "v1", Commit: "abc", GoVersion: "go1"})
	m.SyncDone(true, time.Second)
	m.SetNoLocalEndpoints(1, 2)
	m.SetPorts(map[string]int{"ebpf": 3}, 4)
	m.SyncFailed("ebpf")
	m.SetFeature("AllowServiceExternalIPs", true)
	m.AuditDifferences("ebpf", 0)
	own := prometheus.NewGauge(prometheus.GaugeOpts{Name: "spillway_flows", Help: "Flows."})
	if err := m.Register(own); err != nil {
		t.Fatal(err)
	}
	if err := m.Register(own); err == nil {
		t.Error("one name was registered twice")
	}
	_, _, body := get(t, serve(t, MetricsHandler(m, "ebpf", false))+"/metrics")
	for _, want := range []string{
		"kubeproxy_sync_proxy_rules_duration_seconds_count 1",
		`kubeproxy_sync_proxy_rules_duration_seconds_bucket{le="0.001"}`,
		"kubeproxy_sync_full_proxy_rules_duration_seconds_count 1",
		`kubernetes_feature_enabled{name="AllowServiceExternalIPs",stage=""} 1`,
		"kubeproxy_sync_partial_proxy_rules_duration_seconds_count 0",
		"kubeproxy_sync_proxy_rules_last_timestamp_seconds 0",
		"kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds 0",
		"kubeproxy_sync_proxy_rules_service_changes_total 0",
		"kubeproxy_sync_proxy_rules_service_changes_pending 0",
		"kubeproxy_sync_proxy_rules_endpoint_changes_total 0",
		"kubeproxy_sync_proxy_rules_endpoint_changes_pending 0",
		`kubeproxy_network_programming_duration_seconds_bucket{le="0.25"} 0`,
		`kubeproxy_network_programming_duration_seconds_bucket{le="300"} 0`,
		`kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy="internal"} 1`,
		`kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy="external"} 2`,
		`spillway_build_info{commit="abc",go_version="go1",version="v1"} 1`,
		`spillway_service_ports{dataplane="ebpf"} 3`,
		"spillway_unsupported_service_ports 4",
		"spillway_problems 0",
		"spillway_flows 0",
		"go_goroutines",
		"process_open_fds",
	} {
		if !strings.Contains(body, "\n"+want) {
			t.Errorf("no %s", want)
		}
	}
}

// failing is a collector of a value that has no text.
type failing struct{ *prometheus.Desc }

func (f failing) Describe(ch chan<- *prometheus.Desc) { ch <- f.Desc }
func (f failing) Collect(ch chan<- prometheus.Metric) {
	ch <- prometheus.MustNewConstMetric(f.Desc, prometheus.GaugeValue, 1, "\xff")
}

func TestACollectorThatFailsHidesNoOthers(t *testing.T) {
	m := NewMetrics(Build{})
	if err := m.Register(failing{prometheus.NewDesc("spillway_failing", "A value.", []string{"name"}, nil)}); err != nil {
		t.Fatal(err)
	}
	url := serve(t, MetricsHandler(m, "ebpf", false)) + "/metrics"
	if code, _, body := get(t, url); code != 200 || !strings.Contains(body, "\nspillway_problems 0") {
		t.Errorf("status %d: %s", code, body)
	}
	if _, _, body := get(t, url); !strings.Contains(body, `promhttp_metric_handler_errors_total{cause="gathering"} 1`) {
		t.Error("the failure is not counted")
	}
}

func TestProxyModeAndProfiling(t *testing.T) {
	m := NewMetrics(Build{})
	url := serve(t, MetricsHandler(m, "ebpf", false))
	if code, h, body := get(t, url+"/proxyMode"); code != 200 || body != "ebpf" || !strings.HasPrefix(h.Get("Content-Type"), "text/plain") {
		t.Errorf("/proxyMode: %d %q %v", code, body, h)
	}
	if code, _, _ := get(t, url+"/debug/pprof/"); code != 404 {
		t.Errorf("profiling is served by default: %d", code)
	}
	if code, _, _ := get(t, serve(t, MetricsHandler(m, "ebpf", true))+"/debug/pprof/"); code != 200 {
		t.Errorf("profiling was asked for: %d", code)
	}
}

func TestAnAddressInUseIsOneClearLine(t *testing.T) {
	s, err := Serve(t.Context(), "127.0.0.1:0", http.NotFoundHandler(), quiet)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	_, err = Serve(t.Context(), s.Addr(), http.NotFoundHandler(), quiet)
	if err == nil || err.Error() != "listen on "+s.Addr()+": address already in use" || !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("error: %v", err)
	}
}

func TestAnEmptyAddressIsNotServed(t *testing.T) {
	s, err := Serve(t.Context(), "", nil, quiet)
	if s != nil || err != nil || s.Addr() != "" || s.Close() != nil {
		t.Error(s, err)
	}
}

// flood opens connections, each with a request that is answered, and returns the first.
func flood(t *testing.T, addr string, n int) (first net.Conn) {
	t.Helper()
	for i := range n {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if i == 0 {
			first = c
		}
		if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		resp.Body.Close()
	}
	return first
}

// isReplaced reports whether the server has closed a connection. It does so before it answers
// the one that replaces it, and for an idle one after a minute.
func isReplaced(t *testing.T, c net.Conn) bool {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(idleTimeout / 4)); err != nil {
		t.Fatal(err)
	}
	_, err := c.Read(make([]byte, 1))
	return err != nil && !errors.Is(err, os.ErrDeadlineExceeded)
}

// A flood of connections neither fills the memory nor keeps other clients out, at a server and
// at the healthCheckNodePorts of Services.
func TestConnectionsAreLimited(t *testing.T) {
	answer := http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})
	for _, host := range []string{"127.0.0.1", "::1"} {
		s, err := Serve(t.Context(), net.JoinHostPort(host, "0"), answer, quiet)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		first := flood(t, s.Addr(), limits.Local+1)
		if !isReplaced(t, first) {
			t.Errorf("%s: more than %d connections are open", s.Addr(), limits.Local)
		}
		if code, _, _ := get(t, "http://"+s.Addr()); code != http.StatusOK {
			t.Errorf("%s: code %d", s.Addr(), code)
		}
	}
	h, _ := newChecks(t, false)
	one, other := freePort(t), freePort(t)
	if ps := h.Update([]netip.Addr{lo1}, []intent.HealthCheck{{Service: web, Port: one, Endpoints: 1},
		{Service: dns, Port: other, Endpoints: 1}}); ps != nil {
		t.Fatal(ps)
	}
	first := flood(t, netip.AddrPortFrom(lo1, one).String(), limits.Local/2)
	flood(t, netip.AddrPortFrom(lo1, other).String(), limits.Local/2+1)
	if !isReplaced(t, first) {
		t.Errorf("the ports of two Services have more than %d connections together", limits.Local)
	}
}
