package drops

import (
	"fmt"
	"strings"
)

// explain describes the meaning of a drop, and the next step for the operator.
func explain(d *Drop, path dropsDropPath) string {
	switch path {
	case dropsDropPathPATH_NFT:
		return fmt.Sprintf("a rule reached from nft chain %q of table %q dropped or rejected it%s", d.Chain, d.Table, ofInvalid(d))
	case dropsDropPathPATH_XTABLES:
		return fmt.Sprintf("a rule or policy of iptables' table %q dropped or rejected it at %s%s", d.Table, d.Hook, ofInvalid(d))
	case dropsDropPathPATH_NAT:
		if d.redirect() {
			return redirected
		}
		// Without a free port NAT accepts the packet, and the insertion fails.
		return "NAT could not translate it: the device it leaves by has no address, or another device masqueraded its connection before"
	case dropsDropPathPATH_CONNTRACK_FULL:
		return "conntrack could make no entry for it: its table is full; see 'spillway doctor'"
	case dropsDropPathPATH_CONNTRACK:
		return "conntrack refused it"
	case dropsDropPathPATH_CONNTRACK_INSERT:
		return "conntrack could not insert its entry (insert_failed): another flow took the same addresses and ports first, source NAT has " +
			"no free port towards this destination, or a chain is too long; see 'spillway doctor'"
	case dropsDropPathPATH_LISTEN, dropsDropPathPATH_SYN:
		return meanings[listenOverflow]
	}
	if d.Reason == "IP_INHDR" && d.forwarded() {
		return hopsOver
	}
	meaning, known := meanings[d.Reason]
	if !known {
		meaning = "the kernel says no more than this; the function tells where"
	}
	return meaning + ofInvalid(d)
}

// redirected is the reason of nf_nat's icmp_reply_translation, which drops redirects.
const redirected = "an ICMP redirect of a translated connection: NAT drops such redirects, which does no harm"

// hopsOver is the kernel's reason for a malformed header in the forwarding path.
const hopsOver = "its TTL (hop limit) ran out: it has gone through too many routers, as in a routing loop, or was sent to find them " +
	"(traceroute); the sender is told by ICMP"

// forwarded reports whether it was dropped when it was to go on to another hop.
func (d *Drop) forwarded() bool {
	name, _, _ := strings.Cut(d.Location, "+")
	name, _, _ = strings.Cut(name, ".") // of functions that the compiler split
	return name == "ip_forward" || name == "ip6_forward"
}

// redirect reports whether it is an ICMP redirect.
func (p *Packet) redirect() bool {
	return p.Protocol == "icmp" && strings.HasPrefix(p.ICMP, "5/")
}

func ofInvalid(d *Drop) string {
	if !d.Invalid {
		return ""
	}
	return "; conntrack had called it INVALID: it belongs to no connection that conntrack knows"
}

