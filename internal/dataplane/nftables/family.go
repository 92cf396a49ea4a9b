package nftables

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/facts/model"
)

// family is what differs between IPv4 and IPv6.
type family struct {
	suffix       string // of names
	proto        uint32 // NFPROTO_*
	size         uint32 // bytes of an address
	saddr, daddr uint32 // offsets in the IP header
	ctSrc, ctDst uint32
	addrType     uint32 // nft's number for the type
	header       uint32 // nft's number for the header's description
	daddrField   uint32 // of the destination address in it
}

var (
	ipv4 = family{"4", unix.NFPROTO_IPV4, 4, 12, 16, ctSrcIP, ctDstIP, 7, 12, 12}
	ipv6 = family{"6", unix.NFPROTO_IPV6, 16, 8, 24, ctSrcIP6, ctDstIP6, 8, 13, 9}
)

func familyOf(f model.Family) *family {
	if f == model.IPv6 {
		return &ipv6
	}
	return &ipv4
}

// regs is how many registers an address fills.
func (f family) regs() uint32 { return f.size / 4 }

// only goes on with packets of the family.
func (r *rule) only(f *family) *rule {
	return r.meta(unix.NFT_META_NFPROTO, firstReg).cmp(unix.NFT_CMP_EQ, firstReg, []byte{byte(f.proto)})
}

// source and destination load an address.
func (r *rule) source(f *family, reg uint32) *rule {
	return r.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, f.saddr, f.size, reg)
}

func (r *rule) destination(f *family, reg uint32) *rule {
	return r.payload(unix.NFT_PAYLOAD_NETWORK_HEADER, f.daddr, f.size, reg)
}

func hostU32(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// A key is its fields as registers hold them, each padded to 4 bytes.

func appendAddr(key []byte, a netip.Addr) []byte { return append(key, a.AsSlice()...) }

func appendProto(key []byte, p model.Protocol) []byte { return append(key, byte(p), 0, 0, 0) }

func appendPort(key []byte, port uint16) []byte {
	return append(key, byte(port>>8), byte(port), 0, 0)
}

func appendSlot(key []byte, slot int) []byte {
	return binary.NativeEndian.AppendUint32(key, uint32(slot))
}

// endpointValue is an address and port as dnat takes them.
func endpointValue(e netip.AddrPort) string {
	return string(appendPort(appendAddr(make([]byte, 0, 20), e.Addr()), e.Port()))
}
