package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kernel"
)

// DefaultTable is the name of the table, of family inet, in the agent's network
// namespace.
const DefaultTable = "spillway"

// Config is how the dataplane is set up.
type Config struct {
	// Table is the name of the table; "" is DefaultTable. Two agents in one
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
		c.Table = DefaultTable
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	return c
}

// Backend is the nftables dataplane of one instance.
type Backend struct {
	cfg    Config
	sock   *socket
	traits traits
	counts counts
	// emptyNode is set while the desired state has no port and the kernel therefore holds
	// no table: the node, for when a port is added.
	emptyNode *intent.Node

	table *table // nil: the kernel's state is unknown
	// While the generation of nf_tables is this one, no other program has written to any
	// table since the agent did. generationKnown is false after another program wrote.
	generation      uint32
	generationKnown bool
	// To read all elements is expensive. elementsUnread is set if another program wrote
	// and the agent compared only the table's shape. The agent reads them at nextRead at
	// the earliest.
	elementsUnread bool
	nextRead       time.Time
	found          *image // what unchanged or Applied read, for the Replace that follows
	// watch receives notifications of changes by other programs; nil: the kernel sends
	// none, and only full syncs find changes. notified is set after a notification.
	watch    *kernel.NftablesWatch
	drifted  chan struct{}
	notified atomic.Bool
	have     map[intent.Helper]bool // helpers that the kernel is known to have
	repaired dataplane.Repair
}

// auditShare bounds the time for reading: a table that took 1 s to read is read again 100
// s later at the earliest.
const auditShare = 100

var _ dataplane.Backend = (*Backend)(nil)

// New opens the dataplane. Its error is one line that names what the machine lacks.
func New(ctx context.Context, cfg Config) (*Backend, error) {
	cfg = cfg.withDefaults()
	b := &Backend{cfg: cfg, drifted: make(chan struct{}, 1), have: map[intent.Helper]bool{}}
	liberal, err := kernel.ReadSysctl("net.netfilter.nf_conntrack_tcp_be_liberal")
	b.traits = traits{liberal: err == nil && liberal == "1", beside: cfg.Beside, counted: cfg.ServiceCounters, sockets: true}
	ask := func(s *socket) error { return probe(s, cfg.Table, b.traits) }
	if err = b.do(ctx, ask); err != nil {
		b.traits.sockets = false
		err = b.do(ctx, ask)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %s", explain(err), "this dataplane needs nf_tables and NAT of Linux 5.13 or newer, and root; or use another --proxy-mode")
	}
	if err := b.listen(); err != nil {
		cfg.Log.Info("changes by others are noticed by audits only", "table", cfg.Table, "err", err)
	}
	return b, nil
}

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

// probe has the kernel judge a table with one of everything, and undo it: a
// batch that does not end is never carried out.
func probe(s *socket, name string, tr traits) error {
	t := newTable(tr)
	for _, b := range t.layout.bases() {
		b.timeout(t.layout, time.Hour)
	}
	all := map[string]bool{}
	batch := &batch{table: name + "-probe"}
	batch.addTable()
	for _, s := range t.layout.sets {
		if t.layout.needsHelper(s) {
			continue // a kernel may lack a helper, and serve the rest
		}
		all[s.name] = true
		batch.addSet(s)
	}
	chains := t.ruleset(all, &intent.Node{})
	for i := range chains {
		batch.addChain(&chains[i])
	}
	for i := range chains {
		batch.addRules(&chains[i])
	}
	return s.commit(batch, false)
}

// Name is the value of --proxy-mode.
func (b *Backend) Name() string { return "nftables" }

// CanCarry accepts every protocol that a Service may have.
func (b *Backend) CanCarry(*intent.ServicePort) error { return nil }

