package ebpf

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"testing"

	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// sctpChunks are the types of the first chunk of SCTP packets (RFC 9260, 3.2) by frame.flags:
// packets with the role of a TCP segment have its flags, and DATA has all others. T is the flag
// of that name.
var sctpChunks = map[string]byte{
	"S": 1, "S.": 2, ".": 0, "R": 6, "RT": 6, "cookie-echo": 10, "cookie-ack": 11,
	"heartbeat": 4, "shutdown": 7, "shutdown-ack": 8, "shutdown-complete": 14, "shutdown-completeT": 14,
}

// The initiate tags that frames have if they name none.
const (
	clientTag = 0xc11e0001
	serverTag = 0x5e4ffe42
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// sctp builds an SCTP packet with one chunk. As with TCP, seq is the sender's number, the
// initiate tag of INIT and INIT ACK, and ack the receiver's, the verification tag.
func (f frame) sctp() []byte {
	kind := sctpChunks[f.flags]
	b := binary.BigEndian.AppendUint16(nil, f.src.Port())
	b = binary.BigEndian.AppendUint16(b, f.dst.Port())
	tag := f.ack
	if kind == 1 {
		tag = 0
	}
	b = binary.BigEndian.AppendUint32(b, tag)
	b = append(b, 0, 0, 0, 0, kind, 0, 0, 0)
	if f.flags[max(len(f.flags)-1, 0):] == "T" {
		b[13] = 1
	}
	if kind == 1 || kind == 2 {
		init := f.seq
		if init == 0 {
			init = map[byte]uint32{1: clientTag, 2: serverTag}[kind]
		}
		b = binary.BigEndian.AppendUint32(b, init)
		b = append(b, 0, 1, 0, 0, 0, 10, 0, 10, 0, 0, 0, 1)
	}
	b = append(b, f.payload...)
	binary.BigEndian.PutUint16(b[14:], uint16(len(b)-12))
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	if !f.noSum {
		setCRC(b)
	}
	return b
}

func setCRC(b []byte) {
	copy(b[8:12], []byte{0, 0, 0, 0})
	binary.LittleEndian.PutUint32(b[8:], crc32.Checksum(b, castagnoli))
}

// checkCRC checks the CRC of an SCTP packet. In a quote it may be the one of the packet as it
// was sent: no receiver can check it.
func checkCRC(b []byte, quoted bool) error {
	if quoted {
		return nil
	}
	c := append([]byte{}, b...)
	setCRC(c)
	if have, want := binary.LittleEndian.Uint32(b[8:]), binary.LittleEndian.Uint32(c[8:]); have != want {
		return fmt.Errorf("CRC32c %08x, want %08x", have, want)
	}
	return nil
}

// forgetCRC copies the CRC that a quote has, if it is of SCTP: it stays that of the packet as
// it was received.
func forgetCRC(want, quoted []byte) {
	proto, l4 := want[9], 20
	if want[0]>>4 == 6 {
		proto, l4 = want[6], 40
	}
	if proto == protoSCTP && len(quoted) > l4+8 {
		copy(want[l4+8:l4+12], quoted[l4+8:])
	}
}

func (v *view) sctp(l *layers.SCTP) {
	v.proto, v.src, v.dst = protoSCTP, ap(v.src.Addr(), uint16(l.SrcPort)), ap(v.dst.Addr(), uint16(l.DstPort))
	v.ack, v.flags = l.VerificationTag, "."
	if len(l.Payload) < 4 {
		return
	}
	for _, flags := range []string{"S", "S.", "R"} {
		if sctpChunks[flags] == l.Payload[0] {
			v.flags = flags
		}
	}
	v.payload = l.Payload[4:]
	if v.flags[0] == 'S' && len(l.Payload) >= 20 {
		v.seq, v.payload = binary.BigEndian.Uint32(l.Payload[4:]), l.Payload[20:]
	}
}

// TestPacketSCTP runs the tests of TCP and UDP that ask for nothing but a transport, with SCTP.
func TestPacketSCTP(t *testing.T) {
	n := newPacketNode(t)
	each := func(f func(*testing.T, *plan, uint8)) func(*testing.T) {
		return func(t *testing.T) {
			eachFamily(t, n, func(t *testing.T, p *plan) { f(t, p, protoSCTP) })
		}
	}
	t.Run("Translation", func(t *testing.T) {
		t.Run("EndpointHere", each(n.endpointHere))
		t.Run("EndpointElsewhere", each(n.endpointElsewhere))
		t.Run("EndpointBeyondPodNetwork", each(n.beyondPodNetwork))
		t.Run("Hairpin", each(n.hairpin))
		t.Run("OneClientPortTwoFrontends", each(n.sharedClientPort))
		t.Run("MasqueradeAll", each(n.masqueradeAll))
		t.Run("ThroughTheStack", each(n.throughTheStack))
		t.Run("LongHeaders", each(n.longHeaders))
		t.Run("FrameLongerThanPacket", each(n.padded))
	})
	t.Run("Policy", func(t *testing.T) {
		t.Run("DropRoute", each(n.dropRoute))
		t.Run("LocalRoute", each(n.localRoute))
		t.Run("SourceRanges", each(n.sourceRanges))
		t.Run("NodePortAddresses", each(n.nodePortAddresses))
		t.Run("Spread", each(n.spread))
		t.Run("NoSNATAddress", each(n.noSNATAddress))
		t.Run("IPsec", each(n.ipsec))
	})
	t.Run("Source", func(t *testing.T) {
		t.Run("OwnAddress", each(n.ownAddress))
		t.Run("OtherDevice", each(n.otherDevice))
		t.Run("Martian", each(n.martianSources))
		t.Run("WrongNode", each(n.wrongNode))
		t.Run("UnknownPod", each(n.unknownPod))
	})
	t.Run("ICMPErrors", func(t *testing.T) {
		t.Run("EndpointHere", each(func(t *testing.T, p *plan, proto uint8) { n.relayedErrors(t, p, proto, here) }))
		t.Run("EndpointElsewhere", each(func(t *testing.T, p *plan, proto uint8) { n.relayedErrors(t, p, proto, elsewhere) }))
		t.Run("ThroughTheStack", each(n.errorsBehindStack))
		t.Run("QuoteTooShort", each(n.shortQuotes))
	})
	t.Run("StackTakesPort", each(n.stackTakesPort))
	t.Run("Untracked", func(t *testing.T) {
		eachFamily(t, n, n.sctpTracked)
		n.policies.sctp = true
		each(n.untrackedPeers)(t)
	})
	t.Run("TinyFragments", each(n.fragmentsTiny))
	n.checksComplete = false // see TestPacketAnswers
	t.Run("Answers", func(t *testing.T) {
		t.Run("TooBig", each(n.answersTooBig))
		t.Run("TTL", each(n.answersTTL))
	})
}

// sctpTracked: while another dataplane serves SCTP, its packets do not bypass netfilter.
func (n *packetNode) sctpTracked(t *testing.T, p *plan) {
	w := newPolicyWorld(t, n, p)
	w.set(t, cachePolicy("a", clientsOnly()))
	n.passes(t, "TCP", inTun0, protoTCP, ap(p.far, 4000), ap(p.pod1, cachePort), nextHopPod, 0)
	n.stays(t, "SCTP", inTun0, protoSCTP, ap(p.far, 4000), ap(p.pod1, cachePort))
}

// TestPacketSCTPChecksum is about the CRC32c, which covers the ports and no address.
func TestPacketSCTPChecksum(t *testing.T) {
	n := newPacketNode(t)
	t.Run("AnyLength", func(t *testing.T) { eachFamily(t, n, n.sctpLengths) })
	t.Run("Corrupt", func(t *testing.T) { eachFamily(t, n, n.sctpCorrupt) })
	t.Run("Powers", sctpPowers)
	t.Run("Fragments", func(t *testing.T) { eachFamily(t, n, n.sctpFragments) })
	t.Run("Malformed", func(t *testing.T) { eachFamily(t, n, n.sctpMalformed) })
	t.Run("GSO", func(t *testing.T) { eachFamily(t, n, n.sctpGSO) })
}

// sctpLengths: send checks the CRC of each packet out.
func (n *packetNode) sctpLengths(t *testing.T, p *plan) {
	n.serve(t, service(p, protoSCTP, endpoint(p.pod1, 8080, here)))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	n.send(t, inEth0, frame{proto: protoSCTP, src: client, dst: front, flags: "S"}).wantPath(t, client, ap(p.pod1, 8080))
	for _, size := range []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 100, 255, 256, 1000, 1023, 1024, 2047, 2048, 3000} {
		payload := make([]byte, size)
		for i := range payload {
			payload[i] = byte(i * 7)
		}
		f := frame{proto: protoSCTP, src: client, dst: front, flags: ".", ack: serverTag, payload: payload}
		n.send(t, inEth0, f).wantPath(t, client, ap(p.pod1, 8080))
		// RFC 9260 pads a packet to four bytes. The programs do not depend on it.
		b := f.bytes(n, "eth0")
		if b = b[:len(b)-3]; len(b) > 14+40+16 {
			setLength(b)
			setCRC(transportOf(b))
			n.sendRaw(t, inEth0, b).wantPath(t, client, ap(p.pod1, 8080))
		}
	}
}

