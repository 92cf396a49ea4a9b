// Package load generates traffic and measures the answers: HTTP over kept connections,
// one connection for each request, and UDP request/response. Each runs as a closed loop,
// where the next request leaves after the last answer, or as an open loop at a fixed
// rate.
//
// In the open loop every request has an intended send time, and its latency counts from
// there. So a server that stalls for a second shows in all requests that fell into that
// second, not in one ("coordinated omission").
//
// One event loop for each thread drives all its connections with epoll and allocates
// nothing while it runs. On a small machine the generator must not be the bottleneck.
package load

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// Kind is the kind of traffic.
type Kind string

// The kinds of traffic.
const (
	// HTTP sends GET requests over connections that stay open.
	HTTP Kind = "http"
	// Conn opens a TCP connection for each GET request and resets it after the response,
	// so that neither end keeps a TIME_WAIT entry. The kernel selects another source port
	// each time.
	Conn Kind = "conn"
	// Memcached opens a TCP connection for each get of a missing key. It makes the server
	// close the connection, so that the client's port is free at once.
	Memcached Kind = "memcached"
	// UDP sends a datagram and waits for an answer.
	UDP Kind = "udp"
	// DNS requests an A and an AAAA record from one new socket at once, as a resolver
	// library does, and waits for both answers. Two threads send at the same moment, so
	// the requests race in conntrack.
	DNS Kind = "dns"
	// TFTP reads a file, each time from a new socket. It is a closed loop of one
	// thread.
	TFTP Kind = "tftp"
)

// Config describes a load. Zero values of Path, Timeout, Threads and Payload mean
// defaults; see Validate for required fields.
type Config struct {
	Kind   Kind
	Target netip.AddrPort
	// Sources are addresses to send from, in turns; none lets the kernel choose.
	Sources []netip.Addr
	// Connections is the maximum number of concurrent requests.
	Connections int
	// Rate is requests per second of an open loop; 0 is a closed loop.
	Rate float64
	// Duration is how long to measure, after Warmup, whose requests do not count.
	Duration, Warmup time.Duration
	// MaxRequests ends the run early when so many counted; 0 is no limit.
	MaxRequests int64
	// Timeout is the time limit of a request, from when it was really sent. Default: 5 s,
	// for UDP 1 s.
	Timeout time.Duration
	// Path and Host form the HTTP request. Defaults: "/" and the target.
	Path, Host string
	// Body makes requests POSTs of JSON.
	Body string
	// AnyStatus accepts every status as an answer, and counts each.
	AnyStatus bool
	// Delay is how long a connection of a closed loop waits after an answer.
	Delay time.Duration
	// Payload is the datagram of UDP, or the name of a DNS query. Default: "ping",
	// "example.test".
	Payload string
	// FreshPorts makes UDP use a new socket, so a new source port, for each request.
	FreshPorts bool
	// Threads is how many event loops share the connections. Default: 1.
	Threads int
	// Progress, if set, is called about twice a second with the state of the run.
	Progress func(Progress)
}

// Progress is how far a run is.
type Progress struct {
	Elapsed, Total   time.Duration // with the warm-up
	Answered, Failed int64         // after the warm-up
}

// datagrams reports whether answers are datagrams instead of HTTP responses.
func (c Config) datagrams() bool { return c.Kind == UDP || c.Kind == DNS }

// Limits of the rate of an open loop. Its schedule is in whole nanoseconds of an int64,
// and unsent due requests are counted one by one at the end.
const (
	minRate = 0.001
	maxRate = 1e6
)

// Validate reports the first thing in the config that cannot be run.
func (c Config) Validate() error {
	switch {
	case c.Kind != HTTP && c.Kind != Conn && c.Kind != Memcached && c.Kind != TFTP && !c.datagrams():
		return fmt.Errorf("unknown kind of load %q: use http, conn, memcached, udp, dns or tftp", c.Kind)
	case c.Kind == TFTP && (c.Rate != 0 || c.Threads > 1 || c.MaxRequests != 0 || c.Delay != 0 || len(c.Sources) > 0):
		return errors.New("tftp is a closed loop of one thread without a source: leave out rate, threads, max-requests, delay and source")
	case !c.Target.IsValid() || c.Target.Port() == 0:
		return errors.New("no target: give ADDRESS:PORT, [ADDRESS]:PORT for IPv6")
	case c.Connections < 1 || c.Connections > 60000:
		return fmt.Errorf("connections is %d: use 1 to 60000", c.Connections)
	case !(c.Rate == 0 || c.Rate >= minRate && c.Rate <= maxRate): // NaN fails both comparisons
		return fmt.Errorf("rate is %g: use 0 for a closed loop, else %g to %.0f requests per second", c.Rate, minRate, maxRate)
	case c.Duration <= 0 || c.Warmup < 0 || c.Timeout < 0 || c.MaxRequests < 0 || c.Delay < 0:
		return errors.New("duration must be more than 0; warmup, timeout, delay and max-requests not less")
	case c.Path != "" && (c.Path[0] != '/' || strings.ContainsFunc(c.Path+c.Host, func(r rune) bool { return r <= ' ' || r == 0x7f })):
		return fmt.Errorf("path %q: begin it with /, and leave blanks and control characters out of it and of the host", c.Path)
	case len(c.Body) > maxMessage:
		return fmt.Errorf("body is %d bytes: a socket takes %d at once", len(c.Body), maxMessage)
	case c.Delay > 0 && c.Rate > 0:
		return errors.New("delay and rate: give one of them: at a fixed rate nothing waits for an answer")
	case c.Threads < 0 || c.Threads > c.Connections:
		return fmt.Errorf("threads is %d: use 1 to the number of connections (%d)", c.Threads, c.Connections)
	}
	for _, s := range c.Sources {
		if s.Unmap().Is4() != c.Target.Addr().Unmap().Is4() {
			return fmt.Errorf("source %s and target %s are of different families", s, c.Target)
		}
	}
	if _, err := dnsQuestions(c.Payload); c.Kind == DNS && err != nil {
		return err
	}
	return nil
}