// Apply writes the changes in one batch.
func (b *Backend) Apply(ctx context.Context, c intent.Changes) error {
	if b.emptyNode != nil {
		s := intent.State{Ports: c.Upserts, Node: *b.emptyNode}
		if c.Node != nil {
			s.Node = *c.Node
		}
		return b.Replace(ctx, s)
	}
	if b.table == nil {
		return errors.New("write changes: it is not known what the kernel holds; the whole state is needed")
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
	if err := b.write(ctx, ch, mended); err != nil {
		return err
	}
	return portErrors(failed)
}

// Replace makes the table hold this state. If it is as the agent left it, only
// what differs from the last state is written; else it is read and compared.
func (b *Backend) Replace(ctx context.Context, s intent.State) error {
	if b.cfg.Beside && len(s.Ports) == 0 {
		b.table, b.found, b.emptyNode, b.repaired = nil, nil, &s.Node, dataplane.Repair{}
		return b.remove(ctx)
	}
	b.emptyNode, b.repaired = nil, dataplane.Repair{}
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
	if err := b.write(ctx, ch, mended); err != nil {
		return err
	}
	return portErrors(failed)
}

// unchanged reports whether the table is as the agent left it. That is cheap while no
// other program writes to nf_tables. Otherwise unchanged compares the table's shape and,
// as often as nextRead allows, reads its elements into found.
func (b *Backend) unchanged(ctx context.Context) (same bool, err error) {
	if b.table == nil || b.found != nil {
		return false, nil
	}
	err = b.do(ctx, func(s *socket) error {
		g, err := s.generation()
		if err != nil {
			return err
		}
		due := b.notified.Load() || !time.Now().Before(b.nextRead)
		if same = b.generationKnown && g == b.generation && !(b.elementsUnread && due); same {
			return nil
		}
		shape, err := s.read(b.cfg.Table, false)
		if err != nil {
			return err
		}
		if !shape.shapedAs(b.table) || due {
			return b.readAll(s)
		}
		same, b.generation, b.generationKnown, b.elementsUnread = true, shape.generation, true, true
		return nil
	})
	return same, err
}

// readAll reads the table with all its elements.
func (b *Backend) readAll(s *socket) (err error) {
	start := time.Now()
	b.notified.Store(false)
	b.found, err = s.read(b.cfg.Table, true)
	b.nextRead = time.Now().Add(auditShare * time.Since(start))
	return err
}

// restore compares the whole state with the kernel and writes the difference. If the table
// cannot be repaired, restore replaces it in one batch.
func (b *Backend) restore(ctx context.Context, s intent.State, failed map[intent.PortID]error) error {
	left := b.table
	b.table, b.generationKnown, b.elementsUnread = nil, false, false
	if err := b.do(ctx, b.readUnlessFound); err != nil {
		return err
	}
	found := b.found
	b.found = nil
	if found.owned {
		return fmt.Errorf("table inet %s belongs to another program, which has it locked (flag owner): stop that program, and look with: nft list table inet %s", b.cfg.Table, b.cfg.Table)
	}
	ch, bad := wholeChange(b.traits, s)
	maps.Copy(failed, bad)
	mendable := found.there && ch.against(found)
	if found.there && !mendable {
		b.cfg.Log.Warn("the table has a set or chain of another type; making it anew", "table", b.cfg.Table)
	}
	if mendable {
		b.table, b.generationKnown, b.generation = ch.t, true, found.generation
		before := b.counts.bytes.Load()
		err := b.write(ctx, ch, mended)
		if err == nil {
			if b.counts.bytes.Load() > before {
				b.noteRepair(left, found)
			}
			return portErrors(failed)
		}
		if ctx.Err() != nil {
			return err
		}
		b.cfg.Log.Warn("the table cannot be mended; making it anew", "table", b.cfg.Table, "err", err)
	}
	ch, _ = wholeChange(b.traits, s)
	b.table, b.generationKnown, b.generation = ch.t, true, found.generation
	how := madeAnew
	if !found.there && !found.dormant {
		how = fromNothing
	}
	if err := b.write(ctx, ch, how); err != nil {
		return err
	}
	b.noteRepair(left, found)
	return portErrors(failed)
}

// readUnlessFound reads the table unless found is current.
func (b *Backend) readUnlessFound(s *socket) error {
	if b.found != nil {
		if g, err := s.generation(); err != nil || g == b.found.generation {
			return err
		}
	}
	return b.readAll(s)
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
	mended      origin = iota // the table as it is
	madeAnew                  // the table goes in the same batch
	fromNothing               // there is no table: nothing of it serves before the rules come
)

// write has the kernel make a change. If it fails, nothing is known any more.
func (b *Backend) write(ctx context.Context, c *change, from origin) error {
	p := c.plan(b.cfg.Table)
	if from != mended {
		fresh := &batch{table: b.cfg.Table}
		if fresh.addTable(); from == madeAnew {
			fresh.delTable() // there was one to delete, in any case
			fresh.addTable()
		}
		p.batch.msgs = append(fresh.msgs, p.batch.msgs...)
		p.batch.size += fresh.size
	}
	if from == fromNothing {
		p.batch.loosen()
	}
	if len(p.batch.msgs) == 0 {
		c.done(p)
		return nil
	}
	err := b.do(ctx, func(s *socket) error {
		parts := p.batch.parts()
		for _, part := range parts {
			if err := s.commit(part, true); err != nil {
				return err
			}
		}
		g, err := s.generation()
		if err == nil && g == b.generation+uint32(len(parts)) {
			b.generation = g
			return nil
		}
		b.generationKnown = false // another program wrote at the same time
		return nil
	})
	if err != nil {
		b.table, b.generationKnown = nil, false
		b.counts.failures.Add(1)
		return err
	}
	c.done(p)
	b.found = nil
	b.counts.batches.Add(1)
	b.counts.bytes.Add(uint64(p.batch.size))
	return nil
}

func portErrors(failed map[intent.PortID]error) error {
	if len(failed) == 0 {
		return nil
	}
	return &dataplane.PortErrors{Errors: failed}
}

// samePort compares all that is rendered.
func samePort(a, b *intent.ServicePort) bool {
	return a == b || a != nil && b != nil && a.ID == b.ID && a.Affinity == b.Affinity && a.Helper == b.Helper && a.OfFTP == b.OfFTP &&
		slices.Equal(a.Endpoints, b.Endpoints) && slices.EqualFunc(a.Frontends, b.Frontends, func(x, y intent.Frontend) bool {
		return x.Kind == y.Kind && x.Addr == y.Addr && x.Port == y.Port && x.ExternalRoute == y.ExternalRoute && x.InternalRoute == y.InternalRoute &&
			(x.SourceRanges == nil) == (y.SourceRanges == nil) && slices.Equal(x.SourceRanges, y.SourceRanges)
	})
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
	if err := b.do(ctx, b.readUnlessFound); err != nil {
		return intent.State{}, err
	}
	return b.found.state(newLayout()), nil
}

// Close lets go of the sockets; the table serves on.
func (b *Backend) Close() error {
	if b.watch != nil {
		_ = b.watch.Close()
		b.watch = nil
	}
	if b.sock != nil {
		b.sock.close()
		b.sock = nil
	}
	return nil
}

// Cleanup takes everything of this instance out of the kernel. What is not
// there is no error, and neither is a kernel without nf_tables.
func Cleanup(ctx context.Context, cfg Config) error {
	cfg = cfg.withDefaults()
	b := &Backend{cfg: cfg}
	defer b.Close()
	return b.remove(ctx)
}

// remove deletes the table, if there is one.
func (b *Backend) remove(ctx context.Context) error {
	err := b.do(ctx, func(s *socket) error {
		img := &image{}
		if err := s.readFlags(b.cfg.Table, img); err != nil || !img.there && !img.dormant {
			return err
		}
		if b.cfg.BeforeRemoval != nil {
			if err := b.cfg.BeforeRemoval(ctx); err != nil {
				return err
			}
		}
		batch := &batch{table: b.cfg.Table}
		batch.delTable()
		return s.commit(batch, true)
	})
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("delete table %s: %w", b.cfg.Table, err)
	}
	return nil
}
