/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The layout of every map that the programs and the agent share. bpf2go generates the Go
 * types from this file. Maps outlive the agent. A new field in padding, which older programs
 * may ignore and whose zero is right for them, needs nothing else. Every other change of a
 * layout needs a new ABI_VERSION and migrations in both directions
 * (internal/dataplane/ebpf/upgrade/migrate.go, docs/adr/0045-map-layouts.md).
 *
 * Addresses and ports are in network order, all other numbers in host order. An IPv4
 * address is in w[0], and the other words are zero.
 */
#ifndef SPILLWAY_ABI_H
#define SPILLWAY_ABI_H

#define ABI_VERSION 3

enum family {
	FAMILY_V4 = 4,
	FAMILY_V6 = 6,
};

struct addr {
	__be32 w[4];
};

/* The addresses and ports of one direction of a flow, as on the wire. */
struct tuple {
	struct addr saddr;
	struct addr daddr;
	__be16 sport;
	__be16 dport;
	__u8 proto;
	__u8 family;
	__u16 pad;
} __attribute__((aligned(8)));

/* The action for a packet to a Service. The order is that of intent.Route. */
enum route {
	ROUTE_REJECT = 0,
	ROUTE_DROP = 1,
	ROUTE_CLUSTER = 2,
	ROUTE_LOCAL = 3,
};

/*
 * frontends: the addresses and ports that clients connect to. A NodePort has the zero
 * address and applies to every address in node_addrs. FRONTEND_ENDPOINT marks the address
 * of an endpoint itself: its packets are not translated, but they may bypass netfilter.
 */
struct frontend_key {
	struct addr addr;
	__be16 port;
	__u8 proto;
	__u8 family;
};

enum frontend_flags {
	FRONTEND_RANGES = 1 << 0, /* source_ranges restricts the clients */
	FRONTEND_ENDPOINT = 1 << 2,
	FRONTEND_TFTP = 1 << 5, /* the server answers from ports of its own choice */
};

struct frontend {
	__u32 service;
	__u8 external_route; /* enum route for packets from other machines */
	__u8 internal_route; /* enum route for this node's processes and pods */
	__u8 flags;
	__u8 pad;
};

/* services: the number of endpoints in each set, and the session affinity. */
enum service_flags {
	SERVICE_TFTP = 1 << 0,	  /* its frontends and endpoints have FRONTEND_TFTP */
	SERVICE_LEAST = 1 << 1,	  /* of two endpoints, the one with fewer active flows */
	SERVICE_LATENCY = 1 << 2, /* of two endpoints, the one with less expected delay */
	SERVICE_MAGLEV = 1 << 3,  /* the slots of ROUTE_CLUSTER are the same on all nodes */
	SERVICE_DSR = 1 << 4,	  /* with SERVICE_MAGLEV: DSR to endpoints on other nodes */
};

/* In place of a Service's id: a pod's connection to the outside. It has no endpoint. */
#define SERVICE_EGRESS 0xffffffff

struct service {
	__u32 count[2]; /* of ROUTE_CLUSTER and of ROUTE_LOCAL */
	__u32 affinity; /* timeout in seconds; 0: no affinity */
	__u16 flags;	/* enum service_flags */
	/* SYNs a second that a CPU takes before clients must prove their address; 0: all */
	__u16 syn_limit;
};

/*
 * service_changes: the number of changes after which a UDP flow may no longer be its Service's: a
 * frontend or an endpoint was written or deleted. It is never 0 while an agent runs. A flow is
 * compared with its Service again when it has seen another number.
 */

/* slots: one for each endpoint of a set. SLOT_LOCAL in slot marks the local set. */
#define SLOT_LOCAL (1U << 31)

struct slot_key {
	__u32 service;
	__u32 slot;
};

/* backends: an endpoint of a Service port, by an id that is never reused. */
enum backend_flags {
	/* Without these two it gets no new flows, and UDP flows that have it continue. */
	BACKEND_CLUSTER_POLICY = 1 << 0,      /* in the set of ROUTE_CLUSTER */
	BACKEND_LOCAL_POLICY = 1 << 1,	      /* in the set of ROUTE_LOCAL */
	BACKEND_ON_THIS_NODE = 1 << 2,	      /* runs on this node */
	BACKEND_HOST_NETWORK = 1 << 3,	      /* has the node's own address */
	BACKEND_TRAVERSES_NETFILTER = 1 << 4, /* a NetworkPolicy selects it */
	BACKEND_ALLOWS_ANY = 1 << 5, /* a do-not-track policy allows any client: overrides it */
	BACKEND_WATCHED = 1 << 6,    /* the outcomes of its TCP handshakes are counted */
	BACKEND_EJECTED = 1 << 7,    /* left out for a while, also by session affinity */
};

