package ebpf

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
)

// view is a packet as its receiver reads it.
type view struct {
	ethDst, ethSrc net.HardwareAddr
	proto          uint8
	src, dst       netip.AddrPort
	ttl            uint8
	flags          string
	seq, ack       uint32
	sum            uint16
	payload        []byte
	ip             []byte // from the IP header on
	// Of ICMP:
	icmpType, icmpCode uint8
	icmpWord           uint32
	quoted             []byte // from the quoted IP header on
}

// decode reads a frame with gopacket.
func decode(b []byte) (*view, error) {
	pkt := gopacket.NewPacket(b, layers.LayerTypeEthernet, gopacket.Default)
	eth, isEth := pkt.LinkLayer().(*layers.Ethernet)
	if !isEth {
		return nil, errors.New("no Ethernet frame")
	}
	v := &view{ethDst: eth.DstMAC, ethSrc: eth.SrcMAC, ip: b[14:]}
	var src, dst netip.Addr
	switch ip := pkt.NetworkLayer().(type) {
	case *layers.IPv4:
		src, _ = netip.AddrFromSlice(ip.SrcIP.To4())
		dst, _ = netip.AddrFromSlice(ip.DstIP.To4())
		v.ttl, v.proto, v.ip = ip.TTL, uint8(ip.Protocol), b[14:min(14+int(ip.Length), len(b))]
	case *layers.IPv6:
		src, _ = netip.AddrFromSlice(ip.SrcIP)
		dst, _ = netip.AddrFromSlice(ip.DstIP)
		v.ttl, v.proto, v.ip = ip.HopLimit, uint8(ip.NextHeader), b[14:min(54+int(ip.Length), len(b))]
	default:
		return nil, errors.New("no IP packet")
	}
	v.src, v.dst = ap(src, 0), ap(dst, 0)
	for _, l := range pkt.Layers() {
		v.layer(l)
	}
	return v, nil
}

func (v *view) layer(l gopacket.Layer) {
	switch l := l.(type) {
	case *layers.TCP:
		v.proto, v.src, v.dst = protoTCP, ap(v.src.Addr(), uint16(l.SrcPort)), ap(v.dst.Addr(), uint16(l.DstPort))
		for _, f := range []struct {
			set  bool
			name string
		}{{l.FIN, "F"}, {l.SYN, "S"}, {l.RST, "R"}, {l.PSH, "P"}, {l.ACK, "."}} {
			if f.set {
				v.flags += f.name
			}
		}
		v.seq, v.ack, v.sum, v.payload = l.Seq, l.Ack, l.Checksum, l.Payload
	case *layers.UDP:
		v.proto, v.src, v.dst = protoUDP, ap(v.src.Addr(), uint16(l.SrcPort)), ap(v.dst.Addr(), uint16(l.DstPort))
		v.sum, v.payload = l.Checksum, l.Payload
	case *layers.ICMPv4:
		v.icmpType, v.icmpCode = l.TypeCode.Type(), l.TypeCode.Code()
		v.icmpWord = uint32(l.Id)<<16 | uint32(l.Seq)
		v.quoted = l.Payload
		v.echo(8, 0)
	case *layers.ICMPv6:
		v.proto = protoICMPv6
		v.icmpType, v.icmpCode = l.TypeCode.Type(), l.TypeCode.Code()
		if len(l.Payload) >= 4 {
			v.icmpWord, v.quoted = binary.BigEndian.Uint32(l.Payload), l.Payload[4:]
		}
		v.echo(128, 129)
	}
}

// echo gives an echo its identifier as a port: see frame.icmpBytes.
func (v *view) echo(request, reply uint8) {
	id := uint16(v.icmpWord >> 16)
	switch v.icmpType {
	case request:
		v.src, v.payload = ap(v.src.Addr(), id), v.quoted
	case reply:
		v.dst, v.payload = ap(v.dst.Addr(), id), v.quoted
	}
}

// sum16 adds up big-endian words (RFC 1071), written here once more so that
// nothing of the programs or of gopacket has to be believed.
func sum16(b []byte, start uint16) uint16 {
	s := uint64(start)
	for i := 0; i+1 < len(b); i += 2 {
		s += uint64(b[i])<<8 | uint64(b[i+1])
	}
	if len(b)%2 == 1 {
		s += uint64(b[len(b)-1]) << 8
	}
	for s > 0xffff {
		s = s>>16 + s&0xffff
	}
	return uint16(s)
}

