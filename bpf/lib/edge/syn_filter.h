/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Makes clients prove their address while SYNs flood a Service (spillway.dev/syn-filter).
 *
 *   client -> service   SYN
 *   service -> client   SYN-ACK that acknowledges a number that the client has not sent: a cookie
 *   client -> service   RST with that number (RFC 9293, 3.10.7.3). A forger does not see it
 *   client -> service   the SYN again. Linux repeats it at once, others after their timeout
 *
 * A client that has answered may send so many SYNs a second for a while. The answer shows that the
 * address is in use, not that its owner has asked: a host without such a connection resets it as well.
 * So a forger that knows hosts in use gets SYN_CREDIT a second through for each, and one more for
 * each RST of theirs.
 *
 * The connection is the endpoint's own from its SYN on, so window scale, SACK and timestamps are as
 * without the filter. A cookie that the client accepts (bpf_tcp_raw_gen_syncookie) would put this
 * node's sequence numbers into each packet of the connection, and lose these options.
 *
 * Nothing is stored for a SYN, and the answer is not longer than it.
 */
#ifndef SPILLWAY_EDGE_SYN_FILTER_H
#define SPILLWAY_EDGE_SYN_FILTER_H

#include "../act/answer.h"
#include "../parse/packet.h"
#include "../siphash.h"

#define SYN_COOKIE_SECONDS 16	/* a cookie is valid for one to two times as long */
#define SYN_PROVED_SECONDS 300
#define SYN_AGENT_SECONDS 60 /* without an agent, nothing is dropped after this time */

/* What a cookie belongs to, as SipHash reads it. */
struct syn_claim {
	struct addr client;
	struct addr service;
	__be16 client_port;
	__be16 service_port;
	__u32 period;
};

/* Returns the cookie of a client's SYN in the high half, and a sequence number in the low one. */
static __always_inline __u64 syn_cookie(const struct tuple *t, __u32 period)
{
	struct syn_claim c = {
		.client = t->saddr,
		.service = t->daddr,
		.client_port = t->sport,
		.service_port = t->dport,
		.period = period,
	};

	return siphash(&c, sizeof(c) / sizeof(__u64), syn_key0, syn_key1);
}

/* One who has an IPv6 address has all of its /64. */
static __always_inline void syn_client_key(struct addr_key *key, const struct tuple *t)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->addr = t->saddr;
	if (t->family == FAMILY_V6)
		key->addr.w[2] = key->addr.w[3] = 0;
	key->family = t->family;
}

/* Has the client answered lately, and not sent too many SYNs since? */
static __always_inline bool syn_proved(const struct packet *p)
{
	struct syn_client *c;
	struct addr_key key;

	syn_client_key(&key, &p->tuple);
	c = bpf_map_lookup_elem(&syn_clients, &key);
	if (!c || p->time - c->answered > SYN_PROVED_SECONDS)
		return false;
	if (c->second != p->time) {
		c->second = p->time;
		c->credit = SYN_CREDIT;
	}
	if (!c->credit)
		return false;
	__sync_fetch_and_add(&c->credit, -1);
	return true;
}

/*
 * Does the Service get more SYNs in this second, at this CPU, than it takes unproved? Services may
 * share a counter: the filter then begins earlier.
 */
static __always_inline bool syn_flood(__u32 service, __u16 limit, __u32 time)
{
	__u32 index = service % SYN_RATES;
	struct syn_rate *r = bpf_map_lookup_elem(&syn_rates, &index);

	if (!r)
		return false;
	if (r->second != time) {
		r->second = time;
		r->syns = 0;
	}
	return ++r->syns > limit;
}

/* Must the client of a SYN prove its address? */
__noinline int syn_must_prove(const struct packet *p, __u32 service)
{
	struct service *s = bpf_map_lookup_elem(&services, &service);

	return p && s && s->syn_limit && !syn_proved(p) &&
	       syn_flood(service, s->syn_limit, p->time);
}

/* Takes the RST of a client that proves its address. Returns 1 if it is one. */
__noinline int syn_prove(const struct packet *p)
{
	struct syn_client *c, first = {};
	struct addr_key key;
	__u32 period;

	if (!p)
		return 0;
	period = p->time / SYN_COOKIE_SECONDS;
	if (p->seq != syn_cookie(&p->tuple, period) >> 32 &&
	    p->seq != syn_cookie(&p->tuple, period - 1) >> 32)
		return 0;
	syn_client_key(&key, &p->tuple);
	c = bpf_map_lookup_elem(&syn_clients, &key);
	if (c && p->time - c->answered <= SYN_PROVED_SECONDS) {
		c->answered = p->time;
		if (c->second == p->time)
			__sync_fetch_and_add(&c->credit, 1);
		return 1;
	}
	first.answered = p->time;
	first.second = p->time;
	first.credit = SYN_CREDIT;
	bpf_map_update_elem(&syn_clients, &key, &first, BPF_ANY);
	return 1;
}

/* Fills the SYN-ACK's TCP header, without its checksum. */
static __always_inline void syn_answer(struct tcphdr *tcp, const struct packet *p)
{
	__u64 cookie = syn_cookie(&p->tuple, p->time / SYN_COOKIE_SECONDS);

	__builtin_memset(tcp, 0, sizeof(*tcp));
	tcp->source = p->tuple.dport;
	tcp->dest = p->tuple.sport;
	tcp->seq = (__u32)cookie;
	tcp->ack_seq = bpf_htonl(cookie >> 32);
	tcp->doff = sizeof(*tcp) / 4;
	tcp->syn = 1;
	tcp->ack = 1;
}

/* Turns the frame of a SYN into the answer. Returns 0, or -1. */
__noinline int syn_challenge(struct xdp_md *ctx, const struct packet *p)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct ethhdr *eth = data;
	__u8 mac[ETH_ALEN];
	struct ipv6hdr *ip6;
	struct tcphdr *tcp;
	struct iphdr *ip;
	__u32 len;

	if (!p || data + sizeof(*eth) > end)
		return -1;
	if (p->tuple.family == FAMILY_V4) {
		ip = data + sizeof(*eth);
		tcp = (void *)(ip + 1);
		if ((void *)(tcp + 1) > end)
			return -1;
		answer_ipv4(ip, p, IPPROTO_TCP, sizeof(*ip) + sizeof(*tcp));
		len = sizeof(*eth) + sizeof(*ip) + sizeof(*tcp);
	} else {
		ip6 = data + sizeof(*eth);
		tcp = (void *)(ip6 + 1);
		if ((void *)(tcp + 1) > end)
			return -1;
		answer_ipv6(ip6, p, IPPROTO_TCP, sizeof(*tcp));
		len = sizeof(*eth) + sizeof(*ip6) + sizeof(*tcp);
	}
	syn_answer(tcp, p);
	/* The sum of both addresses does not depend on their order. */
	tcp->check = ~csum_fold16((__u32)bpf_csum_diff(NULL, 0, (__be32 *)tcp, sizeof(*tcp),
						       pseudo_sum(&p->tuple, sizeof(*tcp))));
	__builtin_memcpy(mac, eth->h_dest, ETH_ALEN);
	__builtin_memcpy(eth->h_dest, eth->h_source, ETH_ALEN);
	__builtin_memcpy(eth->h_source, mac, ETH_ALEN);
	return bpf_xdp_adjust_tail(ctx, (int)len - (int)(end - data));
}

#endif
