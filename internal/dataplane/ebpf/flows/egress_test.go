package flows

import (
	"net/netip"
	"reflect"
	"testing"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

// putEgress stores a pod's connection to the outside, in both directions.
func putEgress(t testing.TB, b *Table, proto model.Protocol, pod, node, to string, port uint16) {
	t.Helper()
	p, n, d := netip.MustParseAddr(pod), netip.MustParseAddr(node), netip.MustParseAddrPort(to)
	k := objects.TCTuple{
		Saddr: objects.ToAddr(p), Daddr: objects.ToAddr(d.Addr()), Sport: objects.ToPort(port), Dport: objects.ToPort(d.Port()),
		Proto: uint8(proto), Family: objects.FamilyOf(p),
	}
	f := objects.TCFlow{
		Saddr: objects.ToAddr(n), Daddr: k.Daddr, Sport: objects.ToPort(port), Dport: k.Dport, Seen: objects.BootSeconds(),
		Service: objects.ServiceEgress, Flags: uint16(objects.TCFlowFlagsFLOW_SNAT),
	}
	reply := objects.TCFlow{
		Saddr: k.Daddr, Daddr: k.Saddr, Sport: k.Dport, Dport: k.Sport, Seen: f.Seen, Service: f.Service,
		Flags: f.Flags | uint16(objects.TCFlowFlagsFLOW_REPLY),
	}
	must.Do(t, b.m(objects.TCMapFlows).Put(k, f))
	must.Do(t, b.m(objects.TCMapFlows).Put(objects.ReverseOf(&k, &f), reply))
}

func TestSweepCountsEgress(t *testing.T) {
	b := newTable(t, objects.Config{Timeouts: objectstest.Timeouts, FlowTableSize: 1024})
	for i := range uint16(30) {
		putEgress(t, b, model.TCP, "10.244.0.5", "192.0.2.1", "198.51.100.7:443", 2000+i)
	}
	for i := range uint16(10) {
		putEgress(t, b, model.TCP, "10.244.0.6", "192.0.2.1", "198.51.100.7:443", 3000+i)
		putEgress(t, b, model.UDP, "fd44::6", "fd00::1", "[2001:db8::7]:443", 3000+i)
		putEgress(t, b, model.TCP, "10.244.0.6", "192.0.2.2", "198.51.100.7:443", 4000+i) // by another uplink
	}
	keys, flows := objectstest.Flow(1, model.TCP, objects.TCFlowStateFLOW_ESTABLISHED, objects.BootSeconds())
	for i := range keys {
		must.Do(t, b.m(objects.TCMapFlows).Put(keys[i], flows[i])) // of a Service
	}
	must.Do(t, b.Sweep(t.Context()))
	must.Do(t, b.m(objects.TCMapNodeSettings).Put(uint32(0), objects.TCSettings{
		SnatPorts: 33_500, Flags: uint32(objects.TCSettingsFlagsSETTING_EGRESS),
	}))
	use, err := b.EgressUse()
	must.Do(t, err)
	addr, to := netip.MustParseAddr, netip.MustParseAddrPort
	want := &dataplane.EgressUse{Connections: 60, Ports: 33_500, Bypasses: true, Busiest: []dataplane.EgressDestination{
		{Protocol: model.TCP, Source: addr("192.0.2.1"), Destination: to("198.51.100.7:443"), Connections: 40,
			Pods: []dataplane.EgressPod{{Addr: addr("10.244.0.5"), Connections: 30}, {Addr: addr("10.244.0.6"), Connections: 10}}},
		{Protocol: model.TCP, Source: addr("192.0.2.2"), Destination: to("198.51.100.7:443"), Connections: 10,
			Pods: []dataplane.EgressPod{{Addr: addr("10.244.0.6"), Connections: 10}}},
		{Protocol: model.UDP, Source: addr("fd00::1"), Destination: to("[2001:db8::7]:443"), Connections: 10,
			Pods: []dataplane.EgressPod{{Addr: addr("fd44::6"), Connections: 10}}},
	}}
	if !reflect.DeepEqual(use, want) {
		t.Errorf("use %+v, want %+v", use, want)
	}
	must.Do(t, b.m(objects.TCMapNodeSettings).Put(uint32(0), objects.TCSettings{
		Flags: uint32(objects.TCSettingsFlagsSETTING_EGRESS | objects.TCSettingsFlagsSETTING_BYPASS_NEVER),
	}))
	if use, err := b.EgressUse(); err != nil || use.Bypasses {
		t.Errorf("with --bypass never: use %+v, %v", use, err)
	}
}

// TestEgressUseIsUnknownWhereItIsOff: connections that go on after egress is off are still counted.
func TestEgressUseIsUnknownWhereItIsOff(t *testing.T) {
	b := newTable(t, objects.Config{Timeouts: objectstest.Timeouts, FlowTableSize: 1024})
	for _, connections := range []uint64{0, 1} {
		if connections > 0 {
			putEgress(t, b, model.TCP, "10.244.0.5", "192.0.2.1", "198.51.100.7:443", 2000)
		}
		must.Do(t, b.Sweep(t.Context()))
		use, err := b.EgressUse()
		if err != nil || (use != nil) != (connections > 0) || use != nil && use.Connections != connections {
			t.Errorf("%d connections: use %+v, %v", connections, use, err)
		}
	}
}

// TestFlowsToKeptDestinationsAreWatched: none is called once, after a sweep without such a flow.
func TestFlowsToKeptDestinationsAreWatched(t *testing.T) {
	b := newTable(t, objects.Config{Timeouts: objectstest.Timeouts, FlowTableSize: 1024})
	putEgress(t, b, model.TCP, "10.244.0.5", "192.0.2.1", "198.51.100.7:443", 2000)
	putEgress(t, b, model.TCP, "10.244.0.5", "192.0.2.1", "203.0.113.7:443", 2001) // to another one
	calls := 0
	b.WatchEgressTo([]netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}, func() { calls++ })
	must.Do(t, b.Sweep(t.Context()))
	if calls != 0 {
		t.Fatal("none was called although a flow goes on")
	}
	for k := range objectstest.ReadAll[objects.TCTuple, objects.TCFlow](t, b.m(objects.TCMapFlows)) {
		if k.Daddr == objects.ToAddr(netip.MustParseAddr("198.51.100.7")) {
			must.Do(t, b.m(objects.TCMapFlows).Delete(k))
		}
	}
	for range 2 {
		must.Do(t, b.Sweep(t.Context()))
	}
	if calls != 1 {
		t.Errorf("none was called %d times, want 1", calls)
	}
}

