package stale

import (
	"context"
	"net/netip"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// maxExact is the largest number of destinations that are dumped one by one. The kernel
// walks the whole table for each, but copies almost nothing; a dump of all UDP entries
// copies each of them.
const maxExact = 4

// copyBuckets is how many buckets are walked in the time in which an entry is copied: 1.7 µs and
// 37 ns (20,000 entries, 262,144 buckets, Linux 6.18, EPYC), which is 46.
const copyBuckets = 40

// exact is the number of destinations that are dumped one by one: those whose walks take no longer
// than one dump of all entries.
func (r *Reconciler) exact() int {
	if r.cfg.Size == nil {
		return maxExact
	}
	entries, buckets, err := r.cfg.Size()
	if err != nil || buckets == 0 {
		return maxExact
	}
	return min(maxExact, 1+entries*copyBuckets/buckets)
}

// scan checks the entries of frontends and deletes stale ones.
func (r *Reconciler) scan(ctx context.Context, checks map[frontend]check) error {
	l := scan{r: r, checks: checks, serving: servingSets{}}
	for _, f := range r.filters(checks) {
		if err := r.cfg.Table.Dump(ctx, f, l.check); err != nil {
			return err
		}
		if l.err != nil {
			return l.err
		}
	}
	return nil
}

// filters returns dumps that together contain every entry of the checked frontends.
func (r *Reconciler) filters(checks map[frontend]check) []conntrack.Filter {
	all := conntrack.Filter{Protocol: protocol}
	if r.cfg.TranslatedOnly {
		all.Status = conntrack.DstNAT
	}
	var out []conntrack.Filter
	exact := r.exact()
	add := func(a netip.Addr, port uint16) bool {
		one := all
		one.OrigDst = netip.AddrPortFrom(a, port)
		out = append(out, one)
		return len(out) <= exact
	}
	for f := range checks {
		if f.addr.IsValid() {
			if !add(f.addr, f.port) {
				return ofFamilies(all, checks)
			}
			continue
		}
		for a := range r.nodeAddrs {
			if model.FamilyOf(a) == f.family && !add(a, f.port) {
				return ofFamilies(all, checks)
			}
		}
	}
	return out
}

// ofFamilies returns the filter for each family that the checks have.
func ofFamilies[V any](all conntrack.Filter, checks map[frontend]V) (out []conntrack.Filter) {
	v4, v6 := all, all
	v4.Family, v6.Family = unix.AF_INET, unix.AF_INET6
	families := map[model.Family]bool{}
	for f := range checks {
		families[f.family] = true
	}
	if families[model.IPv4] {
		out = append(out, v4)
	}
	if families[model.IPv6] {
		out = append(out, v6)
	}
	return out
}

// scan is one pass through the table.
type scan struct {
	r       *Reconciler
	checks  map[frontend]check
	serving servingSets
	err     error // the first delete that failed
}

// servingSets is a cache of servingSet.
type servingSets map[*intent.ServicePort]map[netip.AddrPort]struct{}

// check deletes an entry if it is stale. It does so during the dump, so that any number
// of stale entries needs no memory.
func (l *scan) check(e *conntrack.Entry) bool {
	if l.stale(e) {
		l.delete(e)
	}
	return true
}

func (l *scan) delete(e *conntrack.Entry) {
	if err := l.r.cfg.Table.Delete(e); err != nil {
		if l.err == nil {
			l.err = err
		}
		return
	}
	l.r.deleted.Add(1)
}

// stale reports whether an entry is stale. It is false if the original destination is
// not a checked frontend, and as long as the entry may wait for an answer.
func (l *scan) stale(e *conntrack.Entry) bool {
	if e.Zone != 0 || e.Orig.Zone != 0 || e.Reply.Zone != 0 || e.Protocol != protocol {
		return false
	}
	translated := e.Status&conntrack.DstNAT != 0
	if !translated && l.r.cfg.TranslatedOnly {
		return false
	}
	f, c, ok := l.find(e.Orig.Dst)
	if !ok {
		return false
	}
	owner, owned := l.r.owners[f]
	port := c.before
	if owned {
		port = l.r.ports[owner]
	}
	if translated && !c.final && e.Status&conntrack.SeenReply == 0 && !answersElsewhere(port) {
		return false
	}
	if owned {
		return !l.serves(port, e.Reply.Src)
	}
	// The frontend has no owner now. An entry that was translated to an endpoint of the
	// last owner was Spillway's; any other entry belongs to another program.
	return translated && c.before != nil && l.serves(c.before, e.Reply.Src)
}

// answersElsewhere reports whether a server answers from another port than it was asked at.
// The entry of the request never sees a reply then.
func answersElsewhere(p *intent.ServicePort) bool { return p != nil && p.Helper == intent.TFTP }

// find finds the checked frontend of a destination: an address of a Service first, then a
// NodePort, in the order of the dataplanes.
func (l *scan) find(dst netip.AddrPort) (f frontend, c check, ok bool) {
	r := l.r
	f = frontend{addr: dst.Addr(), family: model.FamilyOf(dst.Addr()), port: dst.Port()}
	c, ok = l.checks[f]
	if _, owned := r.owners[f]; ok || owned {
		return f, c, ok
	}
	if _, isNodeAddr := r.nodeAddrs[dst.Addr()]; !isNodeAddr {
		return f, check{}, false
	}
	f.addr = netip.Addr{}
	c, ok = l.checks[f]
	return f, c, ok
}

// serves reports whether the endpoint is valid for flows of a port.
func (l *scan) serves(p *intent.ServicePort, a netip.AddrPort) bool {
	set, known := l.serving[p]
	if !known {
		set = servingSet(p)
		l.serving[p] = set
	}
	_, ok := set[a]
	return ok
}
