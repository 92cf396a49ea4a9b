package otlp

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	collogs "go.opentelemetry.io/proto/otlp/collector/logs/v1"
	colmetrics "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	logs "go.opentelemetry.io/proto/otlp/logs/v1"
	"google.golang.org/protobuf/proto"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/observe/flowlog"
	"spillway.dev/spillway/test/await"
)

var opened = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// event is the n-th event: its reason is n.
func event(n int) dataplane.FlowEvent {
	return dataplane.FlowEvent{
		Kind: dataplane.FlowClosed, Time: opened.Add(time.Minute), Reason: fmt.Sprint(n),
		Flow: dataplane.EventFlow{
			Port:     intent.PortID{Service: model.Name{Namespace: "ns", Name: "web"}, Port: "http", Number: 80, Protocol: model.TCP},
			Protocol: model.TCP, Client: netip.MustParseAddrPort("10.0.0.1:4000"),
			ServiceAddress: netip.MustParseAddrPort("10.96.0.1:80"), Endpoint: netip.MustParseAddrPort("10.0.1.1:8080"),
			Opened: opened, LastSeen: opened.Add(1500 * time.Millisecond), Handshake: 2 * time.Millisecond,
			BytesToEndpoint: 100, PacketsToClient: 7,
		},
	}
}

func add(l *flowlog.Log, from, to int) {
	for n := from; n < to; n++ {
		l.Add([]dataplane.FlowEvent{event(n)})
	}
}

// collector takes requests, with the messages of the OTLP specification. answer may answer a
// request in its own way; it then returns true.
type collector struct {
	answer func(w http.ResponseWriter, r *http.Request) bool

	mu      sync.Mutex
	logs    []*collogs.ExportLogsServiceRequest
	metrics []*colmetrics.ExportMetricsServiceRequest
	more    chan struct{}
}

func newCollector() *collector { return &collector{more: make(chan struct{}, 1)} }

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if c.answer != nil && c.answer(w, r) {
		return
	}
	unzipped, err := gzip.NewReader(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	body, err := io.ReadAll(unzipped)
	var l collogs.ExportLogsServiceRequest
	var m colmetrics.ExportMetricsServiceRequest
	switch {
	case err != nil || r.Header.Get("Content-Type") != "application/x-protobuf":
		http.Error(w, "not protobuf", http.StatusBadRequest)
		return
	case r.URL.Path == "/v1/logs" && proto.Unmarshal(body, &l) == nil:
		c.mu.Lock()
		c.logs = append(c.logs, &l)
		c.mu.Unlock()
	case r.URL.Path == "/v1/metrics" && proto.Unmarshal(body, &m) == nil:
		c.mu.Lock()
		c.metrics = append(c.metrics, &m)
		c.mu.Unlock()
	default:
		http.Error(w, "another path", http.StatusNotFound)
		return
	}
	select {
	case c.more <- struct{}{}:
	default:
	}
}

// records returns the log records in their order.
func (c *collector) records() (out []*logs.LogRecord) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range c.logs {
		for _, resource := range r.ResourceLogs {
			for _, scope := range resource.ScopeLogs {
				out = append(out, scope.LogRecords...)
			}
		}
	}
	return out
}

func (c *collector) reasons() (out []string) {
	for _, r := range c.records() {
		out = append(out, attributesOf(r.Attributes)["spillway.flow.reason"])
	}
	return out
}

func attributesOf(list []*common.KeyValue) map[string]string {
	out := map[string]string{}
	for _, a := range list {
		text := fmt.Sprint(a.Value)
		_, out[a.Key], _ = strings.Cut(text, ":")
		out[a.Key] = strings.Trim(out[a.Key], `"`)
	}
	return out
}

// wait waits until done, which is asked after each request that the collector takes.
func (c *collector) wait(t *testing.T, done func() bool) {
	t.Helper()
	for !done() {
		select {
		case <-c.more:
		case <-t.Context().Done():
			t.Fatal("the test ended")
		}
	}
}

