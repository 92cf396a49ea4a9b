package nftables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/node/nft"
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
//	translated-on, translated-here, translated-out (forward, input, output: after DNAT)
//	  translated, and port . destination . protocol in asked4? ───> chain in-cache-0-from
//	  port, then source . protocol . port in translated4? ────────> chain out-db-0-translated
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
	tableSync
	now      *doNotTrackTable // nil: unknown
	leftLook time.Time        // next run of forgetLeft
	leftMade bool             // the table of remaining connections exists
	nat      bool             // another program translated at the last check
	counts   policyCounts
}

var _ dataplane.DoNotTrack = (*Policies)(nil)

// NewDoNotTrack opens the table of policies; table "" is PolicyTable. Its error is
// one line that says what the machine lacks.
func NewDoNotTrack(ctx context.Context, table string, log *slog.Logger) (*Policies, error) {
	cfg := Config{Table: cmp.Or(table, PolicyTable), Log: log}.withDefaults()
	p := &Policies{tableSync: newTableSync(cfg.Table, "DoNotTrackPolicies, kept by spillway: changes made by hand are undone", cfg.Log)}
	if err := p.conn.Check(ctx, p.probe()); err != nil {
		return nil, fmt.Errorf("%w: do-not-track policies need nf_tables of Linux 5.13 or newer", explain(err))
	}
	p.watch()
	return p, nil
}

// probe makes a table with one object of each kind, for the kernel to check.
func (p *Policies) probe() *nft.Transaction {
	t := newPolicyTable()
	t.rules["r"] = &donottrack.Rule{Name: "r", Pods: true, Side: donottrack.Egress}
	t.verdicts["r"] = &donottrack.Verdict{Name: "r", Rules: []string{"r"}, Deny: true}
	for _, f := range families {
		t.kept[trackedSet(f).Name] = 1
		for _, path := range paths {
			for _, ranges := range []bool{false, true} {
				t.count(path.set(f, ranges), ports{1, 2}, 1)
			}
		}
	}
	t.shape()
	of := p.nftTable
	of.Name += "-probe"
	tx := nft.NewTransaction(of)
	tx.AddTable()
	newPolicyEdit().write(tx, nil, nil, t)
	return tx
}

// HasPolicies reports whether the kernel has a table with targets.
func (p *Policies) HasPolicies(ctx context.Context) (bool, error) {
	found, err := p.conn.Read(ctx, p.nftTable, false)
	return err == nil && found.Active() && found.Chains["prerouting"] != nil, err
}

// CleanupPolicies deletes the table from the kernel; table "" is PolicyTable. A missing table
// is no error.
func CleanupPolicies(ctx context.Context, table string) error {
	table = cmp.Or(table, PolicyTable)
	return errors.Join(Cleanup(ctx, Config{Table: table}), Cleanup(ctx, Config{Table: table + leftPolicies}))
}

// Apply writes changes in one batch.
func (p *Policies) Apply(ctx context.Context, c donottrack.Changes) error {
	if !p.state.known() {
		return errors.New("write policies: it is not known what the kernel holds; the whole state is needed")
	}
	if c.Empty() {
		return nil
	}
	next, edit := p.now.clone(), newPolicyEdit()
	edit.apply(next, c)
	next.shape()
	tx := nft.NewTransaction(p.nftTable)
	switch had := !p.now.empty(); {
	case !next.empty():
		if !had {
			tx.AddTable()
		}
		edit.write(tx, p.now.sets, p.now.sums(), next)
	case had:
		tx.DeleteTable()
	}
	return p.commit(ctx, tx, edit, next)
}

// commit makes the kernel carry out a change, and keep what the edit removes (leave). If
// that fails, the table is unknown.
func (p *Policies) commit(ctx context.Context, tx *nft.Transaction, edit *policyEdit, next *doNotTrackTable) error {
	p.now = nil
	all := []*nft.Transaction{tx}
	if edit != nil {
		all = append(all, p.leave(ctx, edit, next))
	}
	if err := p.committed(p.conn.Commit(ctx, all...)); err != nil {
		p.leftMade = false
		return fmt.Errorf("write policies: %w", err)
	}
	p.now = next
	p.counts.follow(next)
	return nil
}

// Repair makes the table hold the state that the last call has written. It reads the table
// only if another program has written to nf_tables since.
func (p *Policies) Repair(ctx context.Context, s donottrack.State) error {
	g, err := p.conn.Generation(ctx)
	if err != nil {
		return err
	}
	if notified := p.notified.Load(); p.state == current && g == p.generation && !notified {
		p.repaired = dataplane.Repair{}
		return p.forgetLeft(ctx)
	}
	return p.Replace(ctx, s)
}

