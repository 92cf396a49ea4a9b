package web

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"connectrpc.com/connect"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
)

const token = "SECRETSECRETSECRETSECRET"

// agent answers Status with the headers that it got, and WatchFlows with its events.
type agent struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
	name   string
	events int
	watch  error
}

func (a *agent) Status(ctx context.Context, _ *nodev1alpha1.StatusRequest) (*nodev1alpha1.StatusResponse, error) {
	info, _ := connect.CallInfoForHandlerContext(ctx)
	var names []string
	for name := range info.RequestHeader() {
		names = append(names, name)
	}
	return &nodev1alpha1.StatusResponse{Node: a.name, Version: strings.Join(names, " ")}, nil
}

func (a *agent) WatchFlows(ctx context.Context, req *nodev1alpha1.WatchFlowsRequest,
	stream *connect.ServerStream[nodev1alpha1.WatchFlowsResponse]) error {
	if a.watch != nil {
		return a.watch
	}
	for range a.events {
		event := &nodev1alpha1.FlowEvent{Flow: &nodev1alpha1.Flow{Node: a.name, Service: req.Filter.GetService()}}
		if err := stream.Send(&nodev1alpha1.WatchFlowsResponse{Events: []*nodev1alpha1.FlowEvent{event}, Missed: 1}); err != nil {
			return err
		}
	}
	<-ctx.Done()
	return nil
}

// start serves agents, nil for one that does not exist, and returns the page's server.
func start(t *testing.T, agents ...*agent) *httptest.Server {
	t.Helper()
	config := Config{
		Token:    token,
		Page:     fstest.MapFS{"index.html": {Data: []byte("<!doctype html>the page")}},
		Runbooks: fstest.MapFS{"stalls.md": {Data: []byte("# stalls")}, "secret.txt": {Data: []byte("no")}},
	}
	for _, a := range agents {
		socket := filepath.Join(t.TempDir(), "api.sock")
		if a != nil {
			listener, err := net.Listen("unix", socket)
			if err != nil {
				t.Fatal(err)
			}
			mux := http.NewServeMux()
			mux.Handle(nodev1alpha1connect.NewNodeServiceHandler(a))
			// The agent's own headers must not weaken those of the page.
			server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Security-Policy", "default-src *")
				w.Header().Set("Set-Cookie", "a=b")
				mux.ServeHTTP(w, r)
			})}
			go func() { _ = server.Serve(listener) }()
			t.Cleanup(func() { _ = server.Close() })
		}
		config.Nodes = append(config.Nodes, Node{Name: "given", Address: socket, Dial: func(ctx context.Context) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}})
	}
	if err := config.Validate(); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(Handler(config))
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return server
}

type withToken struct{ http.RoundTripper }

func (c withToken) RoundTrip(r *http.Request) (*http.Response, error) {
	r.Header.Set("Authorization", "Bearer "+token)
	return c.RoundTripper.RoundTrip(r)
}

func client(server *httptest.Server, path string) nodev1alpha1connect.NodeServiceClient {
	return nodev1alpha1connect.NewNodeServiceClient(&http.Client{Transport: withToken{http.DefaultTransport}}, server.URL+path)
}

