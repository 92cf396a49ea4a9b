package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"time"

	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/nft"
)

// defaultTable is the name of the table, of family inet, in the agent's network
// namespace.
const defaultTable = "spillway"

// Capacity is what the table takes without delaying other changes for more than a second or two. The
// kernel's time for the source ranges of an address grows with their square (nft_set_pipapo.c): 8,192
// take a second, and 65,536 more than a minute.
var Capacity = intent.Capacity{Frontends: 1 << 19, Endpoints: 1 << 20, Slots: 1 << 21, SourceRanges: 1 << 14, FrontendSlots: 1 << 21}

// Config is how the dataplane is set up.
type Config struct {
	// Table is the name of the table; "" is defaultTable. Two agents in one
	// network namespace need two names.
	Table string
	// Beside says that another dataplane serves this node, and this one only
	// ports that the other cannot: it refuses no other port of their addresses,
	// and while it has no port there is no table, and so no conntrack either.
	Beside bool
	// ServiceCounters has the kernel count, for each address and port of a
	// Service, the connections that ask for it and the bytes of their first
	// packets: nft list set inet spillway services4-counters shows them.
	ServiceCounters bool
	// BeforeRemoval runs before Cleanup removes the table, and with it the translation of
	// its connections. An error keeps the table. Nil: no check.
	BeforeRemoval func(context.Context) error
	Log           *slog.Logger // nil: slog.Default()
}

func (c Config) withDefaults() Config {
	if c.Table == "" {
		c.Table = defaultTable
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	return c
}

// Backend is the nftables dataplane of one instance.
type Backend struct {
	tableSync
	turn       *semaphore.Weighted // one write or comparison at a time
	cfg        Config
	traits     traits
	counts     counts
	handshakes handshakes
	egress     egressCounts
	node       intent.Node // while the table is absent: for when a port is added
	table      *table      // nil: unknown or absent
	// Reading all elements is expensive: the agent does it at nextRead at the earliest, or
	// after a notification.
	nextRead time.Time
	found    *nft.Listing           // what unchanged or Applied read, for the Replace that follows
	have     map[intent.Helper]bool // helpers that the kernel is known to have
}

// auditShare bounds the time for reading: a table that took 1 s to read is read again 100
// s later at the earliest.
const auditShare = 100

var _ dataplane.Partial = (*Backend)(nil)

// New opens the dataplane. Its error is one line that names what the machine lacks.
func New(ctx context.Context, cfg Config) (*Backend, error) {
	cfg = cfg.withDefaults()
	b := &Backend{cfg: cfg, turn: semaphore.NewWeighted(1), tableSync: newTableSync(cfg.Table, tableComment, cfg.Log),
		have: map[intent.Helper]bool{}}
	liberal, err := kernel.ReadSysctl("net.netfilter.nf_conntrack_tcp_be_liberal")
	b.traits = traits{liberal: err == nil && liberal == "1", beside: cfg.Beside, counted: cfg.ServiceCounters, sockets: true}
	if err = b.conn.Check(ctx, probe(b.nftTable, b.traits)); err != nil {
		b.traits.sockets = false
		err = b.conn.Check(ctx, probe(b.nftTable, b.traits))
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %s", explain(err),
			"this dataplane needs nf_tables and NAT of Linux 5.13 or newer, and CAP_NET_ADMIN; or use another --proxy-mode")
	}
	b.watch()
	return b, nil
}

const tableComment = "Kubernetes Services, kept by spillway: changes made by hand are undone"

// explain puts what the kernel answers when nf_tables is not there in words.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("nf_tables may not be used: %w", err)
	case errors.Is(err, unix.EPROTONOSUPPORT), errors.Is(err, unix.EAFNOSUPPORT), errors.Is(err, unix.EINVAL),
		errors.Is(err, unix.ENOENT), errors.Is(err, unix.EOPNOTSUPP):
		return fmt.Errorf("nf_tables of this kernel lacks something: %w", err)
	}
	return err
}

