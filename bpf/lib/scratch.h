/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * What a program needs beside its stack, of which all calls under way share 512 bytes.
 */
#ifndef SPILLWAY_SCRATCH_H
#define SPILLWAY_SCRATCH_H

#include "act/answer.h"
#include "lookup/next_hop.h"

/* From which ports a flow gets another than the client's. */
enum port_list {
	PORTS_SNAT,    /* the address is the node's, or that of a pod of this node */
	PORTS_NETWORK, /* it is that of another node's pod, or of that node */
};

/* The flow that a program is at work on, in both directions. */
struct flow_pair {
	struct flow flow;
	struct flow reply;
	struct tuple reply_key;
	struct tuple holder_key; /* of another flow that has the reply tuple */
	struct tuple reverse_key;	 /* of that flow's other entry */
	__u32 seq;		 /* of the first packet, if it is a SYN */
	enum port_list ports;
	/* The best of the flows met in the search for a port that may be replaced. */
	__u32 victim_slot;
	__u32 victim_rank;
	__be16 victim_port; /* 0: none was met */
};

#define QUOTED_L4 8

/* The quoted IP header and 8 bytes behind it: as it came, as it leaves. */
struct quoted {
	__u8 ip[sizeof(struct ipv6hdr)];
	__u8 l4[QUOTED_L4];
};

struct icmp_scratch {
	struct quoted old;
	struct quoted new;
	struct tuple key;
};

/* tc programs of one CPU never nest. */
struct scratch {
	struct packet packet;
	struct flow_pair pair;
	struct next_hop next_hop;
	union {
		struct icmp_answer answer;
		struct tcp_answer rst;
		struct icmp_scratch icmp;
	};
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct scratch);
} scratches SEC(".maps");

/*
 * Functions that the verifier looks at by themselves ask anew, where they give
 * parts of it to maps: before 6.2 keys and values must not be a caller's memory.
 */
static __always_inline struct scratch *get_scratch(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&scratches, &zero);
}

static __always_inline struct flow_pair *get_flow_pair(void)
{
	struct scratch *m = get_scratch();

	return m ? &m->pair : NULL;
}

#endif
