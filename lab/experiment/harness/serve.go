package harness

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"spillway.dev/spillway/test/testbed/topology"
	"spillway.dev/spillway/test/testbed/workload"
)

// Packages maps the programs that a cluster with conntrack and an HTTP server need
// to their Debian packages.
var Packages = map[string]string{"nginx": "nginx-light", "nft": "nftables"}

// BodySize is the length in bytes of the body that every HTTP server sends, so that
// measurements compare equal responses.
const BodySize = 64

// Serve starts a server of the kind workload.HTTP or workload.UDP on a host and
// returns when it listens. It runs until the harness goes down.
func (h *Harness) Serve(ctx context.Context, host *topology.Host, kind string, port uint16) error {
	cfg := workload.Config{Kind: kind, Listen: fmt.Sprintf(":%d", port), Name: host.Name}
	if kind == workload.HTTP {
		cfg.Size = BodySize
	}
	return h.Start(ctx, host, cfg)
}

// Start starts any server on a host and returns when it listens. It runs until
// the harness goes down.
func (h *Harness) Start(ctx context.Context, host *topology.Host, cfg workload.Config) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	cmd, err := workload.Start(h.life, host, cfg)
	if err != nil {
		return err
	}
	done := make(chan struct{})
	go func() {
		_ = cmd.Wait() // Down ends it; clients notice an earlier end
		close(done)
	}()
	h.servers = append(h.servers, done)
	if h.pids == nil {
		h.pids = map[string]int{}
	}
	h.pids[host.Name] = cmd.Process.Pid
	return nil
}

// waitServers waits up to 3 s for the servers to end.
func (h *Harness) waitServers() {
	limit := time.After(3 * time.Second)
	for _, done := range h.servers {
		select {
		case <-done:
		case <-limit:
			return // the cluster's Down kills what is left
		}
	}
}

// WaitAnswer sends requests from a host until the target answers, for 5 s at most.
func (h *Harness) WaitAnswer(ctx context.Context, host *topology.Host, kind string, target netip.AddrPort) error {
	const limit = 5 * time.Second
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		q := workload.Question{Kind: kind, To: target.String(), Timeout: time.Second}
		a, err := workload.Ask(ctx, host, q)
		if err == nil && a.Outcome == workload.Answered {
			return nil
		}
		if err == nil {
			err = fmt.Errorf("%s: %s", a.Outcome, a.Error)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("wait for %s to answer %s: nothing after %v: %w", target, host.Name, limit, err)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