// lines is a log that goroutines write.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// start runs an Exporter with short pauses, and ends it with the test.
func start(t *testing.T, c Config) (*Exporter, *lines) {
	t.Helper()
	out := &lines{}
	c.Node, c.Version, c.Log = "n1", "1.2.3", slog.New(slog.NewTextHandler(out, nil))
	e, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	if e.logs != nil {
		e.logs.min, e.logs.pause = time.Millisecond, time.Millisecond
	}
	if e.metrics != nil {
		e.metrics.min = time.Millisecond
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- e.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return e, out
}

// wantRecords waits for a value of spillway_otlp_records_total.
func (e *Exporter) wantRecords(t *testing.T, outcome string, want float64) {
	t.Helper()
	for testutil.ToFloat64(e.records.WithLabelValues(outcome)) != want {
		select {
		case <-t.Context().Done():
			t.Fatalf("%s is not %v", outcome, want)
		case <-time.After(time.Millisecond):
		}
	}
}

func TestEventsAreLogRecords(t *testing.T) {
	c := newCollector()
	server := httptest.NewServer(c)
	defer server.Close()
	flows := flowlog.New(flowlog.Config{Node: "n1", Owners: func(_ context.Context, addrs []netip.Addr) ([]flowlog.Owner, error) {
		out := make([]flowlog.Owner, len(addrs))
		for i, a := range addrs {
			out[i] = flowlog.Owner{Pod: "ns/pod-" + a.String(), Node: "n2"}
		}
		return out, nil
	}})
	e, _ := start(t, Config{Endpoint: server.URL, Flows: flows})
	add(flows, 1, 2)
	flows.Add([]dataplane.FlowEvent{{Kind: dataplane.FlowDropped, Time: opened, Reason: "drop_no_route",
		Flow: dataplane.EventFlow{Protocol: model.UDP, ServiceAddress: netip.MustParseAddrPort("[fd00::1]:80")}}})
	c.wait(t, func() bool { return len(c.records()) == 2 })
	e.wantRecords(t, delivered, 2)
	r := c.records()[0]
	if r.EventName != "spillway.flow.closed" || r.SeverityText != "INFO" || r.TimeUnixNano != uint64(opened.Add(time.Minute).UnixNano()) ||
		r.Body.GetStringValue() != "flow closed: 1 (Service ns/web)" {
		t.Errorf("record %v", r)
	}
	want := map[string]string{
		"network.transport": "tcp", "network.type": "ipv4",
		"source.address": "10.0.0.1", "source.port": "4000",
		"spillway.source.k8s.namespace.name": "ns", "spillway.source.k8s.pod.name": "pod-10.0.0.1", "spillway.source.k8s.node.name": "n2",
		"destination.address": "10.96.0.1", "destination.port": "80",
		"k8s.namespace.name": "ns", "k8s.service.name": "web", "spillway.service.port.name": "http",
		"spillway.endpoint.address": "10.0.1.1", "spillway.endpoint.port": "8080",
		"spillway.endpoint.k8s.namespace.name": "ns", "spillway.endpoint.k8s.pod.name": "pod-10.0.1.1", "spillway.endpoint.k8s.node.name": "n2",
		"spillway.flow.reason": "1", "spillway.flow.by_socket": "false", "spillway.flow.duration": "1.5", "spillway.flow.handshake": "0.002",
		"spillway.flow.bytes_to_endpoint": "100", "spillway.flow.packets_to_client": "7",
	}
	if got := attributesOf(r.Attributes); !maps.Equal(got, want) {
		t.Errorf("attributes\n%v\nwant\n%v", got, want)
	}
	r = c.records()[1]
	want = map[string]string{
		"network.transport": "udp", "network.type": "ipv6", "destination.address": "fd00::1", "destination.port": "80",
		"spillway.flow.reason": "drop_no_route", "spillway.flow.by_socket": "false",
	}
	if got := attributesOf(r.Attributes); r.SeverityText != "WARN" || !maps.Equal(got, want) {
		t.Errorf("%s, attributes\n%v\nwant\n%v", r.SeverityText, got, want)
	}
	resource := attributesOf(c.logs[0].ResourceLogs[0].Resource.Attributes)
	for key, value := range map[string]string{"service.name": "spillway", "service.version": "1.2.3", "k8s.node.name": "n1",
		"service.instance.id": "n1"} {
		if resource[key] != value {
			t.Errorf("resource has %s %q, want %q", key, resource[key], value)
		}
	}
}

func TestMetricsAreThoseOfTheRegistry(t *testing.T) {
	c := newCollector()
	fail := true
	c.answer = func(w http.ResponseWriter, _ *http.Request) bool {
		defer func() { fail = false }()
		if fail {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		return fail
	}
	server := httptest.NewServer(c)
	defer server.Close()
	registry := prometheus.NewRegistry()
	counter := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "spillway_things_total", Help: "Things."}, []string{"kind"})
	histogram := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "spillway_things_duration_seconds", Help: "Time.",
		Buckets: []float64{1, 2}})
	registry.MustRegister(counter, histogram)
	counter.WithLabelValues("a").Add(3)
	histogram.Observe(1.5)
	e, _ := start(t, Config{Endpoint: server.URL, Metrics: registry, Interval: time.Millisecond})
	c.wait(t, func() bool { c.mu.Lock(); defer c.mu.Unlock(); return len(c.metrics) > 0 })
	if n := testutil.ToFloat64(e.readings.WithLabelValues(failed)); n != 1 {
		t.Errorf("%v readings failed", n)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	found := map[string]bool{}
	for _, scope := range c.metrics[0].ResourceMetrics[0].ScopeMetrics {
		for _, m := range scope.Metrics {
			found[m.Name] = true
			switch m.Name {
			case "spillway_things_total":
				p := m.GetSum().DataPoints[0]
				if p.GetAsDouble() != 3 || !m.GetSum().IsMonotonic || attributesOf(p.Attributes)["kind"] != "a" {
					t.Errorf("counter %v", m)
				}
			case "spillway_things_duration_seconds":
				if p := m.GetHistogram().DataPoints[0]; p.Count != 1 || p.GetSum() != 1.5 || !slices.Equal(p.BucketCounts, []uint64{0, 1, 0}) {
					t.Errorf("histogram %v", m)
				}
			}
		}
	}
	if len(found) != 2 {
		t.Errorf("metrics %v", found)
	}
}

