package ebpf

import (
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/test/must"
)

// The packets of one measurement: in a row, as in a burst, and apart, with a system call
// before each, so that caches and branch predictors are as after other work.
const (
	benchRow   = 1000 // fewer than the unconfirmed flows of newPacketNode
	benchApart = 1000
)

// BenchmarkPacket reports what a program takes for one packet, in ns, as a table:
//
//	make bench-packet
//
// The kernel's own count (BPF_STATS_RUN_TIME) is of a program that restores the packet and
// then tail-calls the program to measure. What it takes with an empty program is
// subtracted. Each iteration measures every case once, and the table has the minimum of
// each. One case stands twice (A/A): the difference is the error of the table.
func BenchmarkPacket(b *testing.B) {
	n := newPacketNode(b)
	benchPackets(b, n, n.packetCases)
}

// BenchmarkPacketEvents is the same with all events and counters, and an agent that reads
// the events.
func BenchmarkPacketEvents(b *testing.B) {
	n := newPacketNode(b, func(c *Config) { c.FlowEvents, c.ServiceMetrics = EventsAll, true })
	var reader sync.WaitGroup
	reader.Go(func() { _ = n.ReportFlows(b.Context(), func([]dataplane.FlowEvent) {}) })
	b.Cleanup(reader.Wait) // the context has ended
	benchPackets(b, n, n.packetCases)
}

// BenchmarkPacketEgress is what pods' connections to the outside cost, and what others cost beside them.
func BenchmarkPacketEgress(b *testing.B) {
	n := newPacketNode(b)
	n.leaving(b)
	must.Do(b, n.flows.Sweep(b.Context())) // no flow goes to a destination that is left to netfilter
	benchPackets(b, n, n.egressCases)
}

// egressCases starts with the empty program.
func (n *packetNode) egressCases(b *testing.B, p *plan) []*packetCase {
	c := n.newConn(ap(p.pod1, 40000), ap(p.client, 443), ap(p.client, 443), inEth0)
	c.in = inPod1
	c.handshake(b)
	_, in := c.frame("<P.", []byte{0})
	_, out := c.frame("P.", []byte{0})
	first := frame{proto: protoTCP, src: ap(p.pod1, 1000), dst: ap(p.client, 443), flags: "S"}
	inside := frame{proto: protoTCP, src: ap(p.pod1, 1000), dst: ap(p.far, 443), flags: "P."}
	node := frame{proto: protoTCP, src: ap(p.client, 443), dst: ap(p.eth0, 40000), flags: "P."}
	return []*packetCase{
		{name: "empty program", code: actNext, frame: node},
		{name: "not ours, from the network", hook: inEth0, code: actNext, frame: node},
		{name: "not ours, from a pod to another", hook: inPod1, code: actNext, frame: inside},
		{name: "known flow, from a pod to the outside", hook: inPod1, code: actRedirect, frame: out},
		{name: "its answer", hook: inEth0, code: actRedirect, frame: in},
		{name: "first packet to the outside", hook: inPod1, code: actRedirect, frame: first, fresh: true},
	}
}

func benchPackets(b *testing.B, n *packetNode, casesOf func(*testing.B, *plan) []*packetCase) {
	b.Helper()
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	must.Do(b, err)
	b.Cleanup(func() { stats.Close() })
	var table strings.Builder
	for _, name := range []string{"IPv4", "IPv6"} {
		cases := casesOf(b, plans[name])
		for _, c := range cases {
			n.prepare(b, c)
		}
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				for _, c := range cases {
					if !c.grows {
						c.row = min(c.row, n.measure(b, c, 1, benchRow))
					}
					c.apart = min(c.apart, n.measure(b, c, benchApart, 1))
				}
			}
			b.ReportMetric(0, "ns/op")
		})
		for _, c := range cases[1:] {
			row := fmt.Sprintf("%.0f", c.row-cases[0].row)
			if c.grows {
				row = "-"
			}
			fmt.Fprintf(&table, "%s  %-38s %8s %8.0f\n", name, c.name, row, c.apart-cases[0].apart)
		}
	}
	b.Logf("ns a packet, minimum of the rounds\n%-45s %7s %8s\n%s", "", "in a row", "apart", table.String())
}

