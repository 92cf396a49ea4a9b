/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * What the programs and the agent share: the layout of every map. The Go types
 * are generated from this file. A change of layout needs a new ABI_VERSION,
 * because maps outlive the agent.
 *
 * Addresses and ports are in network order, everything else in the host's.
 * An IPv4 address stands in w[0]; the other words are zero.
 */
#ifndef SPILLWAY_ABI_H
#define SPILLWAY_ABI_H

#define ABI_VERSION 2

enum family {
	FAMILY_V4 = 4,
	FAMILY_V6 = 6,
};

struct addr {
	__be32 w[4];
};

/* A flow as one direction of it looks on the wire. */
struct tuple {
	struct addr saddr;
	struct addr daddr;
	__be16 sport;
	__be16 dport;
	__u8 proto;
	__u8 family;
	__u16 pad;
} __attribute__((aligned(8)));

/* Where a packet for a Service goes; the order is intent.Route's. */
enum route {
	ROUTE_REJECT = 0,
	ROUTE_DROP = 1,
	ROUTE_CLUSTER = 2,
	ROUTE_LOCAL = 3,
};

/*
 * frontends: address and port that clients connect to. A NodePort has the zero
 * address and counts for every address in node_addrs. FRONTEND_ENDPOINT marks
 * the address of an endpoint itself: nothing to translate, but its packets need
 * not see netfilter.
 */
struct frontend_key {
	struct addr addr;
	__be16 port;
	__u8 proto;
	__u8 family;
};

enum frontend_flags {
	FRONTEND_RANGES = 1 << 0, /* look into source_ranges */
	FRONTEND_NODEPORT = 1 << 1,
	FRONTEND_ENDPOINT = 1 << 2,
	FRONTEND_LOADBALANCER = 1 << 3,
	FRONTEND_EXTERNALIP = 1 << 4,
	FRONTEND_TFTP = 1 << 5, /* answers come from ports of the server's choice */
};

struct frontend {
	__u32 service;
	__u8 external_route; /* enum route, for packets from other machines */
	__u8 internal_route; /* enum route, for this node's processes and pods */
	__u8 flags;
	__u8 pad;
};

/* services: how many endpoints each set has, and for how long clients stick. */
enum service_flags {
	SERVICE_TFTP = 1 << 0, /* its frontends and endpoints have FRONTEND_TFTP */
};

struct service {
	__u32 count[2]; /* ROUTE_CLUSTER - 2, ROUTE_LOCAL - 2 */
	__u32 affinity; /* seconds, 0: none */
	__u32 flags;	/* enum service_flags */
};

/* slots: one per endpoint of a set; slot has SLOT_LOCAL set for the local set. */
#define SLOT_LOCAL (1U << 31)

struct slot_key {
	__u32 service;
	__u32 slot;
};

/* backends: an endpoint of a Service port, by an id that is never used twice. */
enum backend_flags {
	BACKEND_CLUSTER_POLICY = 1 << 0, /* member of the cluster set */
	BACKEND_LOCAL_POLICY = 1 << 1,	  /* member of the local set */
	BACKEND_ON_THIS_NODE = 1 << 2,	  /* on this node */
	BACKEND_HOST_NETWORK = 1 << 3,	  /* the node's own address */
	BACKEND_TRAVERSES_NETFILTER = 1 << 4, /* through the stack: a NetworkPolicy selects it */
	BACKEND_ALLOWS_ANY = 1 << 5,	  /* not, in spite of that: open to anybody, untracked */
};

struct backend {
	struct addr addr;
	__be16 port;
	__u8 family;
	__u8 flags;
	__u32 service;
};

/*
 * source_ranges: prefixes of clients that a Service allows. Four ids are not
 * Services: ranges of pods, other nodes, and what IPsec policies select.
 */
#define RANGE_PODS 0
#define RANGE_PEERS 0xffffffff
/* Sources and destinations that IPsec (xfrm) policies select; see SETTING_XFRM. */
#define RANGE_XFRM_SRC 0xfffffffe
#define RANGE_XFRM_DST 0xfffffffd

struct range_key {
	__u32 prefixlen; /* 64 + length of the prefix */
	__u32 scope;	 /* source_ranges: a Service, or RANGE_*. untracked_blocks: a rule */
	__u32 family;
	struct addr addr;
};

/* affinity: the endpoint that a client was given last. */
struct affinity_key {
	union {
		struct addr client;
		__u32 cookie[2]; /* of the client's network namespace, with by_cookie */
	};
	__u32 service;
	__u8 family;
	__u8 by_cookie;
	__u16 pad;
};

struct affinity {
	__u32 backend;
	__u32 seen; /* seconds since boot */
};

