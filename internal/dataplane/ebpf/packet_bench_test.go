package ebpf

import (
	"encoding/binary"
	"fmt"
	"net"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// BenchmarkPacket reports what a program takes for one packet by the kernel's own count
// (BPF_STATS_RUN_TIME), in ns. Every run gets a new frame, since BPF_PROG_RUN keeps
// what the program wrote. A frame of a known flow carries the byte after the last frame's.
func BenchmarkPacket(b *testing.B) {
	n := newPacketNode(b)
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { stats.Close() })
	for _, name := range []string{"IPv4", "IPv6"} {
		p := plans[name]
		n.serve(b, service(p, protoTCP, endpoint(p.pod1, 8080, here)))
		c := n.openHere(b, p, 40000)
		_, in := c.frame("P.", []byte{0})
		_, out := c.frame("<P.", []byte{0})
		other := frame{proto: protoTCP, src: ap(p.client, 1000), dst: ap(p.eth0, 22), flags: "P."}
		fromPod := frame{proto: protoTCP, src: ap(p.pod1, 1000), dst: ap(p.client, 443), flags: "P."}
		forOthers := other
		forOthers.ethDst = net.HardwareAddr{2, 9, 9, 9, 9, 9}
		for _, c := range []struct {
			name string
			hook at
			code int
			f    frame
		}{
			{"known flow, to a pod here", inEth0, actRedirect, in},
			{"known flow, from a pod here", inPod1, actRedirect, out},
			{"not ours, from the network", inEth0, actNext, other},
			{"not ours, from a pod", inPod1, actNext, fromPod},
			{"for another host: what measuring takes", inEth0, actNext, forOthers},
		} {
			b.Run(name+"/"+c.name, func(b *testing.B) { n.benchmark(b, c.hook, c.code, c.f) })
		}
	}
}

// benchmark runs a frame whose sequence numbers go on by a byte each time.
func (n *packetNode) benchmark(b *testing.B, hook at, want int, f frame) {
	frameBytes := f.bytes(n, hook.iface)
	l4 := 14 + 20
	if f.src.Addr().Is6() {
		l4 = 14 + 40
	}
	ctx := skBuff{Ifindex: uint32(n.ifindex[hook.iface])}
	ctx.IngressIfindex = ctx.Ifindex
	prog := n.objects.programs[hook.prog]
	opts := ebpf.RunOptions{Data: frameBytes, Context: ctx}
	before, err := prog.Stats()
	ok(b, err)
	n.do(func() {
		var code uint32
		for i := uint32(0); b.Loop(); i++ {
			binary.BigEndian.PutUint32(frameBytes[l4+4:], f.seq+i)
			binary.BigEndian.PutUint32(frameBytes[l4+8:], f.ack+i)
			if code, err = prog.Run(&opts); err == nil && int(int32(code)) != want {
				err = fmt.Errorf("the program returned %d, want %d", int32(code), want)
			}
			if err != nil {
				break
			}
		}
	})
	ok(b, err)
	after, err := prog.Stats()
	ok(b, err)
	b.ReportMetric(float64(after.Runtime-before.Runtime)/float64(after.RunCount-before.RunCount), "ns/packet")
	b.ReportMetric(0, "ns/op")
}