struct backend {
	struct addr addr;
	__be16 port;
	__u8 family;
	__u8 flags;
	__u32 service;
};

/*
 * source_ranges: prefixes of clients that a Service allows.
 * cluster_ranges: prefixes of pods, addresses of other nodes, the selectors of IPsec policies, and
 * what egress leaves to netfilter.
 * route_mtus: by device, the MTU of routes that have one, in bytes; 0: the route has none, but a
 * wider one has.
 */
#define RANGE_PODS 0
#define RANGE_PEERS 0xffffffff
/* Sources and destinations in IPsec (xfrm) policies; see SETTING_XFRM. */
#define RANGE_XFRM_SRC 0xfffffffe
#define RANGE_XFRM_DST 0xfffffffd
/* Destinations of pods' packets that egress leaves to netfilter: egress/leave.h. */
#define RANGE_KEEP 0xfffffffc

struct range_key {
	__u32 prefixlen; /* 64 + length of the prefix */
	/*
	 * source_ranges: a Service. cluster_ranges: RANGE_*. untracked_blocks: a rule. route_mtus:
	 * an ifindex.
	 */
	__u32 scope;
	__u32 family;
	struct addr addr;
};

/* affinity: the last endpoint of each client. */
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

/* The kind of a packet's next hop. Pinned flows contain it, so the values are fixed. */
enum next_hop_kind {
	NEXT_HOP_STACK = 0, /* unknown: the packet traverses the stack */
	NEXT_HOP_POD = 1,
	NEXT_HOP_NEIGH = 2, /* a device; the kernel's neighbor table has the MAC */
	NEXT_HOP_LINK = 3,  /* a device and a known neighbor MAC */
	NEXT_HOP_TOO_BIG = 4,
	NEXT_HOP_TTL_EXCEEDED = 5,
	NEXT_HOP_NO_ROUTE = 6, /* the FIB drops the destination */
};

/*
 * flows: two entries for each flow, one for each direction. The key is a packet's tuple on
 * arrival, the value its tuple after translation. The mirror image of the value is the key
 * of the reverse entry.
 */
enum flow_state {
	FLOW_NEW = 1,	      /* TCP: a SYN was seen. UDP, ICMP: no reply was seen */
	FLOW_SYN_RECV = 2,    /* TCP: a SYN-ACK was seen; DSR: no SYN was seen */
	FLOW_ESTABLISHED = 3, /* TCP: the client has acknowledged it. UDP, ICMP: a reply was seen */
	FLOW_CLOSING = 4,     /* one FIN was seen */
	FLOW_LAST_ACK = 5,    /* both FINs were seen, and at most one is acknowledged */
	FLOW_CLOSED = 6,      /* both FINs are acknowledged, or a valid RST was seen */
};

enum flow_flags {
	FLOW_REPLY = 1 << 0,	   /* from the endpoint to the client */
	FLOW_STACK = 1 << 1,	   /* traverses the stack; replies are translated at egress */
	FLOW_SNAT = 1 << 2,	   /* the source address is replaced */
	FLOW_FIN = 1 << 3,	   /* FIN seen in this direction */
	FLOW_REVERSE_FIN = 1 << 4, /* FIN seen in the other direction */
	FLOW_TO_POD = 1 << 5,	   /* the destination is a pod of this node */
	FLOW_REVERSE_TO_POD = 1 << 6,
	FLOW_RESET = 1 << 7,	  /* TCP: an RST closed the flow */
	FLOW_STREAM = 1 << 8,	  /* UDP: packets continued after the reply, in a later second */
	FLOW_CONFIRMED = 1 << 9,  /* TCP: the client exists, and is within its share of flows */
	FLOW_TRACKED = 1 << 10,	  /* TCP: sequence numbers are known since the SYN */
	FLOW_FIN_ACKED = 1 << 11, /* the peer has acknowledged this direction's FIN */
	FLOW_REPORTED = 1 << 12,  /* its events are stored in the ring events */
	FLOW_WATCHED = 1 << 13,	  /* its endpoint has BACKEND_WATCHED */
	FLOW_COUNTED = 1 << 14,	  /* its endpoint's load counts it */
	FLOW_DSR = 1 << 15,	  /* its endpoint's node answers the client: dsr/receive.h */
};

