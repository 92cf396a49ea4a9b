// Package otlp sends flow events and metrics to an OpenTelemetry collector, by OTLP over HTTP
// with the encoding protobuf:
//
//	flowlog ──Next──> log records ──┐
//	Prometheus registry ──bridge────┴──> collector
//
// A collector cannot hold up the agent. Events that wait for it are those in the ring of
// flowlog, and nowhere else: a collector that is slow or away misses the oldest, and they are
// counted. A reading of the metrics that fails is dropped, since the next one has all of them.
package otlp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/sdk/resource"
	semconv "go.opentelemetry.io/otel/semconv/v1.40.0"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/observe/flowlog"
)

// Config configures an Exporter.
type Config struct {
	// Endpoint is the base address of the collector, such as http://127.0.0.1:4318; v1/logs
	// and v1/metrics are appended. It has no secret: every user of the machine can read a
	// program's arguments.
	Endpoint string
	Insecure bool // allows http:// to other hosts than the node itself

	// Files in PEM; "": none. CAFile replaces the system's authorities.
	CAFile, CertFile, KeyFile string
	// HeadersFile has a header a line, "Name: value"; "": none. It is read for each request,
	// so that a token in it can be replaced.
	HeadersFile string

	Node, Version string
	Flows         *flowlog.Log              // nil: no events are sent
	FlowKinds     []dataplane.FlowEventKind // that are sent; none: all
	Metrics       prometheus.Gatherer       // nil: no metrics are sent
	Interval      time.Duration             // between two readings of the metrics
	Log           *slog.Logger
}

const (
	// requestTimeout bounds one request.
	requestTimeout = 10 * time.Second
	// batchPause is the time in which events are collected for the next request.
	batchPause = time.Second
	// The pauses after failures double from minBackoff to maxBackoff. The collector may ask
	// for maxBackoff at most.
	minBackoff = time.Second
	maxBackoff = time.Minute
	// logEvery is the least time between two warnings about one signal.
	logEvery = time.Minute
)

// Exporter sends flow events and metrics. Run may be called once.
type Exporter struct {
	cfg      Config
	endpoint *url.URL
	resource *resource.Resource
	logs     *logExporter    // nil: off
	metrics  *metricExporter // nil: off

	records  *prometheus.CounterVec
	readings *prometheus.CounterVec
}

// The outcomes of records and readings in metrics.
const (
	delivered = "delivered"
	rejected  = "rejected"
	missed    = "missed"
	failed    = "failed"
)

// New checks the configuration and its files, and starts to watch events. The caller must
// call Run, which ends that.
func New(c Config) (*Exporter, error) {
	endpoint, err := CheckEndpoint(c.Endpoint, c.Insecure)
	if err != nil {
		return nil, err
	}
	e := &Exporter{
		cfg: c, endpoint: endpoint,
		resource: resource.NewWithAttributes(semconv.SchemaURL,
			semconv.ServiceName("spillway"), semconv.ServiceVersion(c.Version), semconv.ServiceInstanceID(c.Node), semconv.K8SNodeName(c.Node)),
		records: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "spillway_otlp_records_total", Help: "Flow events by outcome: delivered to the OpenTelemetry collector, rejected by it, or " +
				"missed because it was too slow or could not be reached.",
		}, []string{"outcome"}),
		readings: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "spillway_otlp_readings_total", Help: "Readings of all metrics by outcome: delivered to the OpenTelemetry collector, or " +
				"failed. The next reading has their values.",
		}, []string{"outcome"}),
	}
	if c.Flows == nil && c.Metrics == nil {
		return e, nil // describes its metrics alone
	}
	if _, err := readHeaders(c.HeadersFile); err != nil {
		return nil, err
	}
	if c.Metrics != nil {
		if e.metrics, err = newMetricExporter(e); err != nil {
			return nil, err
		}
	}
	if c.Flows != nil {
		if e.logs, err = newLogExporter(e); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// CheckEndpoint parses the base address of a collector. Its error quotes no secret.
func CheckEndpoint(address string, insecure bool) (*url.URL, error) {
	u, err := url.Parse(address)
	switch {
	case err != nil, u.Scheme != "http" && u.Scheme != "https", u.Hostname() == "":
		return nil, errors.New("not an address: write https://HOST:4318 or http://127.0.0.1:4318")
	case u.User != nil || u.RawQuery != "" || u.Fragment != "":
		return nil, errors.New("has a user, a query or a fragment, which every user of the machine can read: write credentials to a file, " +
			"and give --otlp-headers-file")
	case u.Scheme == "http" && !insecure && !loopback(u.Hostname()):
		return nil, errors.New("http:// to another host is neither encrypted nor authenticated: write https://, or give --otlp-insecure")
	}
	return u, nil
}

func loopback(host string) bool {
	addr, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && addr.IsLoopback()
}

// Describe implements prometheus.Collector.
func (e *Exporter) Describe(ch chan<- *prometheus.Desc) {
	e.records.Describe(ch)
	e.readings.Describe(ch)
}

// Collect implements prometheus.Collector.
func (e *Exporter) Collect(ch chan<- prometheus.Metric) {
	e.records.Collect(ch)
	e.readings.Collect(ch)
}

// Run sends until ctx ends, and then returns nil. What was not sent by then is lost.
func (e *Exporter) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	if e.logs != nil {
		wg.Go(func() { e.logs.run(ctx) })
	}
	if e.metrics != nil {
		wg.Go(func() { e.metrics.run(ctx) })
	}
	<-ctx.Done()
	return nil
}

