package scripts

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"spillway.dev/spillway/internal/decisions"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/manifest"
	"spillway.dev/spillway/internal/reconcile"
)

const nodeName = "node-a"

var nodeAddrs = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}

// agent is what the command agent runs, with a recorder as its dataplane.
type agent struct {
	loop *reconcile.Reconciler
	log  logBuffer
	end  func() error
}

func startAgent(dir string, r *recorder) (*agent, error) {
	a := &agent{}
	log := slog.New(slog.NewTextHandler(&a.log, nil))
	source, err := manifest.New(manifest.Config{Dir: dir, Logger: log})
	if err != nil {
		return nil, err
	}
	a.loop, err = reconcile.New(reconcile.Config{
		Tracker:      decisions.New(intent.Config{NodeName: nodeName}, donottrack.Config{NodeName: nodeName}),
		Backends:     r.backends(),
		SyncPeriod:   time.Hour, // what is not written at once is missing
		Policies:     r.policies(),
		HealthChecks: r,
		Logger:       log,
	})
	if err != nil {
		return nil, err
	}
	a.loop.SetNodeAddrs(nodeAddrs)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	errs := make([]error, 2)
	running.Go(func() { errs[0] = source.Run(ctx, a.loop.Deliver) })
	running.Go(func() { errs[1] = a.loop.Run(ctx) })
	a.end = func() error {
		cancel()
		running.Wait()
		return errors.Join(errs...)
	}
	return a, nil
}

// logBuffer keeps a log for error messages.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

// Write implements io.Writer.
func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

// String returns the log so far.
func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
