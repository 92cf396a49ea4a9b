package attach

import (
	"cmp"
	"maps"
	"net"
	"net/netip"
	"slices"
	"time"
)

// A pod can give its interface any address, and a virtual machine can send any neighbor
// message. Both only announce the address. An announcement is accepted if
//
//   - the node's own routing leads to the address through that interface, or through the
//     bridge that the interface is a port of;
//   - the address is not the node's own, a Service's, another node's, or that of a pod
//     on another node;
//   - the interface does not already have the address that another Pod object names;
//   - no other interface had the address before and still announces it.

// Fact is the cluster's data about an address.
type Fact uint8

// The facts. If several apply, the first of NodeAddress, OtherNode, PodHere,
// ServiceAddress, PodElsewhere and OtherNodeRange counts: any user with write access to
// Services can give one a pod's address as an externalIP.
const (
	Unknown        Fact = iota
	PodHere             // a Pod object of this node names it
	NodeAddress         // this node has it
	ServiceAddress      // clusterIP, externalIP or load balancer IP of a Service
	OtherNode           // another node has it
	PodElsewhere        // a Pod object of another node names it
	OtherNodeRange      // it is in the podCIDR of another node
)

// Reason says why an announcement is refused. It is a label of a metric.
type Reason string

// The reasons.
const (
	reasonNodeAddress    Reason = "node_address"
	reasonServiceAddress Reason = "service_address"
	reasonOtherNode      Reason = "other_node"
	reasonPodElsewhere   Reason = "pod_of_other_node"
	reasonOtherNodeRange Reason = "range_of_other_node"
	reasonNoRoute        Reason = "no_route"
	reasonOtherPod       Reason = "other_pod"
	reasonInUse          Reason = "in_use"
	reasonContested      Reason = "contested"
	reasonTooMany        Reason = "too_many"
)

// Reasons returns all reasons.
func Reasons() []Reason {
	return []Reason{
		reasonNodeAddress, reasonServiceAddress, reasonOtherNode, reasonPodElsewhere, reasonOtherNodeRange,
		reasonNoRoute, reasonOtherPod, reasonInUse, reasonContested, reasonTooMany,
	}
}

// String explains the reason in words that complete "the address is refused: ".
func (r Reason) String() string {
	switch r {
	case reasonNodeAddress:
		return "it is an address of this node"
	case reasonServiceAddress:
		return "it is the address of a Service"
	case reasonOtherNode:
		return "it is an address of another node"
	case reasonPodElsewhere:
		return "a pod of another node has it"
	case reasonOtherNodeRange:
		return "it is in the podCIDR of another node, and no Pod of this node names it"
	case reasonNoRoute:
		return "this node's routes do not lead to it by that interface"
	case reasonOtherPod:
		return "the interface belongs to a Pod with another address"
	case reasonInUse:
		return "another interface had it before"
	case reasonContested:
		return "several interfaces claim it"
	case reasonTooMany:
		return "the interface has too many addresses that no Pod names"
	}
	return string(r)
}

var reasonOf = map[Fact]Reason{
	NodeAddress: reasonNodeAddress, ServiceAddress: reasonServiceAddress, OtherNode: reasonOtherNode, PodElsewhere: reasonPodElsewhere,
}

// Refusal is an address that a pod-side device announces and does not get.
type Refusal struct {
	Addr      netip.Addr
	Ifindex   int
	Interface string
	Reason    Reason
	// Last says that OnRefused receives no further announcements of this interface.
	Last bool
}

const (
	// maxUnnamed is the maximum number of addresses of an interface that no Pod object
	// names. It prevents one pod from filling the maps. Together the interfaces have at most
	// maxUnnamedOfNode of them, with equal shares: half of what the map pods has room for.
	maxUnnamed       = 256
	maxUnnamedOfNode = 8192
	// maxAddrs is the maximum number of addresses read from a pod's interface.
	maxAddrs = 1024
	// maxReports is the maximum number of reported refused announcements of one interface.
	maxReports = 16
	// defaultReportAfter is the time until a refused announcement is reported. A CNI gives the
	// pod its address before the node has the route, and the kubelet writes the Pod's
	// address some seconds later.
	defaultReportAfter = 5 * time.Second
)

// announcement is an address behind one interface.
type announcement struct {
	port *podPort
	mac  net.HardwareAddr
	// learned says that the address is from a neighbor table, not from the
	// pod's own interface.
	learned bool
	// quiet says that it is normal that the node has no route to the address.
	quiet bool
	order int // position among the addresses of the interface
}

// announcements are all announcements of each address.
type announcements map[netip.Addr][]announcement

// has reports whether an interface announces the address.
func (cs announcements) has(a netip.Addr, ifindex int) bool {
	return slices.ContainsFunc(cs[a], func(c announcement) bool { return c.port.ifindex == ifindex })
}

// owner is the interface that an address was last accepted for.
type owner struct {
	ifindex int
	mac     net.HardwareAddr
	learned bool // from a neighbor table
	earlier bool // in an earlier run, which did not record whether it was learned
}

type refusalKey struct {
	addr    netip.Addr
	ifindex int
}