// Another web page, another user of the machine, and a name that another site makes
// resolve to this address get nothing of a node.
func TestWhoMayRead(t *testing.T) {
	server := start(t, &agent{name: "a"})
	const status = "/api/node/0/spillway.node.v1alpha1.NodeService/Status"
	good := map[string]string{"Authorization": "Bearer " + token, "Content-Type": "application/json"}
	with := func(pairs ...string) map[string]string {
		headers := map[string]string{}
		for name, value := range good {
			headers[name] = value
		}
		for i := 0; i < len(pairs); i += 2 {
			headers[pairs[i]] = pairs[i+1]
		}
		return headers
	}
	for _, tt := range []struct {
		name, method, path, host string
		headers                  map[string]string
		want                     int
	}{
		{"the page itself", "POST", status, "", good, 200},
		{"from its own origin", "POST", status, "", with("Origin", server.URL, "Sec-Fetch-Site", "same-origin"), 200},
		{"by the name localhost", "POST", status, "localhost:80", good, 200},
		{"by an IPv6 address", "POST", status, "[::1]:80", good, 200},
		{"no token", "POST", status, "", with("Authorization", ""), 401},
		{"a wrong token", "POST", status, "", with("Authorization", "Bearer "+token[1:]), 401},
		{"a longer token", "POST", status, "", with("Authorization", "Bearer "+token+"x"), 401},
		{"the token in the address", "POST", status + "?token=" + token, "", with("Authorization", ""), 401},
		{"the list of nodes without a token", "GET", "/api/nodes", "", nil, 401},
		{"the list of nodes", "GET", "/api/nodes", "", good, 200},
		{"the merged flows without a token", "POST", "/api/nodes/spillway.node.v1alpha1.NodeService/WatchFlows", "",
			with("Authorization", "", "Content-Type", "application/connect+json"), 401},
		{"DNS rebinding", "POST", status, "attacker.example:80", good, 421},
		{"DNS rebinding of the page", "GET", "/", "attacker.example", nil, 421},
		{"a name that begins as an address", "POST", status, "127.0.0.1.attacker.example", good, 421},
		{"another page, with the token", "POST", status, "", with("Origin", "https://attacker.example", "Sec-Fetch-Site", "cross-site"), 403},
		{"another port of this machine", "POST", status, "", with("Origin", "http://127.0.0.1:1", "Sec-Fetch-Site", "same-site"), 403},
		{"an old browser's Origin", "POST", status, "", with("Origin", "https://attacker.example"), 403},
		{"another service of the agent", "POST", "/api/node/0/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "", good, 404},
		{"a path upwards", "POST", "/api/node/0/spillway.node.v1alpha1.NodeService/..%2f..%2fmetrics", "", good, 404},
		{"another method", "GET", status, "", good, 405},
		{"no such node", "POST", "/api/node/7/spillway.node.v1alpha1.NodeService/Status", "", good, 404},
		{"the page", "GET", "/", "", nil, 200},
		{"a runbook", "GET", "/runbooks/stalls", "", nil, 200},
		{"no runbook", "GET", "/runbooks/none", "", nil, 404},
		{"not a runbook", "GET", "/runbooks/secret.txt", "", nil, 404},
		{"a file above the runbooks", "GET", "/runbooks/..%2fweb", "", nil, 404},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := http.NewRequest(tt.method, server.URL+tt.path, strings.NewReader("{}"))
			if err != nil {
				t.Fatal(err)
			}
			r.Host = tt.host
			for name, value := range tt.headers {
				r.Header.Set(name, value)
			}
			answer, err := http.DefaultTransport.RoundTrip(r)
			if err != nil {
				t.Fatal(err)
			}
			defer answer.Body.Close()
			body, err := io.ReadAll(answer.Body)
			if err != nil {
				t.Fatal(err)
			}
			if answer.StatusCode != tt.want {
				t.Errorf("status %d, want %d: %s", answer.StatusCode, tt.want, body)
			}
			if tt.want != 200 && strings.Contains(string(body), `"node"`) {
				t.Errorf("a refusal has the answer of the agent: %s", body)
			}
			if tt.want == 200 {
				if got := answer.Header.Values("Content-Security-Policy"); len(got) != 1 || got[0] != policy {
					t.Errorf("policies %q", got)
				}
			}
			if answer.Header.Get("Access-Control-Allow-Origin") != "" || answer.Header.Get("Set-Cookie") != "" {
				t.Errorf("headers %v", answer.Header)
			}
		})
	}
}

