package telemetry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"strconv"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"spillway.dev/spillway/internal/limitlistener"
)

// Health is the input of /healthz, /livez and the healthCheckNodePorts.
type Health struct {
	// Timeout is the longest time that a change may wait for the kernel before the
	// proxy counts as unhealthy; kube-proxy uses twice the sync period.
	Timeout time.Duration
	// Pending returns the time since which a change waits, zero if none waits or the
	// source has not delivered yet. It also returns the time at which the kernel last had
	// every change, zero before the first time.
	Pending func() (since, lastSynced time.Time)
	// Leaving reports whether the node is being removed or has been; nil: never.
	Leaving func() bool
}

// Serving reports whether the kernel has had every change once, and no change has waited
// longer than Timeout since.
func (h Health) Serving() bool {
	healthy, synced := h.state(time.Now())
	return healthy && !synced.IsZero()
}

func (h Health) state(now time.Time) (healthy bool, lastSynced time.Time) {
	since, lastSynced := h.Pending()
	return since.IsZero() || now.Sub(since) < h.Timeout, lastSynced
}

// HealthHandler serves /healthz and /livez with kube-proxy's bodies.
func HealthHandler(h Health, m *Metrics) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		// A node that is being removed gets no new connections from load balancers;
		// /livez is not affected, since the proxy itself is healthy (KEP-3836). The
		// same holds before the proxy's first sync; kube-proxy does not serve
		// /healthz before it has seen its Node.
		_, synced := h.Pending()
		eligible := !synced.IsZero() && (h.Leaving == nil || !h.Leaving())
		code, last, now := h.answer(eligible)
		m.healthz.WithLabelValues(strconv.Itoa(code)).Inc()
		jsonHeader(w, code)
		fmt.Fprintf(w, `{"lastUpdated": %q,"currentTime": %q, "nodeEligible": %v}`, last, now, eligible)
	})
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) {
		code, last, now := h.answer(true)
		m.livez.WithLabelValues(strconv.Itoa(code)).Inc()
		jsonHeader(w, code)
		fmt.Fprintf(w, `{"lastUpdated": %q,"currentTime": %q}`, last, now)
	})
	return mux
}

// answer returns the status code and the two times. As with kube-proxy, a healthy proxy
// reports the current time as its last update, even without an update.
func (h Health) answer(eligible bool) (code int, last, now string) {
	t := time.Now()
	healthy, synced := h.state(t)
	if healthy && eligible {
		return http.StatusOK, t.Format(time.RFC3339Nano), t.Format(time.RFC3339Nano)
	}
	return http.StatusServiceUnavailable, synced.Format(time.RFC3339Nano), t.Format(time.RFC3339Nano)
}

func jsonHeader(w http.ResponseWriter, code int) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
}

// MetricsHandler serves /metrics, /proxyMode and, if asked, /debug/pprof/.
func MetricsHandler(m *Metrics, proxyMode string, profiling bool) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		Registry:      m.registry,               // which counts the errors
		ErrorHandling: promhttp.ContinueOnError, // one collector that fails hides no others
	}))
	mux.HandleFunc("/proxyMode", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		fmt.Fprint(w, proxyMode)
	})
	if profiling {
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	return mux
}

// Server is an HTTP server that listens.
type Server struct {
	http *http.Server
	addr net.Addr
}

// Serve listens on addr, "IP:port", and serves until Close. It returns once it listens, or
// with an error such as an address in use. For an empty addr it returns a nil Server,
// whose methods do nothing.
func Serve(ctx context.Context, addr string, h http.Handler, log *slog.Logger) (*Server, error) {
	if addr == "" {
		return nil, nil
	}
	l, err := listen(ctx, addr)
	if err != nil {
		return nil, err
	}
	limiter := limitlistener.New(limits)
	s := &Server{http: newHTTPServer(h, log), addr: l.Addr()}
	go func() {
		if err := s.http.Serve(limiter.Listener(l)); !errors.Is(err, http.ErrServerClosed) {
			log.Error("serving ended", "address", addr, "err", err)
		}
	}()
	return s, nil
}

// Addr returns the address of the listener, "" for a nil Server.
func (s *Server) Addr() string {
	if s == nil {
		return ""
	}
	return s.addr.String()
}

// Close stops the server.
func (s *Server) Close() error {
	if s == nil {
		return nil
	}
	return s.http.Close()
}

// limits are those of one server, and of all healthCheckNodePorts together.
var limits = limitlistener.Limits{Remote: 128, PerAddress: 16, Local: 64}

// requestTimeout is the time for a request and its answer; a profile takes as long as its
// client asks.
const requestTimeout = 2 * time.Minute

// idleTimeout is the time for which a connection may wait for a request.
const idleTimeout = time.Minute

func newHTTPServer(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       requestTimeout,
		WriteTimeout:      requestTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
}

// listen calls net.Listen and returns an error of one short line: "listen on
// 127.0.0.1:80: address already in use".
func listen(ctx context.Context, addr string) (net.Listener, error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", addr)
	if err == nil {
		return l, nil
	}
	var no syscall.Errno
	var sys *os.SyscallError
	switch {
	case errors.As(err, &no):
		err = no
	case errors.As(err, &sys):
		err = sys
	}
	return nil, fmt.Errorf("listen on %s: %w", addr, err)
}
