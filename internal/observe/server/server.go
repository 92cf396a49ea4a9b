// Package server serves the agent's API (api/proto): gRPC, gRPC-Web and Connect, which is
// JSON over HTTP. It only reads.
//
//	client ──> listener (Unix socket, or TCP with mTLS) ──> limits ──> service ─┬─> reconcile: decisions
//	                                                                            └─> dataplane.Inspector: the kernel
//
// A client never costs the dataplane more than a short question between two turns of
// reconcile: the numbers of connections, requests and streams, and the sizes of messages are
// limited, and requests have deadlines.
package server

import (
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"
	"golang.org/x/sync/singleflight"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/observe/flowlog"
	"spillway.dev/spillway/internal/reconcile"
)

// State is what the agent knows and decides; *reconcile.Reconciler implements it.
type State interface {
	Status() reconcile.Status
	Services(ctx context.Context, namespace string, after model.Name, limit int) ([]reconcile.Service, error)
	Service(ctx context.Context, name model.Name) (reconcile.Service, bool, error)
	Names(ctx context.Context, addrs []reconcile.Address) error
	Pods(ctx context.Context, namespace, name string) ([]intent.Pod, error)
}

// Events follows flows in the kernel. Any goroutine may call its methods.
type Events interface {
	// Counts returns how many events arrived, were lost, and were left out on purpose.
	Counts() *nodev1alpha1.Events
	// Watch calls send with the events that the request selects until ctx ends or send
	// fails, whose error it returns. A slow send costs events, not memory. The first call
	// has no events: it says what is reported.
	Watch(ctx context.Context, req *nodev1alpha1.WatchFlowsRequest, send func(*nodev1alpha1.WatchFlowsResponse) error) error
	// Visit calls visit with the events in memory since a time that the filter selects. It
	// does not wait for others.
	Visit(filter flowlog.Filter, since time.Time, visit func(*flowlog.Event)) error
}

// Config configures a Server; see Validate.
type Config struct {
	Node, Version, Commit, ProxyMode string
	State                            State
	// Backends are the dataplanes of the node. Those that are Inspectors are read.
	Backends []dataplane.Backend
	Events   Events                  // nil: WatchFlows is not implemented
	Denials  dataplane.DenialCounter // nil: denied packets are not found
	Socket   string                  // path of the Unix socket; "": none
	TCP      TCP                     // the zero TCP: none
	// OnProblems, if not nil, receives all current Problems of the listeners each time that
	// they change. It must not block.
	OnProblems func([]model.Problem)
	Findings   *Findings    // that the server keeps; nil: its own
	Logger     *slog.Logger // nil: slog.Default()

	// For tests; nil and 0: those of an agent.
	listeners                          func() ([]kernel.Listener, error)
	addrs                              func() ([]netip.Addr, error) // of the node
	examine                            func(context.Context) (*doctor.Node, error)
	retry, writeTimeout, headerTimeout time.Duration
	watchPause                         time.Duration
}

// Validate returns an error if a field is missing.
func (c Config) Validate() error {
	switch {
	case c.State == nil:
		return errors.New("no state")
	case c.TCP != (TCP{}):
		return c.TCP.Validate()
	}
	return nil
}

// Limits of the server.
const (
	maxConnections = 64 // from other machines, and as many from this one
	maxPerAddress  = 16 // of those, from one address or IPv6 /64
	maxRequests    = 16 // at once, without streams
	maxStreams     = 16 // at once
	maxRequest     = 64 << 10
	maxResponse    = 32 << 20
	pageBytes      = 1 << 20 // of a response that has pages, and a Service more
	requestTimeout = 10 * time.Second
	findingTimeout = time.Minute
	headerTimeout  = 5 * time.Second  // of a handshake, and of the header of a request
	writeTimeout   = 30 * time.Second // of a client that does not read
)

// Server serves the API. Make one with New.
type Server struct {
	cfg      Config
	log      *slog.Logger
	started  time.Time
	requests chan struct{}
	streams  chan struct{}
	counting chan struct{} // who has the one place may read the whole flow table for one client

	examining  singleflight.Group // one examination at a time
	evaluating chan struct{}      // who has the one place may use the next four
	examined   examination
	read       trafficReading
	walk       flowWalk
	clients    cgroupClients
	findings   *Findings
	netns      uint64 // see StatusResponse.network_namespace
	denials    recent // by policy
	direct     recent
	egress     recent

	mu       sync.Mutex
	problems [kinds]model.Problem // zero: none
}