/* The side that closed a TCP connection first and so waits in TIME-WAIT. */
enum flow_end {
	END_UNKNOWN = 0,
	END_CLIENT_FIRST = 1,	/* the endpoint has no state of the connection */
	END_ENDPOINT_FIRST = 2, /* the endpoint accepts a SYN beyond its last ACK (RFC 6191) */
};

/* The progress of a TFTP request. */
enum request_progress {
	REQUEST_SENT = 0,
	REQUEST_ANSWERED = 3, /* a server port other than the requested one has answered */
};

/* The role of a flow where a server answers from a port of its own choice: nat/tftp.h. */
enum flow_helper {
	HELPER_NONE = 0,
	HELPER_REQUEST = 1, /* a request; its reply entry has port 0, which stands for any port */
	HELPER_OWN = 2,	    /* a reply entry alone: of a client's own connection to the endpoint */
	HELPER_DATA = 3,    /* a transfer, which a server's answer started */
	HELPER_NODE = 4,    /* netfilter chose another source port than the socket, or a used one */
};

/*
 * The TCP sequence state of one direction (flow/tcp.h). An entry has the state of its own
 * direction, and copies of the two fields of the other direction that bound it.
 */
struct tcp_side {
	__u32 end;	   /* sequence number after the last byte sent */
	__u32 ack;	   /* highest acknowledgment number sent */
	__u32 window;	   /* largest window offered, in bytes */
	__u32 peer_window; /* window of the other side, at most one second old */
	union {
		__u32 isn; /* of the first SYN, until the flow is confirmed */
		__u32 fin; /* sequence number after the FIN, with FLOW_FIN */
	};
	__u8 scale; /* window scale of this side (RFC 7323) */
	__u8 peer_scale;
	__u8 first_scale; /* window scale of the first SYN, if another SYN followed */
	__u8 reset;	  /* this side has sent an RST that the other side has accepted */
};

/* The fields that every packet needs come first: they fit into two cache lines. */
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
	/* The last next hop and the MAC addresses of the frame, valid for one second. */
	__u8 next_hop_kind; /* NEXT_HOP_POD or NEXT_HOP_LINK */
	__u16 next_hop_mtu;
	__u32 next_hop_seen;
	__u32 next_hop_ifindex;
	__u8 next_hop_macs[12];
	__u32 in_ifindex; /* device of the pod that sends these packets; 0: the network */
	union {
		struct tcp_side tcp;	    /* TCP */
		struct {		    /* UDP */
			__be16 helper_port; /* the endpoint's port that the client asked */
			__u16 answers;	    /* HELPER_REQUEST: server ports that have answered */
			__u32 checked;	    /* service_changes at the last comparison; 0: never */
		};
	};
	__u32 backend;
	__u32 service;
	__u32 slot; /* number in the ring unconfirmed; SLOT_NONE: being replaced, or it has none */
	__u32 opened; /* seconds since boot of the first packet; 0: a flow of version 2 */
} __attribute__((aligned(8)));

/*
 * unconfirmed: the keys of the newest flows, in a ring (flow/unconfirmed.h). A TCP flow is
 * unconfirmed until the client's ACK completes the handshake. A UDP flow stays unconfirmed.
 */
#define SLOT_NONE 0xffffffff

/*
 * sources: number of confirmed flows by client and by /64, hashed. Each sweep recounts
 * them.
 */
#define SOURCES (1 << 16)

/* icmp_rates: a token bucket of ICMP errors for each destination. */
struct icmp_rate {
	__u64 time;   /* nanoseconds since boot of the last update of credit */
	__u64 credit; /* nanoseconds */
};

/* fragments: the ports of datagrams whose first fragment was seen. */
struct fragment_key {
	struct addr saddr;
	struct addr daddr;
	__u32 id;
	__u8 proto;
	__u8 family;
	__u16 pad;
};

#define FRAGMENT_CLOCK_SHIFT 20 /* nanoseconds since boot, in units of about a millisecond */

struct fragment {
	__be16 sport;
	__be16 dport;
	__u32 seen; /* arrival of the first fragment, in that unit */
	__u8 proto;
	__u8 pad[3];
};

