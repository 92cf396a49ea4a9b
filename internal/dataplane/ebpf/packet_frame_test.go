package ebpf

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/test/must"
)

const (
	protoICMP   = 1
	protoTCP    = 6
	protoUDP    = 17
	protoICMPv6 = 58

	extHopByHop = 0
	extRouting  = 43
	extFragment = 44
	extDestOpts = 60
)

// frame describes a packet to send. The zero value of most fields is what is
// usual; checksums are right unless asked otherwise.
type frame struct {
	proto    uint8
	src, dst netip.AddrPort
	ttl      uint8  // 0: 64
	flags    string // of TCP, as tcpdump writes them: S, F, R, P, .
	seq, ack uint32
	scale    int // of a SYN's window, plus one; 0: without the option
	payload  []byte
	noSum    bool // UDP checksum 0
	df       bool
	id       uint32
	options  []byte      // of IPv4
	ext      []extension // of IPv6
	icmp     []byte      // type, code and what follows, for the ICMPs; sum not yet filled in; nil: an echo
	pad      int         // bytes behind the datagram
	ethDst   net.HardwareAddr
}

type extension struct {
	proto uint8
	body  []byte // from the header's third byte; 6 + 8n bytes
}

func ap(a netip.Addr, port uint16) netip.AddrPort { return netip.AddrPortFrom(a, port) }

func serialize(ls ...gopacket.SerializableLayer) []byte {
	buf := gopacket.NewSerializeBuffer()
	opts := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	if err := gopacket.SerializeLayers(buf, opts, ls...); err != nil {
		panic(err)
	}
	return append([]byte{}, buf.Bytes()...)
}

// transport gives the transport header and what follows.
func (f frame) transport() []byte {
	var pseudo gopacket.NetworkLayer = &layers.IPv4{
		SrcIP: f.src.Addr().AsSlice(), DstIP: f.dst.Addr().AsSlice(), Protocol: layers.IPProtocol(f.proto),
	}
	if f.src.Addr().Is6() {
		pseudo = &layers.IPv6{
			SrcIP: f.src.Addr().AsSlice(), DstIP: f.dst.Addr().AsSlice(), NextHeader: layers.IPProtocol(f.proto),
		}
	}
	switch f.proto {
	case protoTCP:
		tcp := &layers.TCP{
			SrcPort: layers.TCPPort(f.src.Port()), DstPort: layers.TCPPort(f.dst.Port()),
			Seq: f.seq, Ack: f.ack, Window: 1000,
			SYN: strings.Contains(f.flags, "S"), FIN: strings.Contains(f.flags, "F"),
			RST: strings.Contains(f.flags, "R"), PSH: strings.Contains(f.flags, "P"),
			ACK: strings.Contains(f.flags, "."),
		}
		if f.scale > 0 {
			tcp.Options = []layers.TCPOption{
				{OptionType: layers.TCPOptionKindMSS, OptionLength: 4, OptionData: []byte{5, 180}},
				{OptionType: layers.TCPOptionKindNop},
				{OptionType: layers.TCPOptionKindWindowScale, OptionLength: 3, OptionData: []byte{byte(f.scale - 1)}},
			}
		}
		_ = tcp.SetNetworkLayerForChecksum(pseudo)
		return serialize(tcp, gopacket.Payload(f.payload))
	case protoUDP:
		udp := &layers.UDP{SrcPort: layers.UDPPort(f.src.Port()), DstPort: layers.UDPPort(f.dst.Port())}
		_ = udp.SetNetworkLayerForChecksum(pseudo)
		b := serialize(udp, gopacket.Payload(f.payload))
		if f.noSum {
			b[6], b[7] = 0, 0
		}
		return b
	case protoICMP:
		b := f.icmpBytes()
		binary.BigEndian.PutUint16(b[2:], ^sum16(b, 0))
		return b
	case protoICMPv6:
		b := f.icmpBytes()
		binary.BigEndian.PutUint16(b[2:], ^sum16(b, pseudoSum(f.src.Addr(), f.dst.Addr(), protoICMPv6, len(b))))
		return b
	}
	return f.payload
}

// isICMP reports whether a protocol is the ICMP of a family.
func isICMP(proto uint8) bool { return proto == protoICMP || proto == protoICMPv6 }

// icmpBytes is an ICMP message without its sum. An echo has its identifier as a port: a request as the source's, a
// reply as the destination's.
func (f frame) icmpBytes() []byte {
	if f.icmp != nil {
		return append([]byte{}, f.icmp...)
	}
	typ, id := uint8(8), f.src.Port()
	if f.dst.Port() != 0 {
		typ, id = 0, f.dst.Port()
	}
	if f.proto == protoICMPv6 {
		typ = map[uint8]uint8{8: 128, 0: 129}[typ]
	}
	b := binary.BigEndian.AppendUint16([]byte{typ, 0, 0, 0}, id)
	return append(binary.BigEndian.AppendUint16(b, 1), f.payload...)
}

func (f frame) eth(n *packetNode, iface string, v6 bool) []byte {
	dst := f.ethDst
	if dst == nil {
		dst = n.mac[iface]
	}
	b := append(append([]byte{}, dst...), 2, 0, 0, 0, 0xfe, 0xfe)
	if v6 {
		return append(b, 0x86, 0xdd)
	}
	return append(b, 0x08, 0x00)
}

// bytes is the whole packet as one frame.
func (f frame) bytes(n *packetNode, iface string) []byte {
	return f.assemble(n, iface, f.transport(), 0, false)
}

