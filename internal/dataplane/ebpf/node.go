package ebpf

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kernel"
)

// nodePortRange is the API server's default --service-node-port-range. A port
// of it must never be a source port: an answer to it would look like a request.
var nodePortRange = kernel.PortRange{First: 30000, Last: 32767}

// portLists are the ports that may replace a client's, one list behind the other, and how
// long each is.
type portLists struct {
	ports         []uint16
	snat, network uint32
}

// networkPortOf8 tells the ports for flows that keep the address of another node, or of its
// pod: every eighth. All nodes agree on that, whatever else their lists lack: a port that
// a node gives itself or its pod is none that another node gives them.
const networkPortOf8 = 6

func listPorts() (l portLists, err error) {
	all, err := snatPortList()
	if err != nil {
		return l, err
	}
	var network []uint16
	for _, p := range all {
		if p%8 == networkPortOf8 {
			network = append(network, p)
		} else {
			l.ports = append(l.ports, p)
		}
	}
	l.snat, l.network = uint32(len(l.ports)), uint32(len(network))
	l.ports = append(l.ports, network...)
	return l, nil
}

// snatPortList is every port that may replace a client's: not one that the
// node's own sockets are given, nor one that the administrator has reserved.
func snatPortList() ([]uint16, error) {
	local, err := kernel.LocalPortRange()
	if err != nil {
		return nil, err
	}
	reserved, err := kernel.LocalReservedPorts()
	if err != nil {
		return nil, err
	}
	banned := append(reserved, local, nodePortRange)
	var ports []uint16
	for p := 1024; p <= 65535; p++ {
		if !slices.ContainsFunc(banned, func(r kernel.PortRange) bool {
			return uint16(p) >= r.First && uint16(p) <= r.Last
		}) {
			ports = append(ports, uint16(p))
		}
	}
	if len(ports) == 0 {
		return nil, errors.New("net.ipv4.ip_local_port_range and ip_local_reserved_ports leave no port for SNAT: make one of them smaller")
	}
	return ports, nil
}

// writeSettings writes what all programs go by.
func (b *Backend) writeSettings(n *intent.Node) error {
	lists, err := listPorts()
	if err != nil {
		return fmt.Errorf("list ports for SNAT: %w", err)
	}
	if !slices.Equal(lists.ports, b.snatPorts) {
		for i, p := range lists.ports {
			if err := b.m(tcMapSnatPorts).Put(uint32(i), p); err != nil {
				return fmt.Errorf("write SNAT ports: %w", err)
			}
		}
		b.snatPorts = lists.ports
	}
	s := b.settings(n)
	s.SnatPorts, s.NetworkPorts = lists.snat, lists.network
	if err := b.m(tcMapNodeSettings).Put(uint32(0), s); err != nil {
		return fmt.Errorf("write settings: %w", err)
	}
	return nil
}

func (b *Backend) settings(n *intent.Node) tcSettings {
	t := b.cfg.Timeouts
	s := tcSettings{
		TimeoutNew:     seconds(t.TCPNew),
		TimeoutTcp:     seconds(t.TCPEstablished),
		TimeoutClosing: seconds(t.TCPClosing),
		TimeoutClosed:  seconds(t.TCPClosed),
		TimeoutUdpNew:  seconds(t.UDPNew),
		TimeoutUdp:     seconds(t.UDP),
	}
	var flags tcSettingsFlags
	if n.MasqueradeAll {
		flags |= tcSettingsFlagsSETTING_MASQUERADE_ALL
	}
	if b.cfg.Bypass == BypassNever || n.PoliciesUnknown {
		flags |= tcSettingsFlagsSETTING_BYPASS_NEVER
	}
	if b.askConntrack {
		flags |= tcSettingsFlagsSETTING_ASK_CONNTRACK
	}
	if len(b.xfrm) > 0 {
		flags |= tcSettingsFlagsSETTING_XFRM
	}
	if b.untracking {
		flags |= tcSettingsFlagsSETTING_UNTRACKED
	}
	if b.cfg.TCPLiberal {
		flags |= tcSettingsFlagsSETTING_TCP_LIBERAL
	}
	s.Flags = uint32(flags)
	s.IcmpIntervalV4 = icmpInterval("net.ipv4.icmp_ratelimit", time.Millisecond)
	s.IcmpIntervalV6 = icmpInterval("net.ipv6.icmp.ratelimit", time.Millisecond)
	if perSecond := icmpInterval("net.ipv4.icmp_msgs_per_sec", 1); perSecond > 0 {
		s.IcmpIntervalAll = uint64(time.Second) / perSecond
	}
	v4, v6 := b.primaryAddrs(n)
	if v4.IsValid() {
		s.NodeV4 = toAddr(v4)
	}
	if v6.IsValid() {
		s.NodeV6 = toAddr(v6)
	}
	return s
}

