package conntrack

import (
	"encoding/binary"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Status is the state of an entry as bits, enum ip_conntrack_status in
// include/uapi/linux/netfilter/nf_conntrack_common.h.
type Status uint32

// The bits of Status that Spillway reads.
const (
	Expected  Status = 1 << 0 // a helper expected it (data of TFTP, FTP)
	SeenReply Status = 1 << 1 // packets went in both directions
	Assured   Status = 1 << 2 // early_drop does not evict it
	Confirmed Status = 1 << 3 // in the table
	SrcNAT    Status = 1 << 4
	DstNAT    Status = 1 << 5
	Dying     Status = 1 << 9
)

// Tuple is one direction of an entry.
type Tuple struct {
	Src, Dst netip.AddrPort // port 0 for protocols without ports
	Zone     uint16         // of this direction only; 0: the entry's
}

// Entry is one entry of the table.
type Entry struct {
	Orig, Reply Tuple
	Protocol    uint8 // IPPROTO_*
	TCPState    uint8 // enum tcp_conntrack; 0 for other protocols
	Zone        uint16
	Status      Status
	ID          uint32        // distinguishes the entry from a later one with the same tuple
	Timeout     time.Duration // until it expires if no packet comes
	Helper      string        // name of the conntrack helper; "" for none
}

// Attributes, from include/uapi/linux/netfilter/nfnetlink_conntrack.h.
const (
	ctaTupleOrig, ctaTupleReply, ctaStatus, ctaProtoInfo, ctaHelp = 1, 2, 3, 4, 5
	ctaTimeout, ctaID, ctaZone, ctaStatusMask, ctaFilter          = 7, 12, 18, 26, 25
	ctaTupleIP, ctaTupleProto, ctaTupleZone                       = 1, 2, 3
	ctaIP4Src, ctaIP4Dst, ctaIP6Src, ctaIP6Dst                    = 1, 2, 3, 4
	ctaProtoNum, ctaProtoSrcPort, ctaProtoDstPort                 = 1, 2, 3
	ctaProtoInfoTCP, ctaProtoInfoTCPState                         = 1, 1
	ctaHelpName                                                   = 1
)

// decodeEntry clears e and decodes the attributes after the nfgenmsg header into it. It
// ignores unknown and truncated attributes.
func decodeEntry(b []byte, e *Entry) {
	*e = Entry{}
	if len(b) < nl.SizeofNfgenmsg {
		return
	}
	for b = b[nl.SizeofNfgenmsg:]; ; {
		kind, v, rest, ok := nextAttr(b)
		if !ok {
			return
		}
		b = rest
		switch kind {
		case ctaTupleOrig:
			e.Protocol = decodeTuple(v, &e.Orig)
		case ctaTupleReply:
			decodeTuple(v, &e.Reply)
		case ctaStatus:
			e.Status = Status(be32(v))
		case ctaProtoInfo:
			e.TCPState = decodeTCPState(v)
		case ctaTimeout:
			e.Timeout = time.Duration(be32(v)) * time.Second
		case ctaID:
			e.ID = be32(v)
		case ctaZone:
			e.Zone = be16(v)
		case ctaHelp:
			e.Helper = decodeHelper(v)
		}
	}
}

// nextAttr splits off the first netlink attribute.
func nextAttr(b []byte) (kind uint16, value, rest []byte, ok bool) {
	if len(b) < nl.SizeofNfattr {
		return 0, nil, nil, false
	}
	n := int(binary.NativeEndian.Uint16(b))
	if n < nl.SizeofNfattr || n > len(b) {
		return 0, nil, nil, false
	}
	kind = binary.NativeEndian.Uint16(b[2:]) & nl.NLA_TYPE_MASK
	return kind, b[nl.SizeofNfattr:n], b[min((n+3)&^3, len(b)):], true
}

func decodeTuple(b []byte, t *Tuple) (protocol uint8) {
	var src, dst netip.Addr
	var sport, dport uint16
	for {
		kind, v, rest, ok := nextAttr(b)
		if !ok {
			t.Src, t.Dst = netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, dport)
			return protocol
		}
		b = rest
		switch kind {
		case ctaTupleIP:
			src, dst = decodeAddrs(v)
		case ctaTupleProto:
			protocol, sport, dport = decodeProto(v)
		case ctaTupleZone:
			t.Zone = be16(v)
		}
	}
}

func decodeAddrs(b []byte) (src, dst netip.Addr) {
	for {
		kind, v, rest, ok := nextAttr(b)
		if !ok {
			return src, dst
		}
		b = rest
		a, _ := netip.AddrFromSlice(v)
		switch kind {
		case ctaIP4Src, ctaIP6Src:
			src = a
		case ctaIP4Dst, ctaIP6Dst:
			dst = a
		}
	}
}

func decodeProto(b []byte) (protocol uint8, src, dst uint16) {
	for {
		kind, v, rest, ok := nextAttr(b)
		if !ok {
			return protocol, src, dst
		}
		b = rest
		switch {
		case kind == ctaProtoNum && len(v) > 0:
			protocol = v[0]
		case kind == ctaProtoSrcPort:
			src = be16(v)
		case kind == ctaProtoDstPort:
			dst = be16(v)
		}
	}
}

func decodeTCPState(b []byte) uint8 {
	kind, v, _, ok := nextAttr(b)
	if !ok || kind != ctaProtoInfoTCP {
		return 0
	}
	for {
		kind, state, rest, ok := nextAttr(v)
		if !ok {
			return 0
		}
		if kind == ctaProtoInfoTCPState && len(state) > 0 {
			return state[0]
		}
		v = rest
	}
}

func decodeHelper(b []byte) string {
	kind, v, _, ok := nextAttr(b)
	if !ok || kind != ctaHelpName {
		return ""
	}
	return unix.ByteSliceToString(v)
}

// encodeTuple encodes a tuple as the kernel's attributes.
func encodeTuple(kind int, t Tuple, protocol uint8) *nl.RtAttr {
	tuple := nl.NewRtAttr(unix.NLA_F_NESTED|kind, nil)
	addrs := nl.NewRtAttr(unix.NLA_F_NESTED|ctaTupleIP, nil)
	srcKind, dstKind := ctaIP4Src, ctaIP4Dst
	if t.Src.Addr().Is6() {
		srcKind, dstKind = ctaIP6Src, ctaIP6Dst
	}
	addrs.AddRtAttr(srcKind, t.Src.Addr().AsSlice())
	addrs.AddRtAttr(dstKind, t.Dst.Addr().AsSlice())
	tuple.AddChild(addrs)
	proto := nl.NewRtAttr(unix.NLA_F_NESTED|ctaTupleProto, nil)
	proto.AddRtAttr(ctaProtoNum, nl.Uint8Attr(protocol))
	proto.AddRtAttr(ctaProtoSrcPort, nl.BEUint16Attr(t.Src.Port()))
	proto.AddRtAttr(ctaProtoDstPort, nl.BEUint16Attr(t.Dst.Port()))
	tuple.AddChild(proto)
	if t.Zone != 0 {
		tuple.AddRtAttr(ctaTupleZone, nl.BEUint16Attr(t.Zone))
	}
	return tuple
}
