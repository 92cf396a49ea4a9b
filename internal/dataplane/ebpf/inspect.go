package ebpf

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

var _ dataplane.Inspector = (*Backend)(nil)

// Tables returns the maps that can be full. The flow table is as at the last sweep.
func (b *Backend) Tables() []dataplane.Table {
	var services, slots, backends, frontends int
	b.portsMu.Lock()
	services, frontends = len(b.ports.byID)+len(b.ports.orphans), len(b.ports.owners)
	for _, p := range b.ports.byID {
		slots += len(p.slots[clusterSet]) + len(p.slots[localSet])
		backends += len(p.ids)
		if p.entries != nil {
			backends += len(p.entries.backends)
		}
	}
	for key := range b.ports.endpoints.refs {
		if _, owned := b.ports.owners[key]; !owned {
			frontends++
		}
	}
	b.portsMu.Unlock()
	tables := []dataplane.Table{{Name: tcMapFlows, Used: b.flows.tcp.Load() + b.flows.udp.Load(), Size: uint64(b.cfg.FlowTableSize)}}
	for _, t := range []struct {
		name string
		used int
	}{{tcMapServices, services}, {tcMapFrontends, frontends}, {tcMapBackends, backends}, {tcMapSlots, slots}} {
		tables = append(tables, dataplane.Table{Name: t.name, Used: uint64(t.used), Size: uint64(b.m(t.name).MaxEntries())})
	}
	return tables
}

// Hooks returns the hooks of devices and of the cgroup.
func (b *Backend) Hooks() []dataplane.Hook {
	var hooks []dataplane.Hook
	for _, s := range b.attacher.Status() {
		if mode, _, _ := strings.Cut(s.XDP, ":"); mode == attach.XDPNative || mode == attach.XDPGeneric {
			hooks = append(hooks, dataplane.Hook{Place: s.Name, Program: xdpProgXdpFromNetwork, Mechanism: "xdp " + mode})
		}
		from := tcProgFromNetwork
		if s.Role == attach.PodSide {
			from = tcProgFromPod
		}
		for _, h := range []dataplane.Hook{{Place: "ingress", Program: from}, {Place: "egress", Program: tcProgToNetwork}} {
			direction := h.Place
			h.Place, h.Mechanism = s.Name+" "+direction, b.attacher.Mechanism()
			if !slices.Contains(s.Attached, direction) {
				if h.Err = s.Err; h.Err == nil {
					continue // the device needs none
				}
			}
			hooks = append(hooks, h)
		}
	}
	b.portsMu.Lock()
	attached := b.attached
	b.portsMu.Unlock()
	var socket []dataplane.Hook
	programs := b.objects.socketPrograms()
	if b.cfg.SocketHooks == HooksOff {
		programs = nil
	}
	for at, program := range programs {
		h := dataplane.Hook{Place: b.cfg.CgroupRoot, Program: strings.ToLower(at.String()), Mechanism: "cgroup"}
		if info, err := program.Info(); err == nil {
			h.Program = info.Name
		}
		if !attached {
			h.Err = errors.New("the first sync has not ended")
		}
		socket = append(socket, h)
	}
	slices.SortFunc(socket, func(a, b dataplane.Hook) int { return strings.Compare(a.Program, b.Program) })
	return append(hooks, socket...)
}

// Features returns the features that the programs use where the kernel has them.
func (b *Backend) Features() []dataplane.Feature {
	f := b.features
	return []dataplane.Feature{
		{Name: "tcx", Present: f.TCX, Detail: "programs of other projects keep their place at a device; otherwise clsact"},
		{Name: "bpf_set_retval", Present: f.SetRetval, Detail: "a refused socket gets ECONNREFUSED, not EPERM"},
		{Name: "bpf_l4_csum_replace IPv6", Present: f.CsumReplaceIPv6, Detail: "checksums of IPv6 by the kernel"},
		{Name: "bpf_skb_ct_lookup", Present: f.ConntrackLookup, Detail: "the programs leave connections of netfilter to it"},
		{Name: "BTF", Present: f.BTF, Detail: "types in dumps of other tools, and events of UDP sockets"},
		{Name: "iterators of sockets", Present: f.SocketIterators, Detail: "--end-sockets, and exact counts of open sockets for --balance-by-load"},
	}
}