// probe makes a table with one object of each kind, for the kernel to check.
func probe(of nft.Table, tr traits) *nft.Transaction {
	t := newTable(tr)
	for _, b := range t.layout.bases() {
		b.timeout(t.layout, time.Hour)
	}
	all := map[string]bool{}
	of.Name += "-probe"
	tx := nft.NewTransaction(of)
	tx.AddTable()
	for _, s := range t.layout.sets {
		if t.layout.needsHelper(s) {
			continue // a kernel may lack a helper, and serve the rest
		}
		all[s.Name] = true
		tx.AddSet(&s.Set)
	}
	tx.Chains(nil, t.ruleset(all, &intent.Node{}))
	return tx
}

// Name is the value of --proxy-mode.
func (b *Backend) Name() string { return "nftables" }

// CanCarry accepts every protocol that a Service may have.
func (b *Backend) CanCarry(*intent.ServicePort) error { return nil }

// PartEndpoints is the number of endpoints that are written in some tenths of a second. The
// kernel also keeps 4 KiB for each element of a batch: see nft.Transaction.Parts.
func (b *Backend) PartEndpoints() int { return 1 << 15 }

// Apply writes the changes in one batch.
func (b *Backend) Apply(ctx context.Context, c intent.Changes) error {
	if err := b.turn.Acquire(ctx, 1); err != nil {
		return err
	}
	defer b.turn.Release(1)
	return b.apply(ctx, c)
}

func (b *Backend) apply(ctx context.Context, c intent.Changes) error {
	switch b.state {
	case unknown:
		return errors.New("write changes: it is not known what the kernel holds; the whole state is needed")
	case absent:
		s := intent.State{Ports: c.Upserts, Node: b.node}
		if c.Node != nil {
			s.Node = *c.Node
		}
		return b.replace(ctx, s)
	}
	ch, failed := b.table.change(), map[intent.PortID]error{}
	for _, id := range c.Deletes {
		if err := ch.setPort(id, nil); err != nil {
			failed[id] = err
		}
	}
	for _, p := range b.checkHelpers(ctx, c.Upserts, failed) {
		if err := ch.setPort(p.ID, p); err != nil {
			failed[p.ID] = err
		}
	}
	if c.Node != nil {
		ch.setNode(c.Node)
	}
	if err := b.write(ctx, ch, fromExisting); err != nil {
		return err
	}
	return dataplane.PortErrorsOf(failed)
}

// Replace makes the table hold this state. If it is as the agent left it, only
// what differs from the last state is written; else it is read and compared.
func (b *Backend) Replace(ctx context.Context, s intent.State) error {
	if err := b.turn.Acquire(ctx, 1); err != nil {
		return err
	}
	defer b.turn.Release(1)
	return b.replace(ctx, s)
}

func (b *Backend) replace(ctx context.Context, s intent.State) error {
	if b.cfg.Beside && len(s.Ports) == 0 {
		b.state, b.node, b.table, b.found, b.repaired = absent, s.Node, nil, nil, dataplane.Repair{}
		return b.remove(ctx, b.cfg.BeforeRemoval)
	}
	b.repaired = dataplane.Repair{}
	failed := map[intent.PortID]error{}
	s.Ports = b.checkHelpers(ctx, s.Ports, failed)
	unchanged, err := b.unchanged(ctx)
	if err != nil {
		return err
	}
	if !unchanged {
		return b.restore(ctx, s, failed)
	}
	ch := b.table.change()
	wanted := make(map[intent.PortID]bool, len(s.Ports))
	for _, p := range s.Ports {
		wanted[p.ID] = true
		if !samePort(b.table.ports[p.ID], p) {
			if err := ch.setPort(p.ID, p); err != nil {
				failed[p.ID] = err
			}
		}
	}
	for id := range b.table.ports {
		if !wanted[id] {
			if err := ch.setPort(id, nil); err != nil {
				failed[id] = err
			}
		}
	}
	if !reflect.DeepEqual(b.table.node, s.Node) {
		ch.setNode(&s.Node)
	}
	if err := b.write(ctx, ch, fromExisting); err != nil {
		return err
	}
	return dataplane.PortErrorsOf(failed)
}

