package nftables

import (
	"maps"
	"slices"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/node/nft"
)

// against writes the difference between the table that was found and the wanted one, of which
// e has all elements. It reports what was not as wanted, and false if the table has to be
// replaced.
func (e *policyEdit) against(tx *nft.Transaction, found *nft.Listing, want *doNotTrackTable) (rep dataplane.Repair, repairable bool) {
	if !found.Active() {
		rep.Note(1, 0, "table")
		return rep, false
	}
	sets := map[string]*nft.Set{}
	for name, have := range found.Sets {
		s := want.sets[name]
		if s == nil {
			s = &nft.Set{Name: name}
			rep.Note(0, 1, "set "+name)
		} else if !have.Is(s) {
			rep.Note(1, 1, "set "+name+" of another type")
			return rep, false
		}
		sets[name] = s
	}
	for name, have := range found.Chains {
		if w := want.chains[name]; w == nil {
			rep.Note(0, 1, "chain "+name)
		} else if !have.Is(w.Hook) {
			rep.Note(1, 1, "chain "+name+" of another type")
			return rep, false
		} else if w.Sums() != have.Sums {
			rep.Note(1, 0, "rules of chain "+name)
		}
	}
	e.diff(found, want, &rep)
	for name := range want.sets {
		if sets[name] == nil {
			rep.Note(1, 0, "set "+name)
		}
	}
	for name := range want.chains {
		if found.Chains[name] == nil {
			rep.Note(1, 0, "chain "+name)
		}
	}
	e.write(tx, sets, found.Sums(), want)
	return rep, true
}

// diff adds the elements that were found. A tree with the wanted elements stays.
func (e *policyEdit) diff(found *nft.Listing, want *doNotTrackTable, rep *dataplane.Repair) {
	for name, s := range want.sets {
		fs := found.Sets[name]
		if fs == nil {
			continue
		}
		if s.Tree() {
			if l := e.whole[name]; l != nil && l.holds(fs) {
				delete(e.whole, name)
			} else {
				rep.Note(1, 0, "elements of "+name)
			}
			continue
		}
		for key, v := range fs.Elements {
			e.set(name, key, &nft.Value{KeyEnd: v.KeyEnd, Jump: v.Jump}, nil)
		}
		for _, key := range slices.Sorted(maps.Keys(e.elems[name])) {
			switch c := e.elems[name][key]; {
			case c.want == nil:
				rep.Note(0, 1, "element of "+name)
			case c.had == nil || *c.had != *c.want:
				rep.Note(1, 0, "element of "+name)
			}
		}
	}
}

// holds reports whether a set that was found has just these elements.
func (l *elemList) holds(fs *nft.ListedSet) bool {
	if len(fs.Elements) != len(l.keys) {
		return false
	}
	for i, key := range l.keys {
		if v := fs.Elements[key]; v == nil || v.IntervalEnd != l.vals[i].IntervalEnd {
			return false
		}
	}
	return true
}
