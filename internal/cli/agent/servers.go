package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"syscall"
	"time"

	"spillway.dev/spillway/internal/telemetry"
)

// server is one of the agent's HTTP servers.
type server struct {
	what, flag, addr string
	handler          http.Handler
	open             *telemetry.Server
	waits            bool // for another program to release the address
}

// servers holds all HTTP servers.
type servers struct {
	log  *slog.Logger
	mu   sync.Mutex
	list []*server
}

// open opens every server. If an address is in use, open fails. During a takeover a
// kube-proxy may have the address; then run waits until it gets it.
func (s *servers) open(ctx context.Context, mayWait bool) error {
	for _, one := range s.list {
		err := s.openOne(ctx, one)
		switch {
		case err == nil:
		case mayWait && errors.Is(err, syscall.EADDRINUSE):
			one.waits = true
			s.log.Warn("address in use; retrying until kube-proxy releases it", "what", one.what, "err", err)
		default:
			return fmt.Errorf("serve %s: %w: give another %s, or an empty one", one.what, err, one.flag)
		}
	}
	return nil
}

func (s *servers) openOne(ctx context.Context, one *server) (err error) {
	one.open, err = telemetry.Serve(ctx, one.addr, one.handler, s.log)
	return err
}

// run opens servers that wait, until ctx ends.
func (s *servers) run(ctx context.Context) error {
	for s.waiting(ctx) {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(time.Second):
		}
	}
	<-ctx.Done()
	return nil
}

// waiting tries the servers that wait, and reports whether any still does.
func (s *servers) waiting(ctx context.Context) (any bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.list {
		if one.waits && s.openOne(ctx, one) == nil {
			one.waits = false
			s.log.Info("serving", one.what, one.open.Addr())
		}
		any = any || one.waits
	}
	return any
}

func (s *servers) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.list {
		one.open.Close()
	}
}