/* How a packet leaves. Flows remember it, so the values stay. */
enum next_hop_kind {
	NEXT_HOP_STACK = 0,	 /* no short way: the stack knows */
	NEXT_HOP_POD = 1,
	NEXT_HOP_NEIGH = 2,	 /* by the kernel's neighbour table */
	NEXT_HOP_LINK = 3,	 /* out, to a neighbour that is known */
	NEXT_HOP_TOO_BIG = 4,
	NEXT_HOP_TTL_EXCEEDED = 5,
	NEXT_HOP_NO_ROUTE = 6,	 /* no route */
};

/*
 * flows: two entries a flow, one for each direction. The key is a packet as it
 * arrives, the value what becomes of it; the key of the other direction is the
 * mirror image of the value, so that each entry names its reverse entry.
 */
enum flow_state {
	FLOW_NEW = 1,	      /* TCP: a SYN. UDP: no answer yet */
	FLOW_SYN_RECV = 2,    /* TCP: the endpoint has answered with SYN-ACK */
	FLOW_ESTABLISHED = 3, /* TCP: the client has acknowledged that. UDP: answered */
	FLOW_CLOSING = 4,     /* one FIN */
	FLOW_LAST_ACK = 5,    /* both FINs, not both acknowledged */
	FLOW_CLOSED = 6,      /* both FINs acknowledged, or a valid RST */
};

enum flow_flags {
	FLOW_REPLY = 1 << 0,	/* from the endpoint to the client */
	FLOW_STACK = 1 << 1,	/* goes through the stack; replies are translated at egress */
	FLOW_SNAT = 1 << 2,	/* the client's address was replaced */
	FLOW_FIN = 1 << 3,	/* FIN seen in this direction */
	FLOW_REVERSE_FIN = 1 << 4, /* FIN seen in the other direction */
	FLOW_TO_POD = 1 << 5,	/* leads to a pod of this node */
	FLOW_REVERSE_TO_POD = 1 << 6,
	FLOW_RESET = 1 << 7,	/* TCP: closed by an RST */
	FLOW_STREAM = 1 << 8,	/* UDP: went on soon after its answer, in another second */
	FLOW_CONFIRMED = 1 << 9, /* TCP: the client is known to exist, and within its share */
	FLOW_TRACKED = 1 << 10, /* TCP: sequence numbers are known since the SYN */
	FLOW_FIN_ACKED = 1 << 11, /* the other side has acknowledged this direction's FIN */
};

/* Which side closed first, and so waits in TIME-WAIT; what a TFTP request has had. */
enum flow_end {
	END_UNKNOWN = 0,
	END_CLIENT_FIRST = 1,	/* the endpoint has forgotten the connection */
	END_ENDPOINT_FIRST = 2, /* it takes a SYN beyond what it has acknowledged (RFC 6191) */
};

/* The progress of a TFTP request. */
enum request_progress {
	REQUEST_SENT = 0,
	REQUEST_ANSWERED = 3, /* a port of the server's choice has answered */
};

/* What a flow has to do with answers from ports of the server's choice: helper.h. */
enum flow_helper {
	HELPER_NONE = 0,
	HELPER_REQUEST = 1, /* asks such a server; its reply entry stands for any port: port 0 */
	HELPER_DIRECT = 2,  /* a reply entry alone, of a client that asks the endpoint itself */
	HELPER_DATA = 3,    /* what a server's answer began */
	HELPER_NODE = 4,    /* the stack sends, and netfilter chose its port: another than the
			     * socket's, or one that a flow has */
};

/*
 * What one direction of a TCP connection shows of its sender (lib/tcp.h). An entry
 * has that of its own direction; of the other it copies what bounds this one.
 */
struct tcp_side {
	__u32 end;	   /* sequence number behind the last byte sent */
	__u32 ack;	   /* the last byte acknowledged, plus one */
	__u32 window;	   /* the largest window offered, in bytes */
	__u32 peer_window; /* the other side's, at most one second old */
	union {
		__u32 isn; /* of the first SYN, until the flow is confirmed */
		__u32 fin; /* sequence number behind the FIN, with FLOW_FIN */
	};
	__u8 scale;	   /* of the offered windows (RFC 7323) */
	__u8 peer_scale;
	__u8 first_scale;  /* of the first SYN, where another one followed */
	__u8 pad;
};