// New returns a Server; Run serves.
func New(cfg Config) (*Server, error) {
	if err := cfg.Validate(); err != nil {
		return nil, fmt.Errorf("configure the API: %w", err)
	}
	cfg.watchPause = cmp.Or(cfg.watchPause, watchPause)
	cfg.headerTimeout = cmp.Or(cfg.headerTimeout, headerTimeout)
	cfg.retry, cfg.writeTimeout = cmp.Or(cfg.retry, retry), cmp.Or(cfg.writeTimeout, writeTimeout)
	s := &Server{
		cfg: cfg, log: cmp.Or(cfg.Logger, slog.Default()), started: time.Now(),
		requests: make(chan struct{}, maxRequests), streams: make(chan struct{}, maxStreams),
		counting: make(chan struct{}, 1), evaluating: make(chan struct{}, 1), netns: ownNetns(),
		findings: cmp.Or(cfg.Findings, NewFindings(nil)),
	}
	if s.cfg.examine == nil {
		s.cfg.examine = s.examineHere
	}
	return s, nil
}

// Handler returns the handler of all requests.
func (s *Server) Handler() http.Handler {
	options := []connect.HandlerOption{
		connect.WithInterceptors(limits{s}),
		connect.WithReadMaxBytes(maxRequest),
		connect.WithSendMaxBytes(maxResponse),
		connect.WithCompressMinBytes(4096),
		connect.WithCompression("gzip", func() connect.Decompressor { return &gzip.Reader{} }, fastGzip),
		connect.WithRecover(s.recover),
	}
	mux := http.NewServeMux()
	mux.Handle(nodev1alpha1connect.NewNodeServiceHandler(service{s}, options...))
	names := grpcreflect.NewStaticReflector(nodev1alpha1connect.NodeServiceName)
	mux.Handle(grpcreflect.NewHandlerV1(names, options...))
	mux.Handle(grpcreflect.NewHandlerV1Alpha(names, options...))
	return s.deadlines(mux)
}

// fastGzip spends the node's CPU time rather than the reader's bytes, as little as it can.
func fastGzip() connect.Compressor {
	w, err := gzip.NewWriterLevel(io.Discard, gzip.BestSpeed)
	if err != nil {
		panic(err) // the level exists
	}
	return w
}

// recover turns a panic into an error of the one request.
func (s *Server) recover(_ context.Context, spec connect.Spec, _ http.Header, what any) error {
	s.log.Error("the API failed; this is a bug", "method", spec.Procedure, "what", what)
	return connect.NewError(connect.CodeInternal, errors.New("the agent's API failed; its log has the reason"))
}

// limits bounds the number of requests and of streams, and the duration of requests.
type limits struct{ s *Server }

func (l limits) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		leave, err := enter(l.s.requests, "requests")
		if err != nil {
			return nil, err
		}
		defer leave()
		timeout := requestTimeout
		if req.Spec().Procedure == nodev1alpha1connect.NodeServiceFindingsProcedure {
			timeout = findingTimeout
		}
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		resp, err := next(ctx, req)
		return resp, coded(err)
	}
}

func (l limits) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (l limits) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		leave, err := enter(l.s.streams, "streams")
		if err != nil {
			return err
		}
		defer leave()
		return coded(next(ctx, conn))
	}
}

// enter takes a place; the caller must call leave.
func enter(places chan struct{}, of string) (leave func(), err error) {
	select {
	case places <- struct{}{}:
		return func() { <-places }, nil
	default:
		return nil, connect.NewError(connect.CodeResourceExhausted,
			fmt.Errorf("the agent answers %d %s at once: end one, or try again", cap(places), of))
	}
}

// coded gives errors of the agent the code that tells a client what to do.
func coded(err error) error {
	var known *connect.Error
	switch {
	case err == nil || errors.As(err, &known):
		return err
	case errors.Is(err, reconcile.ErrBusy):
		return connect.NewError(connect.CodeUnavailable, err)
	case errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeDeadlineExceeded, err)
	case errors.Is(err, context.Canceled):
		return connect.NewError(connect.CodeCanceled, err)
	}
	return connect.NewError(connect.CodeInternal, err)
}

// deadlines ends the connection of a client that does not read what it asked for.
func (s *Server) deadlines(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d := &deadlineWriter{w, http.NewResponseController(w), s.cfg.writeTimeout}
		d.end() // that of the request before on this connection
		next.ServeHTTP(d, r)
		d.begin() // of what is still buffered
	})
}

// deadlineWriter gives each write of a response a deadline of its own. Between two writes
// there is none: a stream may be silent for long, and net/http resets one of HTTP/2 when its
// deadline passes, whether or not a write waits.
type deadlineWriter struct {
	http.ResponseWriter
	control *http.ResponseController
	timeout time.Duration
}

func (w *deadlineWriter) begin() { _ = w.control.SetWriteDeadline(time.Now().Add(w.timeout)) }
func (w *deadlineWriter) end()   { _ = w.control.SetWriteDeadline(time.Time{}) }

func (w *deadlineWriter) Write(b []byte) (int, error) {
	w.begin()
	defer w.end()
	return w.ResponseWriter.Write(b)
}

// Flush implements http.Flusher, which gRPC needs.
func (w *deadlineWriter) Flush() { _ = w.FlushError() }

// FlushError is Flush for http.ResponseController.
func (w *deadlineWriter) FlushError() error {
	w.begin()
	defer w.end()
	return w.control.Flush()
}

// Unwrap is for http.ResponseController.
func (w *deadlineWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