// sctpCorrupt: a packet that was damaged on its way is not made valid.
func (n *packetNode) sctpCorrupt(t *testing.T, p *plan) {
	n.serve(t, service(p, protoSCTP, endpoint(p.pod1, 8080, here)))
	b := frame{proto: protoSCTP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: "S"}.bytes(n, "eth0")
	b[len(b)-1] ^= 1
	r := n.sendRaw(t, inEth0, b)
	r.wantPath(t, ap(p.client, 40000), ap(p.pod1, 8080))
	if err := checkCRC(transportOf(r.out), false); err == nil {
		t.Error("the CRC of a damaged packet is right after the translation")
	}
}

// sctpPowers compares crc32c_powers of bpf/lib/act/crc32c.h with a computation. A test packet
// is too short for the last ones.
func sctpPowers(t *testing.T) {
	spec, err := loadTc()
	ok(t, err)
	var want []byte
	for power, i := uint32(1<<23), 0; i < 16; i++ {
		want = binary.LittleEndian.AppendUint32(want, power)
		power = multiplyCRC(power, power)
	}
	for _, m := range spec.Maps {
		for _, kv := range m.Contents {
			if b, isBytes := kv.Value.([]byte); isBytes && bytes.Contains(b, want) {
				return
			}
		}
	}
	t.Errorf("no map of constants has the powers %x", want)
}

