package iptables

import (
	"hash/maphash"
	"iter"
	"maps"
	"slices"

	"spillway.dev/spillway/internal/decisions/intent"
)

// ruleset holds the desired state of one family's tables, and the known state of the
// kernel. It keeps decisions and a hash of each chain, and generates rules when they are
// needed.
type ruleset struct {
	nodeInputs
	ports     map[intent.PortID]*intent.ServicePort
	addresses dispatch
	nodePorts dispatch
	helpers
	want  map[string]tableSums // by table
	rules map[string]int       // in all chains of the agent, by table
}

// tableSums holds the sums of the agent's chains in one table.
type tableSums map[string]chainSum

// chainSum identifies the rules of a chain.
type chainSum struct {
	rules int
	sum   uint64
}

// hashSeed is valid in this process only: no sum outlives it.
var hashSeed = maphash.MakeSeed()

func sumOf(rules []string) chainSum {
	var s summer
	for _, r := range rules {
		s.add(r)
	}
	return s.chainSum
}

// summer hashes a chain rule by rule.
type summer struct{ chainSum }

func (s *summer) add(rule string) {
	s.rules++
	s.sum = s.sum*1099511628211 + maphash.String(hashSeed, rule)
}

func newRuleset(f nodeInputs) *ruleset {
	r := &ruleset{
		nodeInputs: f,
		ports:      map[intent.PortID]*intent.ServicePort{},
		addresses:  dispatch{root: chainAddresses, addrDigits: addrDigits(f.family)},
		nodePorts:  dispatch{root: chainNodePorts},
		helpers:    helpers{helped: map[intent.PortID]*intent.ServicePort{}},
		want:       map[string]tableSums{tableNAT: {}, tableFilter: {}, tableRaw: {}, tableMangle: {}},
		rules:      map[string]int{},
	}
	for _, c := range f.filterChains() {
		r.wants(tableFilter, c.name, sumOf(c.rules))
	}
	for _, c := range f.natChains() {
		r.wants(tableNAT, c.name, sumOf(c.rules))
	}
	// The roots exist even if they are empty.
	r.addresses.markDirty(topPrefix)
	r.nodePorts.markDirty(topPrefix)
	r.recompute(map[string][]string{})
	return r
}

// wants records the wanted rules of a chain.
func (r *ruleset) wants(table, name string, s chainSum) {
	r.rules[table] += s.rules - r.want[table][name].rules
	r.want[table][name] = s
}

// difference holds the changes that a restore writes to one table.
type difference struct {
	table string
	fill  []chain  // chains to create or empty, and fill
	gone  []string // chains to delete
	edits []string // commands on built-in chains
	check []string // commands that fail if another program edited built-in chains
	have  *dump    // the kernel's state; nil: not read
}

func (d *difference) empty() bool {
	return len(d.fill) == 0 && len(d.gone) == 0 && len(d.edits) == 0
}

// apply stores changed Service ports and returns the resulting difference. It assumes
// that the kernel holds the previous desired state.
func (r *ruleset) apply(upserts []*intent.ServicePort, deletes []intent.PortID) difference {
	changed := map[string][]string{} // nil: deleted
	for _, id := range deletes {
		if old := r.ports[id]; old != nil {
			r.fronts(old, nil)
		}
		r.forget(id, changed)
	}
	// All deletions come first: an address may move from one port to another.
	for _, p := range upserts {
		if p.ID.Family == r.family {
			r.fronts(r.ports[p.ID], p)
			r.forget(p.ID, changed)
		}
	}
	for _, p := range upserts {
		if p.ID.Family == r.family {
			r.remember(p, changed)
		}
	}
	return r.recompute(changed)
}

func (r *ruleset) forget(id intent.PortID, changed map[string][]string) {
	old := r.ports[id]
	if old == nil {
		return
	}
	chains, byAddr, byPort := r.serviceChains(old)
	for _, c := range chains {
		changed[c.name] = nil
	}
	for _, e := range byAddr {
		r.addresses.remove(e.key, e.owner)
	}
	for _, e := range byPort {
		r.nodePorts.remove(e.key, e.owner)
	}
	delete(r.ports, id)
	r.helpers.forget(id)
}