// meanings says what the verdicts mean with which a packet or socket call is refused or
// dropped: effect first.
var meanings = map[string]string{
	"rejected_rst":         "answered with a TCP reset: the Service has no endpoint",
	"rejected_icmp":        "answered with ICMP port unreachable: the Service has no endpoint",
	"rejected_no_flow":     "answered with a TCP reset: no connection is known for the packet",
	"drop_policy_local":    "dropped: traffic policy Local, and no endpoint on this node",
	"drop_source_range":    "dropped: the client is not in loadBalancerSourceRanges",
	"drop_rejected_silent": "dropped: the Service has no endpoint, and the packet must not be answered",
	"drop_no_backend":      "dropped: the endpoint was removed during the choice",
	"drop_snat_ports":      "dropped: no free source port towards the endpoint (SNAT ports exhausted)",
	"drop_no_snat_addr":    "dropped: the device has no address for SNAT",
	"drop_no_route":        "dropped: no route to the endpoint",
	"drop_flow_table":      "dropped: the flow could not be stored",
	"drop_rewrite":         "dropped: the kernel refused to rewrite the packet",
	"drop_helper_answers":  "dropped: too many ports of the server answer one request",
	"drop_no_flow":         "dropped: no connection is known for the packet",
	"drop_xfrm":            "dropped: an IPsec policy selects the packet, and a redirect would bypass IPsec",
	"drop_source":          "dropped: the source address does not belong to the packet's device",
	"drop_dsr":             "dropped: it announces a connection for DSR, and no node with this cluster's key wrote that",
	"drop_syn_form":        "dropped: a SYN with IP options or in fragments, and the Service has a SYN filter",
	"drop_icmp_rate":       "not answered: the answer would exceed the rate of ICMP errors",
	"socket_refused":       "connect failed with ECONNREFUSED: the Service has no endpoint",
	"socket_timed_out":     "connect failed with ETIMEDOUT: traffic policy Local or a source range",
}

// Meaning says what a verdict means with which a packet or socket call is refused or dropped;
// "": it is not.
func Meaning(verdict string) string { return meanings[verdict] }

// refuses reports whether a verdict refuses or drops.
func refuses(verdict string) bool {
	return strings.HasPrefix(verdict, "drop_") || strings.HasPrefix(verdict, "rejected_") ||
		verdict == "socket_refused" || verdict == "socket_timed_out"
}

// Drops returns the counters of the verdicts that refuse or drop and are not 0, sorted.
func (b *Backend) Drops() []dataplane.Drop {
	var drops []dataplane.Drop
	for verdict, n := range b.Verdicts() {
		if refuses(verdict) && n > 0 {
			drops = append(drops, dataplane.Drop{Reason: verdict, Meaning: meanings[verdict], Packets: n})
		}
	}
	slices.SortFunc(drops, func(a, b dataplane.Drop) int { return strings.Compare(a.Reason, b.Reason) })
	return drops
}

// flowStates has the names of enum flow_state of bpf/abi.h.
var flowStates = map[tcFlowState]string{
	tcFlowStateFLOW_NEW: "new", tcFlowStateFLOW_SYN_RECV: "syn-recv", tcFlowStateFLOW_ESTABLISHED: "established",
	tcFlowStateFLOW_CLOSING: "closing", tcFlowStateFLOW_LAST_ACK: "last-ack", tcFlowStateFLOW_CLOSED: "closed",
}

