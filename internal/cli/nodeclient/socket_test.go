package nodeclient

import (
	"context"
	"net"
	"net/http"
	"path/filepath"
	"testing"

	"github.com/spf13/pflag"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
)

// onNode is an agent that tells its node.
type onNode struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
	node string
}

func (a onNode) Status(context.Context, *nodev1alpha1.StatusRequest) (*nodev1alpha1.StatusResponse, error) {
	return &nodev1alpha1.StatusResponse{Node: a.node}, nil
}

// serveAt serves an agent at a socket until the test ends.
func serveAt(t *testing.T, path, node string) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(nodev1alpha1connect.NewNodeServiceHandler(onNode{node: node}))
	srv := &http.Server{Handler: mux}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
}

// A command finds the only agent of the machine, and names the nodes of several.
func TestTheSocketThatIsHere(t *testing.T) {
	dir := t.TempDir()
	before := sockets
	sockets = []string{filepath.Join(dir, "api.sock")}
	defer func() { sockets = before }()
	node := func(args ...string) (string, error) {
		t.Helper()
		var s Socket
		f := pflag.NewFlagSet("ask", pflag.ContinueOnError)
		s.AddFlag(f)
		if err := f.Parse(args); err != nil {
			t.Fatal(err)
		}
		d := s.Dialer()
		resp, err := New(d).Status(t.Context(), &nodev1alpha1.StatusRequest{})
		return resp.GetNode(), Error("ask", d, err)
	}
	want := func(wanted string, args ...string) {
		t.Helper()
		if got, err := node(args...); got != wanted || err != nil {
			t.Errorf("node %q, %v, want %q", got, err, wanted)
		}
	}
	one, two := filepath.Join(dir, "1a2b.sock"), filepath.Join(dir, "3c4d.sock")
	serveAt(t, one, "n1")
	want("n1")
	serveAt(t, two, "n2")
	_, err := node()
	wantLine(t, err, "ask: this machine: 2 agents serve here: choose one with --api-socket or SPILLWAY_API_SOCKET: n1 at "+one+", n2 at "+two)
	_, err = node("--api-socket", filepath.Join(dir, "none.sock"))
	wantLine(t, err, "(this machine has n1 at "+one+", n2 at "+two+")")
	t.Setenv(SocketVariable, two)
	want("n2")
	want("n1", "--api-socket", one)
	t.Setenv(SocketVariable, "")
	serveAt(t, sockets[0], "of-default")
	want("of-default")
}
