package ebpf

import (
	"context"
	"maps"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
)

// dryRun runs a first packet at a hook of the node without a trace of it.
func (n *packetNode) dryRun(t *testing.T, p DryRunPacket) *DryRunResult {
	t.Helper()
	var r *DryRunResult
	n.onThread(t, func() error {
		d, err := OpenDryRun(n.cfg.BPFFS)
		if err != nil {
			return err
		}
		defer d.Close()
		r, err = d.Run(context.Background(), p)
		return err
	})
	return r
}

// everything is the content of all maps that the programs may write.
func (n *packetNode) everything(t *testing.T) map[string]int {
	t.Helper()
	all := map[string]int{}
	for name, m := range n.objects.maps {
		if m.Type().String() == "SkStorage" {
			continue
		}
		var key, value []byte
		var values [][]byte
		it := m.Iterate()
		for perCPU(m.Type()) && it.Next(&key, &values) || !perCPU(m.Type()) && it.Next(&key, &value) {
			if name != tcMapScratches {
				all[name+string(key)+string(value)+string(slices.Concat(values...))]++
			}
		}
	}
	return all
}

// A dry run decides as the attached programs do, and leaves no trace in their maps.
func TestPacketDryRun(t *testing.T) {
	n := newPacketNode(t)
	n.onThread(t, func() error {
		own, err := kernel.CurrentNetns()
		if err != nil {
			return err
		}
		return setOwner(n.cfg.BPFFS, own)
	})
	if testing.Short() {
		n.dryRuns(t, plans["IPv4"], protoTCP)
		return
	}
	eachTransport(t, n, func(t *testing.T, p *plan, proto uint8) { n.dryRuns(t, p, proto) })
}

func (n *packetNode) dryRuns(t *testing.T, p *plan, proto uint8) {
	for name, e := range map[string]where{"EndpointHere": here, "EndpointElsewhere": elsewhere} {
		t.Run(name, func(t *testing.T) {
			n.forget(t)
			to := ap(p.pod1, 8080)
			if e == elsewhere {
				to = ap(p.far, 8080)
			}
			n.serve(t, service(p, proto, endpoint(to.Addr(), to.Port(), e)))
			packet := DryRunPacket{Hook: FromNetwork, Ifindex: n.ifindex["eth0"], Protocol: model.Protocol(proto), Src: ap(p.client, 40000), Dst: ap(p.clusterIP, 80)}
			before := n.everything(t)
			dry := n.dryRun(t, packet)
			if !maps.Equal(before, n.everything(t)) {
				t.Error("the dry run changed a map of the instance")
			}
			real := n.send(t, inEth0, frame{proto: proto, src: packet.Src, dst: packet.Dst, flags: first(proto)})
			var verdicts []string
			for _, v := range slices.Sorted(maps.Keys(real.verdicts)) {
				verdicts = append(verdicts, verdictName(v))
			}
			if !slices.Equal(dry.Verdicts, verdicts) || dry.Action != "redirect" || dry.Flow == nil || dry.Flow.Dst != real.v.dst || dry.Found {
				t.Fatalf("dry run %+v, %+v; the program: %s to %s", dry, dry.Flow, verdicts, real.v.dst)
			}
			if (e == elsewhere) != dry.Flow.Has("snat") || (e == here) != (dry.NextHop.Kind == "pod") || e == elsewhere && dry.NextHop.Gateway != p.farGW {
				t.Errorf("flow %+v, next hop %+v", dry.Flow, dry.NextHop)
			}
			if again := n.dryRun(t, packet); !again.Found || again.Has("flow_created") {
				t.Errorf("with a flow: %+v", again)
			}
		})
	}
}

// The ports of connections that are open count.
func TestPacketDryRunWithoutAFreePort(t *testing.T) {
	n := newPacketNode(t)
	n.onThread(t, func() error { return setOwner(n.cfg.BPFFS, kernel.NetnsID{}) })
	p := plans["IPv4"]
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	n.setSNATPorts(t, 50000)
	n.open(t, p, 40000)
	packet := DryRunPacket{Hook: FromNetwork, Ifindex: n.ifindex["eth0"], Protocol: model.TCP, Src: ap(p.client2, 40000), Dst: ap(p.clusterIP, 80)}
	if r := n.dryRun(t, packet); !slices.Equal(r.Verdicts, []string{"drop_snat_ports"}) || r.Action != "drop" {
		t.Errorf("%+v", r)
	}
}