// Flows calls each with the flows of the table that are not dead, until it returns false.
func (b *Backend) Flows(ctx context.Context, each func(dataplane.Flow) bool) error {
	enough := errors.New("enough")
	clock := time.Now()
	err := eachFlow(ctx, b.m(tcMapFlows), func(k *tcTuple, f *tcFlow, now uint32) error {
		if tcFlowFlags(f.Flags)&tcFlowFlagsFLOW_REPLY != 0 || b.cfg.Timeouts.dead(k, f, now) {
			return nil
		}
		flow := dataplane.Flow{
			Protocol: model.Protocol(k.Proto), State: flowStates[tcFlowState(f.State)],
			Client:   netip.AddrPortFrom(fromAddr(k.Saddr, k.Family), toPort(k.Sport)),
			Service:  netip.AddrPortFrom(fromAddr(k.Daddr, k.Family), toPort(k.Dport)),
			Endpoint: netip.AddrPortFrom(fromAddr(f.Daddr, k.Family), toPort(f.Dport)),
			Reset:    model.Protocol(k.Proto) == model.TCP && tcFlowFlags(f.Flags)&tcFlowFlagsFLOW_RESET != 0,
			LastSeen: clock.Add(-time.Duration(int32(now-f.Seen)) * time.Second),
		}
		flow.Refused = b.refused(k, f)
		flow.Direct, flow.OneWay = directOf(f)
		if f.Opened != 0 {
			flow.Opened = clock.Add(-time.Duration(int32(now-f.Opened)) * time.Second)
		}
		if !each(flow) {
			return enough
		}
		return nil
	})
	if errors.Is(err, enough) {
		return nil
	}
	return err
}

// refused reports whether an RST answered the first segment of a flow's connection. After a
// SYN-ACK, the endpoint's entry has a sequence number or a window.
func (b *Backend) refused(k *tcTuple, f *tcFlow) bool {
	const reset, confirmed = tcFlowFlagsFLOW_RESET, tcFlowFlagsFLOW_CONFIRMED
	if k.Proto != uint8(model.TCP) || tcFlowState(f.State) != tcFlowStateFLOW_CLOSED || tcFlowFlags(f.Flags)&(reset|confirmed) != reset {
		return false
	}
	var reply tcFlow
	if b.m(tcMapFlows).Lookup(reverseOf(k, f), &reply) != nil {
		return false
	}
	return reply.Tcp.End == 0 && reply.Tcp.Window == 0
}

// expected is an entry that a Service port should have in a map.
type expected struct {
	note
	what string                    // the entry, for people
	read func() (got any, e error) // of the kernel
	want any
	tell func(any) string // the value, for people; nil: values are not shown
}

// Differences compares the entries of a Service port with the maps. It reads the maps beside
// writes, and then under the writers' lock only the entries that seemed to differ.
func (b *Backend) Differences(ctx context.Context, id intent.PortID, limit int) ([]string, error) {
	suspects, err := suspectsOf(ctx, b.expectedOf(id), limit)
	if err != nil || len(suspects) == 0 {
		return nil, err
	}
	return b.confirm(id, suspects)
}

// suspectsOf returns the entries that seem to differ, at most limit.
func suspectsOf(ctx context.Context, list []expected, limit int) (map[note]bool, error) {
	suspects := map[note]bool{}
	for i, e := range list {
		if i%entriesAtOnce == 0 && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		what, err := e.difference()
		if err != nil {
			return nil, err
		}
		if what != "" {
			suspects[e.note] = true
		}
		if len(suspects) >= limit {
			break
		}
	}
	return suspects, nil
}

// confirm describes the suspects that differ while no write is possible.
func (b *Backend) confirm(id intent.PortID, suspects map[note]bool) ([]string, error) {
	b.portsMu.Lock()
	defer b.portsMu.Unlock()
	var found []string
	for _, e := range b.ports.expected(b.objects.maps, id) {
		if !suspects[e.note] {
			continue
		}
		what, err := e.difference()
		if err != nil {
			return nil, err
		}
		if what != "" {
			found = append(found, what)
		}
	}
	return found, nil
}

func (b *Backend) expectedOf(id intent.PortID) []expected {
	b.portsMu.Lock()
	defer b.portsMu.Unlock()
	return b.ports.expected(b.objects.maps, id)
}

