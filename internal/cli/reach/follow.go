package reach

import (
	"context"
	"time"

	"spillway.dev/spillway/internal/cli/nodeclient"
)

// Waits between two attempts of Follow.
const (
	firstWait = time.Second
	longWait  = 30 * time.Second
)

// Follow calls watch with the dialer of a node's agent until ctx ends, again each time that
// it returns: after 1 s, then after twice as long, at most 30 s. A watch that reported
// success by calling connected starts again after 1 s. Each attempt looks for the agent's Pod
// anew. Before each wait, lost gets the reason; nil: the agent ended the stream.
//
// No attempt is the last: an agent may be upgraded, and a right granted, while a user
// watches.
func (c *Cluster) Follow(ctx context.Context, node string,
	watch func(ctx context.Context, d nodeclient.Dialer, connected func()) error, lost func(*Error)) {
	wait := firstWait
	for ctx.Err() == nil {
		d, closeAll := closing(c.Node(node))
		err := watch(ctx, d, func() { wait = firstWait })
		closeAll()
		if ctx.Err() != nil {
			return
		}
		lost(Explain(ctx, err))
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		wait = min(2*wait, longWait)
	}
}
