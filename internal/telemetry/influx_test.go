package telemetry

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/test/await"
)

// influxOf makes an Influx with a metric of each kind.
func influxOf(t *testing.T, c InfluxConfig) (*Influx, *bytes.Buffer) {
	t.Helper()
	reg := prometheus.NewRegistry()
	steps := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "spillway_steps_total", Help: "h"}, []string{"what", "empty"})
	took := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "kubeproxy_took_seconds", Help: "h", Buckets: []float64{0.5, 1}})
	never := prometheus.NewGauge(prometheus.GaugeOpts{Name: "spillway_never", Help: "h"})
	foreign := prometheus.NewGauge(prometheus.GaugeOpts{Name: "go_goroutines", Help: "h"})
	reg.MustRegister(steps, took, never, foreign)
	steps.WithLabelValues("a b,c=d", "").Add(3)
	took.Observe(0.7)
	never.Set(math.NaN())
	var log bytes.Buffer
	c.Gatherer, c.Node, c.Log = reg, "node 1", slog.New(slog.NewTextHandler(&log, nil))
	if c.Interval == 0 {
		c.Interval = time.Hour
	}
	i, err := NewInflux(c)
	if err != nil {
		t.Fatal(err)
	}
	return i, &log
}

func TestMetricsAreWrittenAsLineProtocol(t *testing.T) {
	i, _ := influxOf(t, InfluxConfig{URL: "http://h:1"})
	families, err := i.cfg.Gatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	want := "kubeproxy_took_seconds,node=node\\ 1 count=1,sum=0.7,0.5=0,1=1 1000000000\n" +
		"spillway_steps_total,node=node\\ 1,what=a\\ b\\,c\\=d value=3 1000000000\n"
	if got := string(influxLines(families, "node 1", time.Unix(1, 0))); got != want {
		t.Errorf("lines:\n%swant:\n%s", got, want)
	}
}

func TestTheWriteAddressIsCompleted(t *testing.T) {
	for in, want := range map[string]string{
		"http://h:8086":                                "http://h:8086/write?db=spillway&precision=ns",
		"http://h:8086/write?db=x":                     "http://h:8086/write?db=x&precision=ns",
		"https://h/api/v2/write?org=o&bucket=b":        "https://h/api/v2/write?bucket=b&org=o&precision=ns",
		"http://h:8086/write?db=x&precision=s&rp=week": "http://h:8086/write?db=x&precision=ns&rp=week",
		"h:8086": "", "ftp://h": "", "": "",
	} {
		if got, _, err := (InfluxConfig{URL: in}).writeURL(); got != want || (err == nil) != (want != "") {
			t.Errorf("%q gives %q, want %q: %v", in, got, want, err)
		}
	}
}

// TestNoSecretOfAnAddressIsShown checks refused and used addresses.
func TestNoSecretOfAnAddressIsShown(t *testing.T) {
	const secret = "hunter2"
	for _, address := range []string{
		"http://user:hunter2@h:8086/write?db=x", "http://:hunter2@h", "http://h:8086/write?db=x&u=user&p=hunter2", "http://h/write?P=hunter2",
		"http://h/write?token=hunter2",
		"http://h/api/v2/write?org=o&bucket=b&Authorization=Token+hunter2", "http://h/write?hunter2", "http://h/write?db=x;p=hunter2",
		"http://h/write?p=hunter2%zz",
		"htp://user:hunter2@h", "user:hunter2@h:8086", "http://user:hunter2@", "http://user:hunter2@h:port/", "http://h ost/?p=hunter2",
		"http://user:hunter2%@h", "//u:hunter2@h", "http://h/#hunter2?x=1\n:",
	} {
		c := InfluxConfig{URL: address}
		_, err := CheckInfluxURL(address)
		if err == nil {
			if u, _, _ := c.writeURL(); strings.Contains(u, secret) || !strings.Contains(address, "#") {
				t.Errorf("%s is taken as %s", address, u)
			}
			continue
		}
		if text := err.Error(); strings.Contains(text, secret) || strings.ContainsAny(text, "\n") {
			t.Errorf("%s: %s", address, text)
		}
		if _, err := NewInflux(c); err == nil || strings.Contains(err.Error(), secret) {
			t.Errorf("%s: %v", address, err)
		}
	}
	for _, address := range []string{"http://user@h/write?db=x", "http://h/write?db=x&u=user"} {
		if hasUser, err := CheckInfluxURL(address); err != nil || !hasUser {
			t.Errorf("%s: user %v, %v", address, hasUser, err)
		}
		if got, user, _ := (InfluxConfig{URL: address}).writeURL(); got != "http://h/write?db=x&precision=ns" || user != "user" {
			t.Errorf("%s: %s of user %q", address, got, user)
		}
	}
}