// Replace makes the table hold this state. It reads and compares the table.
func (p *Policies) Replace(ctx context.Context, s donottrack.State) error {
	p.repaired = dataplane.Repair{}
	if err := p.forgetLeft(ctx); err != nil {
		return err
	}
	p.notified.Store(false)
	found, err := p.conn.Read(ctx, p.nftTable, true)
	if err != nil {
		return err
	}
	if err := notOwned(found); err != nil {
		return err
	}
	left := p.now
	want, edit := wholePolicies(s)
	p.now, p.generation, p.state = nil, found.Generation, current
	tx := nft.NewTransaction(p.nftTable)
	if want.empty() {
		if found.Exists {
			tx.DeleteTable()
		}
		if found.Active() && left != nil {
			p.repaired.Note(0, 1, "table")
		}
		edit.found(found, want)
		return p.commit(ctx, tx, edit, want)
	}
	rep, repairable := edit.against(tx, found, want)
	if !repairable {
		tx = nft.NewTransaction(p.nftTable)
		tx.ReplaceTable()
		edit.write(tx, nil, nil, want)
	}
	if left != nil {
		p.repaired, edit = rep, nil
	} else {
		edit.found(found, want) // of an earlier agent, or of another program
	}
	return p.commit(ctx, tx, edit, want)
}

// wholePolicies renders a state.
func wholePolicies(s donottrack.State) (*doNotTrackTable, *policyEdit) {
	t := newPolicyTable()
	maps.Copy(t.rules, s.Rules)
	maps.Copy(t.verdicts, s.Verdicts)
	e := newPolicyEdit()
	for target, verdict := range s.Targets {
		targetElems(target, verdict, func(set, key string, v *nft.Value) {
			t.count(set, ports{target.First, target.Last}, 1)
			e.set(set, key, nil, v)
		})
	}
	for m := range s.Members {
		set, key := memberElem(m)
		e.set(set, key, nil, &nft.Value{})
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

// policyEdit collects changes of elements.
type policyEdit struct {
	elems map[string]map[string]elemChange // by set and key
	whole map[string]*elemList             // all elements of trees (nft.Set.Tree)
}

func newPolicyEdit() *policyEdit {
	return &policyEdit{elems: map[string]map[string]elemChange{}, whole: map[string]*elemList{}}
}

func (e *policyEdit) set(set, key string, had, want *nft.Value) {
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

func (e *policyEdit) blocks(r *donottrack.Rule) {
	for _, f := range families {
		e.whole[blocksOf(r.Name, f)] = blockElems(r, f)
	}
}

// apply adds changes to the edit and to the table that follows.
func (e *policyEdit) apply(next *doNotTrackTable, c donottrack.Changes) {
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
			targetElems(ch.Key, ch.Had, func(set, key string, v *nft.Value) { next.count(set, about, -1); e.set(set, key, v, nil) })
		}
		if ch.Want != "" {
			targetElems(ch.Key, ch.Want, func(set, key string, v *nft.Value) { next.count(set, about, 1); e.set(set, key, nil, v) })
		}
	}
	for _, ch := range c.Members {
		set, key := memberElem(ch.Key)
		if ch.Want {
			e.set(set, key, nil, &nft.Value{})
		} else {
			e.set(set, key, &nft.Value{}, nil)
		}
	}
	for _, ch := range c.Tracked {
		e.setTracked(next, ch.Key, ch.Want)
	}
}

// setTracked adds or removes a tracked exception.
func (e *policyEdit) setTracked(next *doNotTrackTable, p donottrack.Pair, want bool) {
	set, key := trackedElem(p)
	if want {
		next.kept[set]++
		e.set(set, key, nil, &nft.Value{})
	} else {
		next.kept[set]--
		e.set(set, key, &nft.Value{}, nil)
	}
}

// write brings a table with these sets and Sums of chains to what it is to have.
func (e *policyEdit) write(tx *nft.Transaction, sets map[string]*nft.Set, chains map[string]string, want *doNotTrackTable) {
	for _, n := range slices.Sorted(maps.Keys(want.sets)) {
		exists := sets[n] != nil
		if !exists {
			tx.AddSet(want.sets[n])
		}
		if l := e.whole[n]; l != nil {
			if exists {
				tx.FlushSet(n)
			}
			tx.AddElements(n, l.values())
		}
		e.writeElems(tx, n, exists)
	}
	for _, n := range slices.Sorted(maps.Keys(sets)) {
		if want.sets[n] == nil {
			tx.DeleteSet(n)
		}
	}
	tx.Chains(chains, slices.Collect(maps.Values(want.chains)))
}

// writeElems writes the elements of a set.
func (e *policyEdit) writeElems(tx *nft.Transaction, set string, exists bool) {
	var del, add elemList
	for _, key := range slices.Sorted(maps.Keys(e.elems[set])) {
		c := e.elems[set][key]
		if c.had != nil && c.want != nil && *c.had == *c.want {
			continue
		}
		if c.had != nil && exists {
			del.add(key, c.had)
		}
		if c.want != nil {
			add.add(key, c.want)
		}
	}
	tx.DeleteElements(set, del.values())
	tx.AddElements(set, add.values())
}
