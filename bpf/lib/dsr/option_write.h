/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Adds the option of dsr/option.h to a packet, and removes it. */
#ifndef SPILLWAY_DSR_OPTION_WRITE_H
#define SPILLWAY_DSR_OPTION_WRITE_H

#include "../scratch.h"
#include "../nat/rewrite.h"

/* Makes the IPv4 header longer, and adds the option. Returns 0, or -1. */
static __always_inline int dsr_add_v4(struct __sk_buff *skb, const struct packet *p,
				      struct dsr_ipv4 *h, const struct tuple *to_service, __u64 tag)
{
	if (load(skb, p->l3_off, &h->ip, sizeof(h->ip)) ||
	    bpf_skb_adjust_room(skb, DSR_ROOM_V4, BPF_ADJ_ROOM_NET, 0))
		return -1;
	h->ip.ihl += DSR_ROOM_V4 / 4;
	h->ip.tot_len = bpf_htons(bpf_ntohs(h->ip.tot_len) + DSR_ROOM_V4);
	h->ip.check = 0;
	dsr_write_v4(&h->option, to_service, tag);
	h->ip.check = ipv4_sum(h, sizeof(*h));
	return bpf_skb_store_bytes(skb, p->l3_off, h, sizeof(*h), BPF_F_RECOMPUTE_CSUM);
}

/* Adds the Destination Options header after the IPv6 header. Returns 0, or -1. */
static __always_inline int dsr_add_v6(struct __sk_buff *skb, const struct packet *p,
				      struct dsr_ipv6 *h, const struct tuple *to_service, __u64 tag)
{
	if (load(skb, p->l3_off, &h->ip, sizeof(h->ip)) ||
	    bpf_skb_adjust_room(skb, DSR_ROOM_V6, BPF_ADJ_ROOM_NET, 0))
		return -1;
	h->next = h->ip.nexthdr;
	h->ip.nexthdr = IPPROTO_DSTOPTS;
	h->ip.payload_len = bpf_htons(bpf_ntohs(h->ip.payload_len) + DSR_ROOM_V6);
	h->words = DSR_HEADER_V6_WORDS;
	dsr_write_v6(&h->option, to_service, tag);
	h->pad[0] = 1;
	h->pad[1] = 0;
	return bpf_skb_store_bytes(skb, p->l3_off, h, sizeof(*h), BPF_F_RECOMPUTE_CSUM);
}

/* Returns the tag for the packet in scratch memory, with the endpoint of its flow. */
static __always_inline __u64 dsr_tag_packet(struct scratch *m)
{
	dsr_connection_fill(&m->dsr.connection, &m->packet.tuple, &m->pair.flow.daddr,
			    m->pair.flow.dport);
	return dsr_tag(&m->dsr.connection, 0);
}

/*
 * Tells the endpoint's node which Service the packet in scratch memory asked for. The packet has
 * the endpoint's address by now. Returns 0, or -1 if the packet cannot grow.
 */
__noinline int dsr_add(struct __sk_buff *skb)
{
	struct scratch *m = get_scratch();
	struct packet *p;
	__u64 tag;

	if (!m)
		return -1;
	p = &m->packet;
	tag = dsr_tag_packet(m);
	if (p->tuple.family == FAMILY_V4)
		return dsr_add_v4(skb, p, &m->dsr.header.v4, &p->tuple, tag);
	return dsr_add_v6(skb, p, &m->dsr.header.v6, &p->tuple, tag);
}

/* Removes the option, whose header is in memory, from a packet. Returns 0, or -1. */
static __always_inline int dsr_remove(struct __sk_buff *skb, struct packet *p, union dsr_header *h)
{
	__u32 room = dsr_room(p->tuple.family);
	bool more = false; /* other options */
	int ret;

	if (bpf_skb_adjust_room(skb, -(__s32)room, BPF_ADJ_ROOM_NET, 0))
		return -1;
	p->l3_len -= room;
	p->l4_off -= room;
	if (p->tuple.family == FAMILY_V4) {
		h->v4.ip.ihl -= DSR_ROOM_V4 / 4;
		h->v4.ip.tot_len = bpf_htons(p->l3_len);
		h->v4.ip.check = 0;
		h->v4.ip.check = ipv4_sum(&h->v4, sizeof(h->v4.ip));
		p->check = h->v4.ip.check;
		ret = bpf_skb_store_bytes(skb, p->l3_off, &h->v4.ip, sizeof(h->v4.ip),
					  BPF_F_RECOMPUTE_CSUM);
	} else {
		more = h->v6.next != p->tuple.proto;
		h->v6.ip.nexthdr = h->v6.next;
		h->v6.ip.payload_len = bpf_htons(p->l3_len - sizeof(h->v6.ip));
		ret = bpf_skb_store_bytes(skb, p->l3_off, &h->v6.ip, sizeof(h->v6.ip),
					  BPF_F_RECOMPUTE_CSUM);
	}
	p->flags &= ~(PACKET_DSR_OPTION | (more ? 0 : PACKET_OPTIONS));
	return ret;
}

#endif