// The first request gets an answer; the second is taken.
func TestAnswersOfTheCollector(t *testing.T) {
	status := func(code int) func(http.ResponseWriter) {
		return func(w http.ResponseWriter) {
			w.Header().Set("Retry-After", "0")
			http.Error(w, "because", code)
		}
	}
	for name, tt := range map[string]struct {
		answer   func(http.ResponseWriter)
		reasons  []string
		rejected float64
		warning  string
	}{
		"429":   {status(429), []string{"0", "1"}, 0, "because"},
		"503":   {status(503), []string{"0", "1"}, 0, "because"},
		"abort": {func(http.ResponseWriter) { panic(http.ErrAbortHandler) }, []string{"0", "1"}, 0, "EOF"},
		"500":   {status(500), []string{"1"}, 1, "500 Internal Server Error"},
		"400":   {status(400), []string{"1"}, 1, "because"},
		"endless": {func(w http.ResponseWriter) {
			for range 1000 {
				if _, err := w.Write(make([]byte, 4096)); err != nil {
					return
				}
			}
		}, []string{"0", "1"}, 0, "longer than 64 KiB"},
		"redirect": {func(w http.ResponseWriter) {
			w.Header().Set("Location", "http://127.0.0.1:1/")
			w.WriteHeader(http.StatusTemporaryRedirect)
		}, []string{"1"}, 1, "307"},
		"partial": {func(w http.ResponseWriter) {
			body, _ := proto.Marshal(&collogs.ExportLogsServiceResponse{PartialSuccess: &collogs.ExportLogsPartialSuccess{RejectedLogRecords: 1,
				ErrorMessage: "too old"}})
			w.Header().Set("Content-Type", "application/x-protobuf")
			_, _ = w.Write(body)
		}, []string{"1"}, 1, "too old"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCollector()
			first := make(chan struct{})
			var once sync.Once
			c.answer = func(w http.ResponseWriter, _ *http.Request) (answered bool) {
				once.Do(func() {
					close(first)
					answered = true
				})
				if answered {
					tt.answer(w)
				}
				return answered
			}
			server := httptest.NewServer(c)
			defer server.Close()
			flows := flowlog.New(flowlog.Config{Events: 8})
			e, out := start(t, Config{Endpoint: server.URL, Flows: flows})
			add(flows, 0, 1)
			<-first
			add(flows, 1, 2)
			e.wantRecords(t, rejected, tt.rejected)
			c.wait(t, func() bool { return len(c.reasons()) == len(tt.reasons) })
			if got := c.reasons(); !slices.Equal(got, tt.reasons) {
				t.Errorf("records %v, want %v", got, tt.reasons)
			}
			e.wantRecords(t, delivered, float64(len(tt.reasons)))
			e.wantRecords(t, missed, 0)
			if text := out.String(); strings.Count(text, "level=WARN") != 1 || !strings.Contains(text, tt.warning) {
				t.Errorf("log:\n%s", text)
			}
		})
	}
}

