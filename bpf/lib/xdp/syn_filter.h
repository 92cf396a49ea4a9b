/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Makes clients prove their address while SYNs flood a Service (spillway.dev/syn-filter).
 *
 *   client -> service   SYN
 *   service -> client   SYN-ACK that acknowledges a number that the client has not sent: a cookie
 *   client -> service   RST with that number (RFC 9293, 3.10.7.3). A forger does not see it
 *   client -> service   the SYN again. Linux repeats it at once, others after their timeout
 *
 * The RST proves one tuple: SYNs with these addresses and ports pass for SYN_COOKIE_SECONDS to
 * twice as long. A client repeats its SYN with the same port, so each connection of a flood costs
 * it a round trip. An address has no credit, because a forger of the address would spend it.
 *
 * The RST shows that the address is in use, not that its owner has asked: a host without such a
 * connection resets it as well. So a forger that knows hosts in use gets a connection begun for
 * each RST of theirs.
 *
 * The answer goes to the neighbor that the routes name for the client, not to the sender of the
 * frame: a host on the LAN that forges an address does not see the cookie. If no neighbor is known,
 * or its device is another one, the tc programs answer (answer/syn_challenge.h): the kernel then
 * asks for the neighbor.
 *
 * The connection is the endpoint's own from its SYN on, so window scale, SACK and timestamps are as
 * without the filter. A cookie that the client accepts (bpf_tcp_raw_gen_syncookie) would put this
 * node's sequence numbers into each packet of the connection, and lose these options.
 *
 * Nothing is stored for a SYN, and the answer is not longer than it.
 */
#ifndef SPILLWAY_XDP_SYN_FILTER_H
#define SPILLWAY_XDP_SYN_FILTER_H

#include "../answer/answer.h"
#include "../answer/syn_cookie.h"
#include "../parse/packet.h"
#include "../scratch.h"

#define SYN_AGENT_SECONDS 60 /* without an agent, nothing is dropped after this time */

/* A proof is the cookie, at a place that the other half of the hash gives. */
static __always_inline __u32 *syn_proof(__u64 hash)
{
	__u32 index = hash % SYN_PROOFS;

	return bpf_map_lookup_elem(&syn_proofs, &index);
}

static __always_inline void syn_proof_store(__u64 hash)
{
	__u32 *proof = syn_proof(hash);

	if (proof)
		*proof = hash >> 32;
}

/* Has the client answered for this tuple? */
static __always_inline bool syn_proved(__u64 hash)
{
	__u32 *proof = syn_proof(hash);

	return proof && *proof == hash >> 32;
}

/*
 * Takes the RST of a client that proves its address. Returns 1 if it is one. The proof is stored
 * for the next period too, so a SYN needs one hash.
 */
__noinline int syn_prove(const struct packet *p)
{
	__u32 period;

	if (!p || !syn_cookie_valid(p, p->seq))
		return 0;
	period = syn_period(p);
	syn_proof_store(syn_hash(&p->tuple, period));
	syn_proof_store(syn_hash(&p->tuple, period + 1));
	return 1;
}

/*
 * Counts a SYN to a Service. Returns true if it gets more of them in this second, at this CPU, than
 * it takes unproved. Services may share a counter: the filter then begins earlier.
 */
static __always_inline bool syn_count(__u32 service, __u16 limit, __u32 time)
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

/*
 * Finds the neighbor of the client. Returns 0 if it is known, at the device that the SYN came by.
 */
static __always_inline int syn_neighbor(struct xdp_md *ctx, const struct packet *p,
					struct bpf_fib_lookup *fib)
{
	fib_fill(fib, ctx->ingress_ifindex, 0, p, &p->tuple.daddr, &p->tuple.saddr);
	if (bpf_fib_lookup(ctx, fib, sizeof(*fib), 0) != BPF_FIB_LKUP_RET_SUCCESS)
		return -1;
	return fib->ifindex == ctx->ingress_ifindex ? 0 : -1;
}

/* Turns the frame of a SYN into the answer, or leaves it to the tc programs. */
static __always_inline int syn_challenge(struct xdp_md *ctx, const struct packet *p, __u32 cookie)
{
	void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct scratch *m = get_scratch();
	struct ethhdr *eth = data;
	struct ipv6hdr *ip6 = data + sizeof(*eth);
	struct iphdr *ip = data + sizeof(*eth);
	bool v4 = p->tuple.family == FAMILY_V4;
	struct tcphdr *tcp;
	__u32 len = sizeof(*eth) + sizeof(*tcp) + (v4 ? sizeof(*ip) : sizeof(*ip6));

	tcp = v4 ? (void *)(ip + 1) : (void *)(ip6 + 1);
	if (!m || (void *)(tcp + 1) > end)
		return XDP_DROP;
	if (syn_neighbor(ctx, p, &m->next_hop.fib)) {
		tcp->ack_seq = bpf_htonl(cookie);
		return XDP_PASS;
	}
	if (v4)
		answer_ipv4(ip, p, IPPROTO_TCP, sizeof(*ip) + sizeof(*tcp));
	else
		answer_ipv6(ip6, p, IPPROTO_TCP, sizeof(*tcp));
	syn_answer_header(tcp, p, cookie);
	tcp->check = tcp_sum(tcp, p);
	__builtin_memcpy(eth->h_dest, m->next_hop.fib.dmac, ETH_ALEN);
	__builtin_memcpy(eth->h_source, m->next_hop.fib.smac, ETH_ALEN);
	if (bpf_xdp_adjust_tail(ctx, (int)len - (int)(end - data)))
		return XDP_DROP;
	count(SYN_CHALLENGED);
	return XDP_TX;
}

/* Makes the client of a SYN prove its address, if its Service is flooded. */
__noinline int syn_filter(struct xdp_md *ctx, const struct packet *p, __u32 service)
{
	struct service *s = bpf_map_lookup_elem(&services, &service);
	__u64 hash;

	if (!p || !s || !s->syn_limit || !syn_count(service, s->syn_limit, p->time))
		return XDP_PASS;
	hash = syn_hash(&p->tuple, syn_period(p));
	return syn_proved(hash) ? XDP_PASS : syn_challenge(ctx, p, hash >> 32);
}

#endif