// icmpInterval reads a sysctl of so many units; 0, which is no limit, if the kernel has
// none of the name: icmp_msgs_per_sec is a namespace's own since 6.12.
func icmpInterval(sysctl string, unit time.Duration) uint64 {
	text, err := kernel.ReadSysctl(sysctl)
	if err != nil {
		return 0
	}
	n, err := strconv.ParseUint(text, 10, 32)
	if err != nil {
		return 0
	}
	return n * uint64(unit)
}

// policing is who has a pod's packets pass by netfilter.
type policing uint8

const (
	notPoliced      policing = iota
	policedByOthers          // whoever enforces NetworkPolicies
	policedByGuard           // the table of do-not-track policies alone
)

func seconds(d time.Duration) uint32 { return uint32(d / time.Second) }

// primaryAddrs are the addresses by which the cluster knows this node: those of
// its outward interfaces, the first interface first.
func (b *Backend) primaryAddrs(n *intent.Node) (v4, v6 netip.Addr) {
	own := func(a netip.Addr) bool { return a.IsValid() && slices.Contains(n.Addrs, a) }
	for _, i := range slices.Sorted(maps.Keys(b.uplinks)) {
		u := b.uplinks[i]
		if !v4.IsValid() && own(u.V4) {
			v4 = u.V4
		}
		if !v6.IsValid() && own(u.V6) {
			v6 = u.V6
		}
	}
	for _, a := range n.Addrs {
		if a.Is4() && !v4.IsValid() {
			v4 = a
		}
		if a.Is6() && !v6.IsValid() {
			v6 = a
		}
	}
	return v4, v6
}

// writeNode brings the maps about the node itself up to date.
func (b *Backend) writeNode(n *intent.Node) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	before := b.node
	b.node = n
	b.setFacts(n)
	want := map[tcAddrKey]uint32{}
	for _, a := range n.Addrs {
		want[addrKey(a)] = 0
	}
	for _, a := range n.NodePortAddrs {
		want[addrKey(a)] = uint32(tcNodeAddrFlagsNODE_ADDR_NODEPORT)
	}
	if err := replaceMap(b.m(tcMapNodeAddrs), want); err != nil {
		return fmt.Errorf("write node addresses: %w", err)
	}
	if err := b.addClusterRanges(n); err != nil {
		return err
	}
	policed := map[netip.Addr]policing{}
	for _, a := range n.MustTraverseNetfilter {
		policed[a] = policedByOthers
	}
	for _, a := range n.DenyRulePods {
		policed[a] = policedByGuard
	}
	changed := maps.Clone(b.policed)
	maps.Copy(changed, policed)
	b.policed = policed
	for a := range b.pods {
		if unclaimed(before, a) != unclaimed(n, a) {
			changed[a] = policed[a]
		}
	}
	for a := range changed {
		if err := b.writePod(a); err != nil {
			return err
		}
	}
	if err := b.writeSettings(n); err != nil {
		return err
	}
	return b.removeClusterRanges(n)
}