// unchanged reports whether the table is as the agent left it. That is cheap while no
// other program writes to nf_tables. Otherwise unchanged compares the table's shape and,
// as often as nextRead allows, reads its elements into found.
func (b *Backend) unchanged(ctx context.Context) (bool, error) {
	if !b.state.known() || b.found != nil {
		return false, nil
	}
	g, err := b.conn.Generation(ctx)
	if err != nil {
		return false, err
	}
	due := b.notified.Load() || !time.Now().Before(b.nextRead)
	if g == b.generation && (b.state == current || b.state == elementsUnread && !due) {
		return true, nil
	}
	shape, err := b.conn.Read(ctx, b.nftTable, false)
	if err != nil {
		return false, err
	}
	if due || !b.table.matches(shape) {
		return false, b.readAll(ctx)
	}
	b.generation, b.state = shape.Generation, elementsUnread
	return true, nil
}

// readAll reads the table with all its elements.
func (b *Backend) readAll(ctx context.Context) (err error) {
	start := time.Now()
	b.notified.Store(false)
	b.found, err = b.conn.Read(ctx, b.nftTable, true)
	b.nextRead = time.Now().Add(auditShare * time.Since(start))
	return err
}

// restoreAll compares the whole state with the kernel and writes the difference. If the table
// cannot be repaired, restoreAll replaces it in one batch.
func (b *Backend) restoreAll(ctx context.Context, s intent.State, failed map[intent.PortID]error) error {
	left := b.table
	b.table, b.state = nil, unknown
	if err := b.readUnlessFound(ctx); err != nil {
		return err
	}
	found := b.found
	b.found = nil
	if err := notOwned(found); err != nil {
		return err
	}
	ch, bad := wholeChange(b.traits, s)
	maps.Copy(failed, bad)
	repairable := found.Active() && ch.against(found)
	if found.Active() && !repairable {
		b.log.Warn("the table has a set or chain of another type; making it anew", "table", b.nftTable.Name)
	}
	b.generation = found.Generation
	if repairable {
		b.table, b.state = ch.t, current
		before := b.counts.bytes.Load()
		err := b.write(ctx, ch, fromExisting)
		if err == nil {
			if b.counts.bytes.Load() > before {
				b.noteRepair(left, found)
			}
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
		b.log.Warn("the table cannot be repaired; making it anew", "table", b.nftTable.Name, "err", err)
	}
	ch, _ = wholeChange(b.traits, s)
	b.table, b.state = ch.t, current
	from := fromDeleted
	if !found.Exists {
		from = fromNothing
	}
	if err := b.write(ctx, ch, from); err != nil {
		return err
	}
	b.noteRepair(left, found)
	return nil
}

// notOwned returns an error if another program has locked the table.
func notOwned(found *nft.Listing) error {
	if found.Table.Flags&nft.TableOwner == 0 {
		return nil
	}
	name := found.Table
	return fmt.Errorf("table %s belongs to another program, which has it locked (flag owner): stop that program, and look with: nft list "+
		"table %s", name, name)
}

// readUnlessFound reads the table unless found is current.
func (b *Backend) readUnlessFound(ctx context.Context) error {
	if b.found != nil {
		if g, err := b.conn.Generation(ctx); err != nil || g == b.found.Generation {
			return err
		}
	}
	return b.readAll(ctx)
}

// wholeChange brings an empty table to a state.
func wholeChange(tr traits, s intent.State) (*change, map[intent.PortID]error) {
	ch, failed := newTable(tr).change(), map[intent.PortID]error{}
	for _, p := range s.Ports {
		if err := ch.setPort(p.ID, p); err != nil {
			failed[p.ID] = err
		}
	}
	ch.setNode(&s.Node)
	return ch, failed
}

// origin is what a change starts from.
type origin int

const (
	fromExisting origin = iota // the table as it is
	fromDeleted                // the same batch deletes the table
	fromNothing                // no table: packets meet none of it before the rules are added
)

// write makes the kernel carry out a change. If that fails, the table is unknown.
func (b *Backend) write(ctx context.Context, c *change, from origin) error {
	rest := c.deferDeletions()
	if err := b.writeBatch(ctx, c, from); err != nil || rest == nil {
		return err
	}
	waitForPackets()
	return b.writeBatch(ctx, rest, fromExisting)
}

// waitForPackets waits until no packet is among the rules that was there before, for some 10 ms. A virtual
// CPU can stop in the middle of a packet for longer than two batches take: the packet would find its
// frontend neither in the new class nor in the old one. Netfilter holds rcu_read_lock at a hook, and
// membarrier waits for all who do (kernel/sched/membarrier.c: synchronize_rcu). It is refused where a CPU
// has no timer tick (nohz_full); then the time between two batches must do.
func waitForPackets() {
	const global = 1 // MEMBARRIER_CMD_GLOBAL, include/uapi/linux/membarrier.h
	_, _, _ = unix.Syscall(unix.SYS_MEMBARRIER, global, 0, 0)
}

// writeBatch is write without regard to the order of deletions.
func (b *Backend) writeBatch(ctx context.Context, c *change, from origin) error {
	p := c.plan(b.nftTable)
	parts := []*nft.Transaction{p.tx}
	switch from {
	case fromDeleted:
		p.tx.ReplaceTable()
	case fromNothing:
		p.tx.AddTable()
		parts = p.tx.Parts()
	}
	if !p.tx.Empty() {
		if err := b.committed(b.conn.CommitParts(ctx, parts)); err != nil {
			b.table = nil
			b.counts.failures.Add(1)
			return err
		}
		b.found = nil
		b.counts.batches.Add(1)
		b.counts.bytes.Add(uint64(p.tx.Size()))
	}
	c.done(p)
	b.egress.follow(c.t)
	return nil
}

// samePort compares all that is rendered.
func samePort(a, b *intent.ServicePort) bool {
	return a == b || a != nil && b != nil && rendered(*a).Equal(rendered(*b))
}

// rendered returns a port without what no rule and no element depends on.
func rendered(p intent.ServicePort) *intent.ServicePort {
	p.Table, p.Balance, p.DSR, p.SYNLimit, p.ServingUnselected, p.Lingering = nil, intent.Random, false, 0, nil, nil
	return &p
}

// Applied returns what the kernel serves, for tests. It reads the table only if another
// program has written to nf_tables since the agent did.
func (b *Backend) Applied(ctx context.Context) (intent.State, error) {
	unchanged, err := b.unchanged(ctx)
	if err != nil {
		return intent.State{}, err
	}
	if unchanged {
		s := intent.State{Ports: slices.Collect(maps.Values(b.table.ports)), Node: b.table.node}
		slices.SortFunc(s.Ports, func(x, y *intent.ServicePort) int { return x.ID.Compare(y.ID) })
		return s, nil
	}
	if err := b.readUnlessFound(ctx); err != nil {
		return intent.State{}, err
	}
	return state(b.found, newLayout()), nil
}

// Cleanup deletes everything of this instance from the kernel. A missing table is no error,
// and neither is a kernel without nf_tables.
func Cleanup(ctx context.Context, cfg Config) error {
	cfg = cfg.withDefaults()
	t := newTableSync(cfg.Table, "", cfg.Log)
	defer t.Close()
	return t.remove(ctx, cfg.BeforeRemoval)
}
