package nft

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Family is the family of a table: unix.NFPROTO_*.
type Family uint8

// String returns nft's name of the family.
func (f Family) String() string {
	switch f {
	case unix.NFPROTO_INET:
		return "inet"
	case unix.NFPROTO_IPV4:
		return "ip"
	case unix.NFPROTO_IPV6:
		return "ip6"
	case unix.NFPROTO_BRIDGE:
		return "bridge"
	case unix.NFPROTO_ARP:
		return "arp"
	}
	return "netdev"
}

// Table is a table.
type Table struct {
	Family  Family
	Name    string
	Comment string
	Flags   uint32 // unix.NFT_TABLE_F_DORMANT, TableOwner
}

// TableOwner is the flag of a table that belongs to one netlink socket and is locked for
// all others (NFT_TABLE_F_OWNER, Linux 5.12).
const TableOwner = 2

// String returns the table as nft's commands name it.
func (t Table) String() string { return t.Family.String() + " " + t.Name }

// Same reports whether both are the same table of a namespace.
func (t Table) Same(other Table) bool { return t.Family == other.Family && t.Name == other.Name }

// Dormant reports whether the hooks of the table are disabled.
func (t Table) Dormant() bool { return t.Flags&unix.NFT_TABLE_F_DORMANT != 0 }

// Chain is a chain and its rules.
type Chain struct {
	Name    string
	Comment string
	Hook    *Hook // of a base chain, whose policy is accept; nil: another chain jumps there
	Rules   []*Rule
}

// Hook is where packets enter a base chain.
type Hook struct {
	Type     string // nft's type: filter, nat or route
	Num      uint32 // unix.NF_INET_*
	Priority int32
}

// Sums identifies the version of a chain's rules: the Sums of a chain that was read are
// equal exactly if the chain has these rules.
func (c *Chain) Sums() string {
	var b []byte
	for _, r := range c.Rules {
		b = append(b, r.Sum()...)
	}
	return string(b)
}

// Field is one part of a set's key or of a map's data.
type Field struct {
	Size   uint32 // bytes, without padding
	typ    uint32 // nft's number of the type
	typeof udata
}

// Numbers of nft's types (include/datatype.h) and expressions (include/expression.h), as
// nft stores them in user data.
const (
	typeInteger, typeProto, typeService = 4, 12, 13
	typeClass                           = 23
	exprPayload, exprMeta               = 7, 9
	exprConcat, exprNumgen              = 13, 23
	headerTransport, fieldDestPort      = 11, 2
)

// Fields of packets.
var (
	ProtocolField = Field{1, typeProto, describe(exprMeta, unix.NFT_META_L4PROTO)}
	PortField     = Field{2, typeService, describe(exprPayload, headerTransport, fieldDestPort)}
	PriorityField = Field{4, typeClass, describe(exprMeta, unix.NFT_META_PRIORITY)} // skb->priority
)

// AddrField returns the field of an address.
func AddrField(f *IP) Field { return Field{f.Size, f.typ, describe(exprPayload, f.header, f.field)} }

// RandomField returns the field of a random number below modulus.
func RandomField(modulus uint32) Field {
	return Field{4, typeInteger, describe(exprNumgen, unix.NFT_NG_RANDOM, modulus, 0)}
}

// describe encodes an expression as nft does: its kind and its parameters.
func describe(kind uint32, numbers ...uint32) udata {
	var inner, u udata
	for i, n := range numbers {
		inner.u32(byte(i), n)
	}
	u.u32(0, kind)
	u.add(1, inner)
	return u
}

func describeAll(fields []Field) udata {
	if len(fields) == 1 {
		return fields[0].typeof
	}
	var inner, u udata
	for i, f := range fields {
		inner.add(byte(i), f.typeof)
	}
	u.u32(0, exprConcat)
	u.add(1, inner)
	return u
}

// Len returns the length of fields in registers, each padded to 4 bytes.
func Len(fields []Field) (n uint32) {
	for _, f := range fields {
		n += (f.Size + 3) &^ 3
	}
	return n
}

// Text writes a key, or data, as people read it: "10.96.0.1 tcp 80".
func Text(fields []Field, raw string) string {
	var words []string
	for _, f := range fields {
		if padded := int(f.Size+3) &^ 3; len(raw) < padded {
			return fmt.Sprintf("%x", raw)
		} else {
			words = append(words, f.text(raw[:f.Size]))
			raw = raw[padded:]
		}
	}
	return strings.Join(words, " ")
}

func (f Field) text(raw string) string {
	switch f.typ {
	case IPv4.typ, IPv6.typ:
		addr, _ := netip.AddrFromSlice([]byte(raw))
		return addr.String()
	case typeProto:
		if name := map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp", unix.IPPROTO_SCTP: "sctp"}[raw[0]]; name != "" {
			return name
		}
	case typeService:
		return strconv.Itoa(int(binary.BigEndian.Uint16([]byte(raw))))
	case typeInteger:
		if len(raw) == 4 {
			return strconv.FormatUint(uint64(binary.NativeEndian.Uint32([]byte(raw))), 10)
		}
	}
	return fmt.Sprintf("%x", raw)
}