// packetCase is one row of the table.
type packetCase struct {
	name  string
	hook  at // of an empty program if prog is ""
	code  int
	frame frame
	fresh bool   // every packet has another source port
	flood bool   // the flows of the last measurement stay, and are replaced
	xdp   bool   // an empty program of this kind
	keep  func() // runs before each call: XDP sends packets of a flow that tc saw in the same second
	grows bool   // the packet: BPF_PROG_RUN repeats the longer one, so none follows in a row

	restore *ebpf.Program
	row     float64 // ns
	apart   float64
}

// packetCases starts with the empty program.
func (n *packetNode) packetCases(b *testing.B, p *plan) []*packetCase {
	n.serve(b, service(p, protoTCP, endpoint(p.pod1, 8080, here)))
	c := n.openHere(b, p, 40000)
	_, in := c.frame("P.", []byte{0})
	_, out := c.frame("<P.", []byte{0})
	tcp := func(src, dst string, port uint16, flags string) frame {
		addrs := map[string]frame{
			"client": {src: ap(p.client, 1000)}, "client2": {src: ap(p.client2, 1000)}, "pod1": {src: ap(p.pod1, 1000)},
			"far": {src: ap(p.far, 1000)},
		}
		to := map[string]frame{"eth0": {dst: ap(p.eth0, port)}, "client": {dst: ap(p.client, port)},
			"service": {dst: ap(p.clusterIP, port)}, "pod1": {dst: ap(p.pod1, port)}}
		return frame{proto: protoTCP, src: addrs[src].src, dst: to[dst].dst, flags: flags, payload: []byte{0}}
	}
	notOurs := tcp("client", "eth0", 22, "P.")
	return []*packetCase{
		{name: "empty program", code: actNext, frame: notOurs},
		{name: "not ours, from the network", hook: inEth0, code: actNext, frame: notOurs},
		{name: "the same again (A/A)", hook: inEth0, code: actNext, frame: notOurs},
		{name: "the same, each from another port", hook: inEth0, code: actNext, frame: notOurs, fresh: true},
		{name: "not ours, from a pod", hook: inPod1, code: actNext, frame: tcp("pod1", "client", 443, "P.")},
		{name: "not ours, to a pod elsewhere", hook: outEth0, code: actNext, frame: tcp("pod1", "client", 443, "P.")},
		{name: "known flow, to a pod here", hook: inEth0, code: actRedirect, frame: in},
		{name: "reply, from a pod here", hook: inPod1, code: actRedirect, frame: out},
		{name: "first packet, to a pod here", hook: inEth0, code: actRedirect, frame: tcp("client", "service", 80, "S"), fresh: true},
		{name: "the same in a flood: replaces another", hook: inEth0, code: actRedirect, frame: tcp("client2", "service", 80, "S"),
			fresh: true, flood: true},
		{name: "pass-through, to a pod here", hook: inTun0, code: actRedirect, frame: tcp("far", "pod1", 8080, "P.")},
	}
}

// prepare loads the program that restores the packet of a case and runs the case.
func (n *packetNode) prepare(b *testing.B, c *packetCase) {
	b.Helper()
	c.row, c.apart = math.MaxFloat64, math.MaxFloat64
	target := n.objects.Programs[c.hook.prog]
	if target == nil {
		c.hook.iface = "eth0"
		target = n.loadProgram(b, "empty", c.kind(), asm.Instructions{asm.LoadImm(asm.R0, int64(int32(c.code)), asm.DWord), asm.Return()})
	}
	targets, err := ebpf.NewMapWithOptions(&ebpf.MapSpec{Type: ebpf.ProgramArray, KeySize: 4, ValueSize: 4, MaxEntries: 1}, ebpf.MapOptions{})
	must.Do(b, err)
	b.Cleanup(func() { targets.Close() })
	must.Do(b, targets.Put(uint32(0), target))
	data := c.frame.bytes(n, c.hook.iface)
	saved, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: uint32(len(data)), MaxEntries: 1})
	must.Do(b, err)
	b.Cleanup(func() { saved.Close() })
	must.Do(b, saved.Put(uint32(0), data))
	port := int16(14 + 20)
	if c.frame.src.Addr().Is6() {
		port = 14 + 40
	}
	code := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMapValue(asm.R3, saved.FD(), 0),
	}
	if c.fresh {
		code = append(code,
			asm.LoadMem(asm.R1, asm.R3, port, asm.Half),
			asm.Add.Imm(asm.R1, 1),
			asm.StoreMem(asm.R3, port, asm.R1, asm.Half))
	}
	store := asm.FnSkbStoreBytes
	if c.kind() == ebpf.XDP {
		store = asm.FnXdpStoreBytes
	}
	c.restore = n.loadProgram(b, "restore", c.kind(), append(code,
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Imm(asm.R2, 0),
		asm.Mov.Imm(asm.R4, int32(len(data))),
		asm.Mov.Imm(asm.R5, 0),
		store.Call(),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.LoadMapPtr(asm.R2, targets.FD()),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnTailCall.Call(),
		asm.Mov.Imm(asm.R0, actDrop),
		asm.Return()))
}

