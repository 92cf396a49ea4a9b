package stale

import (
	"context"
	"net/netip"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// maxExact is up to how many destinations the kernel is asked for each by
// itself. It walks through the whole table each time, but copies next to
// nothing; one dump of all UDP entries copies every one.
const maxExact = 4

// look goes through the entries of the dirty frontends and deletes stale ones.
func (r *Reconciler) look(ctx context.Context) error {
	l := looker{r: r, serving: map[*intent.ServicePort]map[netip.AddrPort]struct{}{}}
	for _, f := range r.filters() {
		if err := r.cfg.Table.Dump(ctx, f, l.visit); err != nil {
			return err
		}
		if l.err != nil {
			return l.err
		}
	}
	return nil
}

// filters are the dumps that show every entry of a dirty frontend.
func (r *Reconciler) filters() []conntrack.Filter {
	all := conntrack.Filter{Protocol: protocol}
	if r.cfg.TranslatedOnly {
		all.Status = conntrack.DstNAT
	}
	var out []conntrack.Filter
	add := func(a netip.Addr, port uint16) bool {
		one := all
		one.OrigDst = netip.AddrPortFrom(a, port)
		out = append(out, one)
		return len(out) <= maxExact
	}
	for f := range r.dirty {
		if f.addr.IsValid() {
			if !add(f.addr, f.port) {
				return []conntrack.Filter{all}
			}
			continue
		}
		for a := range r.nodeAddrs {
			if model.FamilyOf(a) == f.family && !add(a, f.port) {
				return []conntrack.Filter{all}
			}
		}
	}
	return out
}

// looker is one look through the table.
type looker struct {
	r       *Reconciler
	serving map[*intent.ServicePort]map[netip.AddrPort]struct{} // of the port versions met so far
	err     error                                               // the first delete that failed
}

// visit deletes an entry if it is stale, in the middle of the dump: nothing is
// collected, however many there are.
func (l *looker) visit(e *conntrack.Entry) bool {
	if !l.stale(e) {
		return true
	}
	if err := l.r.cfg.Table.Delete(e); err != nil {
		if l.err == nil {
			l.err = err
		}
		return true
	}
	l.r.deleted.Add(1)
	return true
}

// stale judges an entry. Only those whose original destination is a dirty
// frontend are Spillway's to judge.
func (l *looker) stale(e *conntrack.Entry) bool {
	if e.Zone != 0 || e.Orig.Zone != 0 || e.Reply.Zone != 0 || e.Protocol != protocol {
		return false
	}
	translated := e.Status&conntrack.DstNAT != 0
	if !translated && l.r.cfg.TranslatedOnly {
		return false
	}
	f, before, ok := l.dirty(e.Orig.Dst)
	if !ok {
		return false
	}
	if owner, owned := l.r.owners[f]; owned {
		return !l.serves(l.r.ports[owner], e.Reply.Src)
	}
	// Nobody's any more. What was translated to an endpoint of the last owner was
	// ours; anything else is somebody else's.
	return translated && before != nil && l.serves(before, e.Reply.Src)
}

// dirty finds the frontend behind a destination: an address of a Service first,
// then a NodePort, in the order of the dataplanes.
func (l *looker) dirty(dst netip.AddrPort) (f frontend, before *intent.ServicePort, ok bool) {
	r := l.r
	f = frontend{addr: dst.Addr(), family: model.FamilyOf(dst.Addr()), port: dst.Port()}
	before, ok = r.dirty[f]
	if _, owned := r.owners[f]; ok || owned {
		return f, before, ok
	}
	if _, here := r.nodeAddrs[dst.Addr()]; !here {
		return f, nil, false
	}
	f.addr = netip.Addr{}
	before, ok = r.dirty[f]
	return f, before, ok
}

// serves reports whether a port's flow may have this endpoint.
func (l *looker) serves(p *intent.ServicePort, a netip.AddrPort) bool {
	set, known := l.serving[p]
	if !known {
		set = servingSet(p)
		l.serving[p] = set
	}
	_, ok := set[a]
	return ok
}
