package dsrprobe

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"github.com/dchest/siphash"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/wire"
)

// The option of bpf/lib/dsr/option.h, and the header around it in IPv6.
const (
	optionV4, optionV4Len = 0x9e, 16
	optionV6, optionV6Len = 0x1e, 26
	headerV6Words         = 3
)

// Lengths in bytes.
const (
	gueLen      = 4
	bodyV6Len   = 2 + optionV6Len // of the option, with type and length
	tagInputLen = 56
)

// minIPv6 is the length that each network of IPv6 forwards (RFC 8200, 5).
const minIPv6 = 1280

// Room returns how much longer a packet gets within a datagram, in bytes: gue_room of
// bpf/lib/dsr/option.h.
func Room(is4 bool) int {
	if is4 {
		return wire.IPv4Len + wire.UDPLen + gueLen + optionV4Len
	}
	return wire.IPv6Len + wire.UDPLen + gueLen + bodyV6Len
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
	copy(input[16:], p.to.Addr().AsSlice())
	binary.BigEndian.PutUint16(input[50:], p.to.Port())
	input[54], input[55] = unix.IPPROTO_UDP, 6
	if p.is4() {
		input[55] = 4
	}
	return siphash.Hash(binary.LittleEndian.Uint64(key[:]), binary.LittleEndian.Uint64(key[8:]), input)
}

// option returns the option, without the header around it in IPv6.
func (p path) option(key [16]byte) []byte {
	o := make([]byte, bodyV6Len)
	o[0], o[1] = optionV6, optionV6Len
	if p.is4() {
		o = o[:optionV4Len]
		o[0], o[1] = optionV4, optionV4Len
	}
	binary.LittleEndian.PutUint64(o[len(o)-8:], p.tag(key))
	return o
}

// control returns the control message that has the kernel add the option to a datagram.
func (p path) control(key [16]byte) []byte {
	if p.is4() {
		return controlMessage(unix.SOL_IP, unix.IP_RETOPTS, p.option(key))
	}
	h := make([]byte, (headerV6Words+1)*8)
	h[1] = headerV6Words
	n := copy(h[2:], p.option(key))
	h[2+n] = 1 // PadN, without data
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
	b := append([]byte{byte(len(option) / 4), unix.IPPROTO_IPV6, 0, 0}, option...)
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