// difference describes how the kernel's entry differs; "" if it does not.
func (e *expected) difference() (string, error) {
	got, err := e.read()
	switch {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return fmt.Sprintf("%s: eBPF map %s has no entry", e.what, e.m), nil
	case err != nil:
		return "", fmt.Errorf("read eBPF map %s: %w", e.m, err)
	case got == e.want:
		return "", nil
	case e.tell == nil || e.tell(got) == e.tell(e.want):
		return fmt.Sprintf("%s: eBPF map %s has another entry", e.what, e.m), nil
	}
	return fmt.Sprintf("%s: eBPF map %s has %s, not %s", e.what, e.m, e.tell(got), e.tell(e.want)), nil
}

// expected returns the entries that a port should have. The caller holds the lock. Of source
// ranges the kernel finds the longest that contains one, so a larger one can hide that one is
// gone; the comparison after each full sync finds it.
func (t *portTable) expected(m map[string]*ebpf.Map, id intent.PortID) []expected {
	p := t.byID[id]
	if p == nil {
		return nil
	}
	var list []expected
	have := p.current()
	if have.written {
		list = append(list, entryOf(m, tcMapServices, p.service, have.header, "the Service port", func(v tcService) string {
			return fmt.Sprintf("%d endpoints for policy Cluster and %d for Local", v.Count[clusterSet], v.Count[localSet])
		}))
	}
	for key, v := range have.frontends {
		if t.owners[key] == p.service {
			list = append(list, entryOf(m, tcMapFrontends, key, v, "address "+frontendText(key), func(v tcFrontend) string {
				return fmt.Sprintf("Service %d with routes %s from outside and %s from inside", v.Service, routeText(v.ExternalRoute), routeText(v.InternalRoute))
			}))
		}
	}
	addrs := map[uint32]string{}
	for _, e := range have.backends {
		addrs[e.id] = e.addr.String()
		list = append(list, entryOf(m, tcMapBackends, e.id, e.value, "endpoint "+e.addr.String(), func(v tcBackend) string { return endpointOf(v).String() }))
		key := endpointKey(p.protocol, e.addr)
		_, odd := t.endpoints.odd[key]
		if want, ok := t.endpointEntry(key); ok && !odd {
			list = append(list, entryOf(m, tcMapFrontends, key, want, "own address of endpoint "+e.addr.String(), nil))
		}
	}
	for set, ids := range p.slots {
		for i, id := range ids {
			if id == 0 { // a hole that an earlier run has left
				continue
			}
			what := fmt.Sprintf("place %d of the endpoints for policy %s", i, []string{"Cluster", "Local"}[set])
			list = append(list, entryOf(m, tcMapSlots, slotKey(p.service, set, i), id, what, func(id uint32) string {
				if addr, known := addrs[id]; known {
					return addr
				}
				return fmt.Sprintf("unknown endpoint %d", id)
			}))
		}
	}
	for key := range have.ranges {
		list = append(list, entryOf(m, tcMapSourceRanges, key, uint8(1), "source range "+rangePrefix(key).String(), nil))
	}
	return list
}

// entryOf returns an expected entry of a map.
func entryOf[K, V comparable](m map[string]*ebpf.Map, name string, key K, want V, what string, tell func(V) string) expected {
	e := expected{note: note{name, key}, what: what, want: want, read: func() (any, error) {
		var got V
		err := m[name].Lookup(key, &got)
		return got, err
	}}
	if tell != nil {
		e.tell = func(v any) string { return tell(v.(V)) }
	}
	return e
}

func frontendText(key tcFrontendKey) string {
	proto := model.Protocol(key.Proto)
	if key.Addr == (tcAddr{}) {
		return fmt.Sprintf("NodePort %d/%s", toPort(key.Port), proto)
	}
	return fmt.Sprintf("%s/%s", netip.AddrPortFrom(fromAddr(key.Addr, key.Family), toPort(key.Port)), proto)
}

func routeText(route uint8) string {
	switch intent.Route(route) {
	case intent.Reject:
		return "reject"
	case intent.Drop:
		return "drop"
	case intent.ToCluster:
		return "Cluster"
	case intent.ToLocal:
		return "Local"
	}
	return fmt.Sprint(route)
}
