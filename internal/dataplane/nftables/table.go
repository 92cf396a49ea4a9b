package nftables

import (
	"maps"
	"slices"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/nft"
)

// table is what the agent believes the kernel holds: enough to compute what a change
// writes, without a copy of every element. Elements are rendered again from the ports when
// they are needed.
type table struct {
	layout *layout
	traits
	ports   map[intent.PortID]*intent.ServicePort
	watched map[intent.PortID]*intent.ServicePort // of ports, those whose handshakes are counted
	node    intent.Node
	count   map[string]int            // elements of each set
	owners  map[string]map[string]int // of each element of a shared set
	chains  map[string]string         // sums of each chain
	exists  map[string]bool           // sets of the layout that exist
	helpers map[string]bool           // helpers that exist
}

func newTable(tr traits) *table {
	l := newLayout()
	l.counting, l.beside = tr.counted, tr.beside
	return &table{
		layout: l, traits: tr,
		ports: map[intent.PortID]*intent.ServicePort{}, watched: map[intent.PortID]*intent.ServicePort{}, count: map[string]int{},
		owners: map[string]map[string]int{},
		chains: map[string]string{}, exists: map[string]bool{}, helpers: map[string]bool{},
	}
}

// change collects what one Apply or Replace does to a table. done changes the table itself,
// after the commit.
type change struct {
	t       *table
	ports   map[intent.PortID]*intent.ServicePort // nil: deleted
	node    *intent.Node
	sets    map[string]*setChange
	found   bool     // the previous elements are those of the kernel
	foreign []string // sets of the kernel that the layout does not have
}

// setChange is what changes in one set.
type setChange struct {
	set   *set
	elems map[string]*elemChange
	all   elemList // all elements that a tree is to have
}

// elemChange is the change of one element.
type elemChange struct {
	had, want *nft.Value
	owners    int // more or fewer, in a shared set
}

func (t *table) change() *change {
	return &change{t: t, ports: map[intent.PortID]*intent.ServicePort{}, sets: map[string]*setChange{}}
}

// setPort adds, replaces or, if p is nil, deletes a port. A change sets each port once. A port with
// too many endpoints is an error, and is closed: another port may get an address that it gives up.
func (c *change) setPort(id intent.PortID, p *intent.ServicePort) (tooMany error) {
	var want rendering
	if p != nil {
		r, err := renderPort(c.t.layout, p)
		if err != nil {
			p, tooMany = closed(p), err
			if r, err = renderPort(c.t.layout, p); err != nil {
				return err
			}
		}
		want = *r
	}
	if old := c.t.ports[id]; old != nil {
		r, err := renderPort(c.t.layout, old)
		if err != nil {
			return err
		}
		c.removeRendering(r)
	}
	c.addRendering(&want)
	c.ports[id] = p
	return tooMany
}

// closed returns a port that refuses its packets.
func closed(p *intent.ServicePort) *intent.ServicePort {
	out := &intent.ServicePort{ID: p.ID, Frontends: slices.Clone(p.Frontends)}
	for i := range out.Frontends {
		out.Frontends[i].ExternalRoute, out.Frontends[i].InternalRoute = intent.Reject, intent.Reject
	}
	return out
}

// setNode replaces what the table has about the node.
func (c *change) setNode(n *intent.Node) {
	old := renderNode(c.t.layout, &c.t.node)
	want := renderNode(c.t.layout, n)
	for _, e := range want.elems {
		if e.set.Tree() {
			c.set(e.set).all.add(e.key, &e.Value)
		}
	}
	c.removeRendering(old)
	c.addRendering(want)
	c.node = n
}

func (c *change) set(s *set) *setChange {
	sc := c.sets[s.Name]
	if sc == nil {
		sc = &setChange{set: s, elems: map[string]*elemChange{}}
		c.sets[s.Name] = sc
	}
	return sc
}

func (c *change) elem(e *elem) *elemChange {
	sc := c.set(e.set)
	ec := sc.elems[e.key]
	if ec == nil {
		ec = &elemChange{}
		sc.elems[e.key] = ec
	}
	return ec
}

// removeRendering and addRendering are called in any order over all ports: an element that one
// port loses and another gets stays.
func (c *change) removeRendering(r *rendering) {
	for i := range r.elems {
		ec := c.elem(&r.elems[i])
		ec.owners--
		ec.had = &r.elems[i].Value
	}
}

func (c *change) addRendering(r *rendering) {
	for i := range r.elems {
		ec := c.elem(&r.elems[i])
		ec.owners++
		ec.want = &r.elems[i].Value
	}
}

