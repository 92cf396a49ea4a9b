package nodeclient

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/escape"
)

// DefaultSocket is the socket of a node's agent.
const DefaultSocket = "/run/spillway/api.sock"

// SocketVariable is the environment variable with the default of --api-socket.
const SocketVariable = "SPILLWAY_API_SOCKET"

// sockets are where the socket of a node's agent is: on the node and in the agent's
// container, and in a container of "kubectl debug node/NODE". Tests replace them.
var sockets = []string{DefaultSocket, "/host" + DefaultSocket}

// Socket is the flag --api-socket of commands.
type Socket struct {
	path string
	flag *pflag.Flag
}

// AddFlag adds the flag.
func (s *Socket) AddFlag(f *pflag.FlagSet) {
	f.StringVar(&s.path, "api-socket", DefaultSocket, "Unix socket of the agent's API. Without the flag: that of "+SocketVariable+
		", else also below /host, as in containers of 'kubectl debug node', else that of the only agent here.")
	s.flag = f.Lookup("api-socket")
}

// Given reports whether the command line or the environment names a socket.
func (s *Socket) Given() bool { return s.flag.Changed || os.Getenv(SocketVariable) != "" }

// Dialer returns the dialer for the socket that is given, or for the one that is here.
func (s *Socket) Dialer() Dialer {
	switch path := os.Getenv(SocketVariable); {
	case s.flag.Changed:
		return Unix(s.path)
	case path != "":
		return Unix(path)
	}
	for _, path := range sockets {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			return Unix(path)
		}
	}
	var serving []found
	for _, path := range sockets {
		for _, f := range inDirectory(filepath.Dir(path)) {
			if f.node != "" {
				serving = append(serving, f)
			}
		}
	}
	switch len(serving) {
	case 0:
		return Unix(s.path)
	case 1:
		return Unix(serving[0].path)
	}
	return Dialer{Where: "this machine", Local: true, Dial: func(context.Context) (net.Conn, error) {
		return nil, &noAgent{fmt.Sprintf("%d agents serve here: choose one with --api-socket or %s: %s", len(serving), SocketVariable,
			listed(serving))}
	}}
}

// found is a socket on this machine, with the name of the node whose agent serves there; "": none
// answers.
type found struct{ path, node string }

// askTimeout is the time within which an agent on this machine tells its node.
const askTimeout = 500 * time.Millisecond

// inDirectory asks the agents of all sockets in a directory for their nodes.
func inDirectory(dir string) []found {
	paths, _ := filepath.Glob(filepath.Join(dir, "*.sock"))
	list := make([]found, len(paths))
	var asking sync.WaitGroup
	for i, path := range paths {
		list[i].path = path
		asking.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
			defer cancel()
			dial := func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "unix", path) }
			if resp, err := New(Dialer{Local: true, Dial: dial}).Status(ctx, &nodev1alpha1.StatusRequest{}); err == nil {
				list[i].node = resp.Node
			}
		})
	}
	asking.Wait()
	return list
}

// listed is such as "node1 at /run/spillway/a.sock, node2 at /run/spillway/b.sock".
func listed(list []found) string {
	var texts []string
	for _, f := range list {
		text := escape.Text(f.path)
		if f.node != "" {
			text = escape.Text(f.node) + " at " + text
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, ", ")
}

// hint says what an error of connecting to a socket means.
func hint(path string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrPermission):
		return &noAgent{"only the user that it runs as may connect: run this command as root"}
	case errors.Is(err, fs.ErrNotExist):
		what := "no agent serves here: start it, or give its --api-socket"
		if others := inDirectory(filepath.Dir(path)); len(others) > 0 {
			what += " (this machine has " + listed(others) + ")"
		}
		return &noAgent{what}
	case errors.Is(err, syscall.ECONNREFUSED):
		return &noAgent{"no agent serves here any more: start it again"}
	}
	return err
}
