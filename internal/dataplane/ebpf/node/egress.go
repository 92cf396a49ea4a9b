package node

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/decisions/intent"
)

// writeEgressAddresses writes egress_addresses.
func (w *Writer) writeEgressAddresses(n *intent.Node) error {
	var addresses []objects.TCAddr
	for _, v6 := range []bool{false, true} {
		groups := n.Egress.ForPods(v6)
		if groups == nil {
			groups = make([]netip.Addr, egress.PodGroups)
		}
		for _, a := range groups {
			addresses = append(addresses, objects.ToAddr(a))
		}
	}
	if slices.Equal(addresses, w.egressAddresses) {
		return nil
	}
	for i, a := range addresses {
		if err := w.m(objects.TCMapEgressAddresses).Put(uint32(i), a); err != nil {
			return fmt.Errorf("write addresses of egress: %w", err)
		}
	}
	w.egressAddresses = addresses
	for _, a := range n.Egress.Addresses {
		w.sources[a] = true
	}
	return nil
}

// loseSources deletes the flows of source addresses that the node no longer has. The node and its external
// devices change one after the other: until both have, a packet may begin a flow with the old address.
func (w *Writer) loseSources(n *intent.Node) error {
	lost := map[netip.Addr]bool{}
	for a := range w.sources {
		if !slices.Contains(n.Addrs, a) {
			lost[a] = true
		}
	}
	if len(lost) == 0 || w.sourcesLost == nil {
		return nil
	}
	if err := w.sourcesLost(lost); err != nil {
		return fmt.Errorf("delete flows whose source the node has lost: %w", err)
	}
	for _, u := range w.uplinks {
		delete(lost, u.V4)
		delete(lost, u.V6)
	}
	for a := range lost {
		delete(w.sources, a)
	}
	return nil
}

// readSources reads the source addresses of the flows that an earlier run has left.
func (w *Writer) readSources() error {
	var features uint32
	if err := w.m(objects.TCMapFeaturesSeen).Lookup(uint32(0), &features); err != nil {
		return fmt.Errorf("read features: %w", err)
	}
	if features&uint32(objects.TCFeatureFEATURE_EGRESS) == 0 {
		return nil // no need to walk the table
	}
	err := objects.EachFlow(context.Background(), w.m(objects.TCMapFlows), func(k *objects.TCTuple, f *objects.TCFlow, _ uint32) error {
		if f.Service == objects.ServiceEgress && objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_REPLY == 0 {
			w.sources[objects.FromAddr(f.Saddr, k.Family)] = true
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("read source addresses of flows: %w", err)
	}
	return nil
}