/* pods: the device and the MAC addresses of the pods of this node. */
enum pod_flags {
	POD_TRAVERSES_NETFILTER = 1 << 0, /* its packets must traverse netfilter */
	POD_REACHABLE = 1 << 1,		  /* ifindex and mac are valid */
	POD_DENY_RULE_ONLY = 1 << 2,	  /* only deny rules of do-not-track policies require it */
	POD_LEAVES = 1 << 3, /* its connections to the outside get the node's address: egress */
};

struct pod {
	__u32 ifindex; /* the node's end of the pod's veth */
	__u8 mac[6];
	__u8 gateway_mac[6];
	__u32 flags;
};

/*
 * untracked_ports: ports of pods of this node that do-not-track policies leave untracked.
 * Each rule of a port allows any peer, the pods in untracked_pods, or the prefixes in
 * untracked_blocks. No entry denies a packet: a packet without a match traverses the stack,
 * where netfilter decides. The key is a frontend_key.
 */
#define UNTRACKED_RULES 4

enum untracked_peers {
	UNTRACKED_ANY = 1 << 0,
	UNTRACKED_PODS = 1 << 1,
	UNTRACKED_BLOCKS = 1 << 2,
};

struct untracked_rule {
	__u32 id;
	__u32 peers; /* enum untracked_peers; 0: end of the list */
};

struct untracked_port {
	struct untracked_rule rules[UNTRACKED_RULES];
};

struct untracked_pod_key {
	struct addr addr;
	__u32 family;
	__u32 rule;
};

/*
 * egress_ports: the ports that a flow of egress has had as its source: eight in a value. Packets
 * from the network to other ports of the node are no answers of such flows.
 */
#define EGRESS_PORTS_OF_VALUE 8

struct egress_ports {
	__u8 used[EGRESS_PORTS_OF_VALUE]; /* 1: the port was used */
};

/*
 * egress_addresses: the node's address for the pods of each group, first of IPv4, then of IPv6. The
 * last four bits of a pod's address are the number of its group. Zero: that of the route's device.
 */
#define EGRESS_POD_GROUPS 16

/* node_addrs: the node's own addresses. */
enum node_addr_flags {
	NODE_ADDR_NODEPORT = 1 << 0, /* NodePorts are served on this address */
};

struct addr_key {
	struct addr addr;
	__u32 family;
};

/* uplinks: by interface, the node's source address towards other machines. */
struct uplink {
	struct addr v4;
	struct addr v6;
};

/*
 * l3_devices: the interfaces of uplinks without a link-layer header (tun, WireGuard, IPIP).
 * The value is 1.
 */

/*
 * sockets: the Service that a datagram socket sent to, and the endpoint that it got. One
 * socket may have several. connections: the Service that a TCP socket connected to.
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
	__u16 checked; /* as in struct flow: the lower half */
	__u32 backend;
};

struct connection {
	struct addr service;
	struct addr endpoint;
	__be16 service_port;
	__be16 endpoint_port;
};

/*
 * socket_backends: the endpoint that the last connect() of a socket was translated to. backend
 * is 0 if that connect() was not translated.
 */
struct socket_backend {
	struct addr addr;
	__be16 port;
	__u8 proto;
	__u8 family; /* of the address, not of the socket */
	__u32 backend;
};

/* A connected socket whose endpoint is not in backends: a record of the iterator lost_sockets. */
struct lost_socket {
	__u64 cookie;
	__u64 netns_cookie;
	__u32 netns_inode;
	__u32 ifindex; /* that the socket is bound to; 0: none */
	__u32 backend;
	struct addr local;
	struct addr peer;
	__be16 local_port;
	__be16 peer_port;
	__u8 proto;
	__u8 family;
	__u8 pad[6];
};

/*
 * socket_flows: the flow of a connected socket, if its events are stored in the ring events, or
 * until its handshake ends.
 */
enum socket_flow_state {
	SOCKET_FLOW_NONE = 0,	 /* not followed, or over */
	SOCKET_FLOW_PLANNED = 1, /* TCP: no SYN was sent */
	SOCKET_FLOW_OPEN = 2,
};