/* What each packet needs comes first: it fits into two cache lines. */
struct flow {
	struct addr saddr;
	struct addr daddr;
	__be16 sport;
	__be16 dport;
	__u32 seen; /* seconds since boot of the last packet, at most one second late */
	__u16 flags;
	__u8 state;
	union {
		__u8 end;      /* TCP: enum flow_end */
		__u8 progress; /* HELPER_REQUEST: enum request_progress */
	};
	__u8 helper; /* enum flow_helper */
	/* The way that its packets took last, with the frame's addresses; good for one second. */
	__u8 next_hop_kind; /* NEXT_HOP_POD or NEXT_HOP_LINK */
	__u16 next_hop_mtu;
	__u32 next_hop_seen;
	__u32 next_hop_ifindex;
	__u8 next_hop_macs[12];
	__u32 in_ifindex; /* the device of the pod that sends these packets; 0: the network */
	struct tcp_side tcp;
	__u32 backend;
	__u32 service;
	__u32 slot;	    /* the flow's number, see unconfirmed; SLOT_CLAIMED: being replaced */
	__be16 helper_port; /* the endpoint's port that was asked */
	__u16 answers;	    /* of a TFTP request: ports of the server that have answered */
} __attribute__((aligned(8)));

/*
 * unconfirmed: the keys of the flows made last, in a ring (lib/unconfirmed.h). A flow
 * is unconfirmed until the client's ACK ends the TCP handshake; one of UDP stays so.
 */
#define SLOT_CLAIMED 0xffffffff

/* sources: confirmed flows by client and by /64, hashed; each sweep counts them anew. */
#define SOURCES (1 << 16)

/* icmp_rates: by destination, what ICMP errors may be sent to it now. */
struct icmp_rate {
	__u64 time;   /* nanoseconds since boot; when credit was counted */
	__u64 credit; /* nanoseconds */
};

/* fragments: the ports of a datagram whose first fragment passed. */
struct fragment_key {
	struct addr saddr;
	struct addr daddr;
	__u32 id;
	__u8 proto;
	__u8 family;
	__u16 pad;
};

#define FRAGMENT_CLOCK_SHIFT 20 /* of nanoseconds since boot: about a millisecond */

struct fragment {
	__be16 sport;
	__be16 dport;
	__u32 seen; /* the first fragment, by that clock */
	__u8 proto;
	__u8 pad[3];
};

/* pods: how to reach a pod of this node without the stack. */
enum pod_flags {
	POD_TRAVERSES_NETFILTER = 1 << 0, /* netfilter is to judge its packets */
	POD_REACHABLE = 1 << 1, /* ifindex and mac are valid */
	POD_DENY_RULE_ONLY = 1 << 2, /* policed for what do-not-track policies deny, and nothing else */
};

struct pod {
	__u32 ifindex; /* the node's end of the pod's veth */
	__u8 mac[6];
	__u8 gateway_mac[6];
	__u32 flags;
};

/*
 * untracked_ports: ports of pods here that do-not-track policies leave untracked for
 * some peers, by the rules that say for whom: those in untracked_pods, or in a prefix
 * in untracked_blocks, whose range_key.service is the rule. Nothing here denies: what
 * is not found goes through the stack, where netfilter decides. Its key is a
 * frontend_key.
 */
#define UNTRACKED_RULES 4

enum untracked_peers {
	UNTRACKED_ANY = 1 << 0,
	UNTRACKED_PODS = 1 << 1,
	UNTRACKED_BLOCKS = 1 << 2,
};

struct untracked_rule {
	__u32 id;
	__u32 peers; /* enum untracked_peers; 0: no more rules */
};

struct untracked_port {
	struct untracked_rule rules[UNTRACKED_RULES];
};

struct untracked_pod_key {
	struct addr addr;
	__u32 family;
	__u32 rule;
};

/* node_addrs: the node's own addresses. */
enum node_addr_flags {
	NODE_ADDR_NODEPORT = 1 << 0, /* NodePorts are served here */
};

struct addr_key {
	struct addr addr;
	__u32 family;
};

/* uplinks: by interface, the address that packets to other machines get. */
struct uplink {
	struct addr v4;
	struct addr v6;
};

/*
 * sockets: what a datagram socket asked for and what it was given; one may ask
 * for several. connections: the Service that a TCP socket asked for.
 */
enum socket_dir {
	SOCKET_FORWARD = 0, /* Service -> endpoint */
	SOCKET_REVERSE = 1, /* endpoint -> Service */
};

struct socket_key {
	__u64 cookie;
	struct addr addr;
	__be16 port;
	__u8 proto;
	__u8 dir;
	__u32 pad;
};

struct socket_peer {
	struct addr addr;
	__be16 port;
	__u16 pad;
	__u32 backend;
};

struct connection {
	struct addr service;
	struct addr endpoint;
	__be16 service_port;
	__be16 endpoint_port;
};