// refusal is the state of a refused announcement.
type refusal struct {
	Refusal
	since    time.Time
	quiet    bool
	reported bool
}

// collect lists the announcements of each address. It reads neighbor tables again only if
// reread is set.
func (t *podTable) collect(reread bool) {
	t.announced = make(announcements, len(t.reported))
	for _, i := range slices.Sorted(maps.Keys(t.ports)) {
		p := t.ports[i]
		for n, a := range p.addrs {
			t.announced[a.addr] = append(t.announced[a.addr], announcement{port: p, mac: p.podMAC, quiet: a.dynamic, order: n})
		}
	}
	if reread || t.learned == nil {
		t.learned = t.neighbors()
	}
	learned := make(map[netip.Addr]bool)
	for _, n := range t.learned {
		if p := t.ports[n.ifindex]; p != nil && len(p.addrs) == 0 {
			t.announced[n.addr] = append(t.announced[n.addr], announcement{port: p, mac: n.mac, learned: true, quiet: n.addr.Is6()})
			learned[n.addr] = true
		}
	}
	for a, o := range t.owners {
		p := t.ports[o.ifindex]
		if p == nil || len(p.addrs) > 0 {
			continue
		}
		o.learned = o.learned || o.earlier
		t.owners[a] = o
		// One forged message can overwrite a neighbor entry, so a changed entry does
		// not mean that the owner has given up the address.
		believed := o.earlier || t.reported[a].Ifindex == o.ifindex
		if o.learned && believed && learned[a] && !t.announced.has(a, o.ifindex) {
			t.announced[a] = append(t.announced[a], announcement{port: p, mac: o.mac, learned: true})
		}
	}
}

// announcedAddrs returns the addresses that an interface announces, sorted.
func (t *podTable) announcedAddrs() []netip.Addr {
	return slices.SortedFunc(maps.Keys(t.announced), netip.Addr.Compare)
}

// decide returns the accepted announcements. An entry without an interface marks an address
// with conflicting announcements, none of which is accepted.
func (t *podTable) decide(now time.Time) map[netip.Addr]Pod {
	pods := make(map[netip.Addr]Pod, len(t.announced))
	owners := make(map[netip.Addr]owner, len(t.announced))
	refused := make(map[refusalKey]*refusal)
	unnamed := make(map[int]int)
	tooMany := func(p *podPort) bool {
		unnamed[p.ifindex]++
		return unnamed[p.ifindex] > min(maxUnnamed, maxUnnamedOfNode/len(t.ports))
	}
	for _, a := range t.byPrecedence() {
		fact := t.fact(a)
		var left []announcement
		refuse := func(c announcement, r Reason) {
			key := refusalKey{a, c.port.ifindex}
			e := &refusal{since: now}
			if old := t.refused[key]; old != nil {
				e.since, e.reported = old.since, old.reported
			}
			e.Refusal = Refusal{Addr: a, Ifindex: c.port.ifindex, Interface: c.port.name, Reason: r}
			e.quiet = c.quiet && r == reasonNoRoute
			refused[key] = e
		}
		for _, c := range t.announced[a] {
			if r := t.objection(a, c.port, fact); r != "" {
				refuse(c, r)
			} else {
				left = append(left, c)
			}
		}
		winner, lost := t.choose(a, left, fact)
		if winner != nil && fact != PodHere && tooMany(winner.port) {
			winner, lost = nil, reasonTooMany
		}
		if lost == reasonContested {
			for i := range left { // each interface pays for the entry
				if tooMany(left[i].port) {
					lost = reasonTooMany
				}
			}
		}
		for i := range left {
			if winner == nil || left[i].port != winner.port {
				refuse(left[i], lost)
			}
		}
		if winner == nil {
			if lost == reasonContested {
				pods[a] = Pod{}
			}
			continue
		}
		pods[a] = Pod{Ifindex: winner.port.ifindex, PodMAC: winner.mac, HostMAC: winner.port.hostMAC}
		owners[a] = owner{ifindex: winner.port.ifindex, mac: winner.mac, learned: winner.learned}
		if fact == PodHere {
			winner.port.named[familyIndex(a)] = a
		}
	}
	// An interface's Pod may be known only now: the reason must not depend on the order.
	for key, e := range refused {
		if e.Reason == reasonInUse && t.fact(key.addr) == PodHere && t.belongsToOther(t.ports[key.ifindex], key.addr) {
			e.Reason = reasonOtherPod
		}
	}
	for a, o := range t.owners {
		if _, replaced := owners[a]; !replaced && t.remembers(a, o) {
			o.earlier = false
			owners[a] = o
		}
	}
	t.owners, t.refused = owners, refused
	return pods
}

