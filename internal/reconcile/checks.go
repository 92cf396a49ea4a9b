package reconcile

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/outlier"
)

const (
	// checkTimeout is how long an endpoint may take to answer the agent's connections.
	checkTimeout = 500 * time.Millisecond
	// checkGrace follows it: on a busy machine the agent may not have run at the timeout, and the kernel may
	// have an answer for it.
	checkGrace = 50 * time.Millisecond
	// checkTries is the number of these connections: the network may lose a packet of one.
	checkTries = 2
	// checksMax bounds the checks at one time.
	checksMax = 256
)

// checks are the connections by which the agent asks endpoints whether they accept one.
type checks struct {
	connect func(context.Context, netip.AddrPort) error
	running map[outlier.Check]struct{} // of Run's goroutine

	mu    sync.Mutex
	ended []outlier.Result
}

// start begins the checks that are not running, as many as there is room for. A namespace gets
// at most half of what the others leave, so none can delay the checks of another for long.
func (c *checks) start(ctx context.Context, wanted []outlier.Check) {
	perNamespace := map[string]int{}
	for check := range c.running {
		perNamespace[check.Port.Service.Namespace]++
	}
	for _, check := range wanted {
		own := perNamespace[check.Port.Service.Namespace]
		if _, runs := c.running[check]; runs || own >= checksMax-len(c.running) {
			continue
		}
		perNamespace[check.Port.Service.Namespace]++
		c.running[check] = struct{}{}
		go func() {
			answer := answerOf(c.ask(ctx, check.Endpoint))
			c.mu.Lock()
			defer c.mu.Unlock()
			c.ended = append(c.ended, outlier.Result{Check: check, Answer: answer})
		}()
	}
}

// results returns the results of the checks that have ended since the last call.
func (c *checks) results() []outlier.Result {
	c.mu.Lock()
	defer c.mu.Unlock()
	results := c.ended
	c.ended = nil
	for _, r := range results {
		delete(c.running, r.Check)
	}
	return results
}

// ask connects to an endpoint, and returns the first answer.
func (c *checks) ask(ctx context.Context, endpoint netip.AddrPort) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answers := make(chan error, checkTries)
	for range checkTries {
		go func() { answers <- c.connect(ctx, endpoint) }()
	}
	timeout, grace := time.After(checkTimeout), (<-chan time.Time)(nil)
	for left := checkTries; left > 0; {
		select {
		case err = <-answers:
			if !unanswered(err) {
				return err
			}
			left--
		case <-timeout:
			grace = time.After(checkGrace)
		case <-grace:
			return context.DeadlineExceeded
		}
	}
	return err
}

// connect opens a connection and closes it.
func connect(ctx context.Context, endpoint netip.AddrPort) error {
	conn, err := (&net.Dialer{KeepAlive: -1}).DialContext(ctx, "tcp", endpoint.String())
	if err != nil {
		return err
	}
	return conn.Close()
}

// unanswered reports whether a connection has failed for want of an answer: neither the endpoint
// nor its node has sent one, or a router has said that they cannot be reached.
func unanswered(err error) bool {
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, unix.ETIMEDOUT) ||
		errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.ENETUNREACH)
}

func answerOf(err error) outlier.Answer {
	switch {
	case err == nil:
		return outlier.Accepted
	case unanswered(err) || errors.Is(err, unix.ECONNREFUSED):
		return outlier.Failed
	}
	return outlier.Unknown
}
