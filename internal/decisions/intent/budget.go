package intent

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/facts/store"
)

// A dataplane has room for a number of entries, and any author of Services and EndpointSlices
// can ask for all of it. So a namespace never gets more than half of what the others leave:
//
//	share + min(demand, share) of every namespace = capacity
//
// The share is the same for all namespaces, and depends on nothing but what they ask for. A
// namespace that asks for less gets what it asks for, whatever others do. Of one that asks for
// more, the oldest Services that fit are served. See docs/adr/0051-budgets.md.
//
// A Tracker divides twice. What a Service asks for at most is known from its objects alone, and
// what does not fit so is not decided: it costs no more than reading its objects. Of the rest,
// what is decided counts.

// Capacity is the number of entries that a dataplane has room for. 0: any number.
type Capacity struct {
	Frontends    int // addresses and ports, a NodePort once for each family
	Endpoints    int // of all Service ports
	Slots        int // shares of endpoints for each policy, and entries of ServicePort.Table
	SourceRanges int // of all Service ports
	// FallbackRanges are those of the ports that another dataplane carries: see Config.FallsBack.
	FallbackRanges int
	// FrontendSlots are shares of endpoints for each frontend, where each has slots of its own: of the
	// ports that another dataplane carries, and without Config.FallsBack of all ports.
	FrontendSlots int
	// AffinityEndpoints are the endpoints of Service ports with session affinity.
	AffinityEndpoints int
}

// resource is a kind of entry.
type resource uint8

const (
	frontendEntries resource = iota
	endpointEntries
	slotEntries
	rangeEntries
	fallbackRangeEntries
	frontendSlotEntries
	affinityEndpointEntries
	resources
)

// The names of resources in Problems, and the fields that ask for them.
var (
	resourceNames = [resources]string{
		"addresses times ports", "endpoints times ports", "shares of endpoints by weights, policies or maglev's tables",
		"source ranges times ports",
		"source ranges times ports that another dataplane carries (FTP, SCTP)",
		"addresses times ports times endpoints that nftables carries", "endpoints times ports with session affinity",
	}
	resourceFields = [resources]string{
		"spec.ports", "spec.ports", annotationField(BalanceAnnotation), "spec.loadBalancerSourceRanges",
		"spec.loadBalancerSourceRanges", "spec.externalIPs", "spec.sessionAffinity",
	}
)

// entries counts entries by resource.
type entries [resources]int

func (n *entries) add(more entries, sign int) {
	for r := range n {
		n[r] += sign * more[r]
	}
}

// entriesOf counts the entries of a Service's ports.
func (c *Config) entriesOf(ports []*ServicePort) (n entries) {
	for _, p := range ports {
		n[frontendEntries] += len(p.Frontends)
		n[endpointEntries] += len(p.Endpoints) + len(p.ServingUnselected)
		if p.Affinity > 0 {
			n[affinityEndpointEntries] += len(p.Endpoints)
		}
		ranges := 0 // all frontends that have ranges have the same
		for i := range p.Frontends {
			ranges = max(ranges, len(p.Frontends[i].SourceRanges))
		}
		n[rangeEntries] += ranges
		fallsBack := c.FallsBack != nil && c.FallsBack(p)
		if fallsBack {
			n[fallbackRangeEntries] += ranges
		}
		if fallsBack || c.FallsBack == nil {
			for _, route := range []Route{ToCluster, ToLocal} {
				n[frontendSlotEntries] += p.frontendsTo(route) * sum(p.Shares(route))
			}
		}
		routes := []Route{ToCluster, ToLocal}
		if p.Table != nil {
			n[slotEntries] += len(p.Table)
			routes = routes[1:]
		}
		for _, route := range routes {
			n[slotEntries] += sum(p.Shares(route))
		}
	}
	return n
}

func sum(list []int) (n int) {
	for _, one := range list {
		n += one
	}
	return n
}

