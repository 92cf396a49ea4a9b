package objects

import (
	"encoding/binary"
	"net/netip"
	"unsafe"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// ABIVersion is ABI_VERSION of bpf/abi.h.
const ABIVersion = 3

// SlotLocal is SLOT_LOCAL of bpf/abi.h.
const SlotLocal = 1 << 31

// Sources is SOURCES of bpf/abi.h.
const Sources = 1 << 16

// The scopes of cluster_ranges: RANGE_PODS and the others of bpf/abi.h.
const (
	RangePods    = 0
	RangePeers   = 0xffffffff
	RangeXfrmSrc = 0xfffffffe
	RangeXfrmDst = 0xfffffffd
	RangeKeep    = 0xfffffffc
)

// ServiceEgress is SERVICE_EGRESS of bpf/abi.h.
const ServiceEgress = 0xffffffff

// IsClusterRange reports whether a prefix is of the cluster, of an IPsec policy or of egress, and not of
// a Service. Before there was a map cluster_ranges, source_ranges had such prefixes too.
func IsClusterRange(key TCRangeKey) bool {
	return key.Scope == RangePods || key.Scope >= RangeKeep
}

// The two sets of endpoints, as indices of TCService.Count.
const (
	ClusterSet = 0
	LocalSet   = 1
)

// ToAddr converts an address to struct addr: network order, IPv4 in word 0.
func ToAddr(a netip.Addr) TCAddr {
	var out TCAddr
	b := a.Unmap().AsSlice()
	for i := 0; i+4 <= len(b); i += 4 {
		out.W[i/4] = binary.NativeEndian.Uint32(b[i:])
	}
	return out
}

// FromAddr is the inverse of ToAddr; family is FAMILY_V4 or FAMILY_V6.
func FromAddr(a TCAddr, family uint8) netip.Addr {
	var b [16]byte
	for i, w := range a.W {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	if family == uint8(model.IPv4) {
		return netip.AddrFrom4([4]byte(b[:4]))
	}
	return netip.AddrFrom16(b)
}

// ToPort converts a port to network order, or back.
func ToPort(p uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], p)
	return binary.NativeEndian.Uint16(b[:])
}

// FamilyOf returns FAMILY_V4 or FAMILY_V6.
func FamilyOf(a netip.Addr) uint8 { return uint8(model.FamilyOf(a)) }

// AddrKey returns the key of an address in the maps by address.
func AddrKey(a netip.Addr) TCAddrKey {
	return TCAddrKey{Addr: ToAddr(a), Family: uint32(FamilyOf(a))}
}

// FrontendKey returns the key of a frontend of a Service port. A NodePort has the zero address.
func FrontendKey(id intent.PortID, f intent.Frontend) TCFrontendKey {
	key := TCFrontendKey{Port: ToPort(f.Port), Proto: uint8(id.Protocol), Family: uint8(id.Family)}
	if f.Kind != intent.NodePort {
		key.Addr = ToAddr(f.Addr)
	}
	return key
}

// BackendFlags returns the flags of an endpoint.
func BackendFlags(e intent.Endpoint) TCBackendFlags {
	var flags TCBackendFlags
	for _, b := range []struct {
		set  bool
		flag TCBackendFlags
	}{
		{e.ClusterPolicy, TCBackendFlagsBACKEND_CLUSTER_POLICY},
		{e.LocalPolicy, TCBackendFlagsBACKEND_LOCAL_POLICY},
		{e.OnThisNode, TCBackendFlagsBACKEND_ON_THIS_NODE},
		{e.HostNetwork, TCBackendFlagsBACKEND_HOST_NETWORK},
		{e.MustTraverseNetfilter, TCBackendFlagsBACKEND_TRAVERSES_NETFILTER},
		{e.AllowsAny, TCBackendFlagsBACKEND_ALLOWS_ANY},
		{e.Watched, TCBackendFlagsBACKEND_WATCHED},
		{e.Ejected, TCBackendFlagsBACKEND_EJECTED},
	} {
		if b.set {
			flags |= b.flag
		}
	}
	return flags
}

