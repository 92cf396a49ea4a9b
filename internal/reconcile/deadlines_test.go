package reconcile

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
)

// watchedTable reports changes by another program.
type watchedTable struct {
	*fakeTable
	drifted chan struct{}
	repairs atomic.Int32
}

func (w *watchedTable) Drifted() <-chan struct{} { return w.drifted }

func (w *watchedTable) Repair(context.Context, donottrack.State) error {
	w.repairs.Add(1)
	return nil
}

// TestTheLoopWakesBeforeAFullSync: between two full syncs, hours apart here, policies that
// another program changed are restored, and the log repeats a problem that lasts.
func TestTheLoopWakesBeforeAFullSync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		table := &watchedTable{fakeTable: &fakeTable{}, drifted: make(chan struct{})}
		g := start(t, func(c *Config) { c.Policies, c.SyncPeriod = table, 3*time.Hour }, newFakeBackend("ebpf"))
		g.Deliver(policyDelta(), []model.Problem{{Where: "here", What: "lasts"}})
		g.after(time.Second)
		before := table.repairs.Load()
		table.drifted <- struct{}{}
		g.after(2 * driftQuiet)
		if n := table.repairs.Load() - before; n != 1 {
			t.Errorf("%d repairs of the policies, want 1", n)
		}
		g.after(reminderPeriod)
		if n := strings.Count(g.log.String(), "what=lasts"); n != 2 {
			t.Errorf("the log names the problem %d times, want 2:\n%s", n, g.log.String())
		}
	})
}
