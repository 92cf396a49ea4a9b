package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/policy"
)

// PolicyTable is the name of the table of do-not-track policies, of family inet.
const PolicyTable = "spillway-policy"

// Policies is a table of its own for do-not-track policies, beside whichever
// dataplane serves Services:
//
//	prerouting, output (raw: before conntrack and all NAT)
//	  port, then destination . protocol . port in asked4? ────────> chain in-cache-0-from
//	  source port, then source . protocol . it in answering4? ────> chain in-cache-0-to
//	  port, then source . protocol . port in asking4? ────────────> chain out-db-0-to
//	  source port, then destination . protocol . it in answered4? > chain out-db-0-from
//
//	in-cache-0-from:
//	  destination . source . protocol . port in kept4   go back: netfilter translates it
//	  source in in-cache-0-pods4      count, notrack, accept (with egress rules: go back)
//	  source in in-cache-0-ranges4    count, notrack, accept
//	  source is the node's own        go back
//	  deny: others                    count, drop
//
// Ranges of ports are in asked-ranges4 and so on. A port outside all ranges of a path costs
// a comparison. Other packets cost a lookup for each path up to their own, and one for each
// set of the rules that match. Empty sets and paths do not exist. A drop is final, and
// notrack stays: the order of the paths makes no difference to what is allowed.
type Policies struct {
	link *Backend // socket, watch and table
	now  *policyTable
	// generation is as in Backend.
	generation      uint32
	generationKnown bool
	repaired        dataplane.Repair
	leftLook        time.Time // next run of forgetLeft
	leftMade        bool      // the table of remaining connections exists
	nat             bool      // another program translated at the last check
	counts          policyCounts
}

var _ dataplane.Policies = (*Policies)(nil)

// NewPolicies opens the table of policies; table "" is PolicyTable. Its error is
// one line that says what the machine lacks.
func NewPolicies(ctx context.Context, table string, log *slog.Logger) (*Policies, error) {
	cfg := Config{Table: table, Log: log}
	if cfg.Table == "" {
		cfg.Table = PolicyTable
	}
	p := &Policies{link: &Backend{cfg: cfg.withDefaults(), drifted: make(chan struct{}, 1)}}
	if err := p.link.do(ctx, p.probe); err != nil {
		return nil, fmt.Errorf("%w: do-not-track policies need nf_tables of Linux 5.13 or newer", explain(err))
	}
	if err := p.link.listen(); err != nil {
		p.link.cfg.Log.Info("changes by others are noticed by audits only", "table", cfg.Table, "err", err)
	}
	return p, nil
}

// probe has the kernel judge a table with one of everything, and undo it.
func (p *Policies) probe(s *socket) error {
	t := newPolicyTable()
	t.rules["r"] = &policy.Rule{Name: "r", Pods: true, Side: policy.Egress}
	t.verdicts["r"] = &policy.Verdict{Name: "r", Rules: []string{"r"}, Deny: true}
	for _, f := range []*family{&ipv4, &ipv6} {
		t.kept[trackedSet(f).name] = 1
	}
	for _, w := range ways {
		for _, ranges := range []bool{false, true} {
			for _, f := range []*family{&ipv4, &ipv6} {
				t.count(w.set(f, ranges), ports{1, 2}, 1)
			}
		}
	}
	t.shape()
	b := p.batch()
	b.table += "-probe"
	b.addTable()
	t.write(b, nil)
	return s.commit(b, false)
}

func (p *Policies) batch() *batch {
	return &batch{table: p.link.cfg.Table, about: "DoNotTrackPolicies, kept by spillway: changes made by hand are undone"}
}

// Drifted receives when another program has changed the table.
func (p *Policies) Drifted() <-chan struct{} { return p.link.drifted }

// Repaired tells, once, what the last Replace found changed.
func (p *Policies) Repaired() dataplane.Repair {
	r := p.repaired
	p.repaired = dataplane.Repair{}
	return r
}

// HasPolicies reports whether the kernel has a table with targets.
func (p *Policies) HasPolicies(ctx context.Context) (holds bool, err error) {
	err = p.link.do(ctx, func(s *socket) error {
		found, err := s.read(p.link.cfg.Table, false)
		holds = err == nil && found.there && !found.dormant && found.chains["prerouting"] != nil
		return err
	})
	return holds, err
}

// Close lets go of the sockets; the table stays.
func (p *Policies) Close() error { return p.link.Close() }

// CleanupPolicies takes the table out of the kernel; table "" is PolicyTable. What
// is not there is no error.
func CleanupPolicies(ctx context.Context, table string) error {
	if table == "" {
		table = PolicyTable
	}
	return errors.Join(Cleanup(ctx, Config{Table: table}), Cleanup(ctx, Config{Table: table + leftPolicies}))
}

