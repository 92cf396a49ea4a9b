package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/nft"
)

// tableSync is the connection to one table, and what is known of the table.
type tableSync struct {
	conn     nft.Conn
	nftTable nft.Table
	log      *slog.Logger
	state    syncState
	drifted  chan struct{}
	notified atomic.Bool // another program has changed the table since it was last read
	// generation is that of nf_tables when the table was last written or read.
	generation uint32
	repaired   dataplane.Repair
}

// syncState is what is known of a table.
type syncState int

const (
	// unknown: the table has to be read.
	unknown syncState = iota
	// absent: the desired state has no port, and the kernel therefore no table.
	absent
	// current: the table is as it was written. No other program has written to nf_tables
	// since generation.
	current
	// elementsUnread: as current, but another program has written before generation, and
	// only sets, chains and rules have been compared since.
	elementsUnread
	// outdated: another program has written to nf_tables since generation.
	outdated
)

// known reports whether changes can be written without reading the table.
func (s syncState) known() bool { return s >= current }

func newTableSync(name, comment string, log *slog.Logger) tableSync {
	return tableSync{
		nftTable: nft.Table{Family: unix.NFPROTO_INET, Name: name, Comment: comment},
		log:      log, drifted: make(chan struct{}, 1),
	}
}

// watch makes the kernel report changes by other programs.
func (t *tableSync) watch() {
	err := t.conn.Watch(t.nftTable, func() {
		t.notified.Store(true)
		select {
		case t.drifted <- struct{}{}:
		default:
		}
	})
	if err != nil {
		t.log.Info("changes by others are noticed by audits only", "table", t.nftTable.Name, "err", err)
	}
}

// Drifted receives when another program has changed the table, or when the kernel lost
// notifications.
func (t *tableSync) Drifted() <-chan struct{} { return t.drifted }

// Repaired returns, once, what the last Replace found changed.
func (t *tableSync) Repaired() dataplane.Repair {
	r := t.repaired
	t.repaired = dataplane.Repair{}
	return r
}

// Close closes the sockets; the table stays.
func (t *tableSync) Close() error { return t.conn.Close() }

// committed records the result of a commit.
func (t *tableSync) committed(done nft.Committed, err error) error {
	if err != nil {
		t.state = unknown
		return err
	}
	if g, ok := done.Follows(t.generation); ok {
		t.generation = g
	} else {
		t.state = outdated
	}
	return nil
}

// remove deletes the table, if it exists, after before, if that is not nil.
func (t *tableSync) remove(ctx context.Context, before func(context.Context) error) error {
	tables, err := t.conn.Tables(ctx)
	exists := slices.ContainsFunc(tables, t.nftTable.Same)
	if err == nil && exists && before != nil {
		err = before(ctx)
	}
	if err == nil && exists {
		tx := nft.NewTransaction(t.nftTable)
		tx.DeleteTable()
		_, err = t.conn.Commit(ctx, tx)
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("delete table %s: %w", t.nftTable.Name, err)
	}
	return nil
}

// noteRepair compares the last written table with the table that was found, which has been
// repaired meanwhile.
func (b *Backend) noteRepair(left *table, found *nft.Listing) {
	if b.repaired = left.differs(found); b.repaired.Any() {
		b.counts.repairs.Add(1)
	}
}

// differs returns what another program changed. After a start the previous table is
// unknown, and nothing counts as changed.
func (t *table) differs(found *nft.Listing) (r dataplane.Repair) {
	if t == nil {
		return r
	}
	was, _ := wholeChange(t.traits, intent.State{Ports: slices.Collect(maps.Values(t.ports)), Node: t.node})
	switch {
	case !found.Exists:
		r.Note(1, 0, "table")
	case found.Table.Dormant():
		r.Note(1, 0, "hooks: the table was made dormant")
	case !was.against(found):
		r.Note(0, 1, "set or chain of another type")
	default:
		r = was.plan(nft.Table{}).repair
	}
	return r
}