struct socket_flow {
	__u64 opened;	 /* nanoseconds since boot */
	__u64 handshake; /* nanoseconds; 0: not answered */
	struct addr client;
	struct addr service_addr;
	struct addr endpoint;
	__be16 client_port;
	__be16 service_port;
	__be16 endpoint_port;
	__u8 proto;
	__u8 family; /* of the addresses, not of the socket */
	__u32 service;
	__u32 backend;
	__u8 state;   /* enum socket_flow_state */
	__u8 expired; /* 1: TCP has given up to retransmit */
	__u8 silent;  /* 1: it makes no events */
	__u8 watched; /* 1: its endpoint has BACKEND_WATCHED */
	__u8 counted; /* 1: its endpoint's load counts it while it is open */
	__u8 calls;   /* BPF_SOCK_OPS_*_CB_FLAG: asked for by this program alone */
	__u16 sent;   /* time of the last repeated SYN, as in struct fragment; 0: none */
};

/* xdp_devices: the devices with the program of xdp.bpf.c. Those with a higher index have none. */
#define XDP_DEVICES 4096

enum xdp_device_flags {
	XDP_DEVICE_SERVED = 1 << 0,
	XDP_DEVICE_REDIRECTS = 1 << 1, /* the driver sends frames of other devices (ndo_xdp_xmit) */
};

struct xdp_device {
	__u8 mac[6];
	__u16 flags; /* enum xdp_device_flags; 0: no program */
};

/*
 * syn_proofs: cookies of clients that have answered the SYN filter, by a keyed hash. A later one
 * takes the place of an earlier one.
 */
#define SYN_PROOFS (1 << 20)

/* syn_rates: SYNs of a second, by Service, modulo SYN_RATES. */
#define SYN_RATES 1024
struct syn_rate {
	__u32 second;
	__u32 syns;
};

/* node_settings: settings that may change while the programs run. */
struct settings {
	__u32 snat_ports;      /* length of the list PORTS_SNAT in snat_ports */
	__u32 timeout_new;     /* seconds: TCP before it is established */
	__u32 timeout_tcp;     /* established */
	__u32 timeout_closing; /* one FIN */
	__u32 timeout_closed;
	__u32 timeout_udp_new; /* and ICMP */
	__u32 timeout_udp;
	__u32 flags;
	struct addr node_v4; /* the node's primary addresses */
	struct addr node_v6;
	/*
	 * Minimum interval between ICMP errors to one address, in ns
	 * (net.ipv4.icmp_ratelimit); 0: none.
	 */
	__u64 icmp_interval_v4;
	__u64 icmp_interval_v6;
	__u64 icmp_interval_all; /* to all addresses together (net.ipv4.icmp_msgs_per_sec) */
	__u32 network_ports; /* length of the list PORTS_NETWORK, which follows it in snat_ports */
	__u32 agent_seen;    /* seconds since boot; long after it, XDP drops nothing */
};

enum settings_flags {
	SETTING_MASQUERADE_ALL = 1 << 0,
	SETTING_BYPASS_NEVER = 1 << 1,	/* endpoints on this node are reached through the stack */
	SETTING_ASK_CONNTRACK = 1 << 3, /* netfilter may translate destinations: ask conntrack */
	SETTING_DRAINS = 1 << 4,    /* before the detachment: netfilter must learn running flows */
	SETTING_UNTRACKED = 1 << 5, /* untracked_ports has entries */
	SETTING_XFRM = 1 << 6,	    /* RANGE_XFRM_SRC and RANGE_XFRM_DST have entries */
	SETTING_TCP_LIBERAL = 1 << 7,	 /* only RSTs are compared with the TCP window */
	SETTING_EVENTS_REFUSED = 1 << 8, /* store events of refused and dropped packets */
	SETTING_EVENTS_FLOWS = 1 << 9,	 /* store events of flows */
	SETTING_HOOKS_HOST = 1 << 10,	 /* the socket hooks leave the sockets of pods */
	SETTING_HOOKS_EXCEPT = 1 << 11,	 /* they leave the cgroups in unhooked_cgroups */
	SETTING_LOOPBACK_V4 = 1 << 12,	 /* they serve NodePorts on 127.0.0.0/8 */
	SETTING_LOOPBACK_V6 = 1 << 13,	 /* and on ::1 */
	SETTING_EGRESS = 1 << 14, /* new connections of pods to the outside: egress/leave.h */
	SETTING_EGRESS_KEPT = 1 << 15, /* there may be flows of egress to RANGE_KEEP */
	SETTING_EVENTS_SELECTED = 1 << 16, /* events of flows: of Services in reported_services */
};

/*
 * features_seen: which features any packet has used since the maps exist. Programs skip the
 * lookups of features that no packet has used.
 */
