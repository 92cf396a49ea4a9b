/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The cookies of the SYN filter (xdp/syn_filter.h): only this node can compute them. */
#ifndef SPILLWAY_ANSWER_SYN_COOKIE_H
#define SPILLWAY_ANSWER_SYN_COOKIE_H

#include "../parse/packet.h"
#include "../siphash.h"

#define SYN_COOKIE_SECONDS 16 /* a cookie is valid for one to two times as long */

/* What a cookie belongs to, as SipHash reads it. */
struct syn_connection {
	struct addr client;
	struct addr service;
	__be16 client_port;
	__be16 service_port;
	__u32 period;
};

/* Returns the hash of a client's SYN. The high half is its cookie. */
static __always_inline __u64 syn_hash(const struct tuple *t, __u32 period)
{
	struct syn_connection c = {
		.client = t->saddr,
		.service = t->daddr,
		.client_port = t->sport,
		.service_port = t->dport,
		.period = period,
	};

	return siphash(&c, sizeof(c) / sizeof(__u64), syn_key0, syn_key1);
}

static __always_inline __u32 syn_period(const struct packet *p)
{
	return p->time / SYN_COOKIE_SECONDS;
}

/* Is this the cookie of the packet's tuple, of the present period or the one before? */
static __always_inline bool syn_cookie_valid(const struct packet *p, __u32 cookie)
{
	__u32 period = syn_period(p);

	return cookie == syn_hash(&p->tuple, period) >> 32 ||
	       cookie == syn_hash(&p->tuple, period - 1) >> 32;
}

/* Fills the TCP header of the answer to a SYN, without its checksum. */
static __always_inline void syn_answer_header(struct tcphdr *tcp, const struct packet *p,
					      __u32 cookie)
{
	__builtin_memset(tcp, 0, sizeof(*tcp));
	tcp->source = p->tuple.dport;
	tcp->dest = p->tuple.sport;
	tcp->seq = cookie;
	tcp->ack_seq = bpf_htonl(cookie);
	tcp->doff = sizeof(*tcp) / 4;
	tcp->syn = 1;
	tcp->ack = 1;
}

#endif