/* node_settings: what may change while the programs run. */
struct settings {
	__u32 snat_ports;      /* length of the first list in snat_ports */
	__u32 timeout_new;     /* seconds, TCP without an answer */
	__u32 timeout_tcp;     /* established */
	__u32 timeout_closing; /* one FIN */
	__u32 timeout_closed;
	__u32 timeout_udp_new;
	__u32 timeout_udp;
	__u32 flags;
	struct addr node_v4; /* the node's primary addresses */
	struct addr node_v6;
	/* ICMP errors: nanoseconds between two to one address, net.ipv4.icmp_ratelimit; 0: any. */
	__u64 icmp_interval_v4;
	__u64 icmp_interval_v6;
	__u64 icmp_interval_all; /* between two to any address, net.ipv4.icmp_msgs_per_sec */
	__u32 network_ports; /* length of the list behind snat_ports: see enum port_list */
	__u32 pad;
};

enum settings_flags {
	SETTING_MASQUERADE_ALL = 1 << 0,
	SETTING_BYPASS_NEVER = 1 << 1,	/* endpoints here are reached through the stack */
	SETTING_ASK_CONNTRACK = 1 << 3, /* netfilter translates connections of its own */
	SETTING_DRAINS = 1 << 4,	/* the programs go soon: netfilter is to know what runs */
	SETTING_UNTRACKED = 1 << 5,	/* there are untracked_ports */
	SETTING_XFRM = 1 << 6,		/* there are IPsec policies: RANGE_XFRM_SRC and _DST */
	SETTING_TCP_LIBERAL = 1 << 7,	/* only RSTs are compared with the TCP window */
};

/* features_seen: what there has ever been, so that packets are spared looking for it. */
enum feature {
	FEATURE_STACK_FLOW = 1 << 0,
	FEATURE_HELPER = 1 << 1,
	FEATURE_NODE_HELPER = 1 << 2, /* a process of the node has asked */
	FEATURE_SNAT = 1 << 3,	   /* a flow has a port of the node */
};

/*
 * verdicts: a per-CPU counter for each way a packet or a connect() can end.
 * The names are metrics labels; keep the order, add at the end.
 */
enum verdict {
	PASS_OTHER = 0,		/* not a Service's: left alone */
	PASS_MALFORMED,		/* headers do not parse: left to the stack */
	PASS_FRAGMENT,		/* later fragment without a first: left to the stack */
	TRANSLATED_DIRECT,	/* rewritten and redirected */
	TRANSLATED_STACK,	/* rewritten, on through the stack */
	TRANSLATED_EGRESS,	/* reply rewritten behind the stack */
	TRANSLATED_ICMP,	/* an ICMP error about a translated packet */
	PASSED_DIRECT,		/* an endpoint's own packet, redirected unchanged */
	FLOW_CREATED,
	REJECTED_RST,		/* answered with TCP RST */
	REJECTED_ICMP,		/* answered with port unreachable */
	ANSWERED_TOO_BIG,	/* answered with fragmentation needed */
	ANSWERED_TTL,		/* answered with time exceeded */
	DROP_POLICY_LOCAL,	/* local policy, no endpoint here */
	DROP_SOURCE_RANGE,	/* loadBalancerSourceRanges */
	DROP_REJECTED_SILENT,	/* reject that may not be answered (an RST, a later fragment) */
	DROP_NO_BACKEND,	/* the endpoint vanished while it was chosen */
	DROP_SNAT_PORTS,	/* no free port towards the endpoint */
	DROP_NO_SNAT_ADDR,	/* interface without an address */
	DROP_NO_ROUTE,		/* no way to the endpoint */
	DROP_FLOW_TABLE,	/* flow could not be stored */
	DROP_REWRITE,		/* the kernel refused to write the packet */
	FLOW_REVIVED,		/* half of a flow was evicted and made again */
	FLOW_CONFLICT,		/* half of a flow was evicted and its tuple taken */
	SOCKET_TRANSLATED,
	SOCKET_REFUSED,
	SOCKET_TIMED_OUT,
	PASS_CONNTRACK,		/* netfilter knows its flow: left to it */
	HELPER_ASKED,		/* a request to a server that may answer from another port, translated here */
	HELPER_ANSWERED,	/* its first answer from another port */
	DROP_HELPER_ANSWERS,	/* too many ports of the server answer one request */
	PORT_CHANGED,		/* what the stack sends has a flow's port: it gets another */
	PASSED_UNTRACKED,	/* a do-not-track policy allows it: redirected unchanged */
	PASS_SOURCE,		/* its source does not belong to the device: left to the stack */
	PASS_VLAN,		/* tagged: left to the VLAN's own device */
	FLOW_REPLACED,		/* an unconfirmed flow gave its place or port to a newer one */
	DROP_NO_FLOW,		/* TCP, no SYN, and no connection that it may be of */
	REJECTED_NO_FLOW,	/* the same, answered with RST */
	FLOW_OVER_SHARE,	/* the client has half of the flow table: its flow stays unconfirmed */
	DROP_XFRM,		/* an IPsec policy selects it, which a redirect would bypass */
	DROP_ICMP_RATE,		/* the answer would be one ICMP error too many */
	VERDICTS,
};

#endif