// unclaimed reports whether a pod's address may belong to a pod that a NetworkPolicy
// selects and whose Pod object is not known: one that starts, or one whose object is
// gone. Without any Pod objects, as with manifests that have none, that is every pod.
func unclaimed(n *intent.Node, a netip.Addr) bool {
	return n != nil && n.PoliciesExist && !hasAddr(n.KnownPods, a)
}

// clusterRangesOf are the entries of source_ranges that are no Service's: ranges of
// pods, addresses of other nodes, and what IPsec policies select.
func (b *Backend) clusterRangesOf(n *intent.Node) map[tcRangeKey]bool {
	want := map[tcRangeKey]bool{}
	for _, c := range n.ClusterCIDRs {
		want[rangeKey(rangePods, c)] = true
	}
	for _, a := range n.Peers {
		want[rangeKey(rangePeers, netip.PrefixFrom(a, a.BitLen()))] = true
	}
	for _, p := range b.xfrm {
		want[rangeKey(rangeXfrmSrc, p.Src)], want[rangeKey(rangeXfrmDst, p.Dst)] = true, true
		if p.Dir == kernel.XfrmIn { // answers to what it selects have the mirror image
			want[rangeKey(rangeXfrmSrc, p.Dst)], want[rangeKey(rangeXfrmDst, p.Src)] = true, true
		}
	}
	return want
}

// addClusterRanges writes new entries. It runs before writeSettings, so that no
// setting refers to entries that are not there yet.
func (b *Backend) addClusterRanges(n *intent.Node) error {
	if b.clusterRanges == nil {
		b.clusterRanges = map[tcRangeKey]bool{}
	}
	for key := range b.clusterRangesOf(n) {
		if b.clusterRanges[key] {
			continue
		}
		if err := b.m(tcMapSourceRanges).Put(key, uint8(1)); err != nil {
			return fmt.Errorf("write cluster's addresses: %w", err)
		}
		b.clusterRanges[key] = true
	}
	return nil
}

// removeClusterRanges removes old entries. It runs after writeSettings.
func (b *Backend) removeClusterRanges(n *intent.Node) error {
	want := b.clusterRangesOf(n)
	for key := range b.clusterRanges {
		if want[key] {
			continue
		}
		if err := remove(b.m(tcMapSourceRanges), key); err != nil {
			return fmt.Errorf("remove cluster's addresses: %w", err)
		}
		delete(b.clusterRanges, key)
	}
	return nil
}

// onXfrm is called with the IPsec policies of this network namespace. The programs
// leave packets that a policy may select to the stack: from a source of any policy to a
// destination of any policy, whatever the ports.
func (b *Backend) onXfrm(policies []kernel.XfrmPolicy) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(policies) > 0 && len(b.xfrm) == 0 {
		b.cfg.Log.Warn("IPsec policies exist: packets that they select are left to the stack, "+
			"and connections to Services that are forwarded to endpoints on other nodes are dropped where a policy selects them; "+
			"use --proxy-mode nftables if that is not wanted", "policies", len(policies))
	}
	b.xfrm = policies
	if b.node == nil {
		return // the first Replace writes them
	}
	if err := errors.Join(b.addClusterRanges(b.node), b.writeSettings(b.node), b.removeClusterRanges(b.node)); err != nil {
		b.cfg.Log.Error("Write what IPsec policies select", "err", err)
	}
}

// onUplinks is told the outward interfaces.
func (b *Backend) onUplinks(uplinks map[int]attach.Uplink) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.uplinks = maps.Clone(uplinks)
	want := map[uint32]tcUplink{}
	for i, u := range uplinks {
		var v tcUplink
		if u.V4.IsValid() {
			v.V4 = toAddr(u.V4)
		}
		if u.V6.IsValid() {
			v.V6 = toAddr(u.V6)
		}
		want[uint32(i)] = v
	}
	if err := replaceMap(b.m(tcMapUplinks), want); err != nil {
		b.cfg.Log.Error("Write outward interfaces", "err", err)
	}
	if b.node != nil {
		if err := b.writeSettings(b.node); err != nil {
			b.cfg.Log.Error("Write settings", "err", err)
		}
	}
}

