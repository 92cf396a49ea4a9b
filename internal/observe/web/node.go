package web

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/http/httputil"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
)

// node is a Node with the ways to it.
type node struct {
	id        int
	proxy     http.Handler
	client    nodev1alpha1connect.NodeServiceClient
	transport *http.Transport

	mu     sync.Mutex
	is     Node
	watch  string // why the latest attempt to watch flows failed
	failed error  // of a slow Dial
	until  time.Time
}

// dialTime limits how long an agent may take to accept a connection, and answerTime to begin
// an answer. A Dial that failed after slowDial or later is not repeated for dialPause: a page
// calls every 2 s, and a node that hangs must not delay the others.
const (
	dialTime   = 5 * time.Second
	answerTime = 20 * time.Second
	slowDial   = 2 * time.Second
	dialPause  = 10 * time.Second
)

func newNode(id int, is Node) *node {
	n := &node{id: id, is: is}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) { return n.dial(ctx) }
	n.transport = &http.Transport{DialContext: dial, MaxIdleConnsPerHost: 4, IdleConnTimeout: time.Minute}
	if is.OneConnection {
		n.transport.Protocols = &http.Protocols{}
		n.transport.Protocols.SetUnencryptedHTTP2(true)
		// Events that the page does not read in time are counted by the agent, not kept here.
		n.transport.HTTP2 = &http.HTTP2Config{SendPingTimeout: 15 * time.Second, PingTimeout: 15 * time.Second,
			MaxReceiveBufferPerStream: 256 << 10}
	}
	const base = "http://agent"
	n.proxy = &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "http", "agent", "agent"
			r.Out.URL.RawQuery = ""
			for _, name := range []string{"Authorization", "Cookie", "Origin", "Referer"} {
				r.Out.Header.Del(name)
			}
		},
		Transport: headerTimeout{n.transport},
		ModifyResponse: func(r *http.Response) error {
			// The policy of the page is this server's.
			for _, name := range []string{"Set-Cookie", "Content-Security-Policy"} {
				r.Header.Del(name)
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if r.Context().Err() == nil {
				writeError(w, r, connect.CodeUnavailable, n.own().explain(err))
			}
		},
		ErrorLog: discard,
	}
	n.client = nodev1alpha1connect.NewNodeServiceClient(&http.Client{Transport: n.transport}, base)
	return n
}

// headerTimeout fails if an answer does not begin in time.
type headerTimeout struct{ http.RoundTripper }

func (t headerTimeout) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(r.Context()) // the body needs it: the handler's end cancels it
	late := time.AfterFunc(answerTime, cancel)
	resp, err := t.RoundTripper.RoundTrip(r.WithContext(ctx))
	if !late.Stop() && err != nil && r.Context().Err() == nil {
		return nil, context.DeadlineExceeded
	}
	return resp, err
}

// own returns the Node as it was last reported.
func (n *node) own() Node {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.is
}

// update replaces the Node. An agent at another address may answer where the former did not.
func (n *node) update(is Node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.is.Address != is.Address {
		n.failed = nil
	}
	n.is = is
}

func (n *node) dial(ctx context.Context) (net.Conn, error) {
	n.mu.Lock()
	is, failed, until := n.is, n.failed, n.until
	n.mu.Unlock()
	began := time.Now()
	if failed != nil && began.Before(until) {
		return nil, failed
	}
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(is.DialTime, dialTime))
	defer cancel()
	conn, err := is.Dial(ctx)
	if err != nil {
		err = &dialError{err}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.failed = nil
	if now := time.Now(); err != nil && now.Sub(began) >= slowDial {
		n.failed, n.until = err, now.Add(dialPause)
	}
	return conn, err
}

type dialError struct{ error }

func (e *dialError) Unwrap() error { return e.error }

// explain says why an agent cannot be reached, and what to do.
func (n Node) explain(err error) string {
	var netErr net.Error
	var dial *dialError
	switch {
	case errors.As(err, &dial) && n.Explain != nil:
		return n.Explain(dial.error)
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Sprintf("There is no agent at %s. Start it, or name its socket with --api-socket. An agent older than this program has "+
			"no API.", n.Address)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Sprintf("The agent at %s has ended. Its programs keep serving. Look at its log and start it.", n.Address)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Sprintf("The socket %s belongs to another user. Run spillway ui as root.", n.Address)
	case errors.As(err, &dial):
		return fmt.Sprintf("The agent at %s cannot be reached: %v.", n.Address, dial.error)
	case errors.As(err, &netErr) && netErr.Timeout():
		return fmt.Sprintf("The agent at %s accepts calls but does not answer. Look at its log.", n.Address)
	}
	return fmt.Sprintf("The agent at %s ended the call: %v.", n.Address, err)
}

func (n *node) setWatchError(message string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.watch = message
}

func (n *node) watchError() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.watch
}
