/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Rewrites addresses and ports in a packet and keeps its checksums right, by
 * the differences only (RFC 1624). The helpers know about CHECKSUM_PARTIAL and
 * CHECKSUM_COMPLETE, so the sums are right for offloading devices too.
 */
#ifndef SPILLWAY_NAT_H
#define SPILLWAY_NAT_H

#include "parse.h"

#define IPV4_CHECK_OFF 10
#define IPV4_SADDR_OFF 12
#define IPV6_SADDR_OFF 8
#define TCP_CHECK_OFF 16
#define UDP_CHECK_OFF 6
#define ICMP_CHECK_OFF 2

static __always_inline __u64 l4_flags(__u8 family, __u8 proto)
{
	__u64 flags = 0;

	/* RFC 768: an IPv4 datagram may say 0, "no checksum". */
	if (proto == IPPROTO_UDP)
		flags |= BPF_F_MARK_MANGLED_0;
	if (family == FAMILY_V6 && has_csum_ipv6)
		flags |= BPF_F_IPV6;
	return flags;
}

/* Writes both addresses; *diff is their change for the pseudo header. */
static __always_inline int nat_addrs(struct __sk_buff *skb, const struct packet *p,
				     const struct addr *saddr, const struct addr *daddr,
				     __s64 *diff)
{
	struct addr from[2], to[2];

	if (p->tuple.family == FAMILY_V4) {
		__be32 old[2] = {p->tuple.saddr.w[0], p->tuple.daddr.w[0]};
		__be32 new[2] = {saddr->w[0], daddr->w[0]};

		*diff = bpf_csum_diff(old, sizeof(old), new, sizeof(new), 0);
		if (bpf_l3_csum_replace(skb, p->l3_off + IPV4_CHECK_OFF, 0, *diff, 0))
			return -1;
		return bpf_skb_store_bytes(skb, p->l3_off + IPV4_SADDR_OFF, new, sizeof(new), 0);
	}
	from[0] = p->tuple.saddr;
	from[1] = p->tuple.daddr;
	to[0] = *saddr;
	to[1] = *daddr;
	*diff = bpf_csum_diff((__be32 *)from, sizeof(from), (__be32 *)to, sizeof(to), 0);
	/* The transport checksum makes up for it, unless there is none. */
	return bpf_skb_store_bytes(skb, p->l3_off + IPV6_SADDR_OFF, to, sizeof(to),
				   p->flags & PACKET_NO_L4 ? BPF_F_RECOMPUTE_CSUM : 0);
}

/* Turns the packet into what its flow entry says. 0, or -1: unwritable. */
__noinline int nat_rewrite(struct __sk_buff *skb, const struct packet *p, const struct flow *f)
{
	__be16 old[2], new[2];
	__u32 check;
	__u64 flags;
	__s64 diff;

	if (!p || !f)
		return -1;
	old[0] = p->tuple.sport;
	old[1] = p->tuple.dport;
	new[0] = f->sport;
	new[1] = f->dport;
	if (nat_addrs(skb, p, &f->saddr, &f->daddr, &diff))
		return -1;
	if (p->flags & PACKET_NO_L4)
		return 0;
	check = p->l4_off + (p->tuple.proto == IPPROTO_TCP ? TCP_CHECK_OFF : UDP_CHECK_OFF);
	flags = l4_flags(p->tuple.family, p->tuple.proto);
	if (bpf_l4_csum_replace(skb, check, 0, diff, flags | BPF_F_PSEUDO_HDR))
		return -1;
	if (old[0] == new[0] && old[1] == new[1])
		return 0;
	diff = bpf_csum_diff((__be32 *)old, sizeof(old), (__be32 *)new, sizeof(new), 0);
	if (bpf_l4_csum_replace(skb, check, 0, diff, flags & ~BPF_F_IPV6))
		return -1;
	return bpf_skb_store_bytes(skb, p->l4_off, new, sizeof(new), 0);
}

/* One hop less. The caller has seen that ttl > 1. */
static __always_inline int nat_decrement_ttl(struct __sk_buff *skb, const struct packet *p)
{
	__u8 ttl = p->ttl - 1;

	/* No other field makes up for it, as IPv4's checksum does. */
	if (p->tuple.family == FAMILY_V6)
		return bpf_skb_store_bytes(skb, p->l3_off + 7, &ttl, 1, BPF_F_RECOMPUTE_CSUM);
	/* The TTL is the high byte of its 16-bit word; its neighbour does not matter. */
	if (bpf_l3_csum_replace(skb, p->l3_off + IPV4_CHECK_OFF, bpf_htons(p->ttl << 8),
				bpf_htons(ttl << 8), 2))
		return -1;
	return bpf_skb_store_bytes(skb, p->l3_off + 8, &ttl, 1, 0);
}

#endif
