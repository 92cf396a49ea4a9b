package intent

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/facts/model"
)

// zoneLabel says which zone a node is in.
const zoneLabel = "topology.kubernetes.io/zone"

// ownNode is what is known of the node that the Tracker decides for.
type ownNode struct {
	node   Node // as last decided
	told   bool // Changes have carried node
	census bool // Nodes came or went, or got other podCIDRs, since problem was worded
	// problem says that no Node has this node's name, or that its Node lacks what
	// is needed; nil: neither, or no Node is known at all.
	problem *model.Problem
	stale   bool // node must be decided again
	zone    string
	kernel  []netip.Addr   // as SetNodeAddrs told
	addrs   []netip.Addr   // all its addresses, sorted
	cidrs   []netip.Prefix // of the cluster; nil: to be collected again, and peers
	peers   []netip.Addr
	others  []netip.Prefix // ranges of the other nodes' pods; collected with cidrs

	// policed counts for each address how many pods and slices say that it is
	// a policed pod's, and the guard; podsPoliced is what each pod says.
	policed     map[netip.Addr]int
	claimed     map[netip.Addr]int // how many Pods of this node have the address
	podsPoliced map[model.Name][]netip.Addr
	guarded     []netip.Addr            // see SetGuarded
	pods        map[model.Name]struct{} // pods whose say must be heard again

	elsewhere map[netip.Addr]int // how many Pods of other nodes have the address
	otherPods []netip.Addr       // the keys of elsewhere, sorted; nil: to be collected again
}

func newOwnNode() ownNode {
	return ownNode{
		policed:     map[netip.Addr]int{},
		claimed:     map[netip.Addr]int{},
		elsewhere:   map[netip.Addr]int{},
		podsPoliced: map[model.Name][]netip.Addr{},
		pods:        map[model.Name]struct{}{},
	}
}

// has reports whether an address is the node's own.
func (o *ownNode) has(a netip.Addr) bool {
	_, found := slices.BinarySearchFunc(o.addrs, a, netip.Addr.Compare)
	return found
}

// takeNode takes in a Node, nil for one that is gone.
func (t *Tracker) takeNode(name string, n *model.Node) {
	old := t.world.nodes[name]
	t.own.census = t.own.census || (old == nil) != (n == nil) || (len(podCIDRs(old)) == 0) != (len(podCIDRs(n)) == 0)
	if n == nil {
		delete(t.world.nodes, name)
	} else {
		t.world.nodes[name] = n
	}
	if !slices.Equal(podCIDRs(old), podCIDRs(n)) || !slices.Equal(addresses(old), addresses(n)) {
		t.own.cidrs = nil
		t.own.stale = true
	}
	if name != t.cfg.NodeName {
		return
	}
	t.own.stale = t.own.stale || t.leaving() != t.own.node.Leaving
	t.readdress()
	zone := ""
	if n != nil {
		zone = n.Labels[zoneLabel]
	}
	if zone != t.own.zone {
		t.own.zone = zone
		for _, e := range t.services {
			t.touch(e)
		}
	}
}

// namesInProblem bounds how many Nodes a Problem names.
const namesInProblem = 5

// checkNode looks for this node among the Nodes known, and reports whether what
// is wrong changed. A wrong name is easily given and hard to see: everything is
// served, but no endpoint counts as being here. Nor can one see that pods cannot
// be told.
func (t *Tracker) checkNode() bool {
	if !t.own.census {
		return false
	}
	t.own.census = false
	before := t.own.problem
	t.own.problem = nil
	own := t.world.nodes[t.cfg.NodeName]
	if mode := t.localByNode(); mode != "" && own != nil && len(own.PodCIDRs) == 0 {
		p := model.ClusterProblem(model.KindNode, t.cfg.NodeName, "spec.podCIDRs",
			"has none, so --detect-local-mode "+mode+" cannot tell this node's pods from other clients; give another mode, "+t.orRanges()+"or have the Node get its range (kube-controller-manager --allocate-node-cidrs)")
		t.own.problem = &p
	}
	if len(t.world.nodes) > 0 && own == nil {
		names := slices.Sorted(maps.Keys(t.world.nodes))
		known := strings.Join(names[:min(len(names), namesInProblem)], ", ")
		if more := len(names) - namesInProblem; more > 0 {
			known += fmt.Sprintf(" and %d more", more)
		}
		p := model.ClusterProblem(model.KindNode, t.cfg.NodeName, "",
			"is not among the Nodes known ("+known+"), so that no endpoint is taken for one of this node; give --hostname-override")
		t.own.problem = &p
	}
	return (before == nil) != (t.own.problem == nil) || before != nil && *before != *t.own.problem
}

