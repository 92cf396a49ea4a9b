package ebpf

import (
	"context"
	"maps"
	"os"
	"reflect"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/test/must"
)

// dryRun runs a first packet at a hook of the node without a trace of it.
func (n *packetNode) dryRun(t *testing.T, p inspect.DryRunPacket) *inspect.DryRunResult {
	t.Helper()
	var r *inspect.DryRunResult
	n.onThread(t, func() error {
		d, err := inspect.OpenDryRun(n.cfg.BPFFS)
		if err != nil {
			return err
		}
		defer d.Close()
		r, err = d.Run(context.Background(), p)
		return err
	})
	return r
}

// ownPins makes the node's network namespace the owner of its pins until the test ends, as New does.
func (n *packetNode) ownPins(t *testing.T) {
	t.Helper()
	n.onThread(t, func() error { return upgrade.SetPinOwner(n.cfg.BPFFS) })
	t.Cleanup(func() { must.Do(t, os.Remove(objects.OwnerPath(n.cfg.BPFFS))) })
}

// everything is the content of all maps that the programs may write for longer than a packet.
func (n *packetNode) everything(t *testing.T) map[string]mapContent {
	t.Helper()
	all := n.contents(t, nil)
	delete(all, objects.TCMapScratches)
	return all
}

// A dry run decides as the attached programs do, and leaves no trace in their maps.
func TestPacketDryRun(t *testing.T) {
	n := newPacketNode(t)
	n.ownPins(t)
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
			packet := inspect.DryRunPacket{Hook: inspect.FromNetwork, Ifindex: n.ifindex["eth0"], Protocol: model.Protocol(proto),
				Src: ap(p.client, 40000), Dst: ap(p.clusterIP, 80)}
			before := n.everything(t)
			dry := n.dryRun(t, packet)
			if !reflect.DeepEqual(before, n.everything(t)) {
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
			if (e == elsewhere) != dry.Flow.Has("snat") || (e == here) != (dry.NextHop.Kind == "pod") || e == elsewhere &&
				dry.NextHop.Gateway != p.farGW {
				t.Errorf("flow %+v, next hop %+v", dry.Flow, dry.NextHop)
			}
			if again := n.dryRun(t, packet); !again.Found || slices.Contains(again.Verdicts, "flow_created") {
				t.Errorf("with a flow: %+v", again)
			}
		})
	}
}

// The ports of connections that are open count.
func TestPacketDryRunWithoutAFreePort(t *testing.T) {
	n := newPacketNode(t)
	n.onThread(t, func() error { return objects.SetOwner(n.cfg.BPFFS, kernel.NetnsID{}) })
	t.Cleanup(func() { must.Do(t, os.Remove(objects.OwnerPath(n.cfg.BPFFS))) })
	p := plans["IPv4"]
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)))
	n.setSNATPorts(t, 50000)
	n.open(t, p, 40000)
	packet := inspect.DryRunPacket{Hook: inspect.FromNetwork, Ifindex: n.ifindex["eth0"], Protocol: model.TCP, Src: ap(p.client2, 40000),
		Dst: ap(p.clusterIP, 80)}
	if r := n.dryRun(t, packet); !slices.Equal(r.Verdicts, []string{"drop_snat_ports"}) || r.Action != "drop" {
		t.Errorf("%+v", r)
	}
}