// Apply writes changes in one batch.
func (p *Policies) Apply(ctx context.Context, c policy.Changes) error {
	if p.now == nil {
		return errors.New("write policies: it is not known what the kernel holds; the whole state is needed")
	}
	if c.Empty() {
		return nil
	}
	next, edit := p.now.clone(), newPolicyEdit()
	edit.apply(next, c)
	next.shape()
	b := p.batch()
	switch had := len(p.now.sets)+len(p.now.chains) > 0; {
	case len(next.sets)+len(next.chains) > 0:
		if !had {
			b.addTable()
		}
		edit.write(b, p.now, next)
	case had:
		b.delTable()
	}
	p.leave(ctx, b, edit, next)
	return p.commit(ctx, b, next)
}

// commit has the kernel make a change. If it fails, nothing is known any more.
func (p *Policies) commit(ctx context.Context, b *batch, next *policyTable) error {
	p.now = nil
	err := p.link.do(ctx, func(s *socket) error {
		if err := s.commit(b, true); err != nil {
			return err
		}
		g, err := s.generation()
		p.generationKnown = err == nil && (g == p.generation+1 || len(b.msgs) == 0 && g == p.generation)
		if p.generationKnown {
			p.generation = g
		}
		return nil
	})
	if err != nil {
		p.leftMade = false
		return fmt.Errorf("write policies: %w", err)
	}
	p.now = next
	p.counts.follow(next)
	return nil
}

// Replace makes the table hold this state. It is cheap while no other program writes to
// nf_tables; otherwise it reads and compares the table.
func (p *Policies) Replace(ctx context.Context, s policy.State) error {
	p.repaired = dataplane.Repair{}
	if err := p.forgetLeft(ctx); err != nil {
		return err
	}
	var found *image
	same := false
	err := p.link.do(ctx, func(sock *socket) (err error) {
		g, err := sock.generation()
		if same = err == nil && p.now != nil && p.generationKnown && g == p.generation && !p.link.notified.Swap(false); same || err != nil {
			return err
		}
		p.link.notified.Store(false)
		found, err = sock.read(p.link.cfg.Table, true)
		return err
	})
	if err != nil || same {
		return err
	}
	if found.owned {
		return fmt.Errorf("table inet %s belongs to another program, which has it locked (flag owner): stop that program", p.link.cfg.Table)
	}
	left := p.now
	want, edit := wholePolicies(s)
	p.now, p.generation = nil, found.generation
	b := p.batch()
	if len(want.sets)+len(want.chains) == 0 {
		if found.there || found.dormant {
			b.delTable()
		}
		if found.there && left != nil {
			p.repaired.Note(0, 1, "table")
		}
		edit.found(found, want)
		p.leave(ctx, b, edit, want)
		return p.commit(ctx, b, want)
	}
	rep, mendable := edit.against(b, found, want)
	if !mendable {
		b = p.batch()
		b.addTable()
		b.delTable()
		b.addTable()
		edit.write(b, &policyTable{}, want)
	}
	if left != nil {
		p.repaired = rep
	} else {
		edit.found(found, want)
		p.leave(ctx, b, edit, want) // an earlier agent's, or another program's
	}
	return p.commit(ctx, b, want)
}

// wholePolicies renders a state.
func wholePolicies(s policy.State) (*policyTable, *policyEdit) {
	t := newPolicyTable()
	maps.Copy(t.rules, s.Rules)
	maps.Copy(t.verdicts, s.Verdicts)
	e := newPolicyEdit()
	for target, verdict := range s.Targets {
		targetElems(target, verdict, func(set, key string, v *value) {
			t.count(set, ports{target.First, target.Last}, 1)
			e.set(set, key, nil, v)
		})
	}
	for m := range s.Members {
		set, key := memberElem(m)
		e.set(set, key, nil, &value{})
	}
	for p := range s.Tracked {
		e.setTracked(t, p, true)
	}
	for _, r := range s.Rules {
		e.blocks(r)
	}
	t.shape()
	return t, e
}

// write adds all sets, chains, elements and rules; had is what is there.
func (t *policyTable) write(b *batch, e *policyEdit) {
	if e == nil {
		e = newPolicyEdit()
	}
	e.write(b, &policyTable{}, t)
}

// policyEdit is which elements come and go.
type policyEdit struct {
	elems map[string]map[string]elemChange // by set and key
	whole map[string]*elemList             // sets of ranges, which are written anew
}

func newPolicyEdit() *policyEdit {
	return &policyEdit{elems: map[string]map[string]elemChange{}, whole: map[string]*elemList{}}
}

