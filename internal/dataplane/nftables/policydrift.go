package nftables

import (
	"maps"
	"slices"

	"spillway.dev/spillway/internal/dataplane"
)

// against writes what brings the table as it was found to what it is to have, of
// which e holds all elements. It reports what was not as it should be, and false
// where the table has to be made anew.
func (e *policyEdit) against(b *batch, found *image, want *policyTable) (rep dataplane.Repair, mendable bool) {
	if found.dormant || !found.there {
		rep.Note(1, 0, "table")
		return rep, false
	}
	had := &policyTable{sets: map[string]*set{}, chains: map[string]*chain{}}
	for name, fs := range found.sets {
		s := want.sets[name]
		if s == nil {
			s = &set{name: name}
			rep.Note(0, 1, "set "+name)
		} else if !fs.fits(s) {
			rep.Note(1, 1, "set "+name+" of another type")
			return rep, false
		}
		had.sets[name] = s
	}
	for name, fc := range found.chains {
		c := &chain{name: name, rules: []*rule{{sum: fc.sums}}}
		if w := want.chains[name]; w == nil {
			rep.Note(0, 1, "chain "+name)
		} else if (w.hook == nil) != (fc.hook == hook{}) || w.hook != nil && (*w.hook != fc.hook || fc.policy != nfAccept) {
			rep.Note(1, 1, "chain "+name+" of another type")
			return rep, false
		} else if w.sums() != fc.sums {
			rep.Note(1, 0, "rules of chain "+name)
		}
		had.chains[name] = c
	}
	e.diff(found, want, &rep)
	for name := range want.sets {
		if had.sets[name] == nil {
			rep.Note(1, 0, "set "+name)
		}
	}
	for name := range want.chains {
		if had.chains[name] == nil {
			rep.Note(1, 0, "chain "+name)
		}
	}
	e.write(b, had, want)
	return rep, true
}

// diff enters what elements were found. A set of ranges that holds what it should
// is left alone.
func (e *policyEdit) diff(found *image, want *policyTable, rep *dataplane.Repair) {
	for name, s := range want.sets {
		fs := found.sets[name]
		if fs == nil {
			continue
		}
		if s.whole() {
			if l := e.whole[name]; l != nil && l.holds(fs) {
				delete(e.whole, name)
			} else {
				rep.Note(1, 0, "elements of "+name)
			}
			continue
		}
		for key, v := range fs.elems {
			e.set(name, key, &value{end: v.end, jump: v.jump}, nil)
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
func (l *elemList) holds(fs *foundSet) bool {
	if len(fs.elems) != len(l.keys) {
		return false
	}
	for i, key := range l.keys {
		if v := fs.elems[key]; v == nil || v.flags != l.values[i].flags {
			return false
		}
	}
	return true
}