// The events that wait for a collector that is away are those of the ring.
func TestACollectorThatIsAwayAndComesBack(t *testing.T) {
	c := newCollector()
	server := httptest.NewServer(c)
	address := server.Listener.Addr().String()
	flows := flowlog.New(flowlog.Config{Events: 4})
	e, out := start(t, Config{Endpoint: "http://" + address, Flows: flows})
	add(flows, 0, 1)
	e.wantRecords(t, delivered, 1)
	server.Close()
	add(flows, 1, 2)
	await.True(t, "1 is on its way", func() bool { return strings.Contains(out.String(), "level=WARN") })
	add(flows, 2, 102)
	e.wantRecords(t, missed, 96)
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	back := &httptest.Server{Listener: listener, Config: &http.Server{Handler: c}}
	back.Start()
	defer back.Close()
	want := []string{"0", "1", "98", "99", "100", "101"}
	c.wait(t, func() bool { return len(c.reasons()) == len(want) })
	if got := c.reasons(); !slices.Equal(got, want) {
		t.Errorf("records %v, want %v", got, want)
	}
	e.wantRecords(t, delivered, float64(len(want)))
	e.wantRecords(t, missed, 96)
	if text := out.String(); strings.Count(text, "level=WARN") != 1 || strings.Count(text, "takes data again") != 1 {
		t.Errorf("log:\n%s", text)
	}
}

