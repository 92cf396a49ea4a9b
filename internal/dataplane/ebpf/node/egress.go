package node

import (
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
	return nil
}

// loseEgressAddresses deletes the flows of those addresses of egress that the node no longer has.
func (w *Writer) loseEgressAddresses(before, n *intent.Node) error {
	lost := map[netip.Addr]bool{}
	if before != nil {
		for _, a := range before.Egress.Addresses {
			if !slices.Contains(n.Addrs, a) {
				lost[a] = true
			}
		}
	}
	return w.loseSources(lost)
}

// loseSources deletes the flows of addresses that the node has lost.
func (w *Writer) loseSources(lost map[netip.Addr]bool) error {
	if len(lost) == 0 || w.sourcesLost == nil {
		return nil
	}
	if err := w.sourcesLost(lost); err != nil {
		return fmt.Errorf("delete flows whose source the node has lost: %w", err)
	}
	return nil
}