// localByNode is the mode by which pods are told by what the Node says of them, as a
// person would name it; "" if they are not.
func (t *Tracker) localByNode() string {
	switch {
	case t.cfg.DetectLocal == LocalNodeCIDR:
		return string(LocalNodeCIDR)
	case t.cfg.LocalBySource && len(t.cfg.ClusterCIDRs) == 0 && (t.cfg.DetectLocal == "" || t.cfg.DetectLocal == LocalClusterCIDR):
		return string(LocalClusterCIDR) + " without --cluster-cidr"
	}
	return ""
}

// orRanges is what else helps the user of localByNode's mode.
func (t *Tracker) orRanges() string {
	if t.cfg.DetectLocal == LocalNodeCIDR {
		return ""
	}
	return "--cluster-cidr, "
}

// leaving reports whether load balancers should leave this node out.
func (t *Tracker) leaving() bool {
	n := t.world.nodes[t.cfg.NodeName]
	if n == nil {
		return t.cfg.ExpectNode
	}
	return n.Leaving
}

func addresses(n *model.Node) []netip.Addr {
	if n == nil {
		return nil
	}
	return n.Addresses
}

func podCIDRs(n *model.Node) []netip.Prefix {
	if n == nil {
		return nil
	}
	return n.PodCIDRs
}

