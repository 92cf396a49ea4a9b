package ebpf

import (
	"net/netip"
	"runtime"
	"sync"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/test/must"
)

// TestPacketRace: programs on two CPUs draw from the same few ports, all of which flows
// have that are over or that may be replaced. No port is ever that of two flows.
func TestPacketRace(t *testing.T) {
	const ports, rounds, each = 3, 150, 64
	n := newPacketNode(t)
	p := plans["IPv4"]
	n.serve(t, service(p, protoTCP, endpoint(p.far, 8080, elsewhere)), service(p, protoUDP, endpoint(p.far, 8080, elsewhere)))
	var list []uint16
	for i := range uint16(ports) {
		list = append(list, 50000+i)
	}
	n.setSNATPorts(t, list...)
	for round := range rounds {
		var racers sync.WaitGroup
		start := make(chan struct{})
		for cpu := range 2 {
			var frames [][]byte
			for i := range each {
				f := frame{proto: []uint8{protoTCP, protoUDP}[round%2], dst: ap(p.clusterIP, 80), flags: "S", seq: uint32(i)}
				f.src = ap(p.client, uint16(10000+20000*cpu+round*each+i))
				frames = append(frames, f.bytes(n, "eth0"))
			}
			racers.Go(func() { n.race(t, cpu, start, frames) })
		}
		close(start)
		racers.Wait()
		n.last = nil // they have counted
		n.wantPortsOfOne(t)
		// The next round finds them dead.
		n.ageFlows(t, 3600)
	}
}

// race gives frames to from_network on a CPU of its own.
func (n *packetNode) race(t *testing.T, cpu int, start chan struct{}, frames [][]byte) {
	runtime.LockOSThread() // and never unlocks: the thread ends with the goroutine
	var set unix.CPUSet
	set.Set(cpu)
	_ = unix.SchedSetaffinity(0, &set) // on a machine of one CPU they take turns
	if err := netns.Set(n.ns); err != nil {
		t.Error(err)
		return
	}
	<-start
	for _, f := range frames {
		opts := ebpf.RunOptions{Data: f, DataOut: make([]byte, len(f)+256), Context: skBuff{
			IngressIfindex: uint32(n.ifindex["eth0"]), Ifindex: uint32(n.ifindex["eth0"]),
		}}
		if _, err := n.objects.Programs[objects.TCProgFromNetwork].Run(&opts); err != nil {
			t.Error(err)
			return
		}
	}
}

// wantPortsOfOne fails unless each flow that goes out by a port of the node is the one
// that is answered at that port.
func (n *packetNode) wantPortsOfOne(t *testing.T) {
	t.Helper()
	all := map[objects.TCTuple]objects.TCFlow{}
	must.Do(t, objects.Each(n.m(objects.TCMapFlows), func(k objects.TCTuple, f objects.TCFlow) { all[k] = f }))
	type port struct {
		proto uint8
		from  netip.AddrPort
	}
	holder := map[port]objects.TCTuple{}
	for k, f := range all {
		if objects.TCFlowFlags(f.Flags)&objects.TCFlowFlagsFLOW_REPLY != 0 {
			continue
		}
		from := netip.AddrPortFrom(objects.FromAddr(f.Saddr, k.Family), objects.ToPort(f.Sport))
		if other, taken := holder[port{k.Proto, from}]; taken {
			t.Fatalf("%+v and %+v both go out as %s", other, k, from)
		}
		holder[port{k.Proto, from}] = k
		reply := all[objects.TCTuple{Saddr: f.Daddr, Daddr: f.Saddr, Sport: f.Dport, Dport: f.Sport, Proto: k.Proto, Family: k.Family}]
		if reply.Daddr != k.Saddr || reply.Dport != k.Sport {
			t.Fatalf("%+v goes out as %s, which is answered to port %d", k, from, objects.ToPort(reply.Dport))
		}
	}
	if len(holder) == 0 {
		t.Error("no flow is left")
	}
}
