package intent

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// addressKey is what only one Service port can have. An address frontend has
// Addr; a NodePort has Family instead; a healthCheckNodePort has only Port.
type addressKey struct {
	Addr     netip.Addr
	Family   model.Family
	Protocol model.Protocol
	Port     uint16
}

// String names the claim as a person would: "10.96.0.1:80/TCP".
func (k addressKey) String() string {
	switch {
	case k.Addr.IsValid():
		return fmt.Sprintf("%s/%s", netip.AddrPortFrom(k.Addr, k.Port), k.Protocol)
	case k.Family != 0:
		return fmt.Sprintf("NodePort %d/%s (%s)", k.Port, k.Protocol, k.Family)
	}
	return fmt.Sprintf("healthCheckNodePort %d", k.Port)
}

// requester is one Service port (or, for a healthCheckNodePort, a Service) that
// asks for a addressKey.
type requester struct {
	id      PortID
	kind    FrontendKind
	created time.Time
}

// compareRequesters says who comes first where nobody is served yet, as at the
// start: a Service with a creationTimestamp before one without, then the older,
// then the first by name. A clusterIP comes before all else, because the API
// server hands each out once, whereas anybody who may write a Service can name
// any externalIP (CVE-2020-8554).
func compareRequesters(a, b requester) int {
	return cmp.Or(
		trueFirst(a.kind == ClusterIP, b.kind == ClusterIP),
		trueFirst(!a.created.IsZero(), !b.created.IsZero()),
		a.created.Compare(b.created),
		a.id.Compare(b.id),
	)
}

// displaces reports whether a claimant that comes first takes the claim from
// the holder: a clusterIP does, and one that is known to be the older. A
// Service of which it is not known keeps what it is served on, however a later
// one is called. Where all have a timestamp, as from an API server, the holder
// is always the first, so that the nodes of a cluster agree.
func displaces(first, holder requester) bool {
	if (first.kind == ClusterIP) != (holder.kind == ClusterIP) {
		return true
	}
	return !first.created.IsZero() && !holder.created.IsZero()
}

// addressTable holds all claims, the claimants of each with its holder in front.
// While a Delta is taken in nobody holds what it touches; settle decides, so
// that the order in which objects are taken in makes no difference.
type addressTable struct {
	requesters map[addressKey][]requester
	before     map[addressKey]PortID // the touched, and who held them
}

func newAddressTable() addressTable {
	return addressTable{requesters: map[addressKey][]requester{}, before: map[addressKey]PortID{}}
}

func (t *addressTable) add(key addressKey, c requester) {
	t.remember(key)
	t.requesters[key] = append(t.requesters[key], c)
}

func (t *addressTable) remove(key addressKey, id PortID) {
	t.remember(key)
	list := slices.DeleteFunc(t.requesters[key], func(c requester) bool { return c.id == id })
	if len(list) == 0 {
		delete(t.requesters, key)
		return
	}
	t.requesters[key] = list
}

// remember remembers the holder of a claim that is about to change.
func (t *addressTable) remember(key addressKey) {
	if _, ok := t.before[key]; !ok {
		t.before[key] = t.holder(key)
	}
}

// resolve gives every touched claim to one of its claimants.
func (t *addressTable) resolve() {
	if len(t.before) == 0 {
		return
	}
	for key, had := range t.before {
		list := t.requesters[key]
		if len(list) < 2 {
			continue
		}
		slices.SortFunc(list, compareRequesters)
		i := chooseHolder(list, had)
		holder := list[i]
		copy(list[1:], list[:i])
		list[0] = holder
	}
	t.before = map[addressKey]PortID{} // after a first Delta it was as large as the table
}

// chooseHolder finds who of the claimants, which are sorted, gets a claim that had was
// served on. A Service may rename its port and keep it.
func chooseHolder(sorted []requester, had PortID) int {
	i := slices.IndexFunc(sorted, func(c requester) bool { return c.id == had })
	if i < 0 {
		i = slices.IndexFunc(sorted, func(c requester) bool { return c.id.Service == had.Service })
	}
	if i < 0 || displaces(sorted[0], sorted[i]) {
		return 0
	}
	return i
}

// holder returns who has the claim; there is none only if nobody asked.
func (t *addressTable) holder(key addressKey) PortID {
	if list := t.requesters[key]; len(list) > 0 {
		return list[0].id
	}
	return PortID{}
}

// conflict words the Problem of a Service that did not get what it claims.
func conflict(loser model.Name, c addressRequest, holder PortID) model.Problem {
	what := fmt.Sprintf("%s is already taken by Service %s; change one of the two", c.key, holder.Service)
	if holder.Service == loser {
		what = fmt.Sprintf("%s is already taken by port %s of the same Service; change one of the two",
			c.key, portName(holder))
	}
	return model.ServiceProblem(loser, c.field, what)
}

func portName(id PortID) string {
	if id.Port != "" {
		return fmt.Sprintf("%q", id.Port)
	}
	return fmt.Sprintf("%d/%s", id.Number, id.Protocol)
}
