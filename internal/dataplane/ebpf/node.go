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

	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// writeSettings writes the settings of all programs.
func (w *nodeWriter) writeSettings(n *intent.Node) error {
	lists, err := listPorts()
	if err != nil {
		return fmt.Errorf("list ports for SNAT: %w", err)
	}
	if !slices.Equal(lists.ports, w.snatPorts) {
		indexes := make([]uint32, len(lists.ports))
		for i := range indexes {
			indexes[i] = uint32(i)
		}
		if _, err := w.m(objects.TCMapSnatPorts).BatchUpdate(indexes, lists.ports, nil); err != nil {
			return fmt.Errorf("write SNAT ports: %w", err)
		}
		w.snatPorts = lists.ports
	}
	s := w.settings(n)
	s.SnatPorts, s.NetworkPorts = lists.snat, lists.network
	w.written = &s
	return w.beat()
}

// beatInterval is well below SYN_AGENT_SECONDS of bpf/lib/xdp/syn_filter.h.
const beatInterval = 10 * time.Second

// beatLoop tells the XDP program that an agent runs.
func (w *nodeWriter) beatLoop(ctx context.Context) {
	for w.cfg.UsesXDP() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(beatInterval):
		}
		w.mu.Lock()
		err := w.beat()
		w.mu.Unlock()
		if err != nil {
			w.cfg.Log.Error("Tell the XDP program that an agent runs", "err", err)
		}
	}
}

// beat writes the settings with the present time. The caller holds mu.
func (w *nodeWriter) beat() error {
	if w.written == nil {
		return nil
	}
	w.written.AgentSeen = objects.BootSeconds()
	if err := w.m(objects.TCMapNodeSettings).Put(uint32(0), w.written); err != nil {
		return fmt.Errorf("write settings: %w", err)
	}
	return nil
}

