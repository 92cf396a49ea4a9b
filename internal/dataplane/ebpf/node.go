package ebpf

import (
	"context"
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
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// writeSettings writes the settings of all programs.
func (b *Backend) writeSettings(n *intent.Node) error {
	lists, err := listPorts()
	if err != nil {
		return fmt.Errorf("list ports for SNAT: %w", err)
	}
	if !slices.Equal(lists.ports, b.snatPorts) {
		indexes := make([]uint32, len(lists.ports))
		for i := range indexes {
			indexes[i] = uint32(i)
		}
		if _, err := b.m(tcMapSnatPorts).BatchUpdate(indexes, lists.ports, nil); err != nil {
			return fmt.Errorf("write SNAT ports: %w", err)
		}
		b.snatPorts = lists.ports
	}
	s := b.settings(n)
	s.SnatPorts, s.NetworkPorts = lists.snat, lists.network
	b.written = &s
	return b.beat()
}

// beatInterval is well below SYN_AGENT_SECONDS of bpf/lib/xdp/syn_filter.h.
const beatInterval = 10 * time.Second

// beatLoop tells the XDP program that an agent runs.
func (b *Backend) beatLoop(ctx context.Context) {
	for b.cfg.xdp() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(beatInterval):
		}
		b.mu.Lock()
		err := b.beat()
		b.mu.Unlock()
		if err != nil {
			b.cfg.Log.Error("Tell the XDP program that an agent runs", "err", err)
		}
	}
}

// beat writes the settings with the present time. The caller holds mu.
func (b *Backend) beat() error {
	if b.written == nil {
		return nil
	}
	b.written.AgentSeen = bootSeconds()
	if err := b.m(tcMapNodeSettings).Put(uint32(0), b.written); err != nil {
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
	if b.cfg.SocketHooks == HooksHost {
		flags |= tcSettingsFlagsSETTING_HOOKS_HOST
	}
	if len(n.UnhookedPods) > 0 {
		flags |= tcSettingsFlagsSETTING_HOOKS_EXCEPT
	}
	if slices.Contains(n.LoopbackNodePorts, model.IPv4) {
		flags |= tcSettingsFlagsSETTING_LOOPBACK_V4
	}
	if slices.Contains(n.LoopbackNodePorts, model.IPv6) {
		flags |= tcSettingsFlagsSETTING_LOOPBACK_V6
	}
	s.Flags = uint32(flags | b.cfg.eventFlags())
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

// icmpInterval reads a sysctl in this unit. It returns 0, no limit, if the kernel has
// no such sysctl: icmp_msgs_per_sec exists per namespace since 6.12.
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

func seconds(d time.Duration) uint32 { return uint32(d / time.Second) }

// primaryAddrs returns the addresses by which the cluster knows this node: those of its
// external devices, the first device first.
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

// writeNode updates the maps about the node itself: first what protects, of which an error
// holds up nothing else.
func (b *Backend) writeNode(n *intent.Node) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	before := b.node
	b.node = n
	b.setFacts(n)
	errs := []error{b.addClusterRanges(n), b.writeTraversing(before, n)}
	if before == nil || !slices.Equal(before.UnhookedPods, n.UnhookedPods) {
		b.askUnhook()
		_, err := b.writeUnhooked()
		errs = append(errs, err)
	}
	want := map[tcAddrKey]uint32{}
	for _, a := range n.Addrs {
		want[addrKey(a)] = 0
	}
	for _, a := range n.NodePortAddrs {
		want[addrKey(a)] = uint32(tcNodeAddrFlagsNODE_ADDR_NODEPORT)
	}
	if err := replaceMap(b.m(tcMapNodeAddrs), want); err != nil {
		errs = append(errs, fmt.Errorf("write node addresses: %w", err))
	}
	return errors.Join(append(errs, b.writeSettings(n), b.removeClusterRanges(n))...)
}

// writeTraversing writes which pods' packets must traverse netfilter.
func (b *Backend) writeTraversing(before, n *intent.Node) error {
	traversing := map[netip.Addr]traversal{}
	for _, a := range n.MustTraverseNetfilter {
		traversing[a] = traversesForPolicy
	}
	for _, a := range n.DenyRuleOnlyPods {
		traversing[a] = traversesForDenyRule
	}
	changed := maps.Clone(b.traversing)
	maps.Copy(changed, traversing)
	b.traversing = traversing
	for a := range b.pods {
		if unclaimed(before, a) != unclaimed(n, a) {
			changed[a] = traversing[a]
		}
	}
	return b.writePods(maps.Keys(changed))
}

// firstOf returns the first error, and how many others there are: they have one cause.
func firstOf(errs []error) error {
	errs = slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	switch len(errs) {
	case 0:
		return nil
	case 1:
		return errs[0]
	}
	return fmt.Errorf("%w (and %d more)", errs[0], len(errs)-1)
}

// unclaimed reports whether a pod's address may belong to a pod that a NetworkPolicy
// selects but whose Pod object is unknown: the pod starts, or its object is deleted.
// Without any Pod objects, as in manifests, that is every pod.
func unclaimed(n *intent.Node, a netip.Addr) bool {
	return n != nil && n.PoliciesExist && !hasAddr(n.KnownPods, a)
}

// clusterRangesOf returns the entries of cluster_ranges: prefixes of pods, addresses of other
// nodes, and selectors of IPsec policies.
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
		if p.Dir == kernel.XfrmIn { // replies have the mirror image of the selector
			want[rangeKey(rangeXfrmSrc, p.Dst)], want[rangeKey(rangeXfrmDst, p.Src)] = true, true
		}
	}
	return want
}