// meanings are by name, since kernels number reasons differently.
var meanings = map[string]string{
	"NOT_SPECIFIED": "the kernel's code gives no reason here; the function tells where",
	"NO_SOCKET": "nothing listens on that address and port, or no socket has that connection any more; TCP answers with " +
		"RST, UDP with ICMP port unreachable",
	"SOCKET_CLOSE":            "the socket was closed while the packet waited in it",
	"SOCKET_FILTER":           "a filter of the socket (BPF, or a cgroup's) refused it",
	"SOCKET_RCVBUFF":          "the socket's receive buffer is full: the program reads too slowly (SO_RCVBUF, net.core.rmem_max)",
	"SOCKET_BACKLOG":          "the socket was in use and its backlog is full: the program reads too slowly",
	"PROTO_MEM":               "the protocol's memory is used up (net.ipv4.tcp_mem, udp_mem)",
	"PKT_TOO_SMALL":           "it is shorter than its headers say",
	"PKT_TOO_BIG":             "it is longer than the MTU of the way on and may not be fragmented",
	"TCP_CSUM":                "its TCP checksum is wrong: look at offloading of the device or tunnel it came by",
	"UDP_CSUM":                "its UDP checksum is wrong: look at offloading of the device or tunnel it came by",
	"IP_CSUM":                 "its IP header's checksum is wrong",
	"SKB_CSUM":                "its checksum could not be computed",
	"ICMP_CSUM":               "its ICMP checksum is wrong",
	"IP_INHDR":                "its IP header is malformed",
	"IP_RPFILTER":             "its source address would be answered by another interface: reverse path filter (net.ipv4.conf.*.rp_filter)",
	"IP_INADDRERRORS":         "its destination is no address of this namespace, and it does not forward (net.ipv4.ip_forward)",
	"IP_INNOROUTES":           "there is no route to its destination",
	"IP_OUTNOROUTES":          "there is no route to its destination",
	"IP_LOCAL_SOURCE":         "it came from outside with one of this namespace's own addresses as its source",
	"IP_INVALID_SOURCE":       "its source is an address that no packet may have",
	"IP_INVALID_DEST":         "its destination is an address that no packet may have",
	"IP_LOCALNET":             "it is from or to 127.0.0.0/8 and came from outside (net.ipv4.conf.*.route_localnet)",
	"IP_NOPROTO":              "nothing here knows its protocol",
	"UNICAST_IN_L2_MULTICAST": "it is for one host and came in a frame for many",
	"OTHERHOST":               "the frame is for another MAC address",
	"XFRM_POLICY":             "an IPsec policy refused it",
	"NETFILTER_DROP":          "a netfilter hook dropped it",
	"TCP_LISTEN_OVERFLOW": "the listener's queue of connections to accept is full: the program accepts too slowly, or its backlog " +
		"(listen, net.core.somaxconn) is too small",
	"TCP_FLAGS":                "its TCP flags make no sense in the state that the connection is in",
	"TCP_ABORT_ON_DATA":        "data came after the program had closed the connection: it is reset",
	"TCP_ZEROWINDOW":           "the receiver's window is closed: the program reads too slowly",
	"TCP_OLD_DATA":             "the receiver has that data already: a retransmission that was not needed, or whose ACK was lost",
	"TCP_OVERWINDOW":           "it is beyond the receiver's window",
	"TCP_OLD_SEQUENCE":         "its sequence number is from before the window",
	"TCP_INVALID_SEQUENCE":     "its sequence number is outside the window",
	"TCP_INVALID_END_SEQUENCE": "it ends outside the window",
	"TCP_INVALID_ACK_SEQUENCE": "it acknowledges what was not sent",
	"TCP_ACK_UNSENT_DATA":      "it acknowledges what was not sent",
	"TCP_OLD_ACK":              "it acknowledges what was acknowledged before",
	"TCP_TOO_OLD_ACK":          "it acknowledges what was acknowledged long before",
	"TCP_RFC7323_PAWS": "its timestamp is older than one seen before: two hosts behind one address, or a packet from an earlier " +
		"connection",
	"TCP_RFC7323_PAWS_ACK": "its timestamp is older than one seen before",
	"TCP_RFC7323_TW_PAWS":  "its timestamp is older than that of the closed connection in TIME_WAIT",
	"TCP_RFC7323_TSECR":    "it echoes a timestamp that was never sent",
	"TCP_RESET":            "it is a RST that did its work",
	"TCP_INVALID_SYN":      "a SYN in the middle of a connection",
	"TCP_CLOSE":            "the connection is closed",
	"TCP_MINTTL":           "its TTL is below what the socket asks for",
	"TCP_OFO_QUEUE_PRUNE":  "memory ran short, and segments that had come out of order were thrown away",
	"TCP_OFO_DROP":         "there is no memory for segments that come out of order",
	"BPF_CGROUP_EGRESS":    "an eBPF program of the sender's cgroup refused it",
	"IPV6DISABLED":         "IPv6 is off on that interface",
	"NEIGH_CREATEFAIL":     "no neighbor entry could be made: the table is full (net.ipv4.neigh.default.gc_thresh3)",
	"NEIGH_FAILED":         "the next hop did not answer ARP or neighbor discovery: the host is down, or on another segment",
	"NEIGH_QUEUEFULL":      "too many packets wait for the next hop's MAC address",
	"NEIGH_DEAD":           "the next hop's neighbor entry was deleted",
	"NEIGH_HH_FILLFAIL":    "the next hop's MAC address could not be written",
	"TC_INGRESS": "a tc program or filter on the interface it came in by dropped it (Spillway's eBPF dataplane counts its " +
		"own by reason: spillway_ebpf_drops_total)",
	"TC_EGRESS": "a tc program or filter on the interface it was to leave by dropped it (Spillway's eBPF dataplane counts " +
		"its own by reason: spillway_ebpf_drops_total)",
	"XDP":                      "an XDP program dropped it",
	"SECURITY_HOOK":            "a security module (SELinux, AppArmor, BPF LSM) refused it",
	"QDISC_DROP":               "the queue of the interface dropped it: full, or shaped (tc -s qdisc)",
	"QDISC_OVERLIMIT":          "the queue of the interface is full (tc -s qdisc)",
	"QDISC_CONGESTED":          "the queue of the interface dropped it to slow its flow down (tc -s qdisc)",
	"FQ_FLOW_LIMIT":            "the flow has too many packets in the interface's queue (tc -s qdisc)",
	"FQ_BAND_LIMIT":            "too many packets of its priority are in the interface's queue (tc -s qdisc)",
	"FQ_HORIZON_LIMIT":         "it was to be sent too far in the future",
	"CPU_BACKLOG":              "the CPU's queue of packets that came in is full (net.core.netdev_max_backlog)",
	"UNHANDLED_PROTO":          "nothing here takes such frames",
	"DEV_HDR":                  "the device could not write its header",
	"DEV_READY":                "the device is down",
	"FULL_RING":                "the device's ring is full: its reader is too slow",
	"NOMEM":                    "there was no memory",
	"HDR_TRUNC":                "it ends within its headers",
	"DUP_FRAG":                 "that fragment has come before",
	"FRAG_REASM_TIMEOUT":       "the other fragments did not come in time",
	"FRAG_TOO_FAR":             "its fragment id is far from the ids of earlier fragments",
	"IPV6_BAD_EXTHDR":          "an extension header is malformed",
	"IPV6_NDISC_NS_OTHERHOST":  "it asks for another host's MAC address",
	"QUEUE_PURGE":              "the queue it waited in was emptied: a socket or device was closed",
	"VXLAN_INVALID_HDR":        "its VXLAN header is malformed",
	"VXLAN_VNI_NOT_FOUND":      "no VXLAN device here has that network id",
	"NO_TX_TARGET":             "the tunnel or bridge has no destination for it",
	"LOCAL_MAC":                "its source is this device's own MAC address: a loop, or two devices with one address",
	"MAC_INVALID_SOURCE":       "its source MAC address is none that a frame may have",
	"IP_TUNNEL_ECN":            "its congestion marks inside and outside of the tunnel contradict each other",
	"TUNNEL_TXINFO":            "it came to a tunnel that takes its target from the packet, and had none",
	"BRIDGE_INGRESS_STP_STATE": "the bridge's port does not forward (spanning tree)",
	"RECURSION_LIMIT":          "it went through too many devices in one go: a loop of tunnels",
	"PFMEMALLOC":               "memory is so short that only packets for the swap are taken",
}
