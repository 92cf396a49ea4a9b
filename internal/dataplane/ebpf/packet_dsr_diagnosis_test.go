package ebpf

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/attach"
	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

// TestPacketDSRFlows lists the flows of a DSR connection and of others at both nodes.
func TestPacketDSRFlows(t *testing.T) {
	d := newDSRNodes(t)
	eachDSRFamily(t, d, func(t *testing.T, p *plan) {
		c := d.conn(p, 40000)
		c.establish(t)
		d.first.send(t, inEth0, frame{proto: protoTCP, src: ap(p.far2, 40001), dst: ap(p.externalIP, 80), flags: "S", seq: 1})
		for _, row := range []struct {
			name           string
			n              *packetNode
			port           uint16
			direct, oneWay bool
		}{{"the receiving node", d.first, 40000, true, true}, {"the endpoint's node", d.home, 40000, true, false},
			{"a client in the cluster", d.first, 40001, false, false}} {
			f := row.n.listed(t, row.port)
			if f.DSR != row.direct || f.OneWay != row.oneWay {
				t.Errorf("%s: direct %v, one way %v: %+v", row.name, f.DSR, f.OneWay, f)
			}
		}
	})
}

// listed is the flow with this client's port.
func (n *packetNode) listed(t *testing.T, port uint16) (found dataplane.Flow) {
	t.Helper()
	must.Do(t, n.Flows(t.Context(), func(f dataplane.Flow) bool {
		if f.Client.Port() == port {
			found = f
		}
		return true
	}))
	if !found.Client.IsValid() {
		t.Fatalf("no flow of port %d", port)
	}
	return found
}

// TestPacketDSRTrust compares what is reported about a path with what the programs do about it,
// and a dry run with both.
func TestPacketDSRTrust(t *testing.T) {
	d := newDSRNodes(t)
	d.first.ownPins(t)
	t.Cleanup(stubSome(func(p *ebpf.ProgramSpec) bool { return p.Name == objects.TCProgFromPod })) // of the dry runs
	p := plans["IPv4"]
	d.serve(t, p)
	id := d.backendID(t, ap(p.far, 8080))
	for i, row := range []struct {
		failures uint32
		failed   uint32 // seconds ago
		want     bool
	}{
		{uint32(objects.TCDsrPathLimitDSR_FAILURES) - 1, 20, true},
		{uint32(objects.TCDsrPathLimitDSR_FAILURES), 20, false},
		{uint32(objects.TCDsrPathLimitDSR_FAILURES), 70, true},
		{uint32(objects.TCDsrPathLimitDSR_FAILURES_MAX), 20, false},
	} {
		fail := func() {
			path := objects.TCDsrPath{Failures: row.failures, Failed: objects.BootSeconds() - row.failed}
			must.Do(t, d.first.m(objects.TCMapDsrPaths).Put(id, path))
		}
		fail()
		trusted := d.first.dsrPath(t, id).Trusted
		packet := inspect.DryRunPacket{Hook: inspect.FromNetwork, Ifindex: d.first.ifindex["eth0"], Protocol: model.TCP,
			Src: ap(p.client, 40000+uint16(i)), Dst: ap(p.externalIP, 80)}
		dry := d.first.dryRun(t, packet)
		fail() // in an emulated machine, a dry run takes half a minute
		r := d.first.send(t, inEth0, frame{proto: protoTCP, src: packet.Src, dst: packet.Dst, flags: "S", seq: 1})
		if trusted != row.want || announced(r) != row.want || slices.Contains(dry.Verdicts, "dsr_announced") != row.want ||
			dry.Flow.Has("dsr") != row.want {
			t.Errorf("%+v: trusted %v, the program: %s, dry run: %s, %+v", row, trusted, verdictList(r.verdicts), dry.Verdicts, dry.Flow)
		}
	}
}

