/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Memory of a program beside its stack: all active calls share 512 bytes of stack. */
#ifndef SPILLWAY_SCRATCH_H
#define SPILLWAY_SCRATCH_H

#include "answer/answer.h"
#include "dsr/option.h"
#include "hook.h"
#include "lookup/next_hop.h"

/* The lists of source ports that may replace a client's port. */
enum port_list {
	PORTS_SNAT,    /* for the node's address, or that of a pod of this node */
	PORTS_NETWORK, /* for the address of another node or of its pods */
};

/* The source port of a new flow towards its endpoint. */
enum source_port {
	SOURCE_PORT_KEEP, /* the client's, unless another flow to the endpoint has it */
	SOURCE_PORT_RANDOM,
	SOURCE_PORT_EXACT, /* the client's, or none */
};

/* The flow that a program works on, in both directions. */
struct flow_pair {
	struct flow flow;
	struct flow reply;
	struct tuple reply_key;
	/* The key of another flow, or a copy: before 6.2 keys must not be memory of a caller. */
	struct tuple other_key;
	struct tuple reverse_key; /* key of that flow's reverse entry */
	__u32 seq;		  /* of the first packet, if it is a SYN */
	enum source_port source;
	enum port_list ports; /* of random ports */
	/* The best flow to replace that the search for a port has found: flow_replace_rank. */
	__u32 replace_slot;
	__u32 replace_rank;
	__be16 replace_port; /* 0: none was found */
};

#define QUOTED_L4 8

/* A quoted IP header and the 8 bytes after it, before and after translation. */
struct quoted {
	__u8 ip[sizeof(struct ipv6hdr)];
	__u8 l4[QUOTED_L4];
};

struct icmp_scratch {
	struct quoted old;
	struct quoted new;
	struct tuple key;
};

/* One per CPU: tc programs of one CPU never nest. */
struct scratch {
	struct packet packet;
	enum hook hook; /* of the entry program */
	/* The Service that a pod's TCP socket asked for: find_connection_service. */
	struct {
		struct addr addr;
		__be16 port;
	} asked;
	struct flow_pair pair;
	struct next_hop next_hop;
	union {
		struct icmp_answer answer;
		struct tcp_answer rst;
		struct icmp_scratch icmp;
		struct {
			struct dsr_connection connection;
			union dsr_header header;
		} dsr;
		struct backend own; /* plan_own_connection */
	};
	enum verdict drop; /* with DROP of enum step */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct scratch);
} scratches SEC(".maps");

/*
 * The verifier checks global functions separately. Those that pass parts of the scratch
 * memory to maps look it up again: before 6.2, keys and values must not be memory that a
 * caller has passed.
 */
static __always_inline struct scratch *get_scratch(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&scratches, &zero);
}

/* Stores why the packet in scratch memory is dropped. Returns DROP. */
static __always_inline enum step drop_for(struct scratch *m, enum verdict drop)
{
	m->drop = drop;
	return DROP;
}

static __always_inline struct flow_pair *get_flow_pair(void)
{
	struct scratch *m = get_scratch();

	return m ? &m->pair : NULL;
}

#endif