// A collector that never answers holds up no one who adds events, and not the end of the agent.
func TestACollectorThatHangs(t *testing.T) {
	c := newCollector()
	hanging, release := make(chan struct{}, 1), make(chan struct{})
	c.answer = func(_ http.ResponseWriter, r *http.Request) bool {
		_, _ = io.Copy(io.Discard, r.Body)
		select {
		case hanging <- struct{}{}:
		default:
		}
		select {
		case <-release:
		case <-r.Context().Done():
		}
		return true
	}
	server := httptest.NewServer(c)
	defer server.Close()
	defer close(release)
	flows := flowlog.New(flowlog.Config{Events: 4})
	e, err := New(Config{Endpoint: server.URL, Flows: flows, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- e.Run(ctx) }()
	add(flows, 0, 1)
	<-hanging
	add(flows, 1, 10_000)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestHeadersAndCertificates(t *testing.T) {
	c := newCollector()
	seen := make(chan string, 2)
	c.answer = func(_ http.ResponseWriter, r *http.Request) bool {
		seen <- fmt.Sprint(r.Header.Get("Authorization"), len(r.TLS.PeerCertificates))
		return false
	}
	server := httptest.NewUnstartedServer(c)
	server.TLS = &tls.Config{ClientAuth: tls.RequireAnyClientCert}
	server.StartTLS()
	defer server.Close()
	dir := t.TempDir()
	write := func(name, kind string, data []byte) string {
		path := filepath.Join(dir, name)
		if kind != "" {
			data = pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: data})
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	key, err := x509.MarshalPKCS8PrivateKey(server.TLS.Certificates[0].PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	cert := write("cert", "CERTIFICATE", server.Certificate().Raw)
	flows := flowlog.New(flowlog.Config{})
	config := Config{
		Endpoint: server.URL, Flows: flows, CAFile: cert, CertFile: cert, KeyFile: write("key", "PRIVATE KEY", key),
		HeadersFile: write("headers", "", []byte("Authorization: Bearer one\n\n")),
	}
	start(t, config)
	add(flows, 0, 1)
	if got := <-seen; got != "Bearer one1" {
		t.Errorf("the first request had %q", got)
	}
	write("headers", "", []byte("authorization:Bearer two"))
	add(flows, 1, 2)
	if got := <-seen; got != "Bearer two1" {
		t.Errorf("the second request had %q", got)
	}
	// Without its authority, the collector gets nothing.
	config.CAFile = ""
	_, out := start(t, config)
	add(flows, 2, 3)
	<-seen // the exporter from before
	await.True(t, "an error of the certificate", func() bool { return strings.Contains(out.String(), "certificate") })
	write("headers", "", []byte("Authorization: x\nhunter2\n"))
	if _, err := New(config); err == nil || !strings.Contains(err.Error(), "line 2") || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("error %v", err)
	}
	config.HeadersFile, config.CAFile = "", config.KeyFile
	if _, err := New(config); err == nil || !strings.Contains(err.Error(), "--otlp-ca-file") {
		t.Errorf("error %v", err)
	}
}

func TestCheckEndpoint(t *testing.T) {
	for _, tt := range []struct {
		address  string
		insecure bool
		err      string
	}{
		{"https://collector.example:4318", false, ""},
		{"https://collector.example/prefix", false, ""},
		{"http://127.0.0.1:4318", false, ""},
		{"http://[::1]:4318", false, ""},
		{"http://localhost:4318", false, ""},
		{"http://collector.example:4318", true, ""},
		{"http://collector.example:4318", false, "--otlp-insecure"},
		{"http://127.0.0.1.example:4318", false, "--otlp-insecure"},
		{"collector.example:4318", false, "not an address"},
		{"grpc://collector.example:4317", false, "not an address"},
		{"https://", false, "not an address"},
		{"https://me:hunter2@collector.example", false, "--otlp-headers-file"},
		{"https://collector.example?token=hunter2", false, "--otlp-headers-file"},
		{"https://hunter2 @", false, "not an address"},
	} {
		_, err := CheckEndpoint(tt.address, tt.insecure)
		if tt.err == "" && err != nil || tt.err != "" &&
			(err == nil || !strings.Contains(err.Error(), tt.err) || strings.Contains(err.Error(), "hunter2")) {
			t.Errorf("%s: error %v, want %q", tt.address, err, tt.err)
		}
	}
}

func TestBackOffIsBounded(t *testing.T) {
	s := signal{log: slog.New(slog.DiscardHandler), transport: &transport{}, min: minBackoff}
	for range 100 {
		if wait := s.failed(io.EOF); wait < minBackoff/2 || wait > maxBackoff {
			t.Fatalf("wait %v", wait)
		}
	}
	if s.backoff != maxBackoff {
		t.Errorf("back-off %v", s.backoff)
	}
	s.succeeded()
	s.transport.last.retryAfter = 24 * time.Hour
	if wait := s.failed(io.EOF); wait != maxBackoff {
		t.Errorf("a collector that asks for a day gets %v", wait)
	}
}
