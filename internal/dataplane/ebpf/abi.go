package ebpf

import (
	"encoding/binary"
	"net/netip"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// abiVersion is ABI_VERSION of bpf/abi.h.
const abiVersion = 3

// slotLocal is SLOT_LOCAL of bpf/abi.h.
const slotLocal = 1 << 31

// sources is SOURCES of bpf/abi.h.
const sources = 1 << 16

// The scopes of cluster_ranges: RANGE_PODS and the others of bpf/abi.h.
const (
	rangePods    = 0
	rangePeers   = 0xffffffff
	rangeXfrmSrc = 0xfffffffe
	rangeXfrmDst = 0xfffffffd
)

// isClusterRange reports whether a prefix is of the cluster or of an IPsec policy, and not of a
// Service. Before there was a map cluster_ranges, source_ranges had such prefixes too.
func isClusterRange(key tcRangeKey) bool {
	return key.Scope == rangePods || key.Scope >= rangeXfrmDst
}

// The two sets of endpoints, as indices of tcService.Count.
const (
	clusterSet = 0
	localSet   = 1
)

// toAddr converts an address to struct addr: network order, IPv4 in word 0.
func toAddr(a netip.Addr) tcAddr {
	var out tcAddr
	b := a.Unmap().AsSlice()
	for i := 0; i+4 <= len(b); i += 4 {
		out.W[i/4] = binary.NativeEndian.Uint32(b[i:])
	}
	return out
}

// fromAddr is the inverse of toAddr; family is FAMILY_V4 or FAMILY_V6.
func fromAddr(a tcAddr, family uint8) netip.Addr {
	var b [16]byte
	for i, w := range a.W {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	if family == uint8(model.IPv4) {
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	return netip.AddrFrom16(b)
}

// toPort converts a port to network order, or back.
func toPort(p uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], p)
	return binary.NativeEndian.Uint16(b[:])
}

func familyOf(a netip.Addr) uint8 { return uint8(model.FamilyOf(a)) }

func addrKey(a netip.Addr) tcAddrKey {
	return tcAddrKey{Addr: toAddr(a), Family: uint32(familyOf(a))}
}

func frontendKey(id intent.PortID, f intent.Frontend) tcFrontendKey {
	key := tcFrontendKey{Port: toPort(f.Port), Proto: uint8(id.Protocol), Family: uint8(id.Family)}
	if f.Kind != intent.NodePort {
		key.Addr = toAddr(f.Addr)
	}
	return key
}

func backendFlags(e intent.Endpoint) tcBackendFlags {
	var flags tcBackendFlags
	for _, b := range []struct {
		set  bool
		flag tcBackendFlags
	}{
		{e.ClusterPolicy, tcBackendFlagsBACKEND_CLUSTER_POLICY},
		{e.LocalPolicy, tcBackendFlagsBACKEND_LOCAL_POLICY},
		{e.OnThisNode, tcBackendFlagsBACKEND_ON_THIS_NODE},
		{e.HostNetwork, tcBackendFlagsBACKEND_HOST_NETWORK},
		{e.MustTraverseNetfilter, tcBackendFlagsBACKEND_TRAVERSES_NETFILTER},
		{e.AllowsAny, tcBackendFlagsBACKEND_ALLOWS_ANY},
		{e.Watched, tcBackendFlagsBACKEND_WATCHED},
		{e.Ejected, tcBackendFlagsBACKEND_EJECTED},
	} {
		if b.set {
			flags |= b.flag
		}
	}
	return flags
}

// The routes of intent and of the programs are the same numbers.
var _ = [1]struct{}{}[int(intent.Reject)-int(tcRouteROUTE_REJECT)+
	int(intent.Drop)-int(tcRouteROUTE_DROP)+
	int(intent.ToCluster)-int(tcRouteROUTE_CLUSTER)+
	int(intent.ToLocal)-int(tcRouteROUTE_LOCAL)]

func rangeKey(scope uint32, p netip.Prefix) tcRangeKey {
	return tcRangeKey{
		Prefixlen: 64 + uint32(p.Bits()),
		Scope:     scope,
		Family:    uint32(familyOf(p.Addr())),
		Addr:      toAddr(p.Masked().Addr()),
	}
}

// rangePrefix is the inverse of rangeKey.
func rangePrefix(key tcRangeKey) netip.Prefix {
	return netip.PrefixFrom(fromAddr(key.Addr, uint8(key.Family)), int(key.Prefixlen)-64)
}
