package flows

import (
	"context"
	"errors"
	"net/netip"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
)

// ForgetSources deletes the flows of egress with a source address that the node has lost: no answer
// reaches them. Netfilter's masquerading does the same (nf_nat_masquerade.c). A pod's next packet traverses
// the stack, which sends it with a present address, and the other side answers with an RST.
func (t *Table) ForgetSources(lost map[netip.Addr]bool) error {
	flows := t.m(objects.TCMapFlows)
	return objects.EachFlow(context.Background(), flows, func(k *objects.TCTuple, f *objects.TCFlow, _ uint32) error {
		reply := objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_REPLY != 0
		if f.Service != objects.ServiceEgress || reply || !lost[objects.FromAddr(f.Saddr, k.Family)] {
			return nil
		}
		for _, key := range []objects.TCTuple{*k, objects.ReverseOf(k, f)} {
			if err := flows.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
				return err
			}
		}
		return nil
	})
}
