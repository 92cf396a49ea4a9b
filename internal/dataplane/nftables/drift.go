package nftables

import (
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kernel"
)

// listen has the kernel tell what others change in the table.
func (b *Backend) listen() error {
	w, err := kernel.WatchNftables(func(family uint8, table string) bool {
		return family == unix.NFPROTO_INET && table == b.cfg.Table
	}, func() {
		b.notified.Store(true)
		select {
		case b.drifted <- struct{}{}:
		default:
		}
	})
	if err != nil {
		return err
	}
	b.watch = w
	return w.Ignore(b.sock.conn.PID())
}

// Drifted receives when another program has changed the table, or when the kernel lost
// notifications.
func (b *Backend) Drifted() <-chan struct{} { return b.drifted }

// Repaired tells, once, what the last Replace found changed.
func (b *Backend) Repaired() dataplane.Repair {
	r := b.repaired
	b.repaired = dataplane.Repair{}
	return r
}

// noteRepair compares the last written table with the table that was found, which has been
// repaired meanwhile.
func (b *Backend) noteRepair(left *table, found *image) {
	if b.repaired = left.differs(found); b.repaired.Any() {
		b.counts.repairs.Add(1)
	}
}

// differs returns what another program changed. After a start the previous table is
// unknown, and nothing counts as changed.
func (t *table) differs(found *image) (r dataplane.Repair) {
	if t == nil {
		return r
	}
	was, _ := wholeChange(t.traits, intent.State{Ports: slices.Collect(maps.Values(t.ports)), Node: t.node})
	switch {
	case found.dormant:
		r.Note(1, 0, "hooks: the table was made dormant")
	case !found.there:
		r.Note(1, 0, "table")
	case !was.against(found):
		r.Note(0, 1, "set or chain of another type")
	default:
		r = was.plan("").repair
	}
	return r
}