// The routes of intent and of the programs are the same numbers.
var _ = [1]struct{}{}[int(intent.Reject)-int(TCRouteROUTE_REJECT)+
	int(intent.Drop)-int(TCRouteROUTE_DROP)+
	int(intent.ToCluster)-int(TCRouteROUTE_CLUSTER)+
	int(intent.ToLocal)-int(TCRouteROUTE_LOCAL)]

// RangeKey returns the key of a prefix in a map of ranges.
func RangeKey(scope uint32, p netip.Prefix) TCRangeKey {
	return TCRangeKey{
		Prefixlen: 64 + uint32(p.Bits()),
		Scope:     scope,
		Family:    uint32(FamilyOf(p.Addr())),
		Addr:      ToAddr(p.Masked().Addr()),
	}
}

// RangePrefix is the inverse of RangeKey.
func RangePrefix(key TCRangeKey) netip.Prefix {
	return netip.PrefixFrom(FromAddr(key.Addr, uint8(key.Family)), int(key.Prefixlen)-64)
}

// EndpointOf returns the endpoint of an entry.
func EndpointOf(b TCBackend) netip.AddrPort {
	return netip.AddrPortFrom(FromAddr(b.Addr, b.Family), ToPort(b.Port))
}

// PortKey returns the key of an address and port in frontends and untracked_ports.
func PortKey(a netip.Addr, proto model.Protocol, port uint16) TCFrontendKey {
	return TCFrontendKey{Addr: ToAddr(a), Port: ToPort(port), Proto: uint8(proto), Family: FamilyOf(a)}
}

// BalanceFlags returns how a Service port chooses an endpoint.
func BalanceFlags(p *intent.ServicePort) TCServiceFlags {
	switch p.Balance {
	case intent.LeastConnections:
		return TCServiceFlagsSERVICE_LEAST
	case intent.Latency:
		return TCServiceFlagsSERVICE_LATENCY
	case intent.Maglev:
		if p.DSR {
			return TCServiceFlagsSERVICE_MAGLEV | TCServiceFlagsSERVICE_DSR
		}
		return TCServiceFlagsSERVICE_MAGLEV
	}
	return 0
}

// BalanceOf is the inverse of BalanceFlags.
func BalanceOf(flags uint16) intent.Balance {
	switch {
	case TCServiceFlags(flags)&TCServiceFlagsSERVICE_LEAST != 0:
		return intent.LeastConnections
	case TCServiceFlags(flags)&TCServiceFlagsSERVICE_LATENCY != 0:
		return intent.Latency
	case TCServiceFlags(flags)&TCServiceFlagsSERVICE_MAGLEV != 0:
		return intent.Maglev
	}
	return intent.Random
}

// Bytes returns the bytes of a value without pointers.
func Bytes[T any](v *T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(v)), unsafe.Sizeof(*v))
}

// ReadClusterRanges reads the cluster's own prefixes.
func ReadClusterRanges(m *ebpf.Map) (map[TCRangeKey]bool, error) {
	found := map[TCRangeKey]bool{}
	err := Each(m, func(key TCRangeKey, _ uint8) {
		if IsClusterRange(key) {
			found[key] = true
		}
	})
	return found, err
}

// EncapsulationName is a value of dataplane.Encapsulations.
func EncapsulationName(v TCDsrEncapsulation) string {
	switch TCDsrEncapsulationKind(v.Kind) {
	case TCDsrEncapsulationKindDSR_BY_OPTION:
		return dataplane.EncapsulationOption
	case TCDsrEncapsulationKindDSR_BY_GUE:
		return dataplane.EncapsulationGUE
	}
	return dataplane.EncapsulationNone
}

// IsService reports whether a frontend is that of a Service, not the own address of an endpoint.
func IsService(f *TCFrontend) bool { return f.Flags&uint8(TCFrontendFlagsFRONTEND_ENDPOINT) == 0 }

// FlowUDP is the member for UDP of the union of struct flow. bpf2go generates the first
// member alone, which is Tcp.
type FlowUDP struct {
	HelperPort, Answers uint16
	Checked             uint32
}

// UDPOf returns the member for UDP of a flow.
func UDPOf(f *TCFlow) *FlowUDP { return (*FlowUDP)(unsafe.Pointer(&f.Tcp)) }