// frontendsTo counts the frontends from which a route leads, of packets from inside or from outside.
func (p *ServicePort) frontendsTo(route Route) (n int) {
	for i := range p.Frontends {
		f := &p.Frontends[i]
		if f.InternalRoute == route {
			n++
		}
		if f.ExternalRoute == route && f.ExternalRoute != f.InternalRoute {
			n++
		}
	}
	return n
}

// mostEntries counts the entries that a Service, whose slices are of, asks for at most. It leaves
// out shares of endpoints, which only a decision knows.
func (t *Tracker) mostEntries(e *service, of []*store.Slice) (n entries) {
	n = e.demand.entries
	if e.demand.redirect != (model.Name{}) {
		t.nearSlices = t.facts.SlicesOf(e.demand.redirect, t.nearSlices)
		n[endpointEntries] += endpointsOf(t.nearSlices, e.demand.ports)
	}
	n[endpointEntries] += endpointsOf(of, e.demand.ports)
	if e.demand.maglev && n[endpointEntries] > 0 {
		n[slotEntries] = e.demand.ports * t.cfg.MaglevSize
	}
	return n
}

// demand is what a Service asks for, whatever its endpoints are. It costs no more than the object: a
// tenant's 256 ports times 254 addresses are counted, not listed.
type demand struct {
	created  time.Time
	entries  entries // addresses and source ranges, times ports
	ports    int     // times families
	maglev   bool
	redirect model.Name
}

// demand counts what the Service of a plan asks for.
func (p *plan) demand(svc *model.Service) demand {
	ports := len(svc.Ports) * len(p.families)
	a := demand{created: svc.Created, ports: ports, maglev: p.balance == Maglev, redirect: p.redirect}
	withRanges := map[model.Family]bool{}
	for _, at := range p.addrs {
		withRanges[model.FamilyOf(at.addr)] = withRanges[model.FamilyOf(at.addr)] || at.kind == LoadBalancerIP
	}
	for f, are := range withRanges {
		if are {
			a.entries[rangeEntries] += len(svc.Ports) * len(p.ranges[f])
		}
	}
	nodePorts := 0
	for i := range svc.Ports {
		if svc.Ports[i].NodePort != 0 {
			nodePorts += len(p.families)
		}
	}
	a.entries[frontendEntries] = len(svc.Ports)*len(p.addrs) + nodePorts
	return a
}

// endpointsOf counts the endpoints of slices, each once per port of the slice, of which a Service
// has no more than ports.
func endpointsOf(of []*store.Slice, ports int) (n int) {
	for _, s := range of {
		n += min(len(s.Object.Ports), ports) * len(s.Object.Endpoints)
	}
	return n
}

// budget divides a Capacity among namespaces.
type budget struct {
	entriesOf func(*service) *entries // what a Service asks for
	capacity  entries
	total     entries
	of        map[string]*entries  // by namespace
	shares    map[string]entries   // of the namespaces that ask for more than their share
	refused   map[*service]refusal // the Services that do not fit
	stale     bool                 // a Service of a namespace in shares has changed
}

// refusal says what a Service did not get.
type refusal struct {
	what  resource
	share int // of its namespace
}

func newBudget(c Capacity, entriesOf func(*service) *entries) budget {
	return budget{
		entriesOf: entriesOf,
		capacity: entries{frontendEntries: c.Frontends, endpointEntries: c.Endpoints, slotEntries: c.Slots, rangeEntries: c.SourceRanges,
			fallbackRangeEntries: c.FallbackRanges, frontendSlotEntries: c.FrontendSlots, affinityEndpointEntries: c.AffinityEndpoints},
		of: map[string]*entries{},
	}
}

// set records what a Service asks for.
func (b *budget) set(e *service, now entries) {
	demand := b.entriesOf(e)
	if b.capacity == (entries{}) || *demand == now {
		return
	}
	namespace := e.name.Namespace
	sum := b.of[namespace]
	if sum == nil {
		sum = &entries{}
		b.of[namespace] = sum
	}
	for _, n := range []*entries{sum, &b.total} {
		n.add(*demand, -1)
		n.add(now, 1)
	}
	if *sum == (entries{}) {
		delete(b.of, namespace)
	}
	*demand = now
	_, over := b.shares[namespace]
	b.stale = b.stale || over
}

