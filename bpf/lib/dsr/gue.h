/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Encapsulates a packet in a datagram to its endpoint's address, and decapsulates it:
 * dsr/option.h. The datagram has the addresses that SNAT would give the packet, so networks
 * treat both alike. It has no checksum (RFC 6935): the tag and the inner packet's own checksum
 * protect the content.
 */
#ifndef SPILLWAY_DSR_GUE_H
#define SPILLWAY_DSR_GUE_H

#include "../lookup/service.h"
#include "option_write.h"

/*
 * GSO segments keep their length, and the kernel must know where the inner packet begins. Other
 * packets get no flags: bpf_skb_net_shrink of another node would not clear the encapsulation.
 */
static __always_inline __u64 gue_flags(const struct __sk_buff *skb, __u64 outer)
{
	return skb->gso_size ? BPF_F_ADJ_ROOM_FIXED_GSO | BPF_F_ADJ_ROOM_ENCAP_L4_UDP | outer : 0;
}

/* The first of the dynamic ports (RFC 6335). Switches choose a path by the source port. */
#define GUE_FIRST_PORT 0xc000

#define ECN_BITS 3

/* Fills the headers between IP and the option. len is that of the packet inside, in bytes. */
static __always_inline void gue_fill(struct udphdr *udp, struct gue *gue, const struct tuple *t,
				     __u32 len, __u8 option)
{
	len += sizeof(*udp) + sizeof(*gue) + option;
	udp->source = bpf_htons(GUE_FIRST_PORT | (tuple_hash(t) & ~GUE_FIRST_PORT));
	udp->dest = dsr_port;
	/* Segmentation writes the length of each datagram. */
	udp->len = bpf_htons(len > 0xffff ? 0xffff : len);
	udp->check = 0;
	gue->words = option / 4;
	gue->proto = t->family == FAMILY_V4 ? IPPROTO_IPIP : IPPROTO_IPV6;
	gue->flags = 0;
}

static __always_inline int gue_add_v4(struct __sk_buff *skb, const struct packet *p,
				      struct dsr_gue_v4 *h, const struct addr *node,
				      const struct addr *endpoint, __u64 tag)
{
	__u32 len = p->l3_len + sizeof(*h);

	if (load(skb, p->l3_off, &h->ip, sizeof(h->ip)) ||
	    bpf_skb_adjust_room(skb, sizeof(*h), BPF_ADJ_ROOM_MAC,
				gue_flags(skb, BPF_F_ADJ_ROOM_ENCAP_L3_IPV4)))
		return -1;
	/* The other end reads no marks: a congested switch must drop (RFC 6040, 4.3). */
	h->ip.tos &= ~ECN_BITS;
	h->ip.ihl = sizeof(h->ip) / 4;
	h->ip.tot_len = len > 0xffff ? 0 : bpf_htons(len); /* 0: BIG TCP */
	h->ip.id = 0;
	h->ip.frag_off = bpf_htons(0x4000);
	h->ip.ttl = 64;
	h->ip.protocol = IPPROTO_UDP;
	h->ip.saddr = node->w[0];
	h->ip.daddr = endpoint->w[0];
	h->ip.check = 0;
	h->ip.check = ipv4_sum(&h->ip, sizeof(h->ip));
	gue_fill(&h->udp, &h->gue, &p->tuple, p->l3_len, sizeof(h->option));
	dsr_write_v4(&h->option, &p->tuple, tag);
	return bpf_skb_store_bytes(skb, p->l3_off, h, sizeof(*h), BPF_F_RECOMPUTE_CSUM);
}