// kind is the type of the program to measure.
func (c *packetCase) kind() ebpf.ProgramType {
	if c.xdp || c.hook.prog == objects.XDPProgXdpFromNetwork {
		return ebpf.XDP
	}
	return ebpf.SchedCLS
}

func (n *packetNode) loadProgram(b *testing.B, name string, kind ebpf.ProgramType, code asm.Instructions) *ebpf.Program {
	b.Helper()
	spec := &ebpf.ProgramSpec{Name: name, Type: kind, Instructions: code, License: "GPL"}
	if kind == ebpf.XDP {
		spec.AttachType = ebpf.AttachXDP // a tail call needs the same one, and the same flag
		if n.objects.Features.XDPFrags {
			spec.Flags = unix.BPF_F_XDP_HAS_FRAGS
		}
	}
	p, err := ebpf.NewProgram(spec)
	must.Do(b, err)
	b.Cleanup(func() { p.Close() })
	return p
}

// forgetNew deletes the flows that have seen no answer.
func (n *packetNode) forgetNew(b *testing.B) {
	b.Helper()
	flows := n.m(objects.TCMapFlows)
	var fresh []objects.TCTuple
	must.Do(b, objects.EachFlow(b.Context(), flows, func(k *objects.TCTuple, f *objects.TCFlow, _ uint32) error {
		if objects.TCFlowState(f.State) == objects.TCFlowStateFLOW_NEW {
			fresh = append(fresh, *k)
		}
		return nil
	}))
	for _, k := range fresh {
		must.Do(b, flows.Delete(k))
	}
}

// measure returns the ns a packet of some calls, each with so many packets in a row.
func (n *packetNode) measure(b *testing.B, c *packetCase, calls int, row uint32) float64 {
	b.Helper()
	for range 5 {
		ns, err := n.measureOnce(b, c, calls, row)
		if err == nil {
			return ns
		}
		if c.keep == nil {
			b.Fatal(err)
		}
		n.freshened = time.Time{} // the second was over
	}
	b.Fatalf("%s: the flow is never fresh", c.name)
	return 0
}

func (n *packetNode) measureOnce(b *testing.B, c *packetCase, calls int, row uint32) (float64, error) {
	b.Helper()
	ctx := skBuff{Ifindex: uint32(n.ifindex[c.hook.iface])}
	ctx.IngressIfindex = ctx.Ifindex
	data := c.frame.bytes(n, c.hook.iface)
	var in any = ctx
	if c.kind() == ebpf.XDP {
		in = xdpMD{DataEnd: uint32(len(data)), IngressIfindex: ctx.Ifindex}
	}
	if c.fresh && !c.flood {
		n.forgetNew(b)
	}
	if c.keep != nil {
		c.keep()
	}
	before, err := c.restore.Stats()
	must.Do(b, err)
	n.do(func() {
		for range calls {
			var code uint32
			code, err = c.restore.Run(&ebpf.RunOptions{Data: data, Context: in, Repeat: row})
			if err == nil && int(int32(code)) != c.code {
				err = fmt.Errorf("%s: the program returned %d, want %d", c.name, int32(code), c.code)
			}
			if err != nil {
				return
			}
		}
	})
	if err != nil {
		return 0, err
	}
	after, err := c.restore.Stats()
	must.Do(b, err)
	return float64(after.Runtime-before.Runtime) / float64(after.RunCount-before.RunCount), nil
}