// byPrecedence sorts announced addresses: those with an owner come first, and then each
// interface's in the kernel's order, in which the CNI's address is first. An interface
// belongs to the Pod whose address comes first.
func (t *podTable) byPrecedence() []netip.Addr {
	type rank struct{ unowned, ifindex, order int }
	ranks := make(map[netip.Addr]rank, len(t.announced))
	for a, list := range t.announced {
		r := rank{1, list[0].port.ifindex, list[0].order}
		if o, ok := t.owners[a]; ok {
			r.unowned, r.ifindex, r.order = 0, o.ifindex, 0
			for _, c := range list {
				if c.port.ifindex == o.ifindex {
					r.order = c.order
				}
			}
		}
		ranks[a] = r
	}
	return slices.SortedFunc(maps.Keys(t.announced), func(a, b netip.Addr) int {
		x, y := ranks[a], ranks[b]
		return cmp.Or(x.unowned-y.unowned, x.ifindex-y.ifindex, x.order-y.order, a.Compare(b))
	})
}

func (t *podTable) fact(a netip.Addr) Fact {
	if t.facts == nil {
		return Unknown
	}
	return t.facts(a)
}

// objection returns why an interface cannot have the address, regardless of other
// announcements, or "" if it can.
func (t *podTable) objection(a netip.Addr, p *podPort, fact Fact) Reason {
	if r, ok := reasonOf[fact]; ok {
		return r
	}
	where := t.paths.lookup(pathKey{a, p.vrf})
	leads, host := t.leads(where, p)
	switch {
	case where.local:
		return reasonNodeAddress
	case fact == OtherNodeRange && !host:
		// Some CNIs assign addresses regardless of podCIDRs. They write a route
		// to each pod, which a pod cannot.
		return reasonOtherNodeRange
	case !leads:
		return reasonNoRoute
	case fact == PodHere && t.belongsToOther(p, a):
		return reasonOtherPod
	}
	return ""
}

// leads reports whether a path leads to an interface, and whether its route is for
// this address and this interface alone.
func (t *podTable) leads(where path, p *podPort) (leads, host bool) {
	for _, i := range where.devices {
		if i != p.ifindex && (p.master == 0 || t.switchOf(i) != p.master && (!p.ovs || !t.ovs[i])) {
			return false, false
		}
		host = where.host && i == p.ifindex
	}
	return len(where.devices) > 0, host
}

// switchOf returns the bridge that a device is, or that it is a VLAN of; else the
// device itself.
func (t *podTable) switchOf(ifindex int) int {
	if bridge := t.vlans[ifindex]; bridge != 0 {
		return bridge
	}
	return ifindex
}

// belongsToOther reports whether the interface has the address of another Pod. A Pod
// has one address of each family, and an interface belongs to one Pod.
func (t *podTable) belongsToOther(p *podPort, a netip.Addr) bool {
	named := p.named[familyIndex(a)]
	return named.IsValid() && named != a && t.fact(named) == PodHere
}

// choose returns the announcement to accept, nil for none, and the reason to refuse the
// others.
func (t *podTable) choose(a netip.Addr, list []announcement, fact Fact) (*announcement, Reason) {
	if len(list) == 0 {
		return nil, ""
	}
	if o, ok := t.owners[a]; ok {
		for i := range list {
			if list[i].port.ifindex == o.ifindex {
				return &list[i], reasonInUse
			}
		}
		if t.remembers(a, o) {
			return nil, reasonContested
		}
	}
	if len(list) == 1 {
		return &list[0], ""
	}
	where := t.paths.lookup(pathKey{a, list[0].port.vrf})
	for i := range list {
		if _, host := t.leads(where, list[i].port); host {
			return &list[i], reasonInUse
		}
	}
	if fact != PodHere {
		return nil, reasonContested
	}
	best := &list[0]
	for i := range list[1:] {
		c := &list[1+i]
		if cmp.Or(boolCompare(best.learned, c.learned), best.port.ifindex-c.port.ifindex) > 0 {
			best = c
		}
	}
	return best, reasonInUse
}

// remembers reports whether an owner without a current announcement still counts: a virtual
// machine whose neighbor entry the kernel has dropped. Otherwise a pod that fills the
// neighbor table could take over its address.
func (t *podTable) remembers(a netip.Addr, o owner) bool {
	p := t.ports[o.ifindex]
	return p != nil && o.learned && len(p.addrs) == 0 && t.objection(a, p, t.fact(a)) == ""
}

func boolCompare(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

func familyIndex(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// report calls tell once for each announcement that has been refused for that long, and
// returns when to call report again, 0 for not until the next change.
func (t *podTable) report(now time.Time, after time.Duration, tell func(Refusal)) (next time.Duration) {
	for _, e := range t.sortedRefusals() {
		if e.reported || e.quiet {
			continue
		}
		if left := after - now.Sub(e.since); left > 0 {
			if next == 0 || left < next {
				next = left
			}
			continue
		}
		e.reported = true
		p := t.ports[e.Ifindex]
		if p == nil || p.reports >= maxReports {
			continue
		}
		p.reports++
		r := e.Refusal
		r.Last = p.reports == maxReports
		tell(r)
	}
	return next
}

func (t *podTable) sortedRefusals() []*refusal {
	return slices.SortedFunc(maps.Values(t.refused), func(x, y *refusal) int {
		return cmp.Or(x.Ifindex-y.Ifindex, x.Addr.Compare(y.Addr))
	})
}
