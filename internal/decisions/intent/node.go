package intent

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/facts/model"
)

// zoneLabel holds the zone of a node.
const zoneLabel = "topology.kubernetes.io/zone"

// ownNode is the state of the node that the Tracker decides for.
type ownNode struct {
	node         Node // as last decided
	reported     bool // Changes have reported node
	nodesChanged bool // Nodes were added or deleted, or their podCIDRs changed, since the last checkNode
	// problem says that no Node has this node's name, or that its Node lacks a required
	// field. It is nil if neither holds, or if no Node is known at all.
	problem *model.Problem
	stale   bool // node must be computed again
	zone    string
	kernel  []netip.Addr   // as SetNodeAddrs set them, sorted
	named   []netip.Addr   // of its Node
	egress  egress.Plan    // as SetEgress set it
	addrs   []netip.Addr   // all its addresses, sorted
	cidrs   []netip.Prefix // of the cluster; nil: compute cidrs and peers again
	peers   []netip.Addr
	others  []netip.Prefix // ranges of the other nodes' pods; computed with cidrs

	// mustTraverse counts, for each address, the pods, slices and deny rules because of
	// which it must traverse netfilter; the others have the addresses of each of these.
	mustTraverse        map[netip.Addr]int
	mustTraverseOfPod   map[model.Name][]netip.Addr
	mustTraverseOfSlice map[model.Name][]netip.Addr
	denyRulePods        []netip.Addr
	knownPods           map[netip.Addr]int      // how many Pods of this node have the address
	unhookedPods        map[model.Name]string   // UnhookedUID of the Pods of this node that have one
	dirtyPods           map[model.Name]struct{} // pods to check again
	anyPolicy           bool                    // a NetworkPolicy may require netfilter

	nodeAddrs map[netip.Addr]int // how many Nodes have the address

	otherNodesPods map[netip.Addr]int // how many Pods of other nodes have the address
	otherPods      []netip.Addr       // the keys of otherNodesPods, sorted; nil: compute again
}

func newOwnNode() ownNode {
	return ownNode{
		mustTraverse:        map[netip.Addr]int{},
		mustTraverseOfPod:   map[model.Name][]netip.Addr{},
		mustTraverseOfSlice: map[model.Name][]netip.Addr{},
		knownPods:           map[netip.Addr]int{},
		unhookedPods:        map[model.Name]string{},
		nodeAddrs:           map[netip.Addr]int{},
		otherNodesPods:      map[netip.Addr]int{},
		dirtyPods:           map[model.Name]struct{}{},
	}
}

// has reports whether an address is the node's own.
func (o *ownNode) has(a netip.Addr) bool {
	_, found := slices.BinarySearchFunc(o.addrs, a, netip.Addr.Compare)
	return found
}

// onNode marks dirty what depends on a Node.
func (t *Tracker) onNode(name string, old, n *model.Node) {
	t.own.nodesChanged = t.own.nodesChanged || (old == nil) != (n == nil) || (len(podCIDRs(old)) == 0) != (len(podCIDRs(n)) == 0)
	if !slices.Equal(podCIDRs(old), podCIDRs(n)) || !slices.Equal(addresses(old), addresses(n)) {
		t.own.cidrs = nil
		t.own.stale = true
	}
	t.countNodeAddrs(addresses(n), 1)
	t.countNodeAddrs(addresses(old), -1)
	t.replacePodCIDRs(name, podCIDRs(old), podCIDRs(n))
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
			t.markDirty(e)
		}
	}
}

// namesInProblem bounds how many Nodes a Problem names.
const namesInProblem = 5

