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
func (f *family) intact(p *intent.ServicePort, have *dump) bool {
	chains, byAddr, byPort := f.serviceChains(p)
	for _, c := range chains {
		if !f.holdsChain(have, c.name) {
			return false
		}
	}
	return f.leads(have, &f.addresses, byAddr) && f.leads(have, &f.nodePorts, byPort)
}

func (f *family) holdsChain(have *dump, name string) bool {
	got, ok := have.chains[name]
	return ok && got == f.want[tableNAT][name]
}

// leads reports whether the path from a dispatch's root to entries is unchanged.
func (f *family) leads(have *dump, d *dispatch, entries []entry) bool {
	for _, e := range entries {
		if !f.holdsChain(have, d.root) {
			return false
		}
		for n := d.top; n != nil; n = n.kids[digit(e.key, len(n.prefix))] {
			if !f.holdsChain(have, d.chain(n.prefix)) {
				return false
			}
			if n.leaf() {
				break
			}
		}
	}
	return true
}

func sortPorts(ports []*intent.ServicePort) {
	slices.SortFunc(ports, func(a, b *intent.ServicePort) int { return a.ID.Compare(b.ID) })
}