// multiplyCRC multiplies two polynomials modulo that of CRC32c; x^31 is the lowest bit.
func multiplyCRC(a, b uint32) (product uint32) {
	for ; a != 0; a <<= 1 {
		if a>>31 == 1 {
			product ^= b
		}
		b = b>>1 ^ crc32.Castagnoli*(b&1)
	}
	return product
}

// sctpFragments: later fragments follow the first one. Its port can change if the chunk that
// it cuts tells the length of the packet, or if the CRC need not change.
func (n *packetNode) sctpFragments(t *testing.T, p *plan) {
	payload := bytes.Repeat([]byte("0123456789abcde"), 100)
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	f := frame{proto: protoSCTP, src: client, dst: front, flags: "S", payload: payload, id: 77}
	n.serve(t, service(p, protoSCTP, endpoint(p.pod1, 80, here)))
	v := n.sendFragments(t, inEth0, f.fragments(n, "eth0", 512, 512), tcVerdictFLOW_CREATED)
	if v.dst != ap(p.pod1, 80) {
		t.Errorf("fragments went to %s", v.dst)
	}
	n.forget(t)
	n.serve(t, service(p, protoSCTP, endpoint(p.pod1, 8080, here)))
	v = n.sendFragments(t, inEth0, f.fragments(n, "eth0", 512, 512), tcVerdictFLOW_CREATED)
	if v.dst != ap(p.pod1, 8080) {
		t.Errorf("fragments went to %s", v.dst)
	}
	// Other chunks may follow the one that ends with the fragment.
	first := f.fragments(n, "eth0", 512, 512)[0]
	binary.BigEndian.PutUint16(transportOf(first)[14:], 500)
	n.sendRaw(t, inEth0, first).want(t, actDrop, tcVerdictDROP_REWRITE)
}

// sctpMalformed: the common header and a chunk must be whole, and an INIT has a tag.
func (n *packetNode) sctpMalformed(t *testing.T, p *plan) {
	n.serve(t, service(p, protoSCTP, endpoint(p.pod1, 8080, here)))
	f := frame{proto: protoSCTP, src: ap(p.client, 40000), dst: ap(p.clusterIP, 80), flags: "S"}
	b := f.bytes(n, "eth0")
	l4 := len(b) - len(f.transport())
	for size := l4; size < len(b); size++ {
		cut := bytes.Clone(b[:size])
		setLength(cut)
		if size < l4+20 {
			n.untouched(t, fmt.Sprintf("%d bytes", size-l4), inEth0, cut, tcVerdictPASS_MALFORMED)
			n.untouched(t, fmt.Sprintf("%d bytes, padded", size-l4), inEth0, append(cut, b[size:]...), tcVerdictPASS_MALFORMED)
		} else if r := n.sendRaw(t, inEth0, cut); r.code != actRedirect {
			t.Errorf("%d bytes: code %d, %s", size-l4, r.code, verdictList(r.verdicts))
		}
	}
	n.forget(t)
	noTag, tagged := bytes.Clone(b), bytes.Clone(b)
	copy(noTag[l4+16:], []byte{0, 0, 0, 0})
	tagged[l4+7] = 1
	n.untouched(t, "an INIT without an initiate tag", inEth0, noTag, tcVerdictPASS_MALFORMED)
	n.untouched(t, "an INIT with a verification tag", inEth0, tagged, tcVerdictPASS_CONNTRACK)
}

