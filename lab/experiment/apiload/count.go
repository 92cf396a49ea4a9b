package apiload

import (
	"context"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"

	"k8s.io/client-go/rest"
)

// Request is a kind of request that a client sends.
type Request struct {
	// Verb is list, watch, or stream: a watch that begins with all objects (streaming
	// list). Others are get, create, update, patch and delete.
	Verb     string `json:"verb"`
	Resource string `json:"resource"`
	// Selector has the field and label selectors.
	Selector string `json:"selector,omitempty"`
	Status   int    `json:"status"`
	// Type is the media type of the answer: protobuf or json, with the form of metadata
	// only (PartialObjectMetadata) marked.
	Type string `json:"type"`
	// Gzip says that the server compressed the answer.
	Gzip bool `json:"gzip,omitempty"`
}

// counter counts what one client asks and receives.
type counter struct {
	node  string
	wire  atomic.Int64 // bytes of its connections, from the server: TLS, HTTP/2 and all
	conns atomic.Int64 // connections opened

	mu       sync.Mutex
	requests map[Request]int
	bytes    map[Request]*atomic.Int64 // of bodies, decompressed
}

func newCounter(node string) *counter {
	return &counter{node: node, requests: map[Request]int{}, bytes: map[Request]*atomic.Int64{}}
}

// configure puts the counter into the path of a client. The function for connections also
// keeps client-go from sharing them with the process's other clients.
func (c *counter) configure(cfg *rest.Config) {
	cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		c.conns.Add(1)
		return &countedConn{conn, c}, nil
	}
	cfg.Wrap(func(rt http.RoundTripper) http.RoundTripper { return &countedTransport{rt, c} })
}

type countedConn struct {
	net.Conn
	c *counter
}

// Read implements net.Conn.
func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.c.wire.Add(int64(n))
	return n, err
}

type countedTransport struct {
	http.RoundTripper
	c *counter
}

// RoundTrip implements http.RoundTripper.
func (t *countedTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := t.RoundTripper.RoundTrip(r)
	if err != nil {
		return resp, err
	}
	resp.Body = &countedBody{resp.Body, t.c.count(t.c.describe(r, resp))}
	return resp, nil
}

func (c *counter) count(what Request) *atomic.Int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.requests[what]++
	if c.bytes[what] == nil {
		c.bytes[what] = &atomic.Int64{}
	}
	return c.bytes[what]
}

type countedBody struct {
	io.ReadCloser
	n *atomic.Int64
}

// Read implements io.Reader.
func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.n.Add(int64(n))
	return n, err
}

// describe names a request by its address and its answer.
func (c *counter) describe(r *http.Request, resp *http.Response) Request {
	q := r.URL.Query()
	what := Request{Verb: strings.ToLower(r.Method), Status: resp.StatusCode, Gzip: resp.Uncompressed, Resource: resourceOf(r.URL.Path)}
	what.Selector = strings.Trim(strings.ReplaceAll(q.Get("fieldSelector"), "="+c.node, "=NODE")+" "+q.Get("labelSelector"), " ")
	switch {
	case q.Get("watch") != "" && q.Get("sendInitialEvents") == "true":
		what.Verb = "stream"
	case q.Get("watch") != "":
		what.Verb = "watch"
	case r.Method == http.MethodGet && isList(r.URL.Path):
		what.Verb = "list"
	}
	kind := resp.Header.Get("Content-Type")
	for _, form := range []string{"protobuf", "json"} {
		if strings.Contains(kind, form) {
			what.Type = form
			break
		}
	}
	if strings.Contains(kind, "as=PartialObjectMetadata") {
		what.Type += " metadata"
	}
	return what
}

// resourceOf returns the resource of a path such as /api/v1/namespaces/shop/pods/web.
func resourceOf(path string) string {
	parts := segments(path)
	if len(parts) == 0 {
		return strings.Trim(path, "/") // such as version
	}
	return parts[0]
}

// isList reports whether a path names a resource and no object.
func isList(path string) bool { return len(segments(path)) == 1 }

// segments returns the resource of a path, and its object.
func segments(path string) []string {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	switch {
	case parts[0] == "api" && len(parts) > 2:
		parts = parts[2:]
	case parts[0] == "apis" && len(parts) > 3:
		parts = parts[3:]
	default:
		return nil
	}
	if parts[0] == "namespaces" && len(parts) > 2 {
		parts = parts[2:]
	}
	return parts
}

// reading is a counter at one moment.
type reading struct {
	wire, conns int64
	requests    map[Request]int
	bytes       map[Request]int64
}

func (c *counter) read() reading {
	c.mu.Lock()
	defer c.mu.Unlock()
	out := reading{wire: c.wire.Load(), conns: c.conns.Load(), requests: maps.Clone(c.requests), bytes: map[Request]int64{}}
	for r, n := range c.bytes {
		out.bytes[r] = n.Load()
	}
	return out
}