// BenchmarkSweep is one look at a table of Services' connections, and at one of pods' connections to the
// outside, half of them to one destination.
func BenchmarkSweep(b *testing.B) {
	const flows = 100_000
	for _, egress := range []bool{false, true} {
		b.Run(map[bool]string{false: "services", true: "egress"}[egress], func(b *testing.B) {
			t := newTable(b, objects.Config{Timeouts: objectstest.Timeouts, FlowTableSize: 1 << 19})
			for i := range uint32(flows) {
				if egress {
					pod, to := netip.AddrFrom4([4]byte{10, 244, byte(i % 100), 5}), netip.AddrFrom4([4]byte{198, 51, byte(i / 1000), 7})
					if i%2 == 0 {
						to = netip.MustParseAddr("198.51.100.200")
					}
					putEgress(b, t, model.TCP, pod.String(), "192.0.2.1", netip.AddrPortFrom(to, uint16(i%30_000)+1).String(), uint16(i/2))
					continue
				}
				keys, values := objectstest.Flow(i, model.TCP, objects.TCFlowStateFLOW_ESTABLISHED, objects.BootSeconds())
				for j := range keys {
					must.Do(b, t.m(objects.TCMapFlows).Put(keys[j], values[j]))
				}
			}
			for b.Loop() {
				must.Do(b, t.Sweep(b.Context()))
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/flows, "ns/flow")
		})
	}
}
