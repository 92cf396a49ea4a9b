package ebpf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// randomPackets is how many random packets each program is given. With -short it is a fifth: the
// rest are more of the same generator, for faults that only a rare packet finds.
func randomPackets() int {
	if testing.Short() {
		return 20_000
	}
	return 100_000
}

// longPayload, with up to 99 bytes more, makes packets about as long as the MTU of tun0.
const longPayload = mtuTun0 - 60

// zoo is a node with Services of every sort.
func (n *packetNode) zoo(t testing.TB) {
	t.Helper()
	var ports []*intent.ServicePort
	for _, p := range plans {
		for _, proto := range []uint8{protoTCP, protoUDP} {
			policed := endpoint(p.pod2, 9090, here)
			policed.MustTraverseNetfilter = true
			sp := service(p, proto, endpoint(p.pod1, 8080, here), policed, endpoint(p.far, 8080, elsewhere), endpoint(p.far2, 8080, elsewhere))
			sp.Affinity = time.Duration(proto-protoTCP) * time.Second
			reject := &intent.ServicePort{ID: sp.ID, Frontends: []intent.Frontend{
				{Kind: intent.ClusterIP, Addr: p.clusterIP, Port: 81, ExternalRoute: intent.Reject, InternalRoute: intent.Drop},
				{Kind: intent.NodePort, Port: 30081, ExternalRoute: intent.Drop, InternalRoute: intent.Reject},
			}}
			reject.ID.Number = 81
			ports = append(ports, sp, reject)
		}
	}
	n.serve(t, ports...)
}

// generator makes packets: good ones, answers to what came out, and both mutated.
type generator struct {
	*rand.Rand
	n    *packetNode
	hook at
	seen [][]byte // packets that came out translated
}

func pick[T any](r *rand.Rand, list ...T) T { return list[r.IntN(len(list))] }

func (g *generator) frame() frame {
	p := pick(g.Rand, plans["IPv4"], plans["IPv6"])
	f := frame{
		proto: pick(g.Rand, uint8(protoTCP), protoUDP),
		src:   ap(pick(g.Rand, p.client, p.client2, p.pod1, p.pod2, p.far, p.router, p.eth0), pick(g.Rand, uint16(g.IntN(65536)), 8080, 40000)),
		dst: ap(pick(g.Rand, p.clusterIP, p.clusterIP, p.externalIP, p.eth0, p.tun0, p.pod1, p.far, p.client),
			pick(g.Rand, uint16(80), 80, 81, 30080, 30081, 8080, uint16(g.IntN(65536)))),
		flags: pick(g.Rand, "S", "S.", ".", "P.", "F.", "R", "FSRP.", ""), seq: g.Uint32(), ack: g.Uint32(),
		ttl: pick(g.Rand, uint8(64), 64, 1, 2), df: g.IntN(2) > 0, id: uint32(g.IntN(4)),
		payload: make([]byte, pick(g.Rand, 0, 1, g.IntN(64), g.IntN(64), g.IntN(1440), longPayload+g.IntN(100))),
	}
	if g.IntN(50) == 0 {
		f.noSum = p.family == model.IPv4
	}
	if g.IntN(8) == 0 {
		f.options = []byte{7, 7, 4, 0, 0, 0, 0}
		if p.family == model.IPv6 {
			f.ext = []extension{{pick(g.Rand, uint8(extHopByHop), extDestOpts, extRouting), []byte{1, 0, 0, 0, 0, 0}}}
		}
	}
	return f
}

// next is one more packet.
func (g *generator) next() []byte {
	var b []byte
	switch kind := g.IntN(20); {
	case kind < 8 || len(g.seen) == 0:
		b = g.frame().bytes(g.n, g.hook.iface)
	case kind < 10:
		f := g.frame()
		f.payload = make([]byte, 64)
		b = pick(g.Rand, f.fragments(g.n, g.hook.iface, 24, 24)...)
	case kind < 15:
		b = g.answer(pick(g.Rand, g.seen...))
	case kind < 19:
		b = g.error(pick(g.Rand, g.seen...))
	default:
		b = make([]byte, 15+g.IntN(200))
		for i := range b {
			b[i] = byte(g.Uint32())
		}
		copy(b, g.n.mac[g.hook.iface])
	}
	if g.IntN(2) == 0 {
		b = g.mutate(b)
	}
	return b
}

func (g *generator) answer(seen []byte) []byte {
	v, err := decode(seen)
	if err != nil || v.src.Port() == 0 {
		return g.frame().bytes(g.n, g.hook.iface)
	}
	return back(v, pick(g.Rand, "S.", ".", "F.", "R", "cookie-echo", "cookie-ack", "shutdown-ack"),
		make([]byte, g.IntN(50))).bytes(g.n, g.hook.iface)
}

