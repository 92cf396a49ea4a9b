package nftables

import (
	"iter"
	"maps"
	"slices"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/nft"
)

// plan is what has to be written, and the table after it.
type plan struct {
	tx      *nft.Transaction
	repair  dataplane.Repair // differences, if the table should be as it was last written
	count   map[string]int
	owners  map[string]map[string]int
	exists  map[string]bool
	helpers map[string]bool
	chains  map[string]string // nft.Chain.Sums of all chains; nil: as before
}

// plan computes the transaction.
func (c *change) plan(of nft.Table) *plan {
	p := &plan{
		tx: nft.NewTransaction(of), count: map[string]int{}, owners: map[string]map[string]int{},
		exists: maps.Clone(c.t.exists), helpers: map[string]bool{},
	}
	c.planElements(p)
	changed := c.planSets(p)
	c.planHelpers(p)
	if changed || c.node != nil {
		c.planChains(p)
	}
	return p
}

// planSets adds and deletes sets, and reports whether it did. A set of the layout exists
// while it has elements.
func (c *change) planSets(p *plan) (changed bool) {
	filled := func(s *set) bool {
		if n, counted := p.count[s.Name]; counted {
			return s.always || n > 0
		}
		return s.always || c.t.exists[s.Name]
	}
	for _, s := range c.t.layout.sets {
		is := filled(s) && !s.Dynamic() || slices.ContainsFunc(s.with, filled)
		if is && !p.exists[s.Name] {
			p.tx.AddSet(&s.Set)
			p.repair.Note(1, 0, "set "+s.Name)
			changed = true
		} else if !is && p.exists[s.Name] {
			p.tx.DeleteSet(s.Name)
			p.repair.Note(0, 1, "set "+s.Name)
			changed = true
		}
		p.exists[s.Name] = is
	}
	for _, name := range c.foreign {
		p.tx.DeleteSet(name)
		p.repair.Note(0, 1, "set "+name)
		changed = true
	}
	return changed
}

// planElements deletes and adds elements.
func (c *change) planElements(p *plan) {
	for _, n := range slices.Sorted(maps.Keys(c.sets)) {
		sc := c.sets[n]
		var del, add elemList
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
				p.repair.Note(0, 1, "element of "+n)
			}
			if want != nil {
				add.add(key, want)
				p.repair.Note(1, 0, "element of "+n)
			}
		}
		p.count[n] = c.t.count[n] + len(add.keys) - len(del.keys)
		stays := c.t.exists[n] && (sc.set.always || p.count[n] > 0) // else its elements go with it
		switch {
		case len(del.keys)+len(add.keys) == 0:
		case sc.set.Tree():
			if stays {
				p.tx.FlushSet(n)
			}
			p.tx.AddElements(n, sc.all.values())
		default:
			if stays {
				p.tx.DeleteElements(n, del.values())
			}
			p.tx.AddElements(n, add.values())
		}
	}
}

// keys lists the keys in any order, but those of ranges sorted: nft shows ranges
// in the order in which they were added.
func (sc *setChange) keys() []string {
	keys := slices.Collect(maps.Keys(sc.elems))
	if sc.set.Interval {
		slices.Sort(keys)
	}
	return keys
}

// ownersOf counts the owners of an element of a shared set. It exists while it has one.
func (c *change) ownersOf(p *plan, s *set, key string, ec *elemChange) (had, want *nft.Value) {
	before := c.t.owners[s.Name][key]
	if p.owners[s.Name] == nil {
		p.owners[s.Name] = map[string]int{}
	}
	p.owners[s.Name][key] = before + ec.owners
	if before > 0 || c.found && ec.had != nil {
		had = &nft.Value{}
	}
	if before+ec.owners > 0 {
		want = &nft.Value{}
	}
	return had, want
}

// planHelpers adds and deletes helpers. A helper exists while one of its sets does.
func (c *change) planHelpers(p *plan) {
	for _, h := range c.t.layout.helpers {
		if slices.ContainsFunc(h.sets, func(s *set) bool { return p.exists[s.Name] }) {
			p.helpers[h.Name] = true
			if !c.t.helpers[h.Name] {
				p.tx.AddHelper(h.Helper)
				p.repair.Note(1, 0, "ct helper "+h.Name)
			}
		}
	}
	for _, n := range slices.Sorted(maps.Keys(c.t.helpers)) {
		if !p.helpers[n] {
			p.tx.DeleteHelper(n)
			p.repair.Note(0, 1, "ct helper "+n)
		}
	}
}

// planChains replaces chains that differ.
func (c *change) planChains(p *plan) {
	want := c.t.ruleset(p.exists, c.nodeAfter())
	p.tx.Chains(c.t.chains, want)
	p.chains = map[string]string{}
	for _, ch := range want {
		sums := ch.Sums()
		p.chains[ch.Name] = sums
		if have, exists := c.t.chains[ch.Name]; !exists || have != sums {
			p.repair.Note(1, 0, "rules of chain "+ch.Name)
		}
	}
	for _, n := range slices.Sorted(maps.Keys(c.t.chains)) {
		if _, wanted := p.chains[n]; !wanted {
			p.repair.Note(0, 1, "chain "+n)
		}
	}
}

func (c *change) nodeAfter() *intent.Node {
	if c.node != nil {
		return c.node
	}
	return &c.t.node
}

// ruleset writes the chains for the sets that exist.
func (t *table) ruleset(exists map[string]bool, n *intent.Node) []*nft.Chain {
	rs := &ruleset{layout: t.layout, traits: t.traits, exists: func(s *set) bool { return exists[s.Name] }}
	rs.forNode(n)
	return rs.write()
}

// elemList is a list of elements of one set.
type elemList struct {
	keys []string
	vals []*nft.Value
}

func (l *elemList) add(key string, v *nft.Value) {
	l.keys, l.vals = append(l.keys, key), append(l.vals, v)
}

// values iterates over the elements by key.
func (l *elemList) values() iter.Seq2[string, *nft.Value] {
	return func(yield func(string, *nft.Value) bool) {
		for i, key := range l.keys {
			if !yield(key, l.vals[i]) {
				return
			}
		}
	}
}
