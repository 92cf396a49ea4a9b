package dsrprobe

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"github.com/dchest/siphash"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/wire"
)

// Types of the option of bpf/lib/dsr/option.h: those that IANA has for experiments (RFC 4727).
const (
	// optionCopied says that fragments have the option, too (RFC 791, 3.1): IPOPT_COPY of
	// include/uapi/linux/ip.h.
	optionCopied = 0x80
	optionV4     = optionCopied | 30 // EXP, of class control
	// optionV6 has the highest bits 000: a node that does not know it skips it, and routers do not
	// change it (RFC 8200, 4.2).
	optionV6 = 0x1e
	padN     = 1 // RFC 8200, 4.2: IPV6_TLV_PADN of include/uapi/linux/in6.h
)

// Lengths in bytes.
const (
	portLen, ipv4Len, ipv6Len, tagLen = 2, 4, 16, 8

	optionHeaderLen = 2 // type and length, in both families
	optionV4Len     = optionHeaderLen + portLen + ipv4Len + tagLen
	optionV6Len     = optionHeaderLen + portLen + ipv6Len + tagLen

	destinationOptionsUnit      = 8 // the header's own length counts those after the first (RFC 8200, 4.6)
	destinationOptionsHeaderLen = 2 // next header and length
	padNLen                     = optionHeaderLen
	destinationOptionsLen       = destinationOptionsHeaderLen + optionV6Len + padNLen

	gueLen  = 4 // draft-ietf-intarea-gue, 3.1
	gueUnit = 4 // its own length counts those after the first gueLen bytes
)

// Where struct dsr_connection of bpf/lib/dsr/option.h has what the tag of a probe is of, in bytes.
const (
	tagEndpoint     = 1 * ipv6Len // after the client, and before the Service
	tagPorts        = 3 * ipv6Len
	tagEndpointPort = tagPorts + portLen // after the client's, and before the Service's
	tagProtocol     = tagPorts + 3*portLen
	tagFamily       = tagProtocol + 1
	tagInputLen     = tagFamily + 1

	familyV4, familyV6 = 4, 6 // enum family of bpf/abi.h
)

// minIPv6 is the length that each network of IPv6 forwards (RFC 8200, 5).
const minIPv6 = 1280

// Room returns how much longer a packet gets within a datagram, in bytes: gue_room of
// bpf/lib/dsr/option.h.
func Room(is4 bool) int {
	if is4 {
		return wire.IPv4Len + wire.UDPLen + gueLen + optionV4Len
	}
	return wire.IPv6Len + wire.UDPLen + gueLen + optionV6Len
}

// path is the two ends of a probe.
type path struct {
	from, to netip.AddrPort
}

func (p path) is4() bool { return p.from.Addr().Is4() }

// tag is that of bpf/lib/dsr/option.h for a probe: the Service has no address and port 0, and the
// client is not named.
func (p path) tag(key [16]byte) uint64 {
	input := make([]byte, tagInputLen)
	copy(input[tagEndpoint:], p.to.Addr().AsSlice())
	binary.BigEndian.PutUint16(input[tagEndpointPort:], p.to.Port())
	input[tagProtocol], input[tagFamily] = unix.IPPROTO_UDP, familyV6
	if p.is4() {
		input[tagFamily] = familyV4
	}
	return siphash.Hash(binary.LittleEndian.Uint64(key[:]), binary.LittleEndian.Uint64(key[8:]), input)
}

// option returns the option, without the header around it in IPv6.
func (p path) option(key [16]byte) []byte {
	o := make([]byte, optionV6Len)
	o[0], o[1] = optionV6, optionV6Len-optionHeaderLen // RFC 8200, 4.2: without type and length
	if p.is4() {
		o = o[:optionV4Len]
		o[0], o[1] = optionV4, optionV4Len // RFC 791, 3.1: with type and length
	}
	binary.LittleEndian.PutUint64(o[len(o)-tagLen:], p.tag(key))
	return o
}

// control returns the control message that has the kernel add the option to a datagram.
func (p path) control(key [16]byte) []byte {
	if p.is4() {
		return controlMessage(unix.SOL_IP, unix.IP_RETOPTS, p.option(key))
	}
	h := make([]byte, destinationOptionsLen)
	h[1] = destinationOptionsLen/destinationOptionsUnit - 1
	n := copy(h[destinationOptionsHeaderLen:], p.option(key))
	h[destinationOptionsHeaderLen+n] = padN // without data
	return controlMessage(unix.SOL_IPV6, unix.IPV6_DSTOPTS, h)
}

func controlMessage(level, kind int, data []byte) []byte {
	b := make([]byte, unix.CmsgSpace(len(data)))
	h := (*unix.Cmsghdr)(unsafe.Pointer(&b[0]))
	h.Level, h.Type = int32(level), int32(kind)
	h.SetLen(unix.CmsgLen(len(data)))
	copy(b[unix.CmsgLen(0):], data)
	return b
}

// encapsulated returns the payload of a datagram that holds another one with data: GUE, variant 0,
// with the option as its private data.
func (p path) encapsulated(key [16]byte, data []byte) []byte {
	option := p.option(key)
	b := append([]byte{byte(len(option) / gueUnit), unix.IPPROTO_IPV6, 0, 0}, option...)
	if p.is4() {
		b[1] = unix.IPPROTO_IPIP
	}
	b = append(b, wire.IP(unix.IPPROTO_UDP, p.from.Addr(), p.to.Addr(), wire.UDPLen+len(data))...)
	return append(b, p.udp(data)...)
}

// inside returns the data of an encapsulated datagram, or nil if there is none.
func (p path) inside(b []byte) []byte {
	header := Room(p.is4()) // the outer IP header is as long as the inner one, and so are those of UDP
	if len(b) < header {
		return nil
	}
	return b[header:]
}

// udp returns a datagram of UDP.
func (p path) udp(data []byte) []byte {
	d := make([]byte, wire.UDPLen, wire.UDPLen+len(data))
	binary.BigEndian.PutUint16(d, p.from.Port())
	binary.BigEndian.PutUint16(d[2:], p.to.Port())
	binary.BigEndian.PutUint16(d[4:], uint16(wire.UDPLen+len(data)))
	d = append(d, data...)
	pseudo := append(p.from.Addr().AsSlice(), p.to.Addr().AsSlice()...)
	pseudo = append(pseudo, d[4], d[5], 0, unix.IPPROTO_UDP)
	sum := ^wire.OnesSum(append(pseudo, d...))
	if sum == 0 {
		sum = 0xffff // RFC 768: 0 says that there is none
	}
	binary.BigEndian.PutUint16(d[6:], sum)
	return d
}
