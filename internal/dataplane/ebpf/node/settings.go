package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// writeSettings writes the settings of all programs.
func (w *Writer) writeSettings(n *intent.Node) error {
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
	return w.putSettings()
}

// agentSeenInterval is well below SYN_AGENT_SECONDS of bpf/lib/xdp/syn_filter.h.
const agentSeenInterval = 10 * time.Second

// agentSeenLoop renews AgentSeen, by which the XDP program knows that an agent runs.
func (w *Writer) agentSeenLoop(ctx context.Context) {
	for w.cfg.UsesXDP() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(agentSeenInterval):
		}
		w.mu.Lock()
		err := w.putSettings()
		w.mu.Unlock()
		if err != nil {
			w.cfg.Log.Error("Tell the XDP program that an agent runs", "err", err)
		}
	}
}

// putSettings writes the settings to the map, with the present time as that of the agent. The caller holds mu.
func (w *Writer) putSettings() error {
	if w.written == nil {
		return nil
	}
	w.written.AgentSeen = objects.BootSeconds()
	if err := w.m(objects.TCMapNodeSettings).Put(uint32(0), w.written); err != nil {
		return fmt.Errorf("write settings: %w", err)
	}
	return nil
}

func (w *Writer) settings(n *intent.Node) objects.TCSettings {
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
	if n.Egress.Any() {
		flags |= objects.TCSettingsFlagsSETTING_EGRESS
	}
	if w.egressKept {
		flags |= objects.TCSettingsFlagsSETTING_EGRESS_KEPT
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
	s.Flags = uint32(flags | w.events)
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
func (w *Writer) primaryAddrs(n *intent.Node) (v4, v6 netip.Addr) {
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

// SetEvents replaces the settings about events. Before the first node there is none to write.
func (w *Writer) SetEvents(flags objects.TCSettingsFlags) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.events = flags
	if w.written == nil {
		return errors.New("write settings: the first sync has not ended")
	}
	w.written.Flags = w.written.Flags&^uint32(objects.EventSettings) | uint32(flags)
	return w.putSettings()
}

// SetUntracking tells the programs whether untracked_ports has entries.
func (w *Writer) SetUntracking(is bool) error {
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