enum feature {
	FEATURE_STACK_FLOW = 1 << 0,
	FEATURE_HELPER = 1 << 1,
	FEATURE_NODE_HELPER = 1 << 2, /* there is a flow of HELPER_NODE: from_stack.h, tftp.h */
	FEATURE_SNAT = 1 << 3,	      /* a flow uses an address and a port of the node */
	FEATURE_NODE_SOCKET = 1 << 4, /* a UDP socket of the node was connected to an endpoint */
	FEATURE_EGRESS = 1 << 5,      /* a pod's connection to the outside has a flow */
};

/* events: a ring buffer of flow events, which the agent reads. */
enum event_kind {
	EVENT_OPENED = 1,   /* the first packet has created the flow */
	EVENT_ANSWERED = 2, /* TCP: the endpoint's SYN-ACK. UDP: its first datagram */
	EVENT_CLOSED = 3,
	EVENT_REFUSED = 4, /* the Service does not serve the client */
	EVENT_DROPPED = 5,
};

enum event_end {
	EVENT_END_NONE = 0,
	EVENT_END_FIN = 1,
	EVENT_END_RST = 2,
	EVENT_END_TIMEOUT = 3,
	EVENT_END_MOVED = 4,  /* UDP: the endpoint is gone, or the Service has lost the address */
	EVENT_END_SOCKET = 5, /* UDP: the process has closed its socket, or connected it anew */
};

/* The directions of a flow, as indices. */
#define TO_ENDPOINT 0
#define TO_CLIENT 1

struct event {
	__u64 time;	  /* nanoseconds since boot */
	union {
		__u64 handshake; /* nanoseconds from the first packet to the answer; 0: unknown */
		__u64 cgroup;	 /* EVENT_REFUSED with by_socket: of the process; 0: unknown */
	};
	__u64 packets[2]; /* by direction; 0: not counted */
	__u64 bytes[2];
	struct addr client; /* zero: unknown */
	struct addr service_addr;
	struct addr endpoint; /* zero: none was chosen */
	__be16 client_port;
	__be16 service_port;
	__be16 endpoint_port;
	__u8 proto;
	__u8 family;
	__u32 service;	/* 0: unknown */
	__u32 backend;	/* 0: unknown, or none was chosen */
	__u32 opened;	/* seconds since boot; 0: unknown */
	__u32 srtt;	/* microseconds; 0: unknown */
	__u8 kind;	/* enum event_kind */
	__u8 end;	/* EVENT_CLOSED: enum event_end */
	__u8 verdict;	/* EVENT_REFUSED, EVENT_DROPPED: enum verdict */
	__u8 by_socket; /* 1: the socket hooks chose the endpoint */
	__u32 lasted;	/* EVENT_CLOSED with by_socket: milliseconds; 0xffffffff: longer */
};

/* event_counts: per-CPU counters of events. */
enum event_count {
	EVENTS_STORED = 0,
	EVENTS_LOST,	    /* the ring was full */
	EVENTS_LEFT_OUT,    /* flows and refusals beyond the sample or the rate */
	SERVICES_UNCOUNTED, /* increments that found service_counters or service_refusals full */
	EVENT_COUNTS,
};

/* event_rates: a token bucket of a Service's flows, and one of its refusals. */
struct event_rate_key {
	__u32 service;
	__u32 refusals; /* 1: of its refusals and drops */
};

struct event_rate {
	__u64 time;   /* nanoseconds since boot of the last update of credit */
	__u64 credit; /* nanoseconds */
};

/* handshakes: the time of a flow's first packet, by the flow's slot in the ring unconfirmed. */
struct handshake {
	__u64 time; /* nanoseconds since boot */
	__u32 slot;
	__u32 pad;
};

/* How the handshake of a socket that a connect hook has translated fails. */
enum handshake_failure {
	HANDSHAKE_REFUSED = 0,	  /* the endpoint has answered the SYN with an RST */
	HANDSHAKE_UNANSWERED = 1, /* a SYN was repeated, or the process has given up */
	HANDSHAKE_FAILURES,
};

/* Failures in a row: none is later than HANDSHAKE_*_SECONDS after the one before. */
#define HANDSHAKE_REFUSED_SECONDS 10
#define HANDSHAKE_UNANSWERED_SECONDS 30

struct handshake_failures {
	__u64 first; /* nanoseconds since boot of the first one */
	__u64 last;
	__u32 connections;
	__u32 segments; /* SYNs: a connection may have several */
};