func (r *ruleset) remember(p *intent.ServicePort, changed map[string][]string) {
	chains, byAddr, byPort := r.serviceChains(p)
	for _, c := range chains {
		changed[c.name] = slices.Concat([]string{}, c.rules) // not nil
	}
	for _, e := range byAddr {
		r.addresses.set(e)
	}
	for _, e := range byPort {
		r.nodePorts.set(e)
	}
	r.ports[p.ID] = p
	r.helpers.remember(p)
}

// recompute compares changed chains, and the chains of changed dispatch nodes, with the
// previous desired state. It returns the difference.
func (r *ruleset) recompute(changed map[string][]string) difference {
	for _, d := range []*dispatch{&r.addresses, &r.nodePorts} {
		for prefix := range d.dirty {
			rules, ok := d.rules(prefix)
			if ok && rules == nil {
				rules = []string{}
			}
			changed[d.chain(prefix)] = rules
		}
		clear(d.dirty)
	}
	diff, want := difference{table: tableNAT}, r.want[tableNAT]
	for _, name := range slices.Sorted(maps.Keys(changed)) {
		rules := changed[name]
		before, known := want[name]
		switch {
		case rules == nil && known:
			r.rules[tableNAT] -= before.rules
			delete(want, name)
			diff.gone = append(diff.gone, name)
		case rules != nil && (!known || sumOf(rules) != before):
			r.wants(tableNAT, name, sumOf(rules))
			diff.fill = append(diff.fill, chain{name, rules})
		}
	}
	return diff
}

// chains yields every wanted chain of a table.
func (r *ruleset) chains(table string) iter.Seq[chain] {
	return func(yield func(chain) bool) {
		for _, c := range r.helpChains()[table] {
			if !yield(c) {
				return
			}
		}
		if slices.Contains(helpTables, table) {
			return
		}
		if table == tableFilter {
			for _, c := range r.filterChains() {
				if !yield(c) {
					return
				}
			}
			return
		}
		all := r.natChains()
		for _, d := range []*dispatch{&r.addresses, &r.nodePorts} {
			top, _ := d.rules(topPrefix)
			all = append(all, chain{d.root, top})
			d.top.walk(func(n *trieNode) { all = append(all, chain{d.chain(n.prefix), d.rulesOf(n)}) })
		}
		for _, c := range all {
			if !yield(c) {
				return
			}
		}
		for _, p := range r.ports {
			chains, _, _ := r.serviceChains(p)
			for _, c := range chains {
				if !yield(c) {
					return
				}
			}
		}
	}
}

// holds reports whether the ruleset consists of exactly these ports.
func (r *ruleset) holds(ports []*intent.ServicePort) bool {
	n := 0
	for _, p := range ports {
		if p.ID.Family != r.family {
			continue
		}
		if r.ports[p.ID] != p {
			return false
		}
		n++
	}
	return n == len(r.ports)
}

// against compares the wanted state of a table with the kernel's.
func (r *ruleset) against(have *dump) difference {
	diff := difference{table: have.table, have: have}
	want := r.want[have.table]
	if !maps.Equal(have.chains, want) {
		for c := range r.chains(have.table) {
			if have.chains[c.name] != want[c.name] || !have.has(c.name) {
				diff.fill = append(diff.fill, c)
			}
		}
		for name := range have.chains {
			if _, wanted := want[name]; !wanted {
				diff.gone = append(diff.gone, name)
			}
		}
		slices.SortFunc(diff.fill, func(a, b chain) int { return compareStrings(a.name, b.name) })
		slices.Sort(diff.gone)
	}
	diff.edits = have.editJumps(r.jumpsOf(have.table))
	return diff
}

// jumpsOf lists the jumps of one table.
func (r *ruleset) jumpsOf(table string) []jump {
	return append(r.helpJumps(table), slices.DeleteFunc(r.jumps(), func(j jump) bool { return j.table != table })...)
}

// count returns the number of the agent's rules in a table.
func (r *ruleset) count(table string) int {
	return r.rules[table] + len(r.jumpsOf(table))
}
