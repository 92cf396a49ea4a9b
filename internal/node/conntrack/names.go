package conntrack

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// String formats an entry as "udp 10.0.0.9:4000 -> 10.96.0.10:53, answers from
// 10.244.1.2:53".
func (e *Entry) String() string {
	return fmt.Sprintf("%s %s -> %s, answers from %s", ProtocolName(e.Protocol), e.Orig.Src, e.Orig.Dst, e.Reply.Src)
}

// state returns the state of an entry: the TCP state ("established"), or for other
// protocols "replied" or "unreplied".
func (e *Entry) state() string {
	if e.Protocol == unix.IPPROTO_TCP && int(e.TCPState) < len(tcpStates) {
		return tcpStates[e.TCPState]
	}
	if e.Status&SeenReply != 0 {
		return "replied"
	}
	return "unreplied"
}

// tcpStates are the states of enum tcp_conntrack in
// include/uapi/linux/netfilter/nf_conntrack_tcp.h.
var tcpStates = [...]string{"none", "syn_sent", "syn_recv", "established", "fin_wait",
	"close_wait", "last_ack", "time_wait", "close", "syn_sent2"}

// ProtocolName returns the name of an IP protocol, or its number if conntrack does not
// know it.
func ProtocolName(protocol uint8) string {
	switch protocol {
	case unix.IPPROTO_TCP:
		return "tcp"
	case unix.IPPROTO_UDP:
		return "udp"
	case unix.IPPROTO_SCTP:
		return "sctp"
	case unix.IPPROTO_ICMP:
		return "icmp"
	case unix.IPPROTO_ICMPV6:
		return "icmpv6"
	case unix.IPPROTO_GRE:
		return "gre"
	case unix.IPPROTO_DCCP:
		return "dccp"
	case unix.IPPROTO_UDPLITE:
		return "udplite"
	}
	return fmt.Sprint(protocol)
}
