package nftables

import (
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
)

// plan is what has to be written: a batch, and the table that it leaves.
type plan struct {
	batch   *batch
	repair  dataplane.Repair // were this the table as it was left: what is not
	count   map[string]int
	owners  map[string]map[string]int
	exists  map[string]bool
	helpers map[string]bool
	chains  map[string]string // sums of those that come or change
	gone    []string          // chains
}

// plan works out the batch. Sets and chains come first, then elements, then the
// rules that use them, and last goes what nothing uses any more.
func (c *change) plan(name string) *plan {
	p := &plan{
		batch: &batch{table: name}, count: map[string]int{}, owners: map[string]map[string]int{},
		exists: maps.Clone(c.t.exists), helpers: map[string]bool{}, chains: map[string]string{},
	}
	dels, adds := c.elements(p)
	newSets, oldSets := c.setsOf(p)
	for _, s := range newSets {
		p.batch.addSet(s)
	}
	newHelpers, oldHelpers := c.helpersOf(p)
	for _, h := range newHelpers {
		p.batch.addHelper(h)
	}
	comes, goes := c.rules(p, len(newSets)+len(oldSets) > 0)
	for _, ch := range comes {
		if _, there := c.t.chains[ch.name]; !there {
			p.batch.addChain(ch)
		}
	}
	for _, d := range dels {
		if !slices.Contains(oldSets, d.set.name) {
			d.write(p.batch, unix.NFT_MSG_DELSETELEM)
		}
	}
	for _, a := range adds {
		a.write(p.batch, unix.NFT_MSG_NEWSETELEM)
	}
	p.gone = goes
	c.writeRules(p, comes, goes)
	for _, n := range oldSets {
		p.batch.delSet(n) // before chains that its elements may lead to
	}
	for _, n := range goes {
		p.batch.delChain(n)
	}
	for _, n := range oldHelpers {
		p.batch.delHelper(n)
	}
	return p
}

// setsOf lists sets that come and names of those that go. A set of the layout is
// there while it holds something.
func (c *change) setsOf(p *plan) (comes []*set, goes []string) {
	here := func(s *set) bool {
		if n, touched := p.count[s.name]; touched {
			return s.always || n > 0
		}
		return s.always || c.t.exists[s.name]
	}
	for _, s := range c.t.layout.sets {
		is := here(s) && !s.dynamic() || slices.ContainsFunc(s.with, here)
		if is && !p.exists[s.name] {
			comes = append(comes, s)
			p.repair.Note(1, 0, "set "+s.name)
		} else if !is && p.exists[s.name] {
			goes = append(goes, s.name)
			p.repair.Note(0, 1, "set "+s.name)
		}
		p.exists[s.name] = is
	}
	for _, n := range c.strangers {
		p.repair.Note(0, 1, "set "+n)
	}
	return comes, append(goes, c.strangers...)
}

// elements sorts the changes of all sets into those that go and those that come.
func (c *change) elements(p *plan) (dels, adds []*elemList) {
	for _, n := range slices.Sorted(maps.Keys(c.sets)) {
		sc := c.sets[n]
		del, add := &elemList{set: sc.set}, &elemList{set: sc.set}
		count := c.t.count[n]
		for _, key := range sc.keys() {
			ec := sc.elems[key]
			had, want := ec.had, ec.want
			if sc.set.shared {
				had, want = c.ownersOf(p, sc.set, key, ec)
			}
			if had != nil && want != nil && *had == *want {
				continue
			}
			if had != nil {
				del.add(key, had)
				count--
				p.repair.Note(0, 1, "element of "+n)
			}
			if want != nil {
				add.add(key, want)
				count++
				p.repair.Note(1, 0, "element of "+n)
			}
		}
		p.count[n] = count
		if len(del.keys)+len(add.keys) == 0 {
			continue
		}
		if sc.set.whole() {
			del, add = &elemList{set: sc.set}, &elemList{set: sc.set}
			for i := range sc.all {
				add.add(sc.all[i].key, &sc.all[i].value)
			}
		}
		if c.t.exists[n] {
			dels = append(dels, del)
		}
		adds = append(adds, add)
	}
	return dels, adds
}

// keys lists the keys in any order, but those of ranges sorted: nft shows ranges
// in the order in which they were added.
func (sc *setChange) keys() []string {
	keys := slices.Collect(maps.Keys(sc.elems))
	if sc.set.interval {
		slices.Sort(keys)
	}
	return keys
}

// ownersOf counts the owners of an element of a shared set. It is there while
// it has one.
func (c *change) ownersOf(p *plan, s *set, key string, ec *elemChange) (had, want *value) {
	before := c.t.owners[s.name][key]
	if p.owners[s.name] == nil {
		p.owners[s.name] = map[string]int{}
	}
	p.owners[s.name][key] = before + ec.owners
	if before > 0 || c.found && ec.had != nil {
		had = &value{}
	}
	if before+ec.owners > 0 {
		want = &value{}
	}
	return had, want
}

// rules lists chains that come or change, and names of those that go.
func (c *change) rules(p *plan, again bool) (comes []*chain, goes []string) {
	if !again && c.node == nil {
		return nil, nil
	}
	want, here := c.t.ruleset(p.exists, c.nodeAfter()), map[string]bool{}
	for i := range want {
		ch, sums := &want[i], want[i].sums()
		here[ch.name] = true
		if have, there := c.t.chains[ch.name]; !there || have != sums {
			comes = append(comes, ch)
			p.chains[ch.name] = sums
			p.repair.Note(1, 0, "rules of chain "+ch.name)
		}
	}
	for _, n := range slices.Sorted(maps.Keys(c.t.chains)) {
		if !here[n] {
			goes = append(goes, n)
			p.repair.Note(0, 1, "chain "+n)
		}
	}
	return comes, goes
}

func (c *change) nodeAfter() *intent.Node {
	if c.node != nil {
		return c.node
	}
	return &c.t.node
}

// ruleset writes the chains for the sets that exist.
func (t *table) ruleset(exists map[string]bool, n *intent.Node) []chain {
	rs := &ruleset{layout: t.layout, traits: t.traits, exists: func(s *set) bool { return exists[s.name] }}
	rs.forNode(n)
	return rs.write()
}

// writeRules empties chains before it fills any, so that no rule is left that
// uses what goes.
func (c *change) writeRules(p *plan, comes []*chain, goes []string) {
	for _, ch := range comes {
		if _, there := c.t.chains[ch.name]; there {
			p.batch.flushChain(ch.name)
		}
	}
	for _, n := range goes {
		p.batch.flushChain(n)
	}
	for _, ch := range comes {
		p.batch.addRules(ch)
	}
}

// elemList is elements of one set on their way into a batch.
type elemList struct {
	set    *set
	keys   []string
	values []*value
}

func (l *elemList) add(key string, v *value) {
	l.keys, l.values = append(l.keys, key), append(l.values, v)
}

func (l *elemList) write(b *batch, typ int) {
	if typ == unix.NFT_MSG_DELSETELEM && l.set.whole() {
		b.flushSet(l.set.name)
		return
	}
	i := -1
	b.elements(typ, l.set, func() (string, *value, bool) {
		if i++; i < len(l.keys) {
			return l.keys[i], l.values[i], true
		}
		return "", nil, false
	})
}