// deferDeletions takes deletions out of the change that have to follow it, and returns
// them as a change of their own; nil: there are none.
//
// Each lookup of a packet sees the newest batch. A packet that looked for its frontend
// among those of one endpoint, before a batch that moves the frontend there, would find it
// in no other class after the batch. So a frontend is added to its new class before it is
// deleted from the old one, and write waits for packets between the two.
func (c *change) deferDeletions() (rest *change) {
	for _, b := range c.t.layout.bases() {
		for _, p := range []*pool{&b.inner, &b.outer} {
			for _, e := range c.moves(p) {
				if rest == nil {
					rest = c.t.change()
				}
				ec := c.elem(&e)
				rest.elem(&e).had = ec.had
				ec.want = ec.had
			}
		}
	}
	return rest
}

// moves returns the elements of a pool that are deleted, if their frontend gets others in
// the same pool.
func (c *change) moves(p *pool) (list []elem) {
	sets := []*set{p.one}
	for _, k := range p.class {
		sets = append(sets, k.members, k.slots)
	}
	gone := map[string][]elem{} // by frontend
	for _, s := range sets {
		c.eachOf(s, func(frontend, key string, ec *elemChange) {
			if ec.had != nil && ec.want == nil {
				gone[frontend] = append(gone[frontend], elem{set: s, key: key})
			}
		})
	}
	if len(gone) == 0 {
		return nil
	}
	for _, s := range sets {
		c.eachOf(s, func(frontend, _ string, ec *elemChange) {
			if ec.had == nil && ec.want != nil {
				list = append(list, gone[frontend]...)
				delete(gone, frontend)
			}
		})
	}
	return list
}

// eachOf calls f for each changed element of a set of frontends, or of their slots.
func (c *change) eachOf(s *set, f func(frontend, key string, ec *elemChange)) {
	sc := c.sets[s.Name]
	if sc == nil {
		return
	}
	slot := 0
	if s.Typeof {
		slot = len(appendSlot(nil, 0))
	}
	for key, ec := range sc.elems {
		f(key[:len(key)-slot], key, ec)
	}
}

// done enters a committed change into the table.
func (c *change) done(p *plan) {
	t := c.t
	for id, port := range c.ports {
		if port == nil {
			delete(t.ports, id)
		} else {
			t.ports[id] = port
		}
		if watches(port) {
			t.watched[id] = port
		} else {
			delete(t.watched, id)
		}
	}
	if c.node != nil {
		t.node = *c.node
	}
	maps.Copy(t.count, p.count)
	t.exists, t.helpers = p.exists, p.helpers
	for n, owners := range p.owners {
		if t.owners[n] == nil {
			t.owners[n] = map[string]int{}
		}
		for key, k := range owners {
			if k > 0 {
				t.owners[n][key] = k
			} else {
				delete(t.owners[n], key)
			}
		}
	}
	if p.chains != nil {
		t.chains = p.chains
	}
}

// against turns a change of an empty table into a change of the table that was found. It
// reports false if that is impossible: the table then has to be replaced.
func (c *change) against(found *nft.Listing) bool {
	c.found = true
	known := map[string]*set{}
	for _, s := range c.t.layout.sets {
		known[s.Name] = s
	}
	for name, have := range found.Sets {
		s := known[name]
		switch {
		case s == nil:
			c.foreign = append(c.foreign, name)
			continue
		case !have.Is(&s.Set):
			return false
		}
		c.t.exists[name] = true
		c.t.count[name] = len(have.Elements)
		for key, v := range have.Elements {
			c.elem(&elem{set: s, key: key}).had = v
		}
	}
	for name, have := range found.Chains {
		if !have.Is(hooks[name]) {
			return false
		}
	}
	c.t.helpers, c.t.chains = maps.Clone(found.Helpers), found.Sums()
	return true
}

// matches reports whether the kernel's table has the sets, chains and rules that were
// written, and no others.
func (t *table) matches(found *nft.Listing) bool {
	sets := 0
	for name, exists := range t.exists {
		if !exists {
			continue
		}
		if sets++; found.Sets[name] == nil {
			return false
		}
	}
	for name := range t.chains {
		if have := found.Chains[name]; have == nil || !have.Is(hooks[name]) {
			return false
		}
	}
	return found.Active() && sets == len(found.Sets) && maps.Equal(t.chains, found.Sums()) && maps.Equal(t.helpers, found.Helpers)
}