// onPods is told the pods of this node.
func (b *Backend) onPods(c attach.PodChanges) {
	b.mu.Lock()
	defer b.mu.Unlock()
	changed := slices.Collect(maps.Keys(c.Upserts))
	if c.Full {
		// What is policed stays in the map, but not the way to it.
		changed = slices.AppendSeq(changed, maps.Keys(b.policed))
		b.pods = map[netip.Addr]attach.Pod{}
		if err := b.forgetPods(c.Upserts); err != nil {
			b.cfg.Log.Error("Remove pods", "err", err)
		}
	}
	maps.Copy(b.pods, c.Upserts)
	for _, a := range c.Deletes {
		delete(b.pods, a)
		changed = append(changed, a)
	}
	for _, a := range changed {
		if err := b.writePod(a); err != nil {
			b.cfg.Log.Error("Write pod", "address", a, "err", err)
		}
	}
}

// forgetPods removes what an earlier run knew and this one does not.
func (b *Backend) forgetPods(known map[netip.Addr]attach.Pod) error {
	var key tcAddrKey
	var pod tcPod
	var gone []tcAddrKey
	it := b.m(tcMapPods).Iterate()
	for it.Next(&key, &pod) {
		a := fromAddr(key.Addr, uint8(key.Family))
		if _, ok := known[a]; !ok && b.policed[a] == notPoliced {
			gone = append(gone, key)
		}
	}
	for _, key := range gone {
		if err := b.m(tcMapPods).Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
	}
	return it.Err()
}

// writePod writes what is known about one address of a pod: behind which device it is,
// how to reach it, and whether its packets must traverse netfilter. The entry has the
// device even without the MACs: the programs check where a source address comes from.
func (b *Backend) writePod(a netip.Addr) error {
	var pod tcPod
	var flags tcPodFlags
	p, known := b.pods[a]
	contested := known && p.Ifindex == 0
	pod.Ifindex = uint32(p.Ifindex)
	if p.Ifindex != 0 && len(p.PodMAC) == 6 && len(p.HostMAC) == 6 {
		flags |= tcPodFlagsPOD_REACHABLE
		copy(pod.Mac[:], p.PodMAC)
		copy(pod.GatewayMac[:], p.HostMAC)
	}
	switch b.policed[a] {
	case policedByOthers:
		flags |= tcPodFlagsPOD_POLICED
	case policedByGuard:
		flags |= tcPodFlagsPOD_POLICED | tcPodFlagsPOD_GUARDED
	}
	if contested || known && unclaimed(b.node, a) {
		flags |= tcPodFlagsPOD_POLICED
		flags &^= tcPodFlagsPOD_GUARDED
	}
	pod.Flags = uint32(flags)
	var err error
	if flags == 0 && pod.Ifindex == 0 {
		err = b.m(tcMapPods).Delete(addrKey(a))
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			err = nil
		}
	} else {
		err = b.m(tcMapPods).Put(addrKey(a), pod)
	}
	if err != nil {
		return fmt.Errorf("write pod %s: %w", a, err)
	}
	return nil
}

// replaceMap makes a small map hold exactly this; what is right is not touched.
func replaceMap[K comparable, V comparable](m *ebpf.Map, want map[K]V) error {
	var key K
	var value V
	have := map[K]V{}
	it := m.Iterate()
	for it.Next(&key, &value) {
		have[key] = value
	}
	if err := it.Err(); err != nil {
		return err
	}
	for k, v := range want {
		if old, ok := have[k]; !ok || old != v {
			if err := m.Put(k, v); err != nil {
				return err
			}
		}
	}
	for k := range have {
		if _, ok := want[k]; !ok {
			if err := m.Delete(k); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return err
			}
		}
	}
	return nil
}
