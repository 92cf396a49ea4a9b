package snat

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/topology"
)

// openTime is how long connections may take to open: lost SYNs are sent again.
const openTime = 15 * time.Second

// held returns how many connections take the share of ports that n of them take of
// MASQUERADE's. Of each eight ports, eBPF has seven for SNAT
// (docs/reference/ebpf-maps.md, "The choice of a SNAT port").
func (m method) held(n int) int {
	if m.mode == "ebpf" {
		return n * 7 / 8
	}
	return n
}

// hold keeps connections open, so that their ports are taken. All hosts share them: eBPF gives
// one client three quarters of the ports at most. It fails if not all of them are open.
func hold(ctx context.Context, r *harness.Harness, from []*topology.Host, to netip.AddrPort, held int, long time.Duration) (
	stop func() error, err error) {
	if held == 0 {
		return func() error { return nil }, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		_, err := r.LoadFrom(ctx, from, load.Config{Kind: load.HTTP, Target: to, Connections: held, Rate: float64(held),
			Duration: long, Timeout: openTime})
		ended <- err
	}()
	stop = func() error {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			return fmt.Errorf("hold %d connections: %w", held, err)
		}
		return nil
	}
	if err := waitOpen(ctx, from, to, held, ended); err != nil {
		cancel()
		return nil, fmt.Errorf("hold %d connections: %w", held, err)
	}
	return stop, nil
}

// waitOpen waits until all connections are open.
func waitOpen(ctx context.Context, from []*topology.Host, to netip.AddrPort, held int, ended <-chan error) error {
	deadline := time.Now().Add(openTime)
	for {
		open := 0
		for _, host := range from {
			n, err := harness.Established(host, to)
			if err != nil {
				return err
			}
			open += n
		}
		if open >= held {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d are open after %v", open, openTime)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		case err := <-ended:
			return errors.Join(err, errors.New("they ended"))
		}
	}
}
