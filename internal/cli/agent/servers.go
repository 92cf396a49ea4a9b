package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"spillway.dev/spillway/internal/telemetry"
)

// server is one of the agent's HTTP servers.
type server struct {
	what, addr string
	setting    string // names where the address is set
	handler    http.Handler
	open       *telemetry.Server
	waits      bool // for its address
}

// servers holds all HTTP servers.
type servers struct {
	log  *slog.Logger
	mu   sync.Mutex
	list []*server
}

// open opens every server. As kube-proxy does, the agent serves without those whose
// address cannot be bound, and run tries them again; with hardFail, open fails.
func (s *servers) open(ctx context.Context, hardFail bool) error {
	for _, one := range s.list {
		err := s.openOne(ctx, one)
		switch {
		case err == nil:
		case hardFail:
			return fmt.Errorf("serve %s: %w: give another %s, or an empty one", one.what, err, one.setting)
		default:
			one.waits = true
			s.log.Warn("address cannot be bound; trying again", "what", one.what, "err", err, "setting", one.setting)
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
