package inspect

import (
	"encoding/binary"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/wire"
	"spillway.dev/spillway/internal/facts/model"
)

// Lengths of headers, in bytes.
const (
	etherLen = 14
	tcpLen   = 20
)

// firstFrame builds the first packet of a connection: a SYN, or an empty datagram. The
// checksum of TCP and UDP is missing, as in packets that a device has yet to complete.
func firstFrame(proto model.Protocol, to net.HardwareAddr, src, dst netip.AddrPort) []byte {
	l4 := l4Header(proto, src.Port(), dst.Port())
	frame := make([]byte, etherLen, etherLen+wire.IPv6Len+len(l4))
	copy(frame, to)
	frame[6], frame[11] = 2, 1 // a locally administered source
	protocol := uint16(unix.ETH_P_IPV6)
	if dst.Addr().Is4() {
		protocol = unix.ETH_P_IP
	}
	binary.BigEndian.PutUint16(frame[12:], protocol)
	frame = append(frame, wire.IP(byte(proto), src.Addr(), dst.Addr(), len(l4))...)
	return append(frame, l4...)
}

func l4Header(proto model.Protocol, sport, dport uint16) []byte {
	size := wire.UDPLen
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
		binary.BigEndian.PutUint16(h[4:], wire.UDPLen)
	}
	return h
}