// fragments cuts the packet: sizes are the bytes of transport header and
// payload in each fragment, multiples of 8; what is left is the last one's.
func (f frame) fragments(n *packetNode, iface string, sizes ...int) [][]byte {
	l4 := f.transport()
	var out [][]byte
	off := 0
	for _, size := range sizes {
		out = append(out, f.assemble(n, iface, l4[off:off+size], off, true))
		off += size
	}
	return append(out, f.assemble(n, iface, l4[off:], off, false))
}

func (f frame) assemble(n *packetNode, iface string, l4 []byte, off int, more bool) []byte {
	ttl := f.ttl
	if ttl == 0 {
		ttl = 64
	}
	v6 := f.src.Addr().Is6()
	b := f.eth(n, iface, v6)
	if v6 {
		b = append(b, f.ipv6(l4, ttl, off, more)...)
	} else {
		b = append(b, f.ipv4(l4, ttl, off, more)...)
	}
	for range f.pad {
		b = append(b, 0xa5)
	}
	return b
}

func (f frame) ipv4(l4 []byte, ttl uint8, off int, more bool) []byte {
	ip := &layers.IPv4{
		Version: 4, TTL: ttl, Protocol: layers.IPProtocol(f.proto), Id: uint16(f.id), FragOffset: uint16(off / 8),
		SrcIP: f.src.Addr().AsSlice(), DstIP: f.dst.Addr().AsSlice(),
	}
	if f.df {
		ip.Flags |= layers.IPv4DontFragment
	}
	if more {
		ip.Flags |= layers.IPv4MoreFragments
	}
	for o := f.options; len(o) > 0; o = o[o[1]:] {
		ip.Options = append(ip.Options, layers.IPv4Option{OptionType: o[0], OptionLength: o[1], OptionData: o[2:o[1]]})
	}
	return serialize(ip, gopacket.Payload(l4))
}

func (f frame) ipv6(l4 []byte, ttl uint8, off int, more bool) []byte {
	ext := f.ext
	if off > 0 || more {
		body := binary.BigEndian.AppendUint16(nil, uint16(off))
		if more {
			body[1] |= 1
		}
		ext = append(append([]extension{}, ext...), extension{extFragment, binary.BigEndian.AppendUint32(body, f.id)})
	}
	var chain []byte
	first := f.proto
	for i, e := range ext {
		next := f.proto
		if i+1 < len(ext) {
			next = ext[i+1].proto
		}
		if i == 0 {
			first = e.proto
		}
		units := byte((len(e.body)+2)/8 - 1)
		if e.proto == extFragment {
			units = 0
		}
		chain = append(append(chain, next, units), e.body...)
	}
	b := make([]byte, 40, 40+len(chain)+len(l4))
	b[0] = 0x60
	binary.BigEndian.PutUint16(b[4:], uint16(len(chain)+len(l4)))
	b[6], b[7] = first, ttl
	copy(b[8:], f.src.Addr().AsSlice())
	copy(b[24:], f.dst.Addr().AsSlice())
	return append(append(b, chain...), l4...)
}

// back is the answer to a packet as its receiver saw it.
func back(v *view, flags string, payload []byte) frame {
	return frame{proto: v.proto, src: v.dst, dst: v.src, flags: flags, payload: payload, seq: v.ack, ack: v.seq}
}

// icmpError is an error about a packet, given from its IP header on. limit
// cuts the quote; 0 leaves it whole. word is the second word of the header.
func icmpError(from netip.Addr, typ, code uint8, word uint32, ip []byte, limit int) frame {
	if limit > 0 && len(ip) > limit {
		ip = ip[:limit]
	}
	f := frame{proto: protoICMP, src: ap(from, 0)}
	var dst netip.Addr
	if from.Is6() {
		f.proto = protoICMPv6
		dst = netip.AddrFrom16([16]byte(ip[8:24]))
	} else {
		dst = netip.AddrFrom4([4]byte(ip[12:16]))
	}
	f.dst = ap(dst, 0)
	f.icmp = binary.BigEndian.AppendUint32([]byte{typ, code, 0, 0}, word)
	f.icmp = append(f.icmp, ip...)
	return f
}

// result is what became of a frame.
type result struct {
	code     int
	out      []byte
	verdicts map[objects.TCVerdict]uint64 // those that changed, by how much
	v        *view                        // of out; nil if it cannot be read
}

// send runs a frame and checks every sum of what comes out.
func (n *packetNode) send(t testing.TB, hook at, f frame) result {
	t.Helper()
	return n.sendRaw(t, hook, f.bytes(n, hook.iface))
}

func (n *packetNode) sendRaw(t testing.TB, hook at, in []byte) result {
	t.Helper()
	before := n.countersNow(t)
	code, out, err := n.run(hook, in, 0, n.sumFlag(in))
	must.Do(t, err)
	after := n.countersNow(t)
	r := result{code: code, out: out, verdicts: map[objects.TCVerdict]uint64{}}
	for i := range after {
		if d := after[i] - before[i]; d > 0 {
			r.verdicts[objects.TCVerdict(i)] = d
		}
	}
	if checkSums(in) == nil {
		if err := checkSums(out); err != nil {
			t.Errorf("packet out of %s: %v\n in  %x\n out %x", hook.prog, err, in, out)
		}
	}
	r.v, _ = decode(out)
	return r
}

// sumFlag asks the kernel to check CHECKSUM_COMPLETE too. That is let go for a
// datagram without a sum, whose ports then count for nothing.
func (n *packetNode) sumFlag(in []byte) uint32 {
	if v, err := decode(in); !n.checksComplete || err == nil && v.proto == protoUDP && v.sum == 0 {
		return 0
	}
	return testChecksumComplete
}