// sctpGSO: the length of a GSO packet is not that of a packet on the wire.
func (n *packetNode) sctpGSO(t *testing.T, p *plan) {
	n.serve(t, service(p, protoSCTP, endpoint(p.far, 8080, elsewhere)))
	client, front := ap(p.client, 40000), ap(p.clusterIP, 80)
	n.send(t, inEth0, frame{proto: protoSCTP, src: client, dst: front, flags: "S"}).
		want(t, actRedirect, tcVerdictFLOW_CREATED, tcVerdictTRANSLATED_DIRECT)
	b := frame{proto: protoSCTP, src: client, dst: front, flags: ".", df: true, payload: make([]byte, 2800)}.bytes(n, "eth0")
	const byFrags = 0xffff // GSO_BY_FRAGS
	for range 20 {
		code, out, err := n.run(inEth0, b, byFrags, 0)
		ok(t, err)
		v, err := decode(out)
		if err != nil || code != actRedirect || v.dst != ap(p.far, 8080) {
			t.Fatalf("code %d, %+v, %v, want it forwarded", code, v, err)
		}
		// The second one of a second uses the flow's next hop.
		if v.ethDst.String() == "02:00:00:00:09:09" {
			return
		}
	}
	t.Error("no GSO packet uses its flow's next hop")
}

// TestPacketSCTPOffload sends packets through devices. A pod's stack leaves the CRC to the
// device (CHECKSUM_PARTIAL), with 0 in its place. It must stay 0, because the kernel sums
// over it (skb_crc32c_csum_help). A packet that has its CRC gets a new one.
func TestPacketSCTPOffload(t *testing.T) {
	n := newPacketNode(t)
	n.onThread(t, func() error { return n.attachByFilter("pod1", tcProgFromPod) })
	eachFamily(t, n, func(t *testing.T, p *plan) {
		n.serve(t, service(p, protoSCTP, endpoint(p.far, 8080, elsewhere)))
		var in, out int
		n.onThread(t, func() (err error) {
			if in, err = packetSocket("far-pod1"); err == nil {
				out, err = packetSocket("far-tun0")
			}
			return err
		})
		defer unix.Close(in)
		defer unix.Close(out)
		for i, partial := range []bool{false, true, true} {
			f := frame{proto: protoSCTP, src: ap(p.pod1, uint16(40000+i)), dst: ap(p.clusterIP, 80), flags: "S", noSum: partial}
			header := make([]byte, virtioNetHeader)
			b := f.bytes(n, "pod1")
			if partial {
				header[0] = virtioNeedsChecksum
				binary.NativeEndian.PutUint16(header[6:], uint16(len(b)-len(f.transport())))
				binary.NativeEndian.PutUint16(header[8:], 8)
			}
			_, err := unix.Write(in, append(header, b...))
			ok(t, err)
			header, v := receiveSCTP(t, out)
			if v.src != f.src || v.dst != ap(p.far, 8080) {
				t.Fatalf("the packet runs %s -> %s", v.src, v.dst)
			}
			if needs := header[0]&virtioNeedsChecksum != 0; needs != partial {
				t.Errorf("CRC missing: %v, want %v", needs, partial)
			}
			crc := transportOf(append(make([]byte, 14), v.ip...))
			if err := checkCRC(crc, false); partial && !bytes.Equal(crc[8:12], make([]byte, 4)) || !partial && err != nil {
				t.Errorf("CRC missing: %v; CRC %x, %v", partial, crc[8:12], err)
			}
		}
	})
}

// struct virtio_net_hdr, which packet sockets use to show the state of a checksum.
const (
	virtioNetHeader     = 10
	virtioNeedsChecksum = 1
)

// packetSocket opens a socket for the frames of a device, with their virtio_net_hdr.
func packetSocket(iface string) (int, error) {
	link, err := netlink.LinkByName(iface)
	if err != nil {
		return 0, err
	}
	const all = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, all)
	if err != nil {
		return 0, err
	}
	return fd, errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1),
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10}),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: link.Attrs().Index}))
}

// receiveSCTP waits for a frame of SCTP.
func receiveSCTP(t *testing.T, fd int) (header []byte, v *view) {
	t.Helper()
	b := make([]byte, 2048)
	for {
		size, err := unix.Read(fd, b)
		if err != nil {
			t.Fatalf("no packet of SCTP arrives: %v", err)
		}
		if v, err := decode(b[virtioNetHeader:size]); err == nil && v.proto == protoSCTP {
			return b[:virtioNetHeader], v
		}
	}
}

// attachByFilter attaches a program to the ingress of a device, as before Linux 6.6.
func (n *packetNode) attachByFilter(iface, program string) error {
	n.live = true
	clsact := netlink.QdiscAttrs{LinkIndex: n.ifindex[iface], Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}
	if err := netlink.QdiscAdd(&netlink.GenericQdisc{QdiscAttrs: clsact, QdiscType: "clsact"}); err != nil {
		return err
	}
	return netlink.FilterAdd(&netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: n.ifindex[iface], Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL,
		},
		Fd: n.objects.programs[program].FD(), Name: program, DirectAction: true,
	})
}