// The agent learns nothing of the browser.
func TestTheTokenStaysHere(t *testing.T) {
	server := start(t, &agent{name: "a"})
	status, err := client(server, "/api/node/0").Status(t.Context(), &nodev1alpha1.StatusRequest{})
	if err != nil || status.Node != "a" {
		t.Fatal(status, err)
	}
	if strings.Contains(status.Version, "Authorization") || strings.Contains(status.Version, "Cookie") {
		t.Errorf("the agent got the headers %s", status.Version)
	}
}

func TestFlowsOfAllNodesAreOneStream(t *testing.T) {
	old := connect.NewError(connect.CodeUnimplemented, errors.New("no"))
	server := start(t, &agent{name: "a", events: 30}, nil, &agent{name: "b", events: 30}, &agent{name: "c", watch: old})
	stream, err := client(server, "/api/nodes").WatchFlows(t.Context(),
		&nodev1alpha1.WatchFlowsRequest{Filter: &nodev1alpha1.FlowFilter{Service: "web"}})
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	events := map[string]int{}
	missed := 0
	for events["a"] < 30 || events["b"] < 30 {
		if !stream.Receive() {
			t.Fatal(stream.Err(), events)
		}
		missed += int(stream.Msg().Missed)
		for _, e := range stream.Msg().Events {
			events[e.Flow.Node]++
			if e.Flow.Service != "web" {
				t.Fatalf("the filter did not arrive: %v", e)
			}
		}
	}
	if missed != 60 {
		t.Errorf("%d missed events were reported, want 60", missed)
	}
	// The nodes that cannot be watched say why.
	for {
		r, err := (&http.Client{Transport: withToken{http.DefaultTransport}}).Get(server.URL + "/api/nodes")
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(r.Body)
		r.Body.Close()
		if err != nil {
			t.Fatal(err)
		}
		if strings.Count(string(body), `"flows":""`) == 2 && strings.Contains(string(body), "There is no agent at") &&
			strings.Contains(string(body), "older than the page") {
			break
		}
		if t.Context().Err() != nil {
			t.Fatalf("%s", body)
		}
	}
}

// A stream that can never have an event ends, and says why.
func TestNoNodeHasFlows(t *testing.T) {
	for _, code := range []connect.Code{connect.CodeUnimplemented, connect.CodeInvalidArgument} {
		a := &agent{watch: connect.NewError(code, errors.New("the reason"))}
		agents := []*agent{a, a}
		if code == connect.CodeInvalidArgument {
			agents = []*agent{a, {events: 1}} // the filter is wrong for the others too
		}
		stream, err := client(start(t, agents...), "/api/nodes").WatchFlows(t.Context(), &nodev1alpha1.WatchFlowsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for stream.Receive() {
		}
		if err := stream.Err(); connect.CodeOf(err) != code || !strings.Contains(err.Error(), "the reason") {
			t.Errorf("%v, want %v", err, code)
		}
		stream.Close()
	}
}

// What an operator should do about an agent that does not answer.
func TestAgentsThatDoNotAnswer(t *testing.T) {
	_, err := client(start(t, nil), "/api/node/0").Status(t.Context(), &nodev1alpha1.StatusRequest{})
	if connect.CodeOf(err) != connect.CodeUnavailable || !strings.Contains(err.Error(), "There is no agent at") {
		t.Error(err)
	}
	n := Node{Address: "/run/x.sock"}
	for _, tt := range []struct {
		err  error
		want string
	}{
		{&dialError{&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}}, "has ended"},
		{&dialError{os.ErrPermission}, "Run spillway ui as root"},
		{&dialError{context.DeadlineExceeded}, "cannot be reached"},
		{context.DeadlineExceeded, "does not answer"},
		{io.ErrUnexpectedEOF, "ended the call"},
	} {
		if got := n.explain(tt.err); !strings.Contains(got, tt.want) || !strings.Contains(got, "/run/x.sock") {
			t.Errorf("%v: %s, want %s", tt.err, got, tt.want)
		}
	}
}