/*
 * outcomes: the TCP handshakes with an endpoint since its last answer, by its id. The first four
 * fields are of flows and sockets with a watched endpoint. The others are of sockets with any
 * endpoint: an entry is made by the first failure.
 */
struct outcome {
	__u64 since;	  /* nanoseconds since boot of the first one; 0: there is none */
	__u64 answered;	  /* nanoseconds since boot of the last answer; 0: none yet */
	__u32 unanswered; /* all of them */
	__u32 refused;	  /* those that the endpoint answered with an RST */
	struct handshake_failures failures[HANDSHAKE_FAILURES];
	struct addr client; /* of the last failure */
};

/*
 * loads: the active flows of endpoints whose Service asks for them (lib/events/endpoint_load.h).
 * The programs write the first four fields, the agent the last two.
 */
struct load {
	__u32 flows;	  /* of the flow table */
	__u32 sockets;	  /* connected sockets that a hook has translated */
	__u32 handshake;  /* microseconds: the shortest one */
	__u32 measured;	  /* seconds since boot of that handshake; 0: none */
	__u32 lost_flows; /* flows that ended and are still in the count */
	__u32 lost_sockets;
};

/*
 * dsr_paths: whether the answers of endpoints on other nodes reach clients, by the endpoint's id.
 * The network may drop packets with the option, or with a source that is not the sender's.
 */
enum dsr_path_limit {
	DSR_FAILURES = 5,	/* more repeated SYNs than answers: the path counts as broken */
	DSR_FAILURES_MAX = 20,	/* so many more are remembered */
	DSR_RETRY_SECONDS = 60, /* from the last one until the next attempt */
};

struct dsr_path {
	__u32 failures; /* repeated SYNs, minus answers; not below 0 */
	__u32 failed;	/* seconds since boot of the last one */
	__u32 answered; /* seconds since boot of the last answer; 0: none yet */
	__u32 pad;
};

/*
 * dsr_encapsulations: how packets tell the node of an endpoint which Service they are for, by its
 * address. The agents find out by probes; an endpoint without an entry was not probed yet.
 */
enum dsr_encapsulation_kind {
	DSR_BY_OPTION = 0,  /* an IP option of the first packet */
	DSR_BY_GUE = 1,	    /* each packet travels within a datagram to the endpoint's address */
	DSR_BY_NOTHING = 2, /* neither arrives: new connections get SNAT */
};

struct dsr_encapsulation {
	__u16 mtu; /* DSR_BY_GUE: the longest packet that arrives, with all headers, in bytes */
	__u8 kind; /* enum dsr_encapsulation_kind */
	__u8 pad;
};

/* flow_bytes: the packets of one direction of a flow, by the key of its entry. */
struct traffic {
	__u64 packets;
	__u64 bytes;
};

/* service_counters, service_refusals: per-CPU counters by Service. */
#define HANDSHAKE_BUCKETS 16 /* bucket i: less than 2^i ms; the last one: all longer ones */

struct service_counts {
	__u64 connections;
	__u64 packets[2]; /* by direction */
	__u64 bytes[2];
	__u32 handshakes[HANDSHAKE_BUCKETS];
	__u64 handshake_sum; /* microseconds */
};

struct refusal_key {
	__u32 service;
	__u32 verdict; /* enum verdict */
};

/*
 * verdicts: a per-CPU counter for each outcome of a packet or of a connect(). The names are
 * labels of a metric. Keep their order, and add new ones at the end.
 */
