// Package nodeclient is the client of the agent's API that commands share: it finds the
// agent, and turns errors into one clear line.
package nodeclient

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/escape"
)

// Dialer connects to the API of one agent.
type Dialer struct {
	// Where names the agent in errors: "the agent at /run/spillway/api.sock".
	Where string
	Dial  func(context.Context) (net.Conn, error)
	// Local: the agent is on this machine.
	Local bool
}

// Timeout is the time within which an agent answers one request.
const Timeout = 15 * time.Second

// Unix returns the dialer for the socket of an agent.
func Unix(path string) Dialer {
	return Dialer{Where: "the agent at " + escape.Text(path), Local: true, Dial: func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unix", path)
		return conn, hint(path, err)
	}}
}

// noAgent is the error of an agent that cannot be reached.
type noAgent struct{ what string }

func (e *noAgent) Error() string { return e.what }

// Unreachable returns the error of an agent that cannot be reached. Error shows it as it is.
func Unreachable(what string) error { return &noAgent{what} }

// maxMessage is the largest response that a command reads, in bytes.
const maxMessage = 32 << 20

// New returns a client of one agent. It connects with the first request.
func New(d Dialer) nodev1alpha1connect.NodeServiceClient {
	transport := &http.Transport{
		DialContext:           func(ctx context.Context, _, _ string) (net.Conn, error) { return d.Dial(ctx) },
		ResponseHeaderTimeout: 2 * time.Minute,
	}
	options := []connect.ClientOption{connect.WithReadMaxBytes(maxMessage)}
	if d.Local {
		// To compress costs more than to copy.
		options = append(options, connect.WithAcceptCompression("gzip", nil, nil))
	}
	return nodev1alpha1connect.NewNodeServiceClient(&http.Client{Transport: transport}, "http://node", options...)
}

// Absent reports whether the error of a request says that no agent can be reached.
func Absent(err error) bool {
	var none *noAgent
	return errors.As(err, &none)
}

// Error returns the error of a request as one line: what was tried, where, and what to do.
func Error(does string, d Dialer, err error) error {
	if err == nil {
		return nil
	}
	var none *noAgent
	var answer *connect.Error
	switch {
	case errors.As(err, &none):
		return fmt.Errorf("%s: %s: %w", does, d.Where, none)
	case errors.As(err, &answer) && answer.Code() == connect.CodeUnimplemented:
		return fmt.Errorf("%s: %s does not offer this: it is older than this program, or it serves without: use the program of its version", does,
			d.Where)
	// The agent knows the deadline, and may be first to say that it has passed.
	case errors.Is(err, context.DeadlineExceeded), connect.CodeOf(err) == connect.CodeDeadlineExceeded:
		return fmt.Errorf("%s: %s does not answer in time: try again", does, d.Where)
	case errors.As(err, &answer) && connect.IsWireError(err):
		return fmt.Errorf("%s: %s: %s", does, d.Where, escape.Text(answer.Message()))
	}
	return fmt.Errorf("%s: %s: %s", does, d.Where, escape.OneLine(err))
}
