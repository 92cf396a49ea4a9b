// Package wire writes the headers of packets that the agent builds.
package wire

import (
	"encoding/binary"
	"net/netip"
)

// Lengths of headers, in bytes.
const (
	IPv4Len = 20
	IPv6Len = 40
	UDPLen  = 8
)

// IP returns the header of a packet with a payload of so many bytes. It has TTL 64, and must not be
// fragmented.
func IP(proto uint8, src, dst netip.Addr, payload int) []byte {
	if src.Is6() {
		h := make([]byte, IPv6Len)
		h[0], h[6], h[7] = 0x60, proto, 64
		binary.BigEndian.PutUint16(h[4:], uint16(payload))
		copy(h[8:], src.AsSlice())
		copy(h[24:], dst.AsSlice())
		return h
	}
	h := make([]byte, IPv4Len)
	h[0], h[6], h[8], h[9] = 0x45, 0x40, 64, proto // DF
	binary.BigEndian.PutUint16(h[2:], uint16(IPv4Len+payload))
	copy(h[12:], src.AsSlice())
	copy(h[16:], dst.AsSlice())
	binary.BigEndian.PutUint16(h[10:], ^OnesSum(h))
	return h
}

// OnesSum is the Internet checksum's sum (RFC 1071).
func OnesSum(b []byte) uint16 {
	var sum uint32
	for i, v := range b {
		sum += uint32(v) << (8 * (1 - i%2))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