// addClusterRanges writes new entries. It runs before writeSettings, so that no setting
// refers to missing entries.
func (b *Backend) addClusterRanges(n *intent.Node) error {
	if b.clusterRanges == nil {
		b.clusterRanges = map[tcRangeKey]bool{}
	}
	var errs []error
	for key := range b.clusterRangesOf(n) {
		if b.clusterRanges[key] {
			continue
		}
		if err := b.m(tcMapClusterRanges).Put(key, uint8(1)); err != nil {
			errs = append(errs, fmt.Errorf("write cluster's addresses %s: %w", rangePrefix(key), err))
			continue
		}
		b.clusterRanges[key] = true
	}
	return firstOf(errs)
}

// removeClusterRanges removes old entries. It runs after writeSettings.
func (b *Backend) removeClusterRanges(n *intent.Node) error {
	want := b.clusterRangesOf(n)
	var errs []error
	for key := range b.clusterRanges {
		if want[key] {
			continue
		}
		if err := remove(b.m(tcMapClusterRanges), key); err != nil {
			errs = append(errs, fmt.Errorf("remove cluster's addresses %s: %w", rangePrefix(key), err))
			continue
		}
		delete(b.clusterRanges, key)
	}
	return firstOf(errs)
}

// onXfrm receives the IPsec policies of this network namespace. The programs leave
// packets that a policy may select to the stack: from a source of any policy to a
// destination of any policy, for all ports.
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
		b.cfg.Log.Error("Write IPsec policies", "err", err)
	}
}

// onUplinks receives the external devices.
func (b *Backend) onUplinks(uplinks map[int]attach.Uplink) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.uplinks = maps.Clone(uplinks)
	want, l3 := map[uint32]tcUplink{}, map[uint32]uint8{}
	for i, u := range uplinks {
		var v tcUplink
		if u.L3 {
			l3[uint32(i)] = 1
		}
		if u.V4.IsValid() {
			v.V4 = toAddr(u.V4)
		}
		if u.V6.IsValid() {
			v.V6 = toAddr(u.V6)
		}
		want[uint32(i)] = v
	}
	if err := errors.Join(replaceMap(b.m(tcMapUplinks), want), replaceMap(b.m(tcMapL3Devices), l3)); err != nil {
		b.cfg.Log.Error("Write external devices", "err", err)
	}
	if b.node != nil {
		if err := b.writeSettings(b.node); err != nil {
			b.cfg.Log.Error("Write settings", "err", err)
		}
	}
}

// replaceMap makes a small map equal to want. It does not write correct entries, and removes others
// first: they may take the room. An error of one entry holds up no other.
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
	var errs []error
	for k := range have {
		if _, ok := want[k]; !ok {
			errs = append(errs, remove(m, k))
		}
	}
	for k, v := range want {
		if old, ok := have[k]; !ok || old != v {
			errs = append(errs, m.Put(k, v))
		}
	}
	return firstOf(errs)
}
