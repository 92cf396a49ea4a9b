package web

import (
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
	Node
	proxy  http.Handler
	client nodev1alpha1connect.NodeServiceClient

	mu    sync.Mutex
	watch string // why the latest attempt to watch flows failed
}

// dialTime limits how long an agent may take to accept a connection, and to begin an answer.
const (
	dialTime   = 5 * time.Second
	answerTime = 20 * time.Second
)

func newNode(n Node) *node {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, dialTime)
		defer cancel()
		conn, err := n.Dial(ctx)
		if err != nil {
			return nil, &dialError{err}
		}
		return conn, nil
	}
	unary := &http.Transport{DialContext: dial, MaxIdleConnsPerHost: 4, IdleConnTimeout: time.Minute, ResponseHeaderTimeout: answerTime}
	// A stream's answer begins with its first event.
	stream := &http.Transport{DialContext: dial, IdleConnTimeout: time.Minute}
	const base = "http://agent"
	return &node{
		Node: n,
		proxy: &httputil.ReverseProxy{
			Rewrite: func(r *httputil.ProxyRequest) {
				r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "http", "agent", "agent"
				r.Out.URL.RawQuery = ""
				for _, name := range []string{"Authorization", "Cookie", "Origin", "Referer"} {
					r.Out.Header.Del(name)
				}
			},
			Transport: unary,
			ModifyResponse: func(r *http.Response) error {
				// The policy of the page is this server's.
				for _, name := range []string{"Set-Cookie", "Content-Security-Policy"} {
					r.Header.Del(name)
				}
				return nil
			},
			ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
				if r.Context().Err() == nil {
					writeError(w, r, connect.CodeUnavailable, n.explain(err))
				}
			},
			ErrorLog: discard,
		},
		client: nodev1alpha1connect.NewNodeServiceClient(&http.Client{Transport: stream}, base),
	}
}

type dialError struct{ error }

func (e *dialError) Unwrap() error { return e.error }

// explain says why an agent cannot be reached, and what to do.
func (n Node) explain(err error) string {
	var netErr net.Error
	var dial *dialError
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Sprintf("There is no agent at %s. Start it, or name its socket with --api-socket. An agent older than this program has no API.", n.Address)
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