func TestAPasswordIsSentAndNotLogged(t *testing.T) {
	var status atomic.Int32
	status.Store(401)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, ok := r.BasicAuth(); !ok || user != "me" || password != "hunter2" || strings.Contains(r.URL.String(), "me") {
			t.Errorf("%s by %q with %q", r.URL, user, password)
		}
		w.WriteHeader(int(status.Load()))
	}))
	i, log := influxOf(t, InfluxConfig{URL: strings.Replace(s.URL, "http://", "http://me@", 1), Password: "hunter2"})
	i.cfg.Log = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	push := func() { i.read(time.Unix(1, 0)); i.deliver(t.Context()) }
	push()
	push()
	status.Store(204)
	push()
	s.Close() // no server answers
	push()
	if text := log.String(); strings.Count(text, "\n") != 4 || strings.Contains(text, "hunter2") || strings.Contains(text, "me@") {
		t.Errorf("log:\n%s", text)
	}
}

func TestAnInfluxDBThatFailsIsToldOnceAndGetsAllThatFitsLater(t *testing.T) {
	var status atomic.Int32
	var lines atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.Header.Get("Authorization") != "Token secret" {
			t.Errorf("authorization %q", r.Header.Get("Authorization"))
		}
		if w.WriteHeader(int(status.Load())); status.Load() == 204 {
			lines.Add(int64(bytes.Count(body, []byte("\n"))))
		}
	}))
	defer s.Close()
	i, log := influxOf(t, InfluxConfig{URL: s.URL, Token: "secret", Buffer: 2000})
	for round, code := range []int32{204, 500, 503, 429, 401} {
		status.Store(code)
		for range 30 {
			i.read(time.Unix(int64(round), 0))
			i.deliver(t.Context())
			if i.bytes > 2000 {
				t.Fatalf("%d bytes wait, want 2000 at most", i.bytes)
			}
		}
	}
	if got := strings.Count(log.String(), "\n"); got != 1 || !strings.Contains(log.String(), "500 Internal Server Error") {
		t.Errorf("%d lines of log, want one about 500:\n%s", got, log)
	}
	before, kept := lines.Load(), len(i.waiting)
	status.Store(204)
	i.deliver(t.Context())
	if got := lines.Load() - before; kept == 0 || got != int64(2*kept) || len(i.waiting) != 0 || i.bytes != 0 {
		t.Errorf("%d lines delivered later of %d readings; %d still wait", got, kept, len(i.waiting))
	}
	if got := strings.Count(log.String(), "\n"); got != 2 || !strings.Contains(log.String(), "takes metrics again") {
		t.Errorf("log:\n%s", log)
	}
	status.Store(400) // InfluxDB refuses these lines for ever
	i.read(time.Unix(9, 0))
	if i.deliver(t.Context()); len(i.waiting) != 0 {
		t.Errorf("%d readings that are refused are kept", len(i.waiting))
	}
}

func freeAddr(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// start runs a server until the test ends; its output is shown if the test fails.
func start(t *testing.T, program string, args ...string) {
	t.Helper()
	var out bytes.Buffer
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatalf("start %s: %v: install it with hack/deps test", program, err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		if cmd.Wait(); t.Failed() {
			t.Logf("%s: %s", program, out.String())
		}
	})
}

// getUntil repeats a request until the status is 200 and ok accepts the body.
func getUntil(t *testing.T, address string, ok func(body []byte) bool) {
	t.Helper()
	await.NoError(t, func() error {
		r, err := http.Get(address)
		if err != nil {
			return err
		}
		defer r.Body.Close()
		body, err := io.ReadAll(r.Body)
		if err == nil && (r.StatusCode != http.StatusOK || !ok(body)) {
			err = fmt.Errorf("%s: %s: %s", address, r.Status, body)
		}
		return err
	})
}

