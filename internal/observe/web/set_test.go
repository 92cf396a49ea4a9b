package web

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
)

// serveAgent serves an agent by HTTP/1 and HTTP/2, as real ones do, and returns its Node.
// dials counts the connections.
func serveAgent(t *testing.T, a *agent) (n Node, dials *atomic.Int32) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "api.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(nodev1alpha1connect.NewNodeServiceHandler(a))
	server := &http.Server{Handler: mux, Protocols: &http.Protocols{}}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(func() { _ = server.Close() })
	dials = &atomic.Int32{}
	return Node{Name: a.name, Address: "kube-system/" + a.name, OneConnection: true, Dial: func(ctx context.Context) (net.Conn, error) {
		dials.Add(1)
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}}, dials
}

// list is the answer of /api/nodes.
type list struct {
	Lacks string
	Nodes []nodeObject
}

func (l list) id(name string) int {
	for _, n := range l.Nodes {
		if n.Name == name {
			return n.ID
		}
	}
	return -1
}

func nodesOf(t *testing.T, server *httptest.Server) (l list) {
	t.Helper()
	r, err := (&http.Client{Transport: withToken{http.DefaultTransport}}).Get(server.URL + "/api/nodes")
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	if err := json.NewDecoder(r.Body).Decode(&l); err != nil {
		t.Fatal(err)
	}
	return l
}

// cluster is a cluster whose nodes a test changes.
type cluster struct {
	mu    sync.Mutex
	nodes []Node
	lacks string
	err   error
}

func (c *cluster) refresh(context.Context) ([]Node, string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.nodes, c.lacks, c.err
}

// startCluster serves the page of a cluster, and returns how a test changes the cluster.
func startCluster(t *testing.T, nodes ...Node) (server *httptest.Server, change func(func(*cluster))) {
	t.Helper()
	c := &cluster{nodes: nodes}
	s := newSet(nodes, c.refresh)
	s.listing = true // only change lists: the page's own lists would come at any time
	server = httptest.NewServer(handler(Config{Token: token, Page: fstest.MapFS{}, Runbooks: fstest.MapFS{}, Refresh: c.refresh}, s))
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return server, func(f func(*cluster)) {
		c.mu.Lock()
		f(c)
		c.mu.Unlock()
		s.list()
		s.mu.Lock()
		s.listing = true
		s.mu.Unlock()
	}
}

// Nodes come and go while a page follows their flows. A node that comes back is another.
func TestNodesComeAndGo(t *testing.T) {
	a, dials := serveAgent(t, &agent{name: "a", events: 1})
	b, _ := serveAgent(t, &agent{name: "b", events: 1})
	server, change := startCluster(t, a)
	stream, err := client(server, "/api/nodes").WatchFlows(t.Context(), &nodev1alpha1.WatchFlowsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	next := func(want string) {
		t.Helper()
		for stream.Receive() {
			if events := stream.Msg().Events; len(events) > 0 {
				if got := events[0].Flow.Node; got != want {
					t.Fatalf("an event of %s, want one of %s", got, want)
				}
				return
			}
		}
		t.Fatal(stream.Err())
	}
	next("a")
	first := nodesOf(t, server)
	change(func(c *cluster) { c.nodes = []Node{a, b} })
	next("b")
	both := nodesOf(t, server)
	if both.id("a") != first.id("a") || both.id("b") == both.id("a") || len(both.Nodes) != 2 {
		t.Errorf("%+v after %+v", both, first)
	}
	change(func(c *cluster) { c.nodes = []Node{a} })
	_, err = client(server, "/api/node/1").Status(t.Context(), &nodev1alpha1.StatusRequest{})
	if connect.CodeOf(err) != connect.CodeNotFound || !strings.Contains(err.Error(), "no longer part of the cluster") {
		t.Errorf("a node that left: %v", err)
	}
	change(func(c *cluster) { c.nodes = []Node{a, b} })
	next("b")
	if again := nodesOf(t, server); again.id("b") == both.id("b") {
		t.Errorf("a node that came back has the id of the former: %+v", again)
	}
	// The stream of flows and other calls share one connection.
	for range 5 {
		if _, err := client(server, "/api/node/0").Status(t.Context(), &nodev1alpha1.StatusRequest{}); err != nil {
			t.Fatal(err)
		}
	}
	if got := dials.Load(); got != 1 {
		t.Errorf("%d connections to the agent, want 1", got)
	}
}

// A list that fails, or lacks nodes, says so, and the nodes stay.
func TestAListThatFails(t *testing.T) {
	a, _ := serveAgent(t, &agent{name: "a"})
	server, change := startCluster(t, a)
	change(func(c *cluster) { c.err = errors.New("list nodes: no route to host") })
	if l := nodesOf(t, server); l.Lacks != "The list of nodes is old: list nodes: no route to host." || l.id("a") != 0 {
		t.Errorf("%+v", l)
	}
	change(func(c *cluster) { c.err, c.lacks = nil, "Some are missing." })
	if l := nodesOf(t, server); l.Lacks != "Some are missing." || l.id("a") != 0 {
		t.Errorf("%+v", l)
	}
}

// The stream waits for an agent that refuses: it may be upgraded.
func TestRefusalsOfAClusterAreNotFinal(t *testing.T) {
	old, _ := serveAgent(t, &agent{name: "old", watch: connect.NewError(connect.CodeUnimplemented, errors.New("no"))})
	a, _ := serveAgent(t, &agent{name: "a", events: 1})
	server, change := startCluster(t, old)
	stream, err := client(server, "/api/nodes").WatchFlows(t.Context(), &nodev1alpha1.WatchFlowsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	for nodesOf(t, server).Nodes[0].Flows == "" {
		if t.Context().Err() != nil {
			t.Fatal("the refusal is not shown")
		}
	}
	change(func(c *cluster) { c.nodes = []Node{old, a} })
	for stream.Receive() {
		if len(stream.Msg().Events) > 0 {
			return
		}
	}
	t.Error(stream.Err())
}

// A node that hangs is not dialed for each call: the page asks every 2 s. Another Pod is.
func TestASlowDialIsNotRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dials := 0
		is := Node{Name: "a", Address: "kube-system/one", DialTime: slowDial, Dial: func(ctx context.Context) (net.Conn, error) {
			dials++
			<-ctx.Done()
			return nil, ctx.Err()
		}, Explain: func(err error) string { return "Because: " + err.Error() }}
		n := newNode(0, is)
		var err error
		for range 3 {
			_, err = n.dial(t.Context())
		}
		if dials != 1 || n.own().explain(err) != "Because: context deadline exceeded" {
			t.Errorf("%d dials, %v", dials, err)
		}
		is.Address = "kube-system/two"
		n.update(is)
		_, _ = n.dial(t.Context())
		time.Sleep(dialPause)
		_, _ = n.dial(t.Context())
		if dials != 3 {
			t.Errorf("%d dials, want 3: of another Pod, and after the pause", dials)
		}
	})
}