// client returns a client of a signal's own, and the transport that notes its answers.
func (e *Exporter) client() (*http.Client, *transport, error) {
	config, err := tlsConfig(e.cfg)
	if err != nil {
		return nil, nil, err
	}
	t := &transport{headersFile: e.cfg.HeadersFile, base: &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: config,
		DialContext:       (&net.Dialer{Timeout: requestTimeout}).DialContext,
		ForceAttemptHTTP2: true, MaxConnsPerHost: 2, IdleConnTimeout: 90 * time.Second,
		TLSHandshakeTimeout: requestTimeout, MaxResponseHeaderBytes: maxAnswer,
	}}
	return &http.Client{Timeout: requestTimeout, Transport: t, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse // the headers are for one address
	}}, t, nil
}

// signal is what logs and metrics have in common. One goroutine uses it.
type signal struct {
	what, url string // for the log
	log       *slog.Logger
	transport *transport

	backoff  time.Duration // the last one; 0: no failure
	min      time.Duration // the first back-off
	warnedAt time.Time
	warned   bool // about the failures that continue
}

func (e *Exporter) signal(what string) (*signal, *http.Client, error) {
	client, t, err := e.client()
	if err != nil {
		return nil, nil, err
	}
	return &signal{what: what, url: e.endpoint.JoinPath("v1", what).String(), log: e.cfg.Log, transport: t, min: minBackoff}, client, nil
}

// failed notes a failure, and returns the time until the next request. A collector that
// fails and recovers all the time makes one warning a minute.
func (s *signal) failed(err error) time.Duration {
	if now := time.Now(); s.warnedAt.IsZero() || now.Sub(s.warnedAt) >= logEvery {
		s.warnedAt, s.warned = now, true
		s.log.Warn("OpenTelemetry collector does not take data; sending it again later", "signal", s.what, "url", s.url, "err", short(err))
	} else {
		s.log.Debug("OpenTelemetry collector does not take data", "signal", s.what, "url", s.url, "err", short(err))
	}
	s.backoff = min(max(2*s.backoff, s.min), maxBackoff)
	// The agents of a cluster do not all come back at once.
	wait := s.backoff/2 + rand.N(s.backoff/2+1)
	return max(wait, min(s.transport.last.retryAfter, maxBackoff))
}

func (s *signal) succeeded() {
	if s.warned {
		s.log.Info("OpenTelemetry collector takes data again", "signal", s.what, "url", s.url)
	}
	s.warned, s.backoff = false, 0
}

// maxError is the maximum length of a collector's error in the log.
const maxError = 300

func short(err error) string {
	var u *url.Error
	if errors.As(err, &u) {
		err = u.Err // the log has the URL
	}
	text := err.Error()
	if len(text) > maxError {
		text = fmt.Sprintf("%.*s...", maxError, text)
	}
	return text
}

// sleep returns false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
