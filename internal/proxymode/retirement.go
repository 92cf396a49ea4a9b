package proxymode

import (
	"context"
	"slices"
	"sync"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/reconcile"
)

// Retirement says how dataplanes that are not in use are cleaned up.
type Retirement struct {
	Failed func(dataplane string) // counts failed cleanups
	Later  func(func())           // runs a function beside the agent's other work
	Pause  time.Duration          // before the second attempt
}

// maxCleanupPause bounds the time between two attempts at a cleanup.
const maxCleanupPause = 5 * time.Minute

// CleanUnused removes what the dataplanes that are not in used left in the kernel
// under another --proxy-mode. Call it when the new dataplane serves, so that new
// connections always find one of them. CleanUnused waits until late answers have
// arrived. If connections of a dataplane would end with it, CleanUnused waits for
// their end.
func CleanUnused(ctx context.Context, c Config, used []dataplane.Backend, r Retirement) {
	unused := slices.DeleteFunc(slices.Clone(proxyModes), func(m proxyMode) bool {
		return slices.ContainsFunc(used, func(b dataplane.Backend) bool { return b.Name() == m.name })
	})
	for _, m := range unused {
		if m.drain == nil {
			continue
		}
		if err := m.drain(c); err != nil {
			c.Log.Warn("Drain a dataplane that is not in use", "dataplane", m.name, "err", err)
		}
	}
	select {
	case <-ctx.Done():
		return // the next start does it
	case <-time.After(reconcile.Linger):
	}
	var wg sync.WaitGroup
	for _, m := range unused {
		wg.Go(func() { m.retire(ctx, c, r) })
	}
	wg.Wait()
}

// retire cleans up a dataplane that is not in use when its connections have ended.
// A cleanup that fails is tried again in the background.
func (m *proxyMode) retire(ctx context.Context, c Config, r Retirement) {
	if m.drained != nil {
		if err := m.drained(ctx, c); ctx.Err() != nil {
			return // the next start does it
		} else if err != nil {
			c.Log.Warn("Wait for connections of a dataplane that is not in use", "dataplane", m.name, "err", err)
		}
	}
	if m.cleanedUp(ctx, c, r, r.Pause) {
		return
	}
	r.Later(func() {
		for pause := r.Pause; ; pause = min(2*pause, maxCleanupPause) {
			select {
			case <-ctx.Done():
				return // the next start does it
			case <-time.After(pause):
			}
			if m.cleanedUp(ctx, c, r, min(2*pause, maxCleanupPause)) {
				return
			}
		}
	})
}

// cleanedUp reports whether no further attempt is needed, and otherwise logs when
// the next attempt follows.
func (m *proxyMode) cleanedUp(ctx context.Context, c Config, r Retirement, next time.Duration) bool {
	err := m.cleanup(ctx, c)
	if err == nil || ctx.Err() != nil {
		return true
	}
	r.Failed(m.name)
	c.Log.Warn("Clean up a dataplane that is not in use", "dataplane", m.name, "again", next, "err", err)
	return false
}
