package path

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli/nodeclient"
)

// eventReader follows an agent's events, as `spillway flows -f` does, and counts them.
type eventReader struct {
	cancel       context.CancelFunc
	done         chan struct{}
	err          error // why it ended; valid after done
	read, missed atomic.Int64
}

// readEvents starts a reader of the agent that serves a socket.
func readEvents(ctx context.Context, socket string) (*eventReader, error) {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := nodeclient.New(nodeclient.Unix(socket)).WatchFlows(ctx, &nodev1alpha1.WatchFlowsRequest{
		// The agent answers with its first event: those of the setup make it answer at once.
		Since: timestamppb.New(time.Now().Add(-time.Hour)),
	})
	if err != nil {
		cancel()
		return nil, fmt.Errorf("read events of %s: %w", socket, err)
	}
	r := &eventReader{cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(r.done)
		defer stream.Close()
		for stream.Receive() {
			r.read.Add(int64(len(stream.Msg().Events)))
			r.missed.Add(int64(stream.Msg().Missed))
		}
		r.err = errors.Join(errors.New("the agent has ended the stream of events"), stream.Err())
	}()
	return r, nil
}

func (r *eventReader) stop() {
	r.cancel()
	<-r.done
}

// quiet is how long no event must arrive for all to have arrived. The kernel wakes the agent
// every 400 ms at the latest.
const quiet = 500 * time.Millisecond

// settle waits until no more events arrive.
func (r *eventReader) settle(ctx context.Context) error {
	last, since := r.read.Load()+r.missed.Load(), time.Now()
	for time.Since(since) < quiet {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-r.done:
			return r.err
		case <-time.After(20 * time.Millisecond):
		}
		if n := r.read.Load() + r.missed.Load(); n != last {
			last, since = n, time.Now()
		}
	}
	return nil
}