func (e *policyEdit) set(set, key string, had, want *value) {
	m := e.elems[set]
	if m == nil {
		m = map[string]elemChange{}
		e.elems[set] = m
	}
	c := m[key]
	if had != nil {
		c.had = had
	}
	if want != nil {
		c.want = want
	}
	m[key] = c
}

func (e *policyEdit) blocks(r *policy.Rule) {
	for _, f := range []*family{&ipv4, &ipv6} {
		keys, values := blockElems(r, f)
		e.whole[blocksOf(r.Name, f)] = &elemList{keys: keys, values: values}
	}
}

// apply enters changes, here and into the table as it is to be.
func (e *policyEdit) apply(next *policyTable, c policy.Changes) {
	for _, ch := range c.Rules {
		if ch.Want == nil {
			delete(next.rules, ch.Key)
			continue
		}
		next.rules[ch.Key] = ch.Want
		if ch.Had == nil || !slices.Equal(ch.Had.Blocks, ch.Want.Blocks) {
			e.blocks(ch.Want)
		}
	}
	for _, ch := range c.Verdicts {
		if ch.Want == nil {
			delete(next.verdicts, ch.Key)
		} else {
			next.verdicts[ch.Key] = ch.Want
		}
	}
	for _, ch := range c.Targets {
		about := ports{ch.Key.First, ch.Key.Last}
		if ch.Had != "" {
			targetElems(ch.Key, ch.Had, func(set, key string, v *value) { next.count(set, about, -1); e.set(set, key, v, nil) })
		}
		if ch.Want != "" {
			targetElems(ch.Key, ch.Want, func(set, key string, v *value) { next.count(set, about, 1); e.set(set, key, nil, v) })
		}
	}
	for _, ch := range c.Members {
		set, key := memberElem(ch.Key)
		if ch.Want {
			e.set(set, key, nil, &value{})
		} else {
			e.set(set, key, &value{}, nil)
		}
	}
	for _, ch := range c.Tracked {
		e.setTracked(next, ch.Key, ch.Want)
	}
}

// setTracked enters what stays tracked from now on, or no more.
func (e *policyEdit) setTracked(next *policyTable, p policy.Pair, want bool) {
	set, key := trackedElem(p)
	if want {
		next.kept[set]++
		e.set(set, key, nil, &value{})
	} else {
		next.kept[set]--
		e.set(set, key, &value{}, nil)
	}
}

// write brings a table from what it had to what it is to have: first what is
// missing, then elements and rules, last what nothing uses any more.
func (e *policyEdit) write(b *batch, had, want *policyTable) {
	for _, n := range slices.Sorted(maps.Keys(want.sets)) {
		if had.sets[n] == nil {
			b.addSet(want.sets[n])
		}
	}
	names := slices.Sorted(maps.Keys(want.chains))
	for _, n := range names {
		if had.chains[n] == nil {
			b.addChain(want.chains[n])
		}
	}
	for _, n := range slices.Sorted(maps.Keys(e.elems)) {
		e.writeElems(b, n, had.sets[n], want.sets[n])
	}
	for _, n := range slices.Sorted(maps.Keys(e.whole)) {
		if l := e.whole[n]; want.sets[n] != nil {
			l.set = want.sets[n]
			if had.sets[n] != nil {
				b.flushSet(n)
			}
			l.write(b, unix.NFT_MSG_NEWSETELEM)
		}
	}
	gone := func(n string) bool { return want.chains[n] == nil }
	for _, n := range slices.Sorted(maps.Keys(had.chains)) {
		if gone(n) || had.chains[n].sums() != want.chains[n].sums() {
			b.flushChain(n)
		}
	}
	for _, n := range names {
		if had.chains[n] == nil || had.chains[n].sums() != want.chains[n].sums() {
			b.addRules(want.chains[n])
		}
	}
	for _, n := range slices.Sorted(maps.Keys(had.sets)) {
		if want.sets[n] == nil {
			b.delSet(n)
		}
	}
	for _, n := range slices.Sorted(maps.Keys(had.chains)) {
		if gone(n) {
			b.delChain(n)
		}
	}
}

// writeElems writes the elements of a set that stays or comes.
func (e *policyEdit) writeElems(b *batch, name string, had, want *set) {
	if want == nil {
		return // it goes with all that it holds
	}
	del, add := &elemList{set: want}, &elemList{set: want}
	for _, key := range slices.Sorted(maps.Keys(e.elems[name])) {
		c := e.elems[name][key]
		if c.had != nil && c.want != nil && *c.had == *c.want {
			continue
		}
		if c.had != nil && had != nil {
			del.add(key, c.had)
		}
		if c.want != nil {
			add.add(key, c.want)
		}
	}
	del.write(b, unix.NFT_MSG_DELSETELEM)
	add.write(b, unix.NFT_MSG_NEWSETELEM)
}