// withDefaults sets the defaults of empty fields.
func (c Config) withDefaults() Config {
	if c.Timeout == 0 {
		c.Timeout = 5 * time.Second
		if c.Kind == UDP || c.Kind == TFTP {
			c.Timeout = time.Second
		}
	}
	if c.Threads == 0 {
		c.Threads = 1
	}
	if c.Path == "" {
		c.Path = "/"
	}
	if c.Host == "" {
		c.Host = c.Target.String()
	}
	c.FreshPorts = c.FreshPorts || c.Kind == DNS
	if c.Payload == "" && c.Kind == UDP {
		c.Payload = "ping"
	}
	return c
}

// maxMessage limits a body: a socket must accept a whole request (tcp_wmem starts with 16
// KiB).
const maxMessage = 12 << 10

// message returns the bytes of one request. Even for Conn it tells HTTP servers to keep
// the connection. The reset then finds the server's socket open, and the server's FIN
// does not put it into TIME_WAIT.
func (c Config) message() []byte {
	switch c.Kind {
	case UDP:
		return []byte(c.Payload)
	case DNS:
		questions, _ := dnsQuestions(c.Payload) // Validate has checked it
		return questions[0]
	}
	if c.Kind == Memcached {
		return []byte("get nothing\r\nquit\r\n")
	}
	if c.Body != "" {
		return fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
			c.Path, c.Host, len(c.Body), c.Body)
	}
	return fmt.Appendf(nil, "GET %s HTTP/1.1\r\nHost: %s\r\n\r\n", c.Path, c.Host)
}

// Run generates the load and returns the result. When ctx ends, it returns the result so
// far, with Interrupted set, and no error.
func Run(ctx context.Context, cfg Config) (*Result, error) {
	if err := cfg.Validate(); err != nil {
		return nil, err
	}
	cfg = cfg.withDefaults()
	if cfg.Kind == TFTP {
		return runTFTP(ctx, cfg)
	}
	shared := &budget{left: cfg.MaxRequests, limited: cfg.MaxRequests > 0}
	stopWatching := context.AfterFunc(ctx, func() { shared.stop.Store(true) })
	defer stopWatching()

	loops := make([]*loop, cfg.Threads)
	for i := range loops {
		l, err := newLoop(cfg, i, shared)
		if err != nil {
			return nil, err
		}
		defer l.close()
		loops[i] = l
	}
	defer reportProgress(cfg, loops)()
	before := cpuSeconds()
	started := time.Now()
	var wg sync.WaitGroup
	for _, l := range loops {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			l.run(started)
		})
	}
	wg.Wait()
	cpu := cpuSeconds() - before
	return merge(cfg, loops, cpu, time.Since(started), ctx.Err() != nil), nil
}

// reportProgress reports the progress of the loops to cfg.Progress until stop is called.
func reportProgress(cfg Config, loops []*loop) (stop func()) {
	if cfg.Progress == nil {
		return func() {}
	}
	end, started := make(chan struct{}), time.Now()
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(500 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-end:
				return
			case <-tick.C:
			}
			p := Progress{Elapsed: time.Since(started), Total: cfg.Warmup + cfg.Duration}
			for _, l := range loops {
				p.Answered += l.seenAnswered.Load()
				p.Failed += l.seenFailed.Load()
			}
			cfg.Progress(p)
		}
	})
	return func() { close(end); wg.Wait() }
}

// budget is the shared state of the loops of one run.
type budget struct {
	stop    atomic.Bool // end now, report the result so far
	limited bool
	mu      sync.Mutex
	left    int64
}

// take uses one counted request and reports whether one was left. The last one ends the
// run.
func (b *budget) take() bool {
	if !b.limited {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left == 0 {
		return false
	}
	b.left--
	if b.left == 0 {
		b.stop.Store(true)
	}
	return true
}

// cpuSeconds is the CPU time this process has used, user and system.
func cpuSeconds() float64 {
	var u unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}
