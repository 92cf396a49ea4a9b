// Package nodeclienttest has agents for tests of commands: stubs that answer as they are
// told, also as an older or a newer agent would.
package nodeclienttest

import (
	"net"
	"net/http"
	"path/filepath"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
)

// Serve serves the API on a Unix socket until the test ends, and returns its path.
func Serve(t testing.TB, agent nodev1alpha1connect.NodeServiceHandler) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "api.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(nodev1alpha1connect.NewNodeServiceHandler(agent))
	srv := &http.Server{Handler: mux}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	return path
}

// Newer returns the message with a field that this program does not know, as a newer agent
// would send it.
func Newer[M proto.Message](m M) M {
	field := protowire.AppendTag(nil, 4711, protowire.BytesType)
	m.ProtoReflect().SetUnknown(protowire.AppendString(field, "new"))
	return m
}
