package intent

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// addressKey identifies an address and port that only one Service port can have. An
// address frontend has Addr; a NodePort has Family instead; a healthCheckNodePort has only
// Port.
type addressKey struct {
	Addr     netip.Addr
	Family   model.Family
	Protocol model.Protocol
	Port     uint16
}

// String returns the key as a user writes it: "10.96.0.1:80/TCP".
func (k addressKey) String() string {
	switch {
	case k.Addr.IsValid():
		return fmt.Sprintf("%s/%s", netip.AddrPortFrom(k.Addr, k.Port), k.Protocol)
	case k.Family != 0:
		return fmt.Sprintf("NodePort %d/%s (%s)", k.Port, k.Protocol, k.Family)
	}
	return fmt.Sprintf("healthCheckNodePort %d", k.Port)
}

// requester is one Service port (or, for a healthCheckNodePort, a Service) that requests
// an addressKey.
type requester struct {
	service *service
	port    *portPlan // nil: the healthCheckNodePort
	kind    FrontendKind
}

func (c requester) id() PortID {
	if c.port == nil {
		return healthCheckID(c.service.name)
	}
	return c.port.id
}

// ofPod says that a Pod requests its host port.
func (c requester) ofPod() bool { return c.service.spec.Type == model.HostPorts }

func (c requester) created() time.Time { return c.service.spec.Created }

// rank orders requests by the trust in those who chose the address: 0 comes first. The API
// server allocates each clusterIP once, and a controller writes the addresses of load
// balancers, whereas any author of a Service can name any externalIP, and may name one long
// before a controller assigns it (CVE-2020-8554). A Pod's host port comes last: the NodePort
// of a Service would not be served on this node alone.
func (c requester) rank() int {
	switch {
	case c.kind == ClusterIP:
		return 0
	case c.kind == LoadBalancerIP:
		return 1
	case !c.ofPod():
		return 2
	}
	return 3
}

// compareRequesters orders the requesters of a key that none holds yet, as at the start: by
// rank, then a Service with a creationTimestamp before one without, then the older, then the
// first by name.
func compareRequesters(a, b requester) int {
	return cmp.Or(
		cmp.Compare(a.rank(), b.rank()),
		compareAges(a.created(), b.created()),
		a.id().Compare(b.id()),
	)
}

// compareAges puts the older creationTimestamp first, and a known one before none.
func compareAges(a, b time.Time) int {
	return cmp.Or(trueFirst(!a.IsZero(), !b.IsZero()), a.Compare(b))
}

// displaces reports whether the first requester takes the key from its owner: one of another
// rank does, and a Service that is known to be older. A Service without a timestamp keeps its
// key, whatever the name of a later Service. Where all have a timestamp, as from an API
// server, the owner is always the first requester, so that the nodes of a cluster agree.
func displaces(first, owner requester) bool {
	if first.rank() != owner.rank() {
		return true
	}
	return !first.created().IsZero() && !owner.created().IsZero()
}

// addressTable holds the requesters of each key, the owner first. During a Delta a
// changed key has no owner; resolve chooses it at the end, so that the order of objects
// makes no difference.
type addressTable struct {
	requesters map[addressKey][]requester
	before     map[addressKey]PortID // changed keys and their previous owners
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
	list := slices.DeleteFunc(t.requesters[key], func(c requester) bool { return c.id() == id })
	if len(list) == 0 {
		delete(t.requesters, key)
		return
	}
	t.requesters[key] = list
}

// remember stores the owner of a key that is about to change.
func (t *addressTable) remember(key addressKey) {
	if _, ok := t.before[key]; !ok {
		t.before[key] = t.owner(key)
	}
}

// resolve chooses an owner of every changed key, and returns which have another one now.
func (t *addressTable) resolve() (moves []Move) {
	if len(t.before) == 0 {
		return nil
	}
	for key, had := range t.before {
		list := t.requesters[key]
		if len(list) > 1 {
			slices.SortFunc(list, compareRequesters)
			i := chooseOwner(list, had)
			owner := list[i]
			copy(list[1:], list[:i])
			list[0] = owner
		}
		if now := t.owner(key); now != had && now != (PortID{}) && had != (PortID{}) {
			moves = append(moves, Move{had, now})
		}
	}
	t.before = map[addressKey]PortID{} // after a first Delta it was as large as the table
	return moves
}

// chooseOwner returns the index of the requester that gets a key; had was served on it. A
// Service may rename its port and keep the key. The requesters are sorted.
func chooseOwner(sorted []requester, had PortID) int {
	i := slices.IndexFunc(sorted, func(c requester) bool { return c.id() == had })
	if i < 0 {
		i = slices.IndexFunc(sorted, func(c requester) bool { return c.service.name == had.Service })
	}
	if i < 0 || displaces(sorted[0], sorted[i]) {
		return 0
	}
	return i
}

// owner returns the owner of a key; the zero PortID if no Service requests it.
func (t *addressTable) owner(key addressKey) PortID {
	if list := t.requesters[key]; len(list) > 0 {
		return list[0].id()
	}
	return PortID{}
}

// conflict returns the Problem of a Service that did not get an address and port.
func conflict(loser model.Name, c addressRequest, owner PortID) model.Problem {
	what := fmt.Sprintf("%s is already taken by %s; change one of the two", c.key, model.OwnerText(owner.Service))
	if owner.Service == loser {
		what = fmt.Sprintf("%s is already taken by port %s of the same Service; change one of the two",
			c.key, portName(owner))
	}
	return model.ServiceProblem(loser, c.field(), what)
}

func portName(id PortID) string {
	if id.Port != "" {
		return fmt.Sprintf("%q", id.Port)
	}
	return fmt.Sprintf("%d/%s", id.Number, id.Protocol)
}
