/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * What both layouts share: the flows that a run touches, and its counters. A flow is a number, from
 * which its addresses and ports follow. So one BPF_PROG_RUN touches as many flows as it repeats.
 */
#ifndef BUCKETS_COMMON_H
#define BUCKETS_COMMON_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/pkt_cls.h>
#include <bpf/bpf_helpers.h>

#include "../../../bpf/abi.h"

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define READ_ONCE(x) (*(const volatile typeof(x) *)&(x))
#define WRITE_ONCE(x, v) (*(volatile typeof(x) *)&(x) = (v))
#define barrier() asm volatile("" ::: "memory")

#define CPUS 64

#define RUN_RANDOM 1 /* each packet is of a random flow; else they take turns */
#define RUN_IPV6 2
#define RUN_SNAT 4
#define RUN_TICK 8   /* each packet is the first one of its second */
#define RUN_CHECK 16 /* compare what the table returns with the flow */
#define RUN_ONE_PORT 32 /* with RUN_SNAT: flows to one endpoint get the same port */

/* The run of a CPU. */
struct run {
	__u32 first; /* number of the first flow */
	__u32 flows;
	__u32 flags; /* RUN_* */
	__u32 time;  /* seconds */
	__u64 zero;  /* 0, which the compiler does not know */
	__u64 next;  /* number of the next packet */
	__u64 sum;   /* of what was read: the next packet depends on it, as in a real program */
	__u64 done;
	__u64 missed;	/* a flow that is not there, or for a first packet: that is there */
	__u64 refused;	/* no room */
	__u64 replaced; /* unconfirmed flows that gave way */
	__u64 busy;	/* a lock was not available */
	__u64 torn;	/* RUN_CHECK: a part of another flow was read */
	__u64 pad[5];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, CPUS);
	__type(key, __u32);
	__type(value, struct run);
} runs SEC(".maps");

/* A flow, as the steps before the table find it: the packet, the endpoint, the port of SNAT. */
struct facts {
	struct addr client;
	struct addr service;
	struct addr endpoint;
	__be16 client_port;
	__be16 service_port;
	__be16 endpoint_port;
	__be16 snat_port; /* 0: none */
	__u32 backend;
};

static __always_inline struct run *run_of_cpu(void)
{
	__u32 cpu = bpf_get_smp_processor_id();

	return bpf_map_lookup_elem(&runs, &cpu);
}

/* Returns a number that looks random (the finalizer of MurmurHash3, by Austin Appleby). */
static __always_inline __u64 scatter(__u64 x)
{
	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdULL;
	x ^= x >> 33;
	x *= 0xc4ceb9fe1a85ec53ULL;
	return x ^ x >> 33;
}

/* Returns the number of the flow of the next packet. */
static __always_inline __u32 next_flow(struct run *r)
{
	__u64 n = r->next + (r->sum & r->zero);

	r->next = n + 1;
	if (r->flags & RUN_RANDOM)
		return r->first + (__u32)((scatter(n) & 0xffffffff) * r->flows >> 32);
	return r->first + (__u32)n % r->flows;
}

#define NODE 0x0a00ffff

static __always_inline void addr_fill(struct addr *a, __u32 value, bool ipv6)
{
	a->w[0] = ipv6 ? 0x200 : value;
	a->w[1] = 0;
	a->w[2] = 0;
	a->w[3] = ipv6 ? value : 0;
}

static __always_inline void facts_fill(struct facts *f, __u32 flow, __u32 flags)
{
	bool ipv6 = flags & RUN_IPV6;

	addr_fill(&f->client, 0x0b000000 + (flow >> 14), ipv6);
	addr_fill(&f->service, 0x0a600000 + flow % 1000, ipv6);
	addr_fill(&f->endpoint, 0x0af40000 + flow % 7919, ipv6);
	f->client_port = 16384 + (flow & 0x3fff);
	f->service_port = 80;
	f->endpoint_port = 8080;
	f->snat_port = flags & RUN_SNAT ? 1024 : 0;
	if (f->snat_port && !(flags & RUN_ONE_PORT))
		f->snat_port += flow / 7919;
	f->backend = 1 + flow % 7919;
}

static __always_inline __u8 family_of(const struct run *r)
{
	return r->flags & RUN_IPV6 ? FAMILY_V6 : FAMILY_V4;
}

static __always_inline bool addr_equal(const struct addr *a, const struct addr *b)
{
	return !((a->w[0] ^ b->w[0]) | (a->w[1] ^ b->w[1]) | (a->w[2] ^ b->w[2]) |
		 (a->w[3] ^ b->w[3]));
}

static __always_inline __u64 addr_sum(const struct addr *a)
{
	return (__u64)a->w[0] + a->w[1] + a->w[2] + a->w[3];
}

/* The packet of the client. */
static __always_inline void tuple_there(struct tuple *t, const struct facts *f, __u8 family)
{
	t->saddr = f->client;
	t->daddr = f->service;
	t->sport = f->client_port;
	t->dport = f->service_port;
	t->proto = IPPROTO_TCP;
	t->family = family;
	t->pad = 0;
}

/* The packet of the endpoint. */
static __always_inline void tuple_back(struct tuple *t, const struct facts *f, __u8 family)
{
	t->saddr = f->endpoint;
	t->daddr = f->client;
	t->sport = f->endpoint_port;
	t->dport = f->client_port;
	t->proto = IPPROTO_TCP;
	t->family = family;
	t->pad = 0;
	if (!f->snat_port)
		return;
	addr_fill(&t->daddr, NODE, family == FAMILY_V6);
	t->dport = f->snat_port;
}

/* What a packet takes without a table. */
SEC("tc")
int empty(struct __sk_buff *skb)
{
	struct run *r = run_of_cpu();
	struct facts f;
	struct tuple t;

	if (!r)
		return TC_ACT_SHOT;
	facts_fill(&f, next_flow(r), r->flags);
	tuple_there(&t, &f, family_of(r));
	barrier();
	r->sum += t.sport;
	r->done++;
	return TC_ACT_OK;
}

char _license[] SEC("license") = "Dual BSD/GPL";

#endif
