package reach

import (
	"context"
	"net"
	"sync"

	"golang.org/x/sync/errgroup"

	"spillway.dev/spillway/internal/cli/nodeclient"
)

// Result is what one node answered: a value, or why there is none.
type Result[T any] struct {
	Agent Agent
	Value T
	Err   *Error
}

// Each asks the agents, AtOnce of them at the same time, each for at most the Timeout. The
// results are in the order of the agents. The connections are closed when ask returns.
func Each[T any](ctx context.Context, c *Cluster, agents []Agent, ask func(context.Context, nodeclient.Dialer) (T, error)) []Result[T] {
	results := make([]Result[T], len(agents))
	var group errgroup.Group
	group.SetLimit(c.cfg.AtOnce)
	for i, a := range agents {
		group.Go(func() error {
			results[i] = one(ctx, c, a, ask)
			return nil
		})
	}
	_ = group.Wait()
	return results
}

func one[T any](ctx context.Context, c *Cluster, a Agent, ask func(context.Context, nodeclient.Dialer) (T, error)) Result[T] {
	r := Result[T]{Agent: a}
	ctx, cancel := context.WithTimeoutCause(ctx, c.cfg.Timeout, c.noAnswer())
	defer cancel()
	d, closeAll := closing(c.Dialer(a))
	defer closeAll()
	value, err := ask(ctx, d)
	if r.Err = Explain(ctx, err); r.Err == nil {
		r.Value = value
	}
	return r
}

// closing returns the dialer, and a function that closes its connections: a client keeps
// them for later requests.
func closing(d nodeclient.Dialer) (nodeclient.Dialer, func()) {
	var mu sync.Mutex
	var open []net.Conn
	closed := false
	dial := d.Dial
	d.Dial = func(ctx context.Context) (net.Conn, error) {
		conn, err := dial(ctx)
		if err != nil {
			return nil, err
		}
		mu.Lock()
		defer mu.Unlock()
		if closed {
			conn.Close()
			return nil, net.ErrClosed
		}
		open = append(open, conn)
		return conn, nil
	}
	return d, func() {
		mu.Lock()
		defer mu.Unlock()
		closed = true
		for _, conn := range open {
			conn.Close()
		}
	}
}
