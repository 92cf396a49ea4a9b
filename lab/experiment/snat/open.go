package snat

import (
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/lab/experiment"
	"spillway.dev/spillway/lab/experiment/harness"
	"spillway.dev/spillway/lab/load"
	"spillway.dev/spillway/test/testbed/agent"
	"spillway.dev/spillway/test/testbed/topology"
)

// openFlows is how many connections of pods to the outside are open in the row of that name.
func openFlows(o experiment.Options) int {
	if o.Quick {
		return 2000
	}
	return 100_000
}

// openSample measures new connections beside n open ones, which are entries of the flow table without sockets.
func (c cost) openSample(ctx context.Context, r *harness.Harness, n int, cfg load.Config, m *experiment.Measurement) (
	s harness.Sample, err error) {
	node, pod := r.Cluster.Node(c.other), r.Cluster.Pod(c.other, 0)
	table, err := ebpf.LoadPinnedMap(filepath.Join(objects.MapsDir(r.Path("bpf/"+node.Name)), objects.TCMapFlows), nil)
	if err != nil {
		return s, fmt.Errorf("open the flow table of %s: %w", node.Name, err)
	}
	defer table.Close()
	if err := fillFlows(table, node, pod, n); err != nil {
		return s, err
	}
	if s, err = r.Measure(ctx, pod, cfg); err != nil || m == nil {
		return s, err
	}
	began, found := time.Now(), 0
	err = objects.EachFlow(ctx, table, func(_ *objects.TCTuple, f *objects.TCFlow, _ uint32) error {
		if f.Service == objects.ServiceEgress {
			found++
		}
		return nil
	})
	if err != nil {
		return s, err
	}
	m.Add("walk", time.Since(began).Seconds()*1000)
	if found < 2*n {
		return s, fmt.Errorf("keep %d connections open: the flow table of %s has %d entries of egress", n, node.Name, found)
	}
	memory, err := agent.Metric(ctx, node, "process_resident_memory_bytes", "")
	m.Add("memory", memory/(1<<20))
	return s, err
}

// fillFlows makes the flow table that of n established connections of a pod, each to an address of its own.
func fillFlows(table *ebpf.Map, node, pod *topology.Host, n int) error {
	var old []objects.TCTuple
	err := objects.EachFlow(context.Background(), table, func(k *objects.TCTuple, _ *objects.TCFlow, _ uint32) error {
		old = append(old, *k)
		return nil
	})
	if err != nil {
		return err
	}
	for _, k := range old {
		_ = table.Delete(k) // the agent's sweep may have deleted it
	}
	to := netip.MustParseAddr("198.18.0.0") // RFC 2544: of benchmarks
	for i := range n {
		to = to.Next()
		port := uint16(i%20_000) + 40_000
		k := objects.TupleFor(model.TCP, netip.AddrPortFrom(pod.IPv4, port), netip.AddrPortFrom(to, 443))
		f := objects.TCFlow{
			Saddr: objects.ToAddr(node.IPv4), Daddr: k.Daddr, Sport: k.Sport, Dport: k.Dport, Service: objects.ServiceEgress,
			Seen: objects.BootSeconds(), State: uint8(objects.TCFlowStateFLOW_ESTABLISHED), Flags: uint16(objects.TCFlowFlagsFLOW_SNAT),
		}
		reply := f
		reply.Saddr, reply.Daddr, reply.Sport, reply.Dport = k.Daddr, k.Saddr, k.Dport, k.Sport
		reply.Flags |= uint16(objects.TCFlowFlagsFLOW_REPLY)
		for _, put := range []error{table.Put(k, f), table.Put(objects.ReverseOf(&k, &f), reply)} {
			if put != nil {
				return fmt.Errorf("open a connection in the flow table of %s: %w", node.Name, put)
			}
		}
	}
	return nil
}
