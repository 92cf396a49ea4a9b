package nftables

import (
	"encoding/binary"
	"net/netip"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/nft"
)

var families = []*nft.IP{nft.IPv4, nft.IPv6}

func familyOf(f model.Family) *nft.IP {
	if f == model.IPv6 {
		return nft.IPv6
	}
	return nft.IPv4
}

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