func (g *generator) error(seen []byte) []byte {
	p := plans["IPv4"]
	if seen[14]>>4 == 6 {
		p = plans["IPv6"]
	}
	from := pick(g.Rand, p.router, p.far, p.pod1, p.client)
	return pick(g.Rand, errorKinds...).about(p, from, seen[14:], pick(g.Rand, 0, 28, 48, 60, 20+g.IntN(60))).bytes(g.n, g.hook.iface)
}

// mutate damages some bytes, but for the addresses of the frame.
func (g *generator) mutate(b []byte) []byte {
	b = bytes.Clone(b)
	for range 1 + g.IntN(4) {
		switch g.IntN(8) {
		case 0:
			b = b[:15+g.IntN(len(b)-14)]
		case 1:
			b = append(b, make([]byte, g.IntN(40))...)
		default:
			// The headers are worth more than the payload.
			i := 12 + g.IntN(min(len(b)-12, 80))
			b[i] = pick(g.Rand, byte(g.Uint32()), 0, 0xff, b[i]^1<<g.IntN(8))
		}
	}
	if g.IntN(2) == 0 {
		repairSums(b)
	}
	return b
}

// repairSums makes the sums right, so that the damage is all there is to see.
func repairSums(b []byte) {
	ip := b[14:]
	switch {
	case len(ip) >= 20 && ip[0]>>4 == 4 && binary.BigEndian.Uint16(b[12:]) == 0x0800:
		ihl := int(ip[0]&15) * 4
		total := int(binary.BigEndian.Uint16(ip[2:]))
		if ihl < 20 || ihl > len(ip) {
			return
		}
		ip[10], ip[11] = 0, 0
		binary.BigEndian.PutUint16(ip[10:], ^sum16(ip[:ihl], 0))
		if total >= ihl && total <= len(ip) {
			repairTransport(netip.AddrFrom4([4]byte(ip[12:16])), netip.AddrFrom4([4]byte(ip[16:20])), ip[9], ip[ihl:total])
		}
	case len(ip) >= 40 && ip[0]>>4 == 6 && binary.BigEndian.Uint16(b[12:]) == 0x86dd:
		if total := 40 + int(binary.BigEndian.Uint16(ip[4:])); total <= len(ip) {
			repairTransport(netip.AddrFrom16([16]byte(ip[8:24])), netip.AddrFrom16([16]byte(ip[24:40])), ip[6], ip[40:total])
		}
	}
}

func repairTransport(src, dst netip.Addr, proto uint8, b []byte) {
	off, start := 0, pseudoSum(src, dst, proto, len(b))
	switch {
	case proto == protoTCP && len(b) >= 20:
		off = 16
	case proto == protoUDP && len(b) >= 8 && int(binary.BigEndian.Uint16(b[4:])) == len(b):
		off = 6
	case proto == protoICMP && len(b) >= 8:
		off, start = 2, 0
	case proto == protoICMPv6 && len(b) >= 8:
		off = 2
	default:
		return
	}
	b[off], b[off+1] = 0, 0
	s := ^sum16(b, start)
	if s == 0 && proto == protoUDP {
		s = 0xffff
	}
	binary.BigEndian.PutUint16(b[off:], s)
}

// notes are counted beside the verdict on a packet.
var notes = []objects.TCVerdict{objects.TCVerdictFLOW_CREATED, objects.TCVerdictFLOW_REVIVED, objects.TCVerdictFLOW_CONFLICT,
	objects.TCVerdictFLOW_REPLACED, objects.TCVerdictFLOW_OVER_SHARE}

// invariants gives a packet to a program and checks what must hold for any. It
// returns what came out and the verdict.
func (n *packetNode) invariants(t testing.TB, hook at, in []byte) ([]byte, objects.TCVerdict) {
	t.Helper()
	before := n.countersNow(t)
	whole := checkSums(in) == nil
	flags := uint32(0)
	if whole {
		flags = n.sumFlag(in)
	}
	code, out, err := n.run(hook, in, 0, flags)
	verdict, count := n.verdictSince(t, before)
	if errors.Is(err, unix.EBADMSG) && answers(verdict) {
		return nil, verdict // see TestPacketAnswers
	}
	fail := func(what string) {
		t.Errorf("%s: %s\n verdict %s, code %d\n in  %x\n out %x", hook.prog, what, verdictName(verdict), code, in, out)
	}
	switch {
	case errors.Is(err, unix.EINVAL) && tooShort(in):
	case err != nil:
		fail(err.Error())
	case count == 0 && !n.isOurs(hook, in):
		if code != actNext || !bytes.Equal(in, out) {
			fail("a frame for others was touched")
		}
	case count != 1:
		fail(fmt.Sprintf("%d verdicts on one packet", count))
	case !slices.Contains(codes(verdict), code):
		fail("code does not fit the verdict")
	case passes(verdict) && !bytes.Equal(in, out):
		fail("a packet left alone was changed")
	case whole && code != actDrop && checkSums(out) != nil:
		fail(checkSums(out).Error())
	case !answers(verdict) && len(out) != len(in):
		fail("length changed")
	}
	return out, verdict
}

