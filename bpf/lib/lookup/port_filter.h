/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Most packets of a node have nothing to do with a Service. The map port_filter finds them
 * with three loads, instead of a lookup in each of the maps that could know the packet. It
 * is a Bloom filter of addresses with ports: those of Services, of NodePorts with the zero
 * address, of endpoints, and of ports with a do-not-track policy. Those that still have
 * flows or sockets stay in it. A member never fails the test. Others may pass it: they are
 * looked up in vain.
 *
 * A member sets two bits of one word. The words of an address are a group of neighbors: the
 * clients of a server have many ports and few addresses, and their words stay in the cache.
 * filter.go has the same functions, and is the only writer.
 */
#ifndef SPILLWAY_LOOKUP_PORT_FILTER_H
#define SPILLWAY_LOOKUP_PORT_FILTER_H

#include "../dsr/option.h"
#include "../egress/leave.h"
#include "../hook.h"
#include "../parse/packet.h"

/* Words in the group of an address, and of the zero address, which has all NodePorts. */
#define FILTER_GROUP 64
#define FILTER_GROUP_NODEPORTS 4096

/* Mixes a word into a 64-bit hash. The multiplier is the golden ratio's, as in hash_64(). */
static __always_inline __u64 filter_mix(__u64 h, __u64 v)
{
	h = (h ^ v) * 0x9e3779b97f4a7c15ULL;
	return h ^ h >> 32;
}

static __always_inline __u64 filter_addr(const struct addr *a)
{
	return filter_mix(filter_mix(hash_seed, (__u64)a->w[0] << 32 | a->w[1]),
			  (__u64)a->w[2] << 32 | a->w[3]);
}

/* May the filter have this port of the address with the hash addr? */
static __always_inline int filter_has(__u64 addr, __be16 port, __u8 proto, __u32 group)
{
	__u64 h = filter_mix(addr, (__u32)port << 8 | proto), bits;
	__u32 index = ((addr & ~(group - 1)) | (h >> 32 & (group - 1))) & port_filter_mask;
	__u64 *word;

	word = bpf_map_lookup_elem(&port_filter, &index);
	bits = 1ULL << (h & 63) | 1ULL << (h >> 6 & 63);
	return word && (*word & bits) == bits;
}

/* May the packet belong to a Service, an endpoint, a flow or a do-not-track policy? */
static __always_inline int filter_passes(const struct packet *p)
{
	const struct tuple *t = &p->tuple;
	const struct addr none = {};

	if (filter_has(filter_addr(&t->daddr), t->dport, t->proto, FILTER_GROUP) ||
	    filter_has(filter_addr(&t->saddr), t->sport, t->proto, FILTER_GROUP) ||
	    filter_has(filter_addr(&none), t->dport, t->proto, FILTER_GROUP_NODEPORTS))
		return 1;
	/* A server of TFTP answers from any port. */
	return t->proto == IPPROTO_UDP && feature_seen(FEATURE_HELPER | FEATURE_NODE_HELPER);
}

/* May an ICMP echo be of a flow of egress, or of the stack and have the identifier of one? */
static __always_inline bool echo_may_be_ours(const struct packet *p, enum hook hook)
{
	if (echo_is_request(&p->tuple) == (hook == FROM_NETWORK))
		return false;
	if (hook == FROM_POD)
		return egress_may_leave(p);
	return egress_has_port(echo_id(p->tuple.sport, p->tuple.dport));
}

/* May the packet that an entry program has parsed be these programs' business? */
static __always_inline bool may_be_ours(struct packet *p, enum hook hook)
{
	/* An ICMP error is looked up by the packet that it quotes. */
	if (unlikely(p->flags & (PACKET_ICMP_ERROR | PACKET_ECHO)))
		return p->flags & PACKET_ICMP_ERROR || echo_may_be_ours(p, hook);
	if (dsr && hook == FROM_NETWORK && may_be_wrapped(p))
		return true;
	if (filter_passes(p))
		return true;
	if (hook == FROM_POD)
		return egress_may_leave(p);
	/* An answer to a pod, or a packet of the stack whose port such a flow may have. */
	return egress_has_port(hook == FROM_NETWORK ? p->tuple.dport : p->tuple.sport);
}

#endif