enum verdict {
	PASS_OTHER = 0,	      /* not a packet of a Service: left unchanged */
	PASS_MALFORMED,	      /* headers do not parse: left to the stack */
	PASS_FRAGMENT,	      /* later fragment without a first one: left to the stack */
	TRANSLATED_DIRECT,    /* rewritten and redirected */
	TRANSLATED_STACK,     /* rewritten, and passed to the stack */
	TRANSLATED_FROM_STACK,    /* reply rewritten at egress, after the stack */
	TRANSLATED_ICMP,      /* an ICMP error about a translated packet */
	PASSED_DIRECT,	      /* to or from an endpoint's own address: redirected unchanged */
	FLOW_CREATED,	      /* a new flow was stored */
	REJECTED_RST,	      /* answered with a TCP RST */
	REJECTED_ICMP,	      /* answered with ICMP port unreachable */
	ANSWERED_TOO_BIG,     /* answered with ICMP fragmentation needed */
	ANSWERED_TTL,	      /* answered with ICMP time exceeded */
	DROP_POLICY_LOCAL,    /* Local traffic policy, no endpoint on this node */
	DROP_SOURCE_RANGE,    /* loadBalancerSourceRanges */
	DROP_REJECTED_SILENT, /* a reject that must not be answered (an RST, a later fragment) */
	DROP_NO_BACKEND,      /* the endpoint was removed during the choice */
	DROP_SNAT_PORTS,      /* no free port towards the endpoint */
	DROP_NO_SNAT_ADDR,    /* the interface has no address */
	DROP_NO_ROUTE,	      /* no route to the endpoint */
	DROP_FLOW_TABLE,      /* the flow could not be stored */
	DROP_REWRITE,	      /* the kernel refused to write the packet */
	FLOW_REVIVED,	      /* the kernel evicted one entry of a flow, and it was restored */
	FLOW_CONFLICT,	      /* the kernel evicted an entry of a flow, and another has its tuple */
	SOCKET_TRANSLATED,    /* a socket connects or sends to an endpoint instead of a Service */
	SOCKET_REFUSED,	      /* a socket gets ECONNREFUSED: the Service has no endpoint */
	SOCKET_TIMED_OUT,     /* a socket gets ETIMEDOUT: by a Local policy or a source range */
	PASS_CONNTRACK,	      /* netfilter knows the flow: left to it */
	HELPER_ASKED,	      /* a request to a server that may answer from another port */
	HELPER_ANSWERED,      /* the first answer to such a request from another port */
	DROP_HELPER_ANSWERS,  /* too many ports of the server answer one request */
	PORT_CHANGED,	      /* the stack's packet had the port of a flow, and got another */
	PASSED_UNTRACKED,     /* a do-not-track policy allows it: redirected unchanged */
	PASS_SOURCE,	      /* the source does not belong to the device: left to the stack */
	PASS_VLAN,	      /* tagged: left to the VLAN's own device */
	FLOW_REPLACED,	      /* a newer flow took the slot or the port of an unconfirmed flow */
	DROP_NO_FLOW,	      /* TCP, not a SYN, and of no known connection */
	REJECTED_NO_FLOW,     /* TCP, not a SYN, and of no known connection: answered with an RST */
	FLOW_OVER_SHARE,      /* the client has half of the flow table: the flow is unconfirmed */
	DROP_XFRM,	      /* an IPsec policy selects it, and a redirect would bypass IPsec */
	DROP_ICMP_RATE,	      /* the answer would exceed the rate of ICMP errors */
	DROP_SOURCE,	      /* to a Service or of a flow, with a source of another device */
	DSR_ANNOUNCED,	      /* a packet told the endpoint's node the Service that it is for */
	DROP_DSR,	      /* an option with a Service that no node of the cluster wrote */
	DSR_UNANSWERED,	      /* a client repeated its SYN to an endpoint with DSR */
	TRANSLATED_XDP,	      /* rewritten and sent before the kernel had an skb for it */
	SYN_CHALLENGED,	      /* a SYN of a flood: its client must prove its address */
	SYN_PROVED,	      /* a client has proved its address */
	DROP_SYN_FORM,	      /* a SYN with options or fragments, to a Service with a SYN filter */
	DSR_ENCAPSULATED,     /* sent to the endpoint's node within a datagram */
	DSR_PROBED,	      /* another node's probe was answered */
	DROP_MISSED_TAIL_CALL, /* the program behind an entry program is gone */
	EGRESS_CREATED,	       /* a new flow of a pod to the outside was stored */
	DROP_EGRESS_PORTS, /* a pod's connection to the outside: no free port to its destination */
	DROP_POD_REPLACED, /* an answer to a pod whose address another pod has by now */
	DROP_HELPER_CONFLICT, /* a server's answer, to ports that another flow has */
	VERDICTS,
};

/*
 * Does a verdict say that the Service refuses the client? All others of refused and dropped packets
 * are drops. The agent has the same list (internal/dataplane/ebpf/objects/verdicts.go).
 */
static __always_inline int verdict_refuses(enum verdict verdict)
{
	switch (verdict) {
	case REJECTED_RST:
	case REJECTED_ICMP:
	case DROP_POLICY_LOCAL:
	case DROP_SOURCE_RANGE:
	case SOCKET_REFUSED:
	case SOCKET_TIMED_OUT:
		return 1;
	default:
		return 0;
	}
}

#endif