func (w *nodeWriter) settings(n *intent.Node) objects.TCSettings {
	t := w.cfg.Timeouts
	s := objects.TCSettings{
		TimeoutNew:     objects.Seconds(t.TCPNew),
		TimeoutTcp:     objects.Seconds(t.TCPEstablished),
		TimeoutClosing: objects.Seconds(t.TCPClosing),
		TimeoutClosed:  objects.Seconds(t.TCPClosed),
		TimeoutUdpNew:  objects.Seconds(t.UDPNew),
		TimeoutUdp:     objects.Seconds(t.UDP),
	}
	var flags objects.TCSettingsFlags
	if n.MasqueradeAll {
		flags |= objects.TCSettingsFlagsSETTING_MASQUERADE_ALL
	}
	if w.cfg.Bypass == objects.BypassNever || n.PoliciesUnknown {
		flags |= objects.TCSettingsFlagsSETTING_BYPASS_NEVER
	}
	if w.askConntrack {
		flags |= objects.TCSettingsFlagsSETTING_ASK_CONNTRACK
	}
	if w.draining {
		flags |= objects.TCSettingsFlagsSETTING_ASK_CONNTRACK | objects.TCSettingsFlagsSETTING_DRAINS
	}
	if len(w.xfrm) > 0 {
		flags |= objects.TCSettingsFlagsSETTING_XFRM
	}
	if w.untracking {
		flags |= objects.TCSettingsFlagsSETTING_UNTRACKED
	}
	if w.cfg.TCPLiberal {
		flags |= objects.TCSettingsFlagsSETTING_TCP_LIBERAL
	}
	if w.cfg.SocketHooks == objects.HooksHost {
		flags |= objects.TCSettingsFlagsSETTING_HOOKS_HOST
	}
	if len(n.UnhookedPods) > 0 {
		flags |= objects.TCSettingsFlagsSETTING_HOOKS_EXCEPT
	}
	if slices.Contains(n.LoopbackNodePorts, model.IPv4) {
		flags |= objects.TCSettingsFlagsSETTING_LOOPBACK_V4
	}
	if slices.Contains(n.LoopbackNodePorts, model.IPv6) {
		flags |= objects.TCSettingsFlagsSETTING_LOOPBACK_V6
	}
	s.Flags = uint32(flags | w.cfg.EventFlags())
	s.IcmpIntervalV4 = icmpInterval("net.ipv4.icmp_ratelimit", time.Millisecond)
	s.IcmpIntervalV6 = icmpInterval("net.ipv6.icmp.ratelimit", time.Millisecond)
	if perSecond := icmpInterval("net.ipv4.icmp_msgs_per_sec", 1); perSecond > 0 {
		s.IcmpIntervalAll = uint64(time.Second) / perSecond
	}
	v4, v6 := w.primaryAddrs(n)
	if v4.IsValid() {
		s.NodeV4 = objects.ToAddr(v4)
	}
	if v6.IsValid() {
		s.NodeV6 = objects.ToAddr(v6)
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

// primaryAddrs returns the addresses by which the cluster knows this node: those of its
// external devices, the first device first.
func (w *nodeWriter) primaryAddrs(n *intent.Node) (v4, v6 netip.Addr) {
	own := func(a netip.Addr) bool { return a.IsValid() && slices.Contains(n.Addrs, a) }
	for _, i := range slices.Sorted(maps.Keys(w.uplinks)) {
		u := w.uplinks[i]
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

// setUntracking tells the programs whether untracked_ports has entries.
func (w *nodeWriter) setUntracking(is bool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if is == w.untracking {
		return nil
	}
	w.untracking = is
	if w.node == nil {
		return nil // the first Replace writes the settings
	}
	return w.writeSettings(w.node)
}

// writeNode updates the maps about the node itself: first what protects, of which an error
// holds up nothing else.
func (w *nodeWriter) writeNode(n *intent.Node) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.node
	w.node = n
	w.setFacts(n)
	errs := []error{w.addClusterRanges(n), w.writeTraversing(before, n)}
	if before == nil || !slices.Equal(before.UnhookedPods, n.UnhookedPods) {
		w.askUnhook()
		_, err := w.writeUnhooked()
		errs = append(errs, err)
	}
	want := map[objects.TCAddrKey]uint32{}
	for _, a := range n.Addrs {
		want[objects.AddrKey(a)] = 0
	}
	for _, a := range n.NodePortAddrs {
		want[objects.AddrKey(a)] = uint32(objects.TCNodeAddrFlagsNODE_ADDR_NODEPORT)
	}
	if err := objects.ReplaceMap(w.m(objects.TCMapNodeAddrs), want); err != nil {
		errs = append(errs, fmt.Errorf("write node addresses: %w", err))
	}
	return errors.Join(append(errs, w.writeSettings(n), w.removeClusterRanges(n))...)
}

// writeTraversing writes which pods' packets must traverse netfilter.
func (w *nodeWriter) writeTraversing(before, n *intent.Node) error {
	traversing := map[netip.Addr]traversal{}
	for _, a := range n.MustTraverseNetfilter {
		traversing[a] = traversesForPolicy
	}
	for _, a := range n.DenyRuleOnlyPods {
		traversing[a] = traversesForDenyRule
	}
	changed := maps.Clone(w.traversing)
	maps.Copy(changed, traversing)
	w.traversing = traversing
	for a := range w.pods {
		if unclaimed(before, a) != unclaimed(n, a) {
			changed[a] = traversing[a]
		}
	}
	return w.writePods(maps.Keys(changed))
}

// unclaimed reports whether a pod's address may belong to a pod that a NetworkPolicy
// selects but whose Pod object is unknown: the pod starts, or its object is deleted.
// Without any Pod objects, as in manifests, that is every pod.
func unclaimed(n *intent.Node, a netip.Addr) bool {
	return n != nil && n.PoliciesExist && !hasAddr(n.KnownPods, a)
}

// clusterRangesOf returns the entries of cluster_ranges: prefixes of pods, addresses of other
// nodes, and selectors of IPsec policies.
func (w *nodeWriter) clusterRangesOf(n *intent.Node) map[objects.TCRangeKey]bool {
	want := map[objects.TCRangeKey]bool{}
	for _, c := range n.ClusterCIDRs {
		want[objects.RangeKey(objects.RangePods, c)] = true
	}
	for _, a := range n.Peers {
		want[objects.RangeKey(objects.RangePeers, netip.PrefixFrom(a, a.BitLen()))] = true
	}
	for _, p := range w.xfrm {
		want[objects.RangeKey(objects.RangeXfrmSrc, p.Src)], want[objects.RangeKey(objects.RangeXfrmDst, p.Dst)] = true, true
		if p.Dir == kernel.XfrmIn { // replies have the mirror image of the selector
			want[objects.RangeKey(objects.RangeXfrmSrc, p.Dst)], want[objects.RangeKey(objects.RangeXfrmDst, p.Src)] = true, true
		}
	}
	return want
}

// addClusterRanges writes new entries. It runs before writeSettings, so that no setting
// refers to missing entries.
func (w *nodeWriter) addClusterRanges(n *intent.Node) error {
	if w.clusterRanges == nil {
		w.clusterRanges = map[objects.TCRangeKey]bool{}
	}
	var errs []error
	for key := range w.clusterRangesOf(n) {
		if w.clusterRanges[key] {
			continue
		}
		if err := w.m(objects.TCMapClusterRanges).Put(key, uint8(1)); err != nil {
			errs = append(errs, fmt.Errorf("write cluster's addresses %s: %w", objects.RangePrefix(key), err))
			continue
		}
		w.clusterRanges[key] = true
	}
	return objects.FirstOf(errs)
}

// removeClusterRanges removes old entries. It runs after writeSettings.
func (w *nodeWriter) removeClusterRanges(n *intent.Node) error {
	want := w.clusterRangesOf(n)
	var errs []error
	for key := range w.clusterRanges {
		if want[key] {
			continue
		}
		if err := objects.Remove(w.m(objects.TCMapClusterRanges), key); err != nil {
			errs = append(errs, fmt.Errorf("remove cluster's addresses %s: %w", objects.RangePrefix(key), err))
			continue
		}
		delete(w.clusterRanges, key)
	}
	return objects.FirstOf(errs)
}

// onXfrm receives the IPsec policies of this network namespace. The programs leave
// packets that a policy may select to the stack: from a source of any policy to a
// destination of any policy, for all ports.
func (w *nodeWriter) onXfrm(policies []kernel.XfrmPolicy) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(policies) > 0 && len(w.xfrm) == 0 {
		w.cfg.Log.Warn("IPsec policies exist: packets that they select are left to the stack, "+
			"and connections to Services that are forwarded to endpoints on other nodes are dropped where a policy selects them; "+
			"use --proxy-mode nftables if that is not wanted", "policies", len(policies))
	}
	w.xfrm = policies
	if w.node == nil {
		return // the first Replace writes them
	}
	if err := errors.Join(w.addClusterRanges(w.node), w.writeSettings(w.node), w.removeClusterRanges(w.node)); err != nil {
		w.cfg.Log.Error("Write IPsec policies", "err", err)
	}
}

// onUplinks receives the external devices.
func (w *nodeWriter) onUplinks(uplinks map[int]attach.Uplink) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.uplinks = maps.Clone(uplinks)
	want, l3 := map[uint32]objects.TCUplink{}, map[uint32]uint8{}
	for i, u := range uplinks {
		var v objects.TCUplink
		if u.L3 {
			l3[uint32(i)] = 1
		}
		if u.V4.IsValid() {
			v.V4 = objects.ToAddr(u.V4)
		}
		if u.V6.IsValid() {
			v.V6 = objects.ToAddr(u.V6)
		}
		want[uint32(i)] = v
	}
	if err := errors.Join(objects.ReplaceMap(w.m(objects.TCMapUplinks), want), objects.ReplaceMap(w.m(objects.TCMapL3Devices), l3)); err != nil {
		w.cfg.Log.Error("Write external devices", "err", err)
	}
	if w.node != nil {
		if err := w.writeSettings(w.node); err != nil {
			w.cfg.Log.Error("Write settings", "err", err)
		}
	}
}