// verdictSince gives the verdict and how many there are; notes do not count.
func (n *packetNode) verdictSince(t testing.TB, before []uint64) (verdict objects.TCVerdict, count uint64) {
	t.Helper()
	for i, v := range n.countersNow(t) {
		if d := v - before[i]; d > 0 && !slices.Contains(notes, objects.TCVerdict(i)) {
			verdict, count = objects.TCVerdict(i), count+d
		}
	}
	return verdict, count
}

// isOurs: frames for others are not counted (see framesForOthers).
func (n *packetNode) isOurs(hook at, in []byte) bool {
	switch hook.prog {
	case objects.TCProgFromNetwork:
		return bytes.Equal(in[:6], n.mac[hook.iface])
	case objects.TCProgFromPod:
		return in[0]&1 == 0
	}
	return true
}

func passes(v objects.TCVerdict) bool {
	return strings.HasPrefix(verdictName(v), "pass_")
}

func answers(v objects.TCVerdict) bool {
	name := verdictName(v)
	return strings.HasPrefix(name, "rejected_") || strings.HasPrefix(name, "answered_")
}

// codes says how a packet with a verdict leaves.
func codes(v objects.TCVerdict) []int {
	switch {
	case passes(v), v == objects.TCVerdictTRANSLATED_STACK, v == objects.TCVerdictTRANSLATED_FROM_STACK:
		return []int{actNext}
	case v == objects.TCVerdictTRANSLATED_ICMP:
		return []int{actNext, actRedirect}
	case strings.HasPrefix(verdictName(v), "drop_"):
		return []int{actDrop}
	}
	return []int{actRedirect}
}

// allHooks is every program, at interfaces where it would be.
var allHooks = []at{inEth0, outEth0, inPod1, outPod1}

// TestPacketRandom gives each program many packets that no stack would send.
func TestPacketRandom(t *testing.T) {
	n := newPacketNode(t)
	n.enter(t)
	n.zoo(t)
	verdicts := map[objects.TCVerdict]int{}
	for i, hook := range allHooks {
		g := &generator{Rand: rand.New(rand.NewPCG(1, uint64(i))), n: n, hook: hook}
		for range randomPackets() {
			if t.Failed() {
				return
			}
			in := g.next()
			out, verdict := n.invariants(t, hook, in)
			verdicts[verdict]++
			// Egress and ingress take turns, or one would see no flows.
			if hook != inEth0 && g.IntN(8) == 0 {
				in = g.frame().bytes(n, "eth0")
				out, verdict = n.invariants(t, inEth0, in)
			}
			if isTranslated(verdict) && len(out) > 14 {
				g.remember(out)
			}
		}
	}
	for _, v := range []objects.TCVerdict{
		objects.TCVerdictPASS_OTHER, objects.TCVerdictPASS_MALFORMED, objects.TCVerdictPASS_FRAGMENT, objects.TCVerdictTRANSLATED_DIRECT,
		objects.TCVerdictTRANSLATED_STACK, objects.TCVerdictTRANSLATED_FROM_STACK, objects.TCVerdictTRANSLATED_ICMP,
		objects.TCVerdictREJECTED_RST,
		objects.TCVerdictREJECTED_ICMP, objects.TCVerdictANSWERED_TOO_BIG, objects.TCVerdictANSWERED_TTL, objects.TCVerdictDROP_POLICY_LOCAL,
		objects.TCVerdictDROP_REJECTED_SILENT, objects.TCVerdictPASSED_DIRECT,
	} {
		if verdicts[v] == 0 {
			t.Errorf("no random packet ended as %s: the test does not reach that far", verdictName(v))
		}
	}
	for v, count := range verdicts {
		t.Logf("%-22s %d", verdictName(v), count)
	}
}

func isTranslated(v objects.TCVerdict) bool {
	return v >= objects.TCVerdictTRANSLATED_DIRECT && v <= objects.TCVerdictTRANSLATED_ICMP
}

// remember keeps the last few translated packets.
func (g *generator) remember(out []byte) {
	if len(g.seen) < 32 {
		g.seen = append(g.seen, out)
		return
	}
	g.seen[g.IntN(len(g.seen))] = out
}

// FuzzPrograms looks for a packet that breaks an invariant. Sums are made right
// with repair, so that mutation gets past them.
func FuzzPrograms(f *testing.F) {
	n := newPacketNode(f)
	for _, p := range plans {
		for _, b := range n.samples(f, p) {
			for i := range allHooks {
				f.Add(uint8(i), true, b)
			}
		}
	}
	n.zoo(f)
	f.Fuzz(func(t *testing.T, which uint8, repair bool, b []byte) {
		hook := allHooks[int(which)%len(allHooks)]
		if len(b) < 15 || len(b) > 3000 {
			return // no frame, or more than BPF_PROG_RUN takes
		}
		b = bytes.Clone(b)
		copy(b, n.mac[hook.iface])
		if repair {
			repairSums(b)
		}
		n.invariants(t, hook, b)
	})
}
