package node

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/node/kernel"
)

// clusterRangesOf returns the entries of cluster_ranges: prefixes of pods, addresses of other
// nodes, selectors of IPsec policies, and destinations that egress leaves to netfilter.
func (w *Writer) clusterRangesOf(n *intent.Node) map[objects.TCRangeKey]bool {
	want := map[objects.TCRangeKey]bool{}
	for _, c := range n.ClusterCIDRs {
		want[objects.RangeKey(objects.RangePods, c)] = true
	}
	for _, a := range n.Peers {
		want[objects.RangeKey(objects.RangePeers, netip.PrefixFrom(a, a.BitLen()))] = true
	}
	for _, p := range n.Egress.Keep {
		want[objects.RangeKey(objects.RangeKeep, p)] = true
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
func (w *Writer) addClusterRanges(n *intent.Node) error {
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
	return objects.FirstError(errs)
}

// keepEgressFlows has the programs look up flows of egress to destinations that are left to netfilter from
// now on. It runs before addClusterRanges, and lasts until there is no such flow.
func (w *Writer) keepEgressFlows(before, n *intent.Node) error {
	grown := slices.ContainsFunc(n.Egress.Keep, func(p netip.Prefix) bool { return !w.clusterRanges[objects.RangeKey(objects.RangeKeep, p)] })
	if w.watchFlowsTo == nil || !grown && (before != nil || !w.egressKept) {
		return nil
	}
	w.egressKept = true
	w.watchFlowsTo(n.Egress.Keep, w.egressFlowsEnded)
	m := w.m(objects.TCMapNodeSettings)
	var s objects.TCSettings
	if err := m.Lookup(uint32(0), &s); err != nil {
		return fmt.Errorf("read settings: %w", err)
	}
	s.Flags |= uint32(objects.TCSettingsFlagsSETTING_EGRESS_KEPT)
	if err := m.Put(uint32(0), &s); err != nil {
		return fmt.Errorf("write settings: %w", err)
	}
	return nil
}

// egressFlowsEnded ends what keepEgressFlows has begun.
func (w *Writer) egressFlowsEnded() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.egressKept = false
	if w.node == nil {
		return
	}
	if err := w.writeSettings(w.node); err != nil {
		w.cfg.Log.Error("Write settings", "err", err)
	}
}

// removeClusterRanges removes old entries. It runs after writeSettings.
func (w *Writer) removeClusterRanges(n *intent.Node) error {
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
	return objects.FirstError(errs)
}

// OnXfrm receives the IPsec policies of this network namespace. The programs leave
// packets that a policy may select to the stack: from a source of any policy to a
// destination of any policy, for all ports.
func (w *Writer) OnXfrm(policies []kernel.XfrmPolicy) {
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
