package iptables

import (
	"context"
	"maps"
	"slices"

	"spillway.dev/spillway/internal/decisions/intent"
)

// served lists the Service ports of one family that the kernel serves, in any order. With
// known, it compares the kernel's chains with those that were written. Otherwise it
// trusts the chains of an earlier process.
func (f *family) served(ctx context.Context, known bool) ([]intent.PortID, error) {
	if known && f.seen.same(newFingerprint(f.programs.variant, f.ruleset.family, f.tables())) {
		return slices.Collect(maps.Keys(f.ports)), nil
	}
	named := map[intent.PortID]bool{}
	have, err := f.programs.readTable(ctx, tableNAT, func(_, rule string) {
		if id, ok := parseComment(rule, f.ruleset.family); ok {
			named[id] = true
		}
	})
	if err != nil {
		return nil, err
	}
	switch {
	case len(have.editJumps(f.jumpsOf(tableNAT))) > 0:
		return nil, nil // no packet reaches the chains
	case known && !maps.Equal(have.chains, f.want[tableNAT]):
		for id, p := range f.ports {
			if !f.intact(p, have) {
				delete(named, id)
			}
		}
	}
	return slices.Collect(maps.Keys(named)), nil
}

// intact reports whether the chains of a Service port, and those that lead to them, are
// unchanged.
func (f *family) intact(p *intent.ServicePort, have *dump) bool { return len(f.changed(p, have)) == 0 }

// changed returns the chains of a Service port, and those that lead to them, that differ from
// what was written.
func (f *family) changed(p *intent.ServicePort, have *dump) (list []chain) {
	chains, byAddr, byPort := f.serviceChains(p)
	names := slices.Concat(f.addresses.path(byAddr), f.nodePorts.path(byPort))
	for _, c := range chains {
		names = append(names, c.name)
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if !f.holdsChain(have, name) {
			list = append(list, chain{name: name})
		}
	}
	return list
}

func (f *family) holdsChain(have *dump, name string) bool {
	got, ok := have.chains[name]
	return ok && got == f.want[tableNAT][name]
}

// path returns the names of the chains from a dispatch's root to entries.
func (d *dispatch) path(entries []entry) (names []string) {
	for _, e := range entries {
		names = append(names, d.root)
		for n := d.top; n != nil; n = n.children[digit(e.key, len(n.prefix))] {
			names = append(names, d.chain(n.prefix))
			if n.leaf() {
				break
			}
		}
	}
	return names
}

func sortPorts(ports []*intent.ServicePort) {
	slices.SortFunc(ports, func(a, b *intent.ServicePort) int { return a.ID.Compare(b.ID) })
}
