package ebpf

import (
	"encoding/binary"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/facts/model"
)

// Lengths of headers, in bytes.
const (
	etherLen = 14
	ipv4Len  = 20
	ipv6Len  = 40
	tcpLen   = 20
	udpLen   = 8
)

// firstFrame builds the first packet of a connection: a SYN, or an empty datagram. The
// checksum of TCP and UDP is missing, as in packets that a device has yet to complete.
func firstFrame(proto model.Protocol, to net.HardwareAddr, src, dst netip.AddrPort) []byte {
	l4 := l4Header(proto, src.Port(), dst.Port())
	frame := make([]byte, etherLen, etherLen+ipv6Len+len(l4))
	copy(frame, to)
	frame[6], frame[11] = 2, 1 // a locally administered source
	if dst.Addr().Is4() {
		binary.BigEndian.PutUint16(frame[12:], unix.ETH_P_IP)
		ip := make([]byte, ipv4Len)
		ip[0], ip[6], ip[8], ip[9] = 0x45, 0x40, 64, byte(proto) // DF, TTL 64
		binary.BigEndian.PutUint16(ip[2:], uint16(ipv4Len+len(l4)))
		copy(ip[12:], src.Addr().AsSlice())
		copy(ip[16:], dst.Addr().AsSlice())
		binary.BigEndian.PutUint16(ip[10:], ^onesSum(ip))
		frame = append(frame, ip...)
	} else {
		binary.BigEndian.PutUint16(frame[12:], unix.ETH_P_IPV6)
		ip := make([]byte, ipv6Len)
		ip[0], ip[6], ip[7] = 0x60, byte(proto), 64
		binary.BigEndian.PutUint16(ip[4:], uint16(len(l4)))
		copy(ip[8:], src.Addr().AsSlice())
		copy(ip[24:], dst.Addr().AsSlice())
		frame = append(frame, ip...)
	}
	return append(frame, l4...)
}

func l4Header(proto model.Protocol, sport, dport uint16) []byte {
	size := udpLen
	if proto == model.TCP {
		size = tcpLen
	}
	h := make([]byte, size)
	binary.BigEndian.PutUint16(h, sport)
	binary.BigEndian.PutUint16(h[2:], dport)
	if proto == model.TCP {
		h[12], h[13] = tcpLen/4<<4, 0x02 // SYN
		binary.BigEndian.PutUint16(h[14:], 0xffff)
	} else {
		binary.BigEndian.PutUint16(h[4:], udpLen)
	}
	return h
}

// onesSum is the Internet checksum's sum (RFC 1071) of an even number of bytes.
func onesSum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