// typeOf returns nft's number of a concatenation.
func typeOf(fields []Field) (t uint32) {
	for _, f := range fields {
		t = t<<6 | f.typ
	}
	return t
}

// Set is a set or a map.
type Set struct {
	Name     string
	Comment  string
	Key      []Field
	Data     []Field // of a map
	Verdict  bool    // a map of jumps
	Interval bool    // holds ranges
	Typeof   bool    // a field of the key has no name as a type
	Counted  bool    // each element counts packets
	Expires  bool    // elements have timeouts
	Size     uint32  // maximum number of elements, of a set that packets fill; else 0
}

// Dynamic reports whether packets fill the set.
func (s *Set) Dynamic() bool { return s.Size > 0 }

// Tree reports whether the set holds ranges as borders (Value.IntervalEnd). Its elements
// can only be written all at once: the kernel may refuse to delete one range and to add
// its neighbor.
func (s *Set) Tree() bool { return s.Interval && len(s.Key) == 1 }

func (s *Set) flags() uint32 {
	var f uint32
	if len(s.Data) > 0 || s.Verdict {
		f |= unix.NFT_SET_MAP
	}
	if s.Interval {
		f |= unix.NFT_SET_INTERVAL
	}
	if s.Interval && len(s.Key) > 1 {
		f |= setConcat
	}
	if s.Expires || s.Dynamic() {
		f |= unix.NFT_SET_TIMEOUT
	}
	if s.Dynamic() {
		f |= unix.NFT_SET_EVAL
	}
	return f
}

// Numbers that golang.org/x/sys/unix does not have (include/uapi/linux/netfilter/nf_tables.h).
const (
	setConcat     = 0x80       // NFT_SET_CONCAT
	setDescConcat = 2          // NFTA_SET_DESC_CONCAT
	setFieldLen   = 1          // NFTA_SET_FIELD_LEN
	setExpr       = 17         // NFTA_SET_EXPR; counters since Linux 5.7
	setElemKeyEnd = 10         // NFTA_SET_ELEM_KEY_END
	dataVerdict   = 0xffffff00 // NFT_DATA_VERDICT
	tableUserData = 6          // NFTA_TABLE_USERDATA
	chainUserData = 12         // NFTA_CHAIN_USERDATA
	policyAccept  = 1          // NF_ACCEPT
)

// Types of user data (libnftnl's udata.h). udataRuleSum is this package's own; nft does not
// show types that it does not know.
const (
	udataComment                          = 0 // of tables, chains, rules and elements
	udataKeyByteOrder, udataDataByteOrder = 0, 1
	udataKeyTypeof, udataDataTypeof       = 3, 4
	udataSetComment                       = 7
	udataRuleSum                          = 250
)

// userData tells nft how to show the set.
func (s *Set) userData() udata {
	const host, network = 1, 2
	var u udata
	switch {
	case len(s.Key) > 1:
		u.u32(udataKeyByteOrder, 0)
	case s.Key[0].typ == typeInteger:
		u.u32(udataKeyByteOrder, host)
	default:
		u.u32(udataKeyByteOrder, network)
	}
	if len(s.Data) == 1 {
		u.u32(udataDataByteOrder, host)
	} else if s.flags()&unix.NFT_SET_MAP != 0 {
		u.u32(udataDataByteOrder, 0)
	}
	if s.Typeof {
		u.add(udataKeyTypeof, describeAll(s.Key))
		u.add(udataDataTypeof, describeAll(s.Data))
	}
	u.str(udataSetComment, s.Comment)
	return u
}

// Value is an element of a set or map without its key. Keys and data are fields as
// registers hold them, each padded to 4 bytes.
type Value struct {
	KeyEnd      string // last key of the range, in sets of ranges with several fields
	IntervalEnd bool   // in trees: the range that began before ends before this key
	Data        string // of a map
	Jump        string // of a map of jumps: the chain
	Comment     string
	Timeout     time.Duration // in sets with Expires; 0: none
}

// Helper is a conntrack helper of the kernel, as an object of the same name.
type Helper struct {
	Name     string
	Protocol uint8 // unix.IPPROTO_*
}

// IP describes the addresses of one version of IP.
type IP struct {
	Suffix       string // of names of objects
	Family       Family
	Size         uint32 // bytes of an address
	CtSrc, CtDst uint32 // keys of conntrack's addresses
	saddr, daddr uint32 // offsets in the header
	typ          uint32 // nft's number of the type
	header       uint32 // nft's number of the header
	field        uint32 // nft's number of the destination address in the header
}

// The versions of IP.
var (
	IPv4 = &IP{"4", unix.NFPROTO_IPV4, 4, 19, 20, 12, 16, 7, 12, 12}
	IPv6 = &IP{"6", unix.NFPROTO_IPV6, 16, 21, 22, 8, 24, 8, 13, 9}
)

// Regs returns how many registers an address fills.
func (f *IP) Regs() uint32 { return f.Size / 4 }
