package drops

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/conntrack"
)

// By values of Drop, by enum drop_path.
var dropper = map[dropsDropPath]string{
	dropsDropPathPATH_NFT:              "nft",
	dropsDropPathPATH_XTABLES:          "iptables",
	dropsDropPathPATH_NAT:              "nat",
	dropsDropPathPATH_CONNTRACK:        "conntrack",
	dropsDropPathPATH_CONNTRACK_FULL:   "conntrack",
	dropsDropPathPATH_CONNTRACK_INSERT: "conntrack",
	dropsDropPathPATH_LISTEN:           "tcp",
	dropsDropPathPATH_SYN:              "tcp",
}

func (f *Follower) decode(raw *dropsDrop) Drop {
	path := dropsDropPath(raw.Path)
	d := Drop{
		Time:   time.Unix(0, int64(raw.Time)+int64(f.offset)),
		Reason: f.reasons.name(raw.Reason),
		By:     dropper[path],
		Packet: decodePacket(raw),
		Place: Place{
			Interface: text(raw.In[:]),
			Out:       text(raw.Out[:]),
			Table:     text(raw.Table[:]),
			Chain:     text(raw.Chain[:]),
			Location:  f.symbols.function(raw.Location),
		},
	}
	if raw.HookFamily != 0 {
		d.Hook = hookName(raw.HookFamily, raw.Hook)
	}
	if path == dropsDropPathPATH_LISTEN || path == dropsDropPathPATH_SYN {
		d.Location = "tcp_conn_request"
	}
	if path == dropsDropPathPATH_NFT {
		d.Table = nftFamily(raw.HookFamily) + d.Table
	}
	f.places.fill(&d.Place, raw.Cookie, uint64(raw.Netns), raw.Iif)
	d.Stack = f.stack(raw)
	d.Meaning = explain(&d, path)
	if path == dropsDropPathPATH_NONE && d.Reason == netfilterDrop {
		f.evidence.netfilter(&d, raw)
	}
	return d
}

// stack names the functions from the one that dropped on; the frames before it are the
// tracing itself.
func (f *Follower) stack(raw *dropsDrop) (names []string) {
	first := slices.Index(raw.Stack[:], raw.Location)
	for _, at := range raw.Stack[max(0, first):] {
		if at != 0 && first >= 0 {
			names = append(names, f.symbols.function(at))
		}
	}
	return names
}

func decodePacket(raw *dropsDrop) Packet {
	p := Packet{
		Protocol:    conntrack.ProtocolName(raw.Proto),
		Source:      address(raw.Family, raw.Saddr),
		Destination: address(raw.Family, raw.Daddr),
		Length:      int(raw.Length),
		Fragment:    raw.Flags&uint8(dropsDropFlagsDROP_FRAGMENT) != 0,
		Invalid:     raw.Flags&uint8(dropsDropFlagsDROP_INVALID) != 0,
	}
	source, destination := port(raw.Sport), port(raw.Dport)
	switch {
	case p.Fragment:
	case raw.Proto == unix.IPPROTO_ICMP || raw.Proto == unix.IPPROTO_ICMPV6:
		p.ICMP = fmt.Sprintf("%d/%d", source>>8, source&0xff)
	default:
		p.SourcePort, p.DestinationPort = source, destination
	}
	if raw.Proto == unix.IPPROTO_TCP && !p.Fragment {
		p.TCPFlags = tcpFlags(raw.TcpFlags)
	}
	return p
}

// tcpFlags writes the flags as tcpdump does.
func tcpFlags(bits uint8) string {
	var b strings.Builder
	for i, letter := range []string{"F", "S", "R", "P", ".", "U", "E", "W"} {
		if bits&(1<<i) != 0 {
			b.WriteString(letter)
		}
	}
	if b.Len() == 0 {
		return "none"
	}
	return b.String()
}

func address(family uint8, words [4]uint32) netip.Addr {
	bytes := (*[16]byte)(unsafe.Pointer(&words))
	if family == 4 {
		return netip.AddrFrom4([4]byte(bytes[:4]))
	}
	return netip.AddrFrom16(*bytes)
}

func port(wire uint16) uint16 {
	var b [2]byte
	binary.NativeEndian.PutUint16(b[:], wire)
	return binary.BigEndian.Uint16(b[:])
}

func text(chars []int8) string {
	var b strings.Builder
	for _, c := range chars {
		if c == 0 {
			break
		}
		b.WriteByte(byte(c))
	}
	return b.String()
}

// hookName is a netfilter hook as iptables or nft calls it.
func hookName(family, hook uint8) string {
	names := []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING", "ingress"}
	prefix := ""
	switch family {
	case unix.NFPROTO_NETDEV:
		names = []string{"netdev ingress", "netdev egress"}
	case unix.NFPROTO_BRIDGE:
		prefix = "bridge "
	case unix.NFPROTO_ARP:
		names = []string{"arp IN", "arp OUT", "arp FORWARD"}
	}
	if int(hook) >= len(names) {
		return fmt.Sprintf("%shook %d", prefix, hook)
	}
	return prefix + names[hook]
}

// nftFamily is the prefix of the name of a table that is not in family inet. A packet
// does not distinguish "ip" from "inet", so both have no prefix.
func nftFamily(family uint8) string {
	switch family {
	case unix.NFPROTO_NETDEV:
		return "netdev "
	case unix.NFPROTO_BRIDGE:
		return "bridge "
	}
	return ""
}