// hold adds what a Service asks for to held, unless that would be more than half of the capacity.
// It reports whether it did.
func (b *budget) hold(held *entries, demand entries) bool {
	sum := *held
	sum.add(demand, 1)
	for r, capacity := range b.capacity {
		if capacity > 0 && sum[r] > capacity/2 {
			return false
		}
	}
	*held = sum
	return true
}

// divide chooses the Services that do not fit. It returns those for which that has changed.
// While no namespace asks for more than its share, the work does not depend on the number of
// Services.
func (b *budget) divide(services map[model.Name]*service) (changed []*service) {
	shares := b.divideShares()
	if !b.stale && maps.Equal(shares, b.shares) {
		return nil
	}
	b.shares, b.stale = shares, false
	of := map[string][]*service{}
	for name, e := range services {
		if _, over := shares[name.Namespace]; over && *b.entriesOf(e) != (entries{}) {
			of[name.Namespace] = append(of[name.Namespace], e)
		}
	}
	before := b.refused
	b.refused = map[*service]refusal{}
	for namespace, list := range of {
		b.choose(list, shares[namespace])
	}
	for e, why := range b.refused {
		if before[e] != why {
			changed = append(changed, e)
		}
		delete(before, e)
	}
	return slices.AppendSeq(changed, maps.Keys(before))
}

// choose refuses the Services of a namespace that do not fit into its share, the youngest first.
func (b *budget) choose(list []*service, share entries) {
	slices.SortFunc(list, func(a, b *service) int {
		return cmp.Or(compareAges(a.demand.created, b.demand.created), a.name.Compare(b.name))
	})
	var used entries
next:
	for _, e := range list {
		demand := b.entriesOf(e)
		for r := range share {
			if b.capacity[r] > 0 && used[r]+demand[r] > share[r] {
				b.refused[e] = refusal{resource(r), share[r]}
				continue next
			}
		}
		used.add(*demand, 1)
	}
}

// shareSteps is the number of sizes that a share can have. With a few, a change of one
// namespace seldom changes what fits into the share of another.
const shareSteps = 64

// divideShares returns the shares of the namespaces that ask for more.
func (b *budget) divideShares() map[string]entries {
	shares := map[string]entries{}
	for r, capacity := range b.capacity {
		if b.total[r] <= capacity/2 { // no namespace has more than a half
			continue
		}
		demands := make([]int, 0, len(b.of))
		for _, sum := range b.of {
			demands = append(demands, sum[r])
		}
		share := shareOf(capacity, demands)
		for namespace, sum := range b.of {
			if sum[r] <= share {
				continue
			}
			of, over := shares[namespace]
			if !over {
				of = b.capacity
			}
			step := max(capacity/shareSteps, 1)
			of[r] = max(share-share%step, min(share, step))
			shares[namespace] = of
		}
	}
	return shares
}

// shareOf returns the number of entries that each namespace may have at most, so that as many
// stay free. It sorts what they ask for.
func shareOf(capacity int, demands []int) int {
	slices.Sort(demands)
	left := capacity
	for i, n := range demands {
		// The others ask for as much or more.
		if share := left / (len(demands) - i + 1); n > share {
			return share
		}
		left -= n
	}
	return left
}

// problem returns the Problem of a Service that does not fit.
func (b *budget) problem(e *service) (p model.Problem, refused bool) {
	why, refused := b.refused[e]
	if !refused {
		return p, false
	}
	return model.ServiceProblem(e.name, resourceFields[why.what], fmt.Sprintf(
		"is not served: it asks for %d %s, and all Services of namespace %s may have %d of the %d that a node has room for: as many stay "+
			"free for other namespaces; "+
			"the oldest that fit are served: ask for fewer, or delete Services of the namespace",
		b.entriesOf(e)[why.what], resourceNames[why.what], e.name.Namespace, why.share, b.capacity[why.what])), true
}