// checkNode looks for this node among the known Nodes, and reports whether its Problem
// changed. A wrong node name is hard to notice: everything is served, but no endpoint
// counts as on this node. That packets of pods cannot be recognized is equally hard to
// notice.
func (t *Tracker) checkNode() bool {
	if !t.own.nodesChanged {
		return false
	}
	t.own.nodesChanged = false
	before := t.own.problem
	t.own.problem = nil
	own := t.facts.ThisNode()
	if mode := t.localByNode(); mode != "" && own != nil && len(own.PodCIDRs) == 0 {
		p := model.ClusterProblem(model.KindNode, t.cfg.NodeName, "spec.podCIDRs",
			"has none, so --detect-local-mode "+mode+" cannot tell this node's pods from other clients; give another mode, "+t.orRanges()+
				"or have the Node get its range (kube-controller-manager --allocate-node-cidrs)")
		t.own.problem = &p
	}
	if names := t.facts.NodeNames(); own == nil && len(names) > 0 {
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

// localByNode returns the mode that recognizes pods by the Node's podCIDRs, as a user
// writes it; "" if another mode is set.
func (t *Tracker) localByNode() string {
	switch {
	case t.cfg.DetectLocal == LocalNodeCIDR:
		return string(LocalNodeCIDR)
	case t.cfg.LocalBySource && len(t.cfg.ClusterCIDRs) == 0 && (t.cfg.DetectLocal == "" || t.cfg.DetectLocal == LocalClusterCIDR):
		return string(LocalClusterCIDR) + " without --cluster-cidr"
	}
	return ""
}

// orRanges names the flag that also fixes the Problem of localByNode's mode.
func (t *Tracker) orRanges() string {
	if t.cfg.DetectLocal == LocalNodeCIDR {
		return ""
	}
	return "--cluster-cidr, "
}

// leaving reports whether load balancers should exclude this node.
func (t *Tracker) leaving() bool {
	n := t.facts.ThisNode()
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

// readdress computes the node's addresses and marks what depends on them dirty.
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
	named := addresses(t.facts.ThisNode())
	add(named)
	slices.SortFunc(addrs, netip.Addr.Compare)
	addrs = slices.Compact(addrs)
	if slices.Equal(addrs, t.own.addrs) && slices.Equal(named, t.own.named) {
		return
	}
	for _, a := range slices.Concat(addrs, t.own.addrs) {
		t.markAddressConflictsDirty(a)
		t.markEndpointDirty(a)
	}
	t.own.named, t.own.addrs = named, addrs
	t.own.stale = true
	t.markHostPortsDirty()
}

// reachable reports whether other machines can reach the node at an address. Loopback is
// never reachable: a NodePort on it would admit neighbors (CVE-2020-8558). The node's own
// processes may have NodePorts there: Config.LocalhostNodePorts.
func reachable(a netip.Addr) bool {
	return a.IsValid() && !a.IsUnspecified() && !a.IsLoopback() && !a.IsLinkLocalUnicast() && !a.IsMulticast()
}

// countPod adds 1 or -1 to the Pods of this node that have its addresses.
func (o *ownNode) countPod(name string, p *model.Pod, by int) {
	if p.Node != name {
		o.countOtherNodesPod(p, by)
		return
	}
	for _, a := range p.IPs {
		a = a.Unmap()
		before := o.knownPods[a]
		if o.knownPods[a] = before + by; o.knownPods[a] == 0 {
			delete(o.knownPods, a)
		}
		o.stale = o.stale || before == 0 || before+by == 0
	}
}

// countOtherNodesPod adds 1 or -1 to the Pods of other nodes. A Pod without a node does
// not run yet.
func (o *ownNode) countOtherNodesPod(p *model.Pod, by int) {
	if p.Node == "" {
		return
	}
	for _, a := range p.IPs {
		a = a.Unmap()
		before := o.otherNodesPods[a]
		if o.otherNodesPods[a] = before + by; o.otherNodesPods[a] == 0 {
			delete(o.otherNodesPods, a)
		}
		if before == 0 || before+by == 0 {
			o.otherPods, o.stale = nil, true
		}
	}
}

// noteUnhooked notes whether a Pod of this node has no socket hooks; now is nil for a deleted
// Pod.
func (o *ownNode) noteUnhooked(node string, name model.Name, now *model.Pod) {
	uid := ""
	if now != nil && now.Node == node {
		uid = now.UnhookedUID
	}
	if o.unhookedPods[name] == uid {
		return
	}
	o.stale = true
	if o.unhookedPods[name] = uid; uid == "" {
		delete(o.unhookedPods, name)
	}
}

// ChangedNode returns the Node if it differs from what was last returned, here or by Changes.
func (t *Tracker) ChangedNode() *Node {
	t.updatePods()
	if t.own.stale {
		t.own.stale = false
		if n := t.describeNode(); !sameNode(n, t.own.node) {
			t.own.node = n
			t.own.reported = false
		}
	}
	if t.own.reported {
		return nil
	}
	t.own.reported = true
	n := t.own.node
	return &n
}

func (t *Tracker) describeNode() Node {
	if t.own.cidrs == nil {
		t.own.cidrs, t.own.peers, t.own.others = t.clusterCIDRs(), t.peers(), t.otherPodCIDRs()
	}
	if t.own.otherPods == nil {
		t.own.otherPods = slices.AppendSeq(make([]netip.Addr, 0, len(t.own.otherNodesPods)), maps.Keys(t.own.otherNodesPods))
		slices.SortFunc(t.own.otherPods, netip.Addr.Compare)
	}
	n := Node{
		Name:          t.cfg.NodeName,
		Addrs:         t.own.addrs,
		PodCIDRs:      canonicalPrefixes(podCIDRs(t.facts.ThisNode())),
		ClusterCIDRs:  t.own.cidrs,
		Peers:         t.own.peers,
		OtherPods:     t.own.otherPods,
		OtherPodCIDRs: t.own.others,
		UnhookedPods:  slices.Sorted(maps.Values(t.own.unhookedPods)),
		MasqueradeAll: t.cfg.MasqueradeAll,
		Egress:        t.own.egress,

		PoliciesUnknown: t.policiesUnknown(),
		PoliciesExist:   t.anyNetworkPolicy() || t.policiesUnknown(),
		Local:           t.localTraffic(),
		Leaving:         t.leaving(),
	}
	for _, a := range t.own.addrs {
		if t.servesNodePorts(a) {
			n.NodePortAddrs = append(n.NodePortAddrs, a)
		}
	}
	n.LoopbackNodePorts = t.cfg.LoopbackNodePorts()
	for _, a := range slices.SortedFunc(maps.Keys(t.own.knownPods), netip.Addr.Compare) {
		if !t.own.has(a) {
			n.KnownPods = append(n.KnownPods, a)
		}
	}
	unverified := 0
	for _, a := range slices.SortedFunc(maps.Keys(t.own.mustTraverse), netip.Addr.Compare) {
		_, denyRule := t.doNotTrack.denyRule[a]
		if !denyRule && !t.podOnThisNode(a) {
			if unverified++; unverified > maxUnverified {
				continue
			}
		}
		// The effect of a NetworkPolicy on a hostNetwork pod is undefined, and the node's
		// own address would include all of its traffic.
		if !t.own.has(a) {
			n.MustTraverseNetfilter = append(n.MustTraverseNetfilter, a)
			if denyRule && t.own.mustTraverse[a] == 1 {
				n.DenyRuleOnlyPods = append(n.DenyRuleOnlyPods, a)
			}
		}
	}
	return n
}

// localTraffic returns how to recognize packets of this node's pods.
func (t *Tracker) localTraffic() LocalTraffic {
	switch t.cfg.DetectLocal {
	case LocalNodeCIDR:
		return LocalTraffic{Sources: canonicalPrefixes(podCIDRs(t.facts.ThisNode()))}
	case LocalBridgeInterface:
		return LocalTraffic{Interface: t.cfg.LocalInterface}
	case LocalInterfaceNamePrefix:
		return LocalTraffic{Prefix: t.cfg.LocalInterface}
	}
	if len(t.cfg.ClusterCIDRs) > 0 {
		return LocalTraffic{Sources: t.cfg.ClusterCIDRs}
	}
	// kube-proxy then treats all pods as external clients. The Node's podCIDRs are more
	// precise.
	return LocalTraffic{Sources: canonicalPrefixes(podCIDRs(t.facts.ThisNode()))}
}

func (t *Tracker) servesNodePorts(a netip.Addr) bool {
	if t.cfg.NodePortPrimary {
		for _, own := range addresses(t.facts.ThisNode()) {
			if model.FamilyOf(own) == model.FamilyOf(a) {
				return own.Unmap() == a
			}
		}
		return false
	}
	return t.cfg.allowsNodePorts(a)
}

// allowsNodePorts reports whether NodePortAddresses has an address.
func (c Config) allowsNodePorts(a netip.Addr) bool {
	return len(c.NodePortAddresses) == 0 ||
		slices.ContainsFunc(c.NodePortAddresses, func(p netip.Prefix) bool { return p.Contains(a) })
}

// LoopbackNodePorts returns the families whose loopback addresses serve NodePorts, sorted:
// Node.LoopbackNodePorts. The range of a family counts if it has 127.0.0.1 or ::1.
func (c Config) LoopbackNodePorts() (families []model.Family) {
	if !c.LocalhostNodePorts || c.NodePortPrimary {
		return nil
	}
	for _, a := range []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()} {
		if c.allowsNodePorts(a) {
			families = append(families, model.FamilyOf(a))
		}
	}
	return families
}

// clusterCIDRs collects the address ranges of all nodes' pods. The result is
// never nil.
func (t *Tracker) clusterCIDRs() []netip.Prefix {
	all := append([]netip.Prefix{}, t.cfg.ClusterCIDRs...)
	for _, n := range t.facts.Nodes() {
		all = append(all, n.PodCIDRs...)
	}
	return canonicalPrefixes(all)
}

// otherPodCIDRs collects the address ranges of the other nodes' pods.
func (t *Tracker) otherPodCIDRs() []netip.Prefix {
	var all []netip.Prefix
	for _, n := range t.facts.Nodes() {
		if n.Name != t.cfg.NodeName {
			all = append(all, n.PodCIDRs...)
		}
	}
	return canonicalPrefixes(all)
}

// peers collects the addresses of the other nodes.
func (t *Tracker) peers() []netip.Addr {
	var all []netip.Addr
	for _, n := range t.facts.Nodes() {
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
		slices.Equal(a.LoopbackNodePorts, b.LoopbackNodePorts) &&
		slices.Equal(a.PodCIDRs, b.PodCIDRs) &&
		slices.Equal(a.ClusterCIDRs, b.ClusterCIDRs) && slices.Equal(a.MustTraverseNetfilter, b.MustTraverseNetfilter) &&
		slices.Equal(a.DenyRuleOnlyPods, b.DenyRuleOnlyPods) &&
		slices.Equal(a.Peers, b.Peers) && a.PoliciesUnknown == b.PoliciesUnknown && a.PoliciesExist == b.PoliciesExist &&
		slices.Equal(a.KnownPods, b.KnownPods) && a.Leaving == b.Leaving &&
		slices.Equal(a.UnhookedPods, b.UnhookedPods) && slices.Equal(a.OtherPods, b.OtherPods) &&
		slices.Equal(a.OtherPodCIDRs, b.OtherPodCIDRs) && a.Egress.Equal(b.Egress) &&
		slices.Equal(a.Local.Sources, b.Local.Sources) && a.Local.Interface == b.Local.Interface && a.Local.Prefix == b.Local.Prefix
}