func pseudoSum(src, dst netip.Addr, proto uint8, length int) uint16 {
	b := append(src.AsSlice(), dst.AsSlice()...)
	b = binary.BigEndian.AppendUint32(b, uint32(length))
	return sum16(append(b, 0, 0, 0, proto), 0)
}

// errUnknown says that a packet's sums cannot be checked: it is a fragment, or
// not whole, or of a protocol without one. Translation need not care.
var errUnknown = errors.New("sums cannot be checked")

// checkSums checks every checksum in a frame, and in what an ICMP error
// quotes, as far as the quote is whole.
func checkSums(b []byte) error {
	if len(b) < 14 {
		return errUnknown
	}
	switch binary.BigEndian.Uint16(b[12:]) {
	case 0x0800, 0x86dd:
		return checkIP(b[14:], false)
	}
	return errUnknown
}

func checkIP(b []byte, quoted bool) error {
	if len(b) < 20 {
		return errUnknown
	}
	if b[0]>>4 == 6 {
		return checkIPv6(b, quoted)
	}
	ihl, total := int(b[0]&15)*4, int(binary.BigEndian.Uint16(b[2:]))
	if b[0]>>4 != 4 || ihl < 20 || total < ihl || len(b) < ihl {
		return errUnknown
	}
	if s := sum16(b[:ihl], 0); s != 0xffff {
		return fmt.Errorf("IPv4 header checksum (quoted: %v)", quoted)
	}
	if total > len(b) {
		return orWhole(quoted)
	}
	if binary.BigEndian.Uint16(b[6:])&0x3fff != 0 {
		return orWhole(quoted)
	}
	src, dst := netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
	return checkTransport(src, dst, b[9], b[ihl:total], quoted)
}

// orWhole: of a quote it is enough that what can be checked is right.
func orWhole(quoted bool) error {
	if quoted {
		return nil
	}
	return errUnknown
}

func checkIPv6(b []byte, quoted bool) error {
	if len(b) < 40 {
		return orWhole(quoted)
	}
	total := int(binary.BigEndian.Uint16(b[4:])) + 40
	if total > len(b) {
		return orWhole(quoted)
	}
	src, dst := netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
	next, rest := b[6], b[40:total]
	for next == extHopByHop || next == extRouting || next == extDestOpts {
		if len(rest) < 8 || len(rest) < (int(rest[1])+1)*8 || (next == extRouting && rest[3] != 0) {
			return orWhole(quoted)
		}
		next, rest = rest[0], rest[(int(rest[1])+1)*8:]
	}
	return checkTransport(src, dst, next, rest, quoted)
}

func checkTransport(src, dst netip.Addr, proto uint8, b []byte, quoted bool) error {
	length := len(b)
	switch {
	case proto == protoTCP && len(b) >= 20:
	case proto == protoUDP && len(b) >= 8:
		length = int(binary.BigEndian.Uint16(b[4:]))
		if length < 8 || length > len(b) {
			return orWhole(quoted)
		}
		if binary.BigEndian.Uint16(b[6:]) == 0 {
			// Datagrams between nodes have none (RFC 6935).
			if src.Is6() && !quoted && binary.BigEndian.Uint16(b[2:]) != DefaultDSRPort {
				return errors.New("UDP over IPv6 without checksum")
			}
			return nil
		}
	case proto == protoICMP && src.Is4() && len(b) >= 8:
		if sum16(b, 0) != 0xffff {
			return fmt.Errorf("ICMP checksum (quoted: %v)", quoted)
		}
		if !quoted && (b[0] == 3 || b[0] == 11 || b[0] == 12) {
			return checkIP(b[8:], true)
		}
		return nil
	case proto == protoICMPv6 && src.Is6() && len(b) >= 8:
	default:
		return orWhole(quoted)
	}
	if sum16(b[:length], pseudoSum(src, dst, proto, length)) != 0xffff {
		return fmt.Errorf("checksum of protocol %d, %s to %s (quoted: %v)", proto, src, dst, quoted)
	}
	if proto == protoICMPv6 && !quoted && b[0] < 128 {
		return checkIP(b[8:], true)
	}
	return nil
}