// TestPacketDSRDryRunKnowsTheEncapsulation: a dry run decides by what probes have found out, as the
// programs do.
func TestPacketDSRDryRunKnowsTheEncapsulation(t *testing.T) {
	d := newDSRNodes(t, withDSRPort)
	d.first.ownPins(t)
	t.Cleanup(stubSome(func(p *ebpf.ProgramSpec) bool { return p.Name == objects.TCProgFromPod })) // of the dry runs
	p := plans["IPv4"]
	d.serve(t, p)
	for i, encapsulation := range []objects.TCDsrEncapsulationKind{objects.TCDsrEncapsulationKindDSR_BY_OPTION,
		objects.TCDsrEncapsulationKindDSR_BY_GUE, objects.TCDsrEncapsulationKindDSR_BY_NOTHING} {
		d.first.carry(t, p.far, encapsulation)
		packet := inspect.DryRunPacket{Hook: inspect.FromNetwork, Ifindex: d.first.ifindex["eth0"], Protocol: model.TCP,
			Src: ap(p.client, 40000+uint16(i)), Dst: ap(p.externalIP, 80)}
		dry := d.first.dryRun(t, packet)
		r := d.first.send(t, inEth0, frame{proto: protoTCP, src: packet.Src, dst: packet.Dst, flags: "S", seq: 1})
		direct, byGUE := encapsulation != objects.TCDsrEncapsulationKindDSR_BY_NOTHING, encapsulation == objects.TCDsrEncapsulationKindDSR_BY_GUE
		if dry.Flow.Has("dsr") != direct || dry.Flow.Has("snat") == direct || slices.Contains(dry.Verdicts, "dsr_encapsulated") != byGUE ||
			announced(r) != direct {
			t.Errorf("encapsulation %d: the program: %s, dry run: %s, %+v", encapsulation, verdictList(r.verdicts), dry.Verdicts, dry.Flow)
		}
	}
}

// backendID is the id of an endpoint at the first node.
func (d *dsrNodes) backendID(t *testing.T, at netip.AddrPort) (found uint32) {
	t.Helper()
	must.Do(t, objects.Each(d.first.m(objects.TCMapBackends), func(id uint32, b objects.TCBackend) {
		if objects.EndpointOf(b) == at {
			found = id
		}
	}))
	return found
}

// dsrPath is the only path that a node reports, with this id. View must report the same.
func (n *packetNode) dsrPath(t *testing.T, id uint32) dataplane.DSRPath {
	t.Helper()
	replies, err := n.DSRReplies()
	if err != nil || len(replies.Paths) != 1 {
		t.Fatalf("%+v, %v", replies, err)
	}
	path := replies.Paths[0]
	v, err := inspect.OpenView(n.cfg.BPFFS)
	must.Do(t, err)
	defer v.Close()
	if seen := v.DSRPath(id); seen == nil || seen.Trusted != path.Trusted || seen.Failures != path.Failures || seen.Endpoint != path.Endpoint {
		t.Errorf("a view sees %+v, not %+v", seen, path)
	}
	return path
}

// TestPacketDSRThroughStack lists the Pods whose DSR packets traverse the stack, and compares
// that with what the programs do.
func TestPacketDSRThroughStack(t *testing.T) {
	d := newDSRNodes(t)
	p := plans["IPv4"]
	d.serve(t, p)
	pod := attach.Pod{Ifindex: d.home.ifindex["pod1"], PodMAC: podMAC("pod1"), HostMAC: d.home.mac["pod1"]}
	syn := func(n *packetNode, port uint16) result {
		sent := d.first.send(t, inEth0, frame{proto: protoTCP, src: ap(p.client, port), dst: ap(p.externalIP, 80), flags: "S", seq: 1})
		return n.sendRaw(t, inTun0, toDevice(n, sent.out))
	}
	for i, through := range []bool{false, true} {
		if through {
			d.home.setNode(t, func(node *intent.Node) { node.MustTraverseNetfilter = []netip.Addr{p.far} })
			d.home.node.OnPods(attach.PodChanges{Upserts: map[netip.Addr]attach.Pod{p.far: pod}})
		}
		r := syn(d.home, 40000+uint16(i))
		replies, err := d.home.DSRReplies()
		must.Do(t, err)
		if listed := slices.Equal(replies.ThroughStack, []netip.AddrPort{ap(p.far, 8080)}); listed != through ||
			(r.verdicts[objects.TCVerdictTRANSLATED_STACK] == 1) != through {
			t.Errorf("through the stack: listed %v, the program: %s, want %v", replies.ThroughStack, verdictList(r.verdicts), through)
		}
	}
	announced, unanswered := d.first.DSRCounts()
	if replies, err := d.first.DSRReplies(); err != nil || len(replies.ThroughStack) > 0 || announced != 2 || unanswered > 0 {
		t.Errorf("the receiving node: %+v, %v, %d announced, %d unanswered", replies, err, announced, unanswered)
	}
	d.home.serve(t, service(p, protoTCP, endpoint(p.far, 8080, here)))
	if replies, err := d.home.DSRReplies(); err != nil || len(replies.ThroughStack) > 0 {
		t.Errorf("a Service without DSR replies: %+v, %v", replies, err)
	}
}