static __always_inline int gue_add_v6(struct __sk_buff *skb, const struct packet *p,
				      struct dsr_gue_v6 *h, const struct addr *node,
				      const struct addr *endpoint, __u64 tag)
{
	__u32 payload = p->l3_len + sizeof(*h) - sizeof(h->ip);

	/* The flow label stays, and the traffic class but for its two bits of ECN. */
	if (load(skb, p->l3_off, &h->ip, sizeof(h->ip)) ||
	    bpf_skb_adjust_room(skb, sizeof(*h), BPF_ADJ_ROOM_MAC,
				gue_flags(skb, BPF_F_ADJ_ROOM_ENCAP_L3_IPV6)))
		return -1;
	h->ip.flow_lbl[0] &= ~(ECN_BITS << 4);
	h->ip.payload_len = payload > 0xffff ? 0 : bpf_htons(payload);
	h->ip.nexthdr = IPPROTO_UDP;
	h->ip.hop_limit = 64;
	__builtin_memcpy(&h->ip.saddr, node, sizeof(h->ip.saddr));
	__builtin_memcpy(&h->ip.daddr, endpoint, sizeof(h->ip.daddr));
	gue_fill(&h->udp, &h->gue, &p->tuple, p->l3_len, sizeof(h->option));
	dsr_write_v6(&h->option, &p->tuple, tag);
	return bpf_skb_store_bytes(skb, p->l3_off, h, sizeof(*h), BPF_F_RECOMPUTE_CSUM);
}

/*
 * Puts the packet in scratch memory into a datagram. The packet has the endpoint's address by now.
 * Returns GO_ON or DROP. An IPsec policy may select the datagram, as with SNAT.
 */
__noinline int gue_add(struct __sk_buff *skb)
{
	struct scratch *m = get_scratch();
	struct settings *s = get_settings();
	struct addr node, *endpoint;
	__u8 family;
	__u64 tag;
	int ret;

	if (!m || !s)
		return DROP;
	family = m->packet.tuple.family;
	endpoint = &m->pair.flow.daddr;
	if (node_addr(&node, m->next_hop.ifindex, family, s))
		return drop_for(m, DROP_NO_SNAT_ADDR);
	if (xfrm_selects(s, &node, endpoint, family))
		return drop_for(m, DROP_XFRM);
	tag = dsr_tag_packet(m);
	if (family == FAMILY_V4)
		ret = gue_add_v4(skb, &m->packet, &m->dsr.header.gue_v4, &node, endpoint, tag);
	else
		ret = gue_add_v6(skb, &m->packet, &m->dsr.header.gue_v6, &node, endpoint, tag);
	return ret ? drop_for(m, DROP_REWRITE) : GO_ON;
}

static __always_inline bool gue_fits(const struct gue *gue, __u8 proto, __u8 option)
{
	return gue->words == option / 4 && gue->proto == proto && !gue->flags;
}

/*
 * Loads the headers of a datagram after IP. Returns the option, or NULL if this is a datagram of
 * something else.
 */
static __always_inline const void *gue_load(struct __sk_buff *skb, const struct packet *p,
					    union dsr_header *h)
{
	struct dsr_gue_v4 *v4 = &h->gue_v4;
	struct dsr_gue_v6 *v6 = &h->gue_v6;

	if (p->tuple.family == FAMILY_V4) {
		if (load(skb, p->l4_off, &v4->udp, sizeof(*v4) - sizeof(v4->ip)) ||
		    !gue_fits(&v4->gue, IPPROTO_IPIP, sizeof(v4->option)) ||
		    v4->option.type != DSR_OPTION_V4 || v4->option.len != DSR_OPTION_V4_LEN)
			return NULL;
		return &v4->option;
	}
	if (load(skb, p->l4_off, &v6->udp, sizeof(*v6) - sizeof(v6->ip)) ||
	    !gue_fits(&v6->gue, IPPROTO_IPV6, sizeof(v6->option)) ||
	    v6->option.type != DSR_OPTION_V6 || v6->option.len != DSR_OPTION_V6_LEN)
		return NULL;
	return &v6->option;
}

/* Removes the headers before the packet inside, which is the parsed one. Returns 0, or -1. */
static __always_inline int gue_remove(struct __sk_buff *skb, struct packet *p)
{
	__u32 room = gue_room(p->tuple.family);

	p->l3_off -= room;
	p->l4_off -= room;
	return bpf_skb_adjust_room(skb, -(__s32)room, BPF_ADJ_ROOM_MAC, BPF_F_ADJ_ROOM_FIXED_GSO)
		       ? -1
		       : 0;
}

#endif