func TestARealInfluxDBTakesReadingsFromBeforeItWasThere(t *testing.T) {
	dir, addr := t.TempDir(), freeAddr(t)
	config := filepath.Join(dir, "influxdb.conf")
	err := os.WriteFile(config, []byte(fmt.Sprintf(`reporting-disabled = true
bind-address = %q
[meta]
dir = %q
[data]
dir = %q
wal-dir = %q
[http]
bind-address = %q
`, freeAddr(t), dir+"/meta", dir+"/data", dir+"/wal", addr)), 0o644)
	if err != nil {
		t.Fatal(err)
	}
	i, log := influxOf(t, InfluxConfig{URL: "http://" + addr})
	for s := range 3 {
		i.read(time.Unix(int64(1000+s), 0))
		i.deliver(t.Context())
	}
	if len(i.waiting) != 3 || strings.Count(log.String(), "\n") != 1 {
		t.Fatalf("%d readings wait for an InfluxDB that is away:\n%s", len(i.waiting), log)
	}
	start(t, "influxd", "run", "-config", config)
	query := func(db, q string) string {
		return "http://" + addr + "/query?" + url.Values{"db": {db}, "q": {q}, "epoch": {"s"}}.Encode()
	}
	getUntil(t, query("", "SHOW DATABASES"), func([]byte) bool { return true })
	if i.deliver(t.Context()); len(i.waiting) != 3 { // 404: no such database yet
		t.Fatalf("%d readings wait for a database that is not there", len(i.waiting))
	}
	r, err := http.Post(query("", "CREATE DATABASE spillway"), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, r.Body) // the header comes before the database exists
	r.Body.Close()
	if i.deliver(t.Context()); len(i.waiting) != 0 || !strings.Contains(log.String(), "takes metrics again") {
		t.Fatalf("%d readings still wait:\n%s", len(i.waiting), log)
	}
	getUntil(t, query("spillway", `SELECT value FROM spillway_steps_total WHERE what = 'a b,c=d' AND node = 'node 1'`),
		func(body []byte) bool {
			return strings.Contains(string(body), `[[1000,3],[1001,3],[1002,3]]`)
		})
	getUntil(t, query("spillway", `SELECT "sum", "0.5", "1" FROM kubeproxy_took_seconds`), func(body []byte) bool {
		return strings.Contains(string(body), `[1000,0.7,0,1]`)
	})
}

func TestARealPrometheusScrapesTheMetrics(t *testing.T) {
	m := NewMetrics(Build{Version: "v1"})
	s := httptest.NewServer(MetricsHandler(m, "ebpf", false))
	defer s.Close()
	dir, addr := t.TempDir(), freeAddr(t)
	config := filepath.Join(dir, "prometheus.yml")
	err := os.WriteFile(config, []byte(fmt.Sprintf(`scrape_configs:
- job_name: spillway
  scrape_interval: 1s
  static_configs: [{targets: [%q]}]
`, strings.TrimPrefix(s.URL, "http://"))), 0o644)
	if err != nil {
		t.Fatal(err)
	}
	start(t, "prometheus", "--config.file", config, "--storage.tsdb.path", dir+"/data", "--web.listen-address", addr)
	for query, want := range map[string]string{
		`up{job="spillway"}`:                                   "1",
		`spillway_build_info{version="v1"}`:                    "1",
		`kubeproxy_network_programming_duration_seconds_count`: "0",
	} {
		getUntil(t, "http://"+addr+"/api/v1/query?"+url.Values{"query": {query}}.Encode(), func(body []byte) bool {
			var a struct {
				Data struct{ Result []struct{ Value [2]any } }
			}
			return json.Unmarshal(body, &a) == nil && len(a.Data.Result) == 1 && a.Data.Result[0].Value[1] == want
		})
	}
}

func TestThePushEndsWithItsContext(t *testing.T) {
	i, _ := influxOf(t, InfluxConfig{URL: "http://" + freeAddr(t), Interval: time.Millisecond})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := i.Run(ctx); err != nil {
		t.Error(err)
	}
}
