package kube

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// ServerMonitor records the last answer of the API server. client-go does not report it. It
// treats a watch that times out like a watch that ends without an event, and a server
// that has silently disappeared looks idle. Make one with NewServerMonitor, and set it in
// Access and Config.
type ServerMonitor struct {
	// quiet is the time without an answer after which Run sends a request. timeout is the
	// longest time for its answer.
	quiet, timeout time.Duration
	ask            func(context.Context) error // set by Connect

	mu    sync.Mutex
	since time.Time // of the last answer; before the first, the start of the wait
	heard bool      // there was an answer
	why   error     // why the last request without an answer has none
	away  string    // why there has been none for too long; "": there was
}

// NewServerMonitor returns a ServerMonitor without any answer yet.
func NewServerMonitor() *ServerMonitor {
	return &ServerMonitor{quiet: 15 * time.Second, timeout: 10 * time.Second}
}

// answered records an answer of the server.
func (c *ServerMonitor) answered() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.since, c.heard, c.why = time.Now(), true, nil
}

func (c *ServerMonitor) unanswered(err error) {
	if errors.Is(err, context.Canceled) {
		return // by the caller of the request
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.why = err
}

// wrap returns a transport that records every answer, including refusals, and every read
// from its body.
func (c *ServerMonitor) wrap(rt http.RoundTripper) http.RoundTripper {
	return roundTripper(func(r *http.Request) (*http.Response, error) {
		resp, err := rt.RoundTrip(r)
		if err != nil {
			c.unanswered(err)
			return resp, err
		}
		c.answered()
		resp.Body = &answer{resp.Body, c}
		return resp, nil
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

// RoundTrip implements http.RoundTripper.
func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// answer is a body whose every read counts as an answer: a watch has a single body.
type answer struct {
	io.ReadCloser
	monitor *ServerMonitor
}

// Read implements io.Reader.
func (a *answer) Read(p []byte) (int, error) {
	n, err := a.ReadCloser.Read(p)
	if n > 0 {
		a.monitor.answered()
	}
	return n, err
}

// run sends a request when the server has been quiet, and calls changed when the server
// becomes unreachable or reachable, until ctx ends.
func (c *ServerMonitor) run(ctx context.Context, changed func()) {
	c.mu.Lock()
	c.since = time.Now()
	c.mu.Unlock()
	tick := time.NewTicker(c.quiet / 5)
	defer tick.Stop()
	for ctx.Err() == nil {
		if c.isQuiet() {
			limited, done := context.WithTimeout(ctx, c.timeout)
			err := c.ask(limited)
			done()
			if ctx.Err() == nil && err != nil && c.isQuiet() {
				c.unanswered(err)
			}
		}
		if ctx.Err() == nil && c.updateState() {
			changed()
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

func (c *ServerMonitor) isQuiet() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Since(c.since) >= c.quiet
}

// updateState decides whether the server is unreachable, and reports a change. It keeps
// the first reason, since the error differs between requests.
func (c *ServerMonitor) updateState() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.away
	switch {
	case time.Since(c.since) < c.quiet:
		c.away = ""
	case c.away == "" && c.why != nil:
		c.away = reason(c.why)
	case c.away == "":
		c.away = reason(context.DeadlineExceeded)
	}
	return (before == "") != (c.away == "")
}

// unreachableReason returns why the server is unreachable; "" if it is not.
func (c *ServerMonitor) unreachableReason() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.away
}

// Collectors returns the metrics of the monitor.
func (c *ServerMonitor) Collectors() []prometheus.Collector {
	locked := func(f func() float64) func() float64 {
		return func() float64 {
			c.mu.Lock()
			defer c.mu.Unlock()
			return f()
		}
	}
	return []prometheus.Collector{
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "spillway_api_server_reachable",
			Help: "1 while the API server answers; 0 before its first answer, and when a request gets no answer for 15 seconds or more. At 0, " +
				"changes have no effect on this node.",
		}, locked(func() float64 {
			if c.heard && c.away == "" {
				return 1
			}
			return 0
		})),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "spillway_api_server_silent_seconds",
			Help: "Seconds since the last data from the API server, or since the agent started to wait for it.",
		}, locked(func() float64 {
			if c.since.IsZero() {
				return 0
			}
			return time.Since(c.since).Seconds()
		})),
	}
}