// readdress works out the node's addresses and touches what depends on them.
func (t *Tracker) readdress() {
	var addrs []netip.Addr
	add := func(list []netip.Addr) {
		for _, a := range list {
			if a = a.Unmap().WithZone(""); reachable(a) {
				addrs = append(addrs, a)
			}
		}
	}
	add(t.own.kernel)
	if n := t.world.nodes[t.cfg.NodeName]; n != nil {
		add(n.Addresses)
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	addrs = slices.Compact(addrs)
	if slices.Equal(addrs, t.own.addrs) {
		return
	}
	for _, a := range slices.Concat(addrs, t.own.addrs) {
		t.touchClaiming(a)
		for _, s := range t.world.slicesOfAddr[a] {
			t.touch(s.service)
		}
	}
	t.own.addrs = addrs
	t.own.stale = true
}

// reachable reports whether other machines can address the node so. Loopback
// must never be: a NodePort there lets neighbours in (CVE-2020-8558).
func reachable(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsLoopback() && !a.IsLinkLocalUnicast() && !a.IsMulticast()
}

// claim counts a Pod among those of this node that have its addresses, by 1 or -1.
func (o *ownNode) claim(name string, p *model.Pod, by int) {
	if p.Node != name {
		o.claimElsewhere(p, by)
		return
	}
	for _, a := range p.IPs {
		a = a.Unmap()
		before := o.claimed[a]
		if o.claimed[a] = before + by; o.claimed[a] == 0 {
			delete(o.claimed, a)
		}
		o.stale = o.stale || before == 0 || before+by == 0
	}
}

// claimElsewhere counts a Pod among those of other nodes. A Pod without a node runs
// nowhere yet.
func (o *ownNode) claimElsewhere(p *model.Pod, by int) {
	if p.Node == "" {
		return
	}
	for _, a := range p.IPs {
		a = a.Unmap()
		before := o.elsewhere[a]
		if o.elsewhere[a] = before + by; o.elsewhere[a] == 0 {
			delete(o.elsewhere, a)
		}
		if before == 0 || before+by == 0 {
			o.otherPods, o.stale = nil, true
		}
	}
}

// pollSlice renews what a slice says about policed pods on this node. A Pod of this
// node that has the address says it better.
func (t *Tracker) pollSlice(s *slice) {
	if !s.near && len(s.policed) == 0 {
		return
	}
	var now []netip.Addr
	for i := range s.object.Endpoints {
		ep := &s.object.Endpoints[i]
		addr := endpointAddr(ep)
		if addr.IsValid() && isHere(ep, t.cfg.NodeName) && !t.world.podHere(addr) && t.world.selected(s.object.Service.Namespace, ep, addr) {
			now = append(now, addr)
		}
	}
	t.setPoliced(&s.policed, now)
}

// pollPods renews what the touched pods say about policed pods on this node.
func (t *Tracker) pollPods() {
	for name := range t.own.pods {
		var now []netip.Addr
		if p := t.world.pods[name]; p != nil && p.Node == t.cfg.NodeName && t.world.podPoliced(name) {
			for _, a := range p.IPs {
				now = append(now, a.Unmap())
			}
		}
		said := t.own.podsPoliced[name]
		t.setPoliced(&said, now)
		if len(said) == 0 {
			delete(t.own.podsPoliced, name)
		} else {
			t.own.podsPoliced[name] = said
		}
	}
	clear(t.own.pods)
}

// setPoliced replaces what somebody says about policed pods on this node.
func (t *Tracker) setPoliced(said *[]netip.Addr, now []netip.Addr) {
	if slices.Equal(*said, now) {
		return
	}
	for _, a := range now {
		t.own.policed[a]++
		t.own.stale = t.own.stale || t.own.policed[a] <= 2 // the second may be one beside a guard
	}
	for _, a := range *said {
		t.own.policed[a]--
		t.own.stale = t.own.stale || t.own.policed[a] < 2
		if t.own.policed[a] == 0 {
			delete(t.own.policed, a)
		}
	}
	*said = now
}

// changedNode returns the Node if it differs from what was last returned.
func (t *Tracker) changedNode() *Node {
	t.pollPods()
	if t.own.stale {
		t.own.stale = false
		if n := t.describeNode(); !sameNode(n, t.own.node) {
			t.own.node = n
			t.own.told = false
		}
	}
	if t.own.told {
		return nil
	}
	t.own.told = true
	n := t.own.node
	return &n
}

func (t *Tracker) describeNode() Node {
	if t.own.cidrs == nil {
		t.own.cidrs, t.own.peers, t.own.others = t.clusterCIDRs(), t.peers(), t.otherPodCIDRs()
	}
	if t.own.otherPods == nil {
		t.own.otherPods = slices.AppendSeq(make([]netip.Addr, 0, len(t.own.elsewhere)), maps.Keys(t.own.elsewhere))
		slices.SortFunc(t.own.otherPods, netip.Addr.Compare)
	}
	n := Node{
		Name:          t.cfg.NodeName,
		Addrs:         t.own.addrs,
		PodCIDRs:      canonicalPrefixes(podCIDRs(t.world.nodes[t.cfg.NodeName])),
		ClusterCIDRs:  t.own.cidrs,
		Peers:         t.own.peers,
		OtherPods:     t.own.otherPods,
		OtherPodCIDRs: t.own.others,
		MasqueradeAll: t.cfg.MasqueradeAll,

		PoliciesUnknown: t.world.policiesUnknown || t.world.guardsUnknown,
		PoliciesExist:   len(t.world.policies) > 0 || t.world.policiesUnknown || t.world.guardsUnknown,
		Local:           t.localTraffic(),
		Leaving:         t.leaving(),
	}
	for _, a := range t.own.addrs {
		if t.servesNodePorts(a) {
			n.NodePortAddrs = append(n.NodePortAddrs, a)
		}
	}
	for _, a := range slices.SortedFunc(maps.Keys(t.own.claimed), netip.Addr.Compare) {
		if !t.own.has(a) {
			n.ClaimedPods = append(n.ClaimedPods, a)
		}
	}
	unverified := 0
	for _, a := range slices.SortedFunc(maps.Keys(t.own.policed), netip.Addr.Compare) {
		_, guarded := t.world.guarded[a]
		if !guarded && !t.world.podHere(a) {
			if unverified++; unverified > maxUnverified {
				continue
			}
		}
		// Whether a policy holds for a hostNetwork pod is undefined, and
		// policing the node's own address would take in all its traffic.
		if !t.own.has(a) {
			n.PolicedPods = append(n.PolicedPods, a)
			if guarded && t.own.policed[a] == 1 {
				n.GuardedPods = append(n.GuardedPods, a)
			}
		}
	}
	return n
}

// localTraffic is how packets of this node's pods are recognised.
func (t *Tracker) localTraffic() LocalTraffic {
	switch t.cfg.DetectLocal {
	case LocalNodeCIDR:
		return LocalTraffic{Sources: canonicalPrefixes(podCIDRs(t.world.nodes[t.cfg.NodeName]))}
	case LocalBridgeInterface:
		return LocalTraffic{Interface: t.cfg.LocalInterface}
	case LocalInterfaceNamePrefix:
		return LocalTraffic{Prefix: t.cfg.LocalInterface}
	}
	if len(t.cfg.ClusterCIDRs) > 0 {
		return LocalTraffic{Sources: t.cfg.ClusterCIDRs}
	}
	// kube-proxy cannot tell then, and takes all pods for clients from outside.
	// What the Node says is better than that.
	return LocalTraffic{Sources: canonicalPrefixes(podCIDRs(t.world.nodes[t.cfg.NodeName]))}
}

func (t *Tracker) servesNodePorts(a netip.Addr) bool {
	if t.cfg.NodePortPrimary {
		for _, own := range addresses(t.world.nodes[t.cfg.NodeName]) {
			if model.FamilyOf(own) == model.FamilyOf(a) {
				return own.Unmap() == a
			}
		}
		return false
	}
	return len(t.cfg.NodePortAddresses) == 0 ||
		slices.ContainsFunc(t.cfg.NodePortAddresses, func(p netip.Prefix) bool { return p.Contains(a) })
}

// clusterCIDRs collects the address ranges of all nodes' pods. The result is
// never nil.
func (t *Tracker) clusterCIDRs() []netip.Prefix {
	all := append([]netip.Prefix{}, t.cfg.ClusterCIDRs...)
	for _, n := range t.world.nodes {
		all = append(all, n.PodCIDRs...)
	}
	return canonicalPrefixes(all)
}

// otherPodCIDRs collects the address ranges of the other nodes' pods.
func (t *Tracker) otherPodCIDRs() []netip.Prefix {
	var all []netip.Prefix
	for _, n := range t.world.nodes {
		if n.Name != t.cfg.NodeName {
			all = append(all, n.PodCIDRs...)
		}
	}
	return canonicalPrefixes(all)
}

// peers collects the addresses of the other nodes.
func (t *Tracker) peers() []netip.Addr {
	var all []netip.Addr
	for _, n := range t.world.nodes {
		if n.Name == t.cfg.NodeName {
			continue
		}
		for _, a := range n.Addresses {
			all = append(all, a.Unmap())
		}
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}

func sameNode(a, b Node) bool {
	return a.Name == b.Name && a.MasqueradeAll == b.MasqueradeAll &&
		slices.Equal(a.Addrs, b.Addrs) && slices.Equal(a.NodePortAddrs, b.NodePortAddrs) &&
		slices.Equal(a.PodCIDRs, b.PodCIDRs) &&
		slices.Equal(a.ClusterCIDRs, b.ClusterCIDRs) && slices.Equal(a.PolicedPods, b.PolicedPods) && slices.Equal(a.GuardedPods, b.GuardedPods) &&
		slices.Equal(a.Peers, b.Peers) && a.PoliciesUnknown == b.PoliciesUnknown && a.PoliciesExist == b.PoliciesExist && slices.Equal(a.ClaimedPods, b.ClaimedPods) && a.Leaving == b.Leaving &&
		slices.Equal(a.OtherPods, b.OtherPods) && slices.Equal(a.OtherPodCIDRs, b.OtherPodCIDRs) &&
		slices.Equal(a.Local.Sources, b.Local.Sources) && a.Local.Interface == b.Local.Interface && a.Local.Prefix == b.Local.Prefix
}
