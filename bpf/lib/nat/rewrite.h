/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Rewrites addresses and ports of a packet, and updates its checksums incrementally (RFC
 * 1624). The helpers handle CHECKSUM_PARTIAL and CHECKSUM_COMPLETE, so that devices with
 * checksum offload send correct sums too.
 */
#ifndef SPILLWAY_NAT_REWRITE_H
#define SPILLWAY_NAT_REWRITE_H

#include "../parse/packet.h"

/* One's complement sums (RFC 1071) and their incremental update (RFC 1624). */

static __always_inline __u32 csum_fold32(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

/* Folds a sum to 16 bits, not inverted. */
static __always_inline __u16 csum_fold16(__u64 sum)
{
	__u32 s = csum_fold32(sum);

	s = (s & 0xffff) + (s >> 16);
	return (s & 0xffff) + (s >> 16);
}

/* Returns the checksum of an IPv4 header whose own field is 0. The memory has no other bytes. */
static __always_inline __u16 ipv4_sum(const void *header, __u32 len)
{
	return ~csum_fold16((__u32)bpf_csum_diff(NULL, 0, (__be32 *)header, len, 0));
}

/*
 * Returns the checksum difference between from[] and to[]. n is a constant, so this is a
 * few additions, while bpf_csum_diff is a call.
 */
static __always_inline __u32 csum_change(const __be32 *from, const __be32 *to, int n)
{
	__u64 sum = 0;

	for (int i = 0; i < n; i++)
		sum += (__u64)(__u32)~from[i] + to[i];
	return csum_fold32(sum);
}

/* Applies a change to a checksum (RFC 1624, eqn. 3). */
static __always_inline __u16 check_apply(__u16 check, __u32 change)
{
	return ~csum_fold16((__u64)(__u16)~check + change);
}

#define IPV4_TTL_OFF 8
#define IPV6_HOPS_OFF 7
#define IPV6_SADDR_OFF 8
#define TCP_CHECK_OFF 16
#define UDP_CHECK_OFF 6
#define ICMP_CHECK_OFF 2

static __always_inline __u64 l4_flags(__u8 family, __u8 proto)
{
	__u64 flags = 0;

	/* RFC 768: an IPv4 datagram may have the checksum 0, "no checksum". */
	if (proto == IPPROTO_UDP)
		flags |= BPF_F_MARK_MANGLED_0;
	if (family == FAMILY_V6 && has_csum_ipv6)
		flags |= BPF_F_IPV6;
	return flags;
}

static __always_inline __u32 l4_check_off(__u8 proto)
{
	if (proto == IPPROTO_TCP)
		return TCP_CHECK_OFF;
	return proto == IPPROTO_UDP ? UDP_CHECK_OFF : ICMP_CHECK_OFF;
}

static __always_inline __u32 addrs_change(const struct addr *old_saddr,
					  const struct addr *old_daddr, const struct addr *saddr,
					  const struct addr *daddr)
{
	/* Words 1 to 3 of IPv4 addresses are zero and change nothing. */
	return csum_fold32((__u64)csum_change(old_saddr->w, saddr->w, 4) +
			   csum_change(old_daddr->w, daddr->w, 4));
}

/* The end of an IPv4 header from the TTL on, which one call writes. */
struct ipv4_tail {
	__u8 ttl;
	__u8 proto;
	__u16 check;
	__be32 saddr;
	__be32 daddr;
};

/* Returns the IPv4 header checksum after a change of addresses and of the TTL by hops. */
static __always_inline __u16 ipv4_check(const struct packet *p, __u32 addrs, __u8 hops)
{
	/* The TTL is the high byte of its word. */
	__u32 hop = (__u16)~bpf_htons(p->ttl << 8) + bpf_htons((__u8)(p->ttl - hops) << 8);

	return check_apply(p->check, csum_fold32((__u64)addrs + hop));
}

/*
 * Writes both addresses and decrements the TTL by hops. change is the checksum change of
 * the addresses.
 */
static __always_inline int nat_addrs(struct __sk_buff *skb, const struct packet *p,
				     const struct addr *saddr, const struct addr *daddr,
				     __u32 change, __u8 hops)
{
	__u8 ttl = p->ttl - hops;
	struct addr to[2];

	if (p->tuple.family == FAMILY_V4) {
		struct ipv4_tail tail = {
			.ttl = ttl,
			.proto = p->tuple.proto,
			.saddr = saddr->w[0],
			.daddr = daddr->w[0],
		};

		tail.check = ipv4_check(p, change, hops);
		return bpf_skb_store_bytes(skb, p->l3_off + IPV4_TTL_OFF, &tail, sizeof(tail), 0);
	}
	/* No IPv6 checksum covers the hop limit. */
	if (hops &&
	    bpf_skb_store_bytes(skb, p->l3_off + IPV6_HOPS_OFF, &ttl, 1, BPF_F_RECOMPUTE_CSUM))
		return -1;
	to[0] = *saddr;
	to[1] = *daddr;
	/* The transport checksum covers the addresses. */
	return bpf_skb_store_bytes(skb, p->l3_off + IPV6_SADDR_OFF, to, sizeof(to),
				   p->flags & PACKET_NO_L4 ? BPF_F_RECOMPUTE_CSUM : 0);
}

union ports {
	__be16 p[2];
	__be32 word;
};

/*
 * The kernel's state of a packet's transport checksum (linux/skbuff.h). struct __sk_buff
 * lacks it, but programs can read it through BTF (bpf_cast_to_kern_ctx, 6.2).
 */
#define CHECKSUM_COMPLETE 2
#define CHECKSUM_PARTIAL 3

struct sk_buff {
	__u8 ip_summed : 2;
} __attribute__((preserve_access_index));

extern void *bpf_cast_to_kern_ctx(void *ctx) __ksym __weak;

static __always_inline int ip_summed(struct __sk_buff *skb)
{
	struct sk_buff *kernel_skb = bpf_cast_to_kern_ctx(skb);

	return BPF_CORE_READ_BITFIELD(kernel_skb, ip_summed);
}

/* Returns the transport checksum after a change of addresses and of ports. */
static __always_inline __u16 l4_check(__u16 check, __u8 proto, int partial, __u32 addrs,
				      __u32 ports)
{
	/* RFC 768: an IPv4 datagram may have the checksum 0, "no checksum". */
	if (proto == IPPROTO_UDP && !check)
		return 0;
	/* Partial: the sum of the pseudo header, not inverted. A device adds the rest. */
	check = partial ? csum_fold16((__u64)check + addrs)
			: check_apply(check, csum_fold32((__u64)addrs + ports));
	return proto == IPPROTO_UDP && !check ? 0xffff : check;
}

/*
 * Rewrites a packet between data and end as its flow entry says. partial: its checksum is that of
 * CHECKSUM_PARTIAL. Returns 0, or -1 if it has written nothing: the headers are elsewhere.
 */
static __always_inline int nat_store(void *data, void *end, const struct packet *p,
				     const struct flow *f, __u8 hops, bool partial)
{
	__u32 addrs, l3_off = p->l3_off, l4_off = p->l4_off;
	union ports old, new, *ports;
	struct ipv6hdr *ip6;
	struct iphdr *ip;
	__u16 *check;

	if (l3_off > ETH_HLEN || l4_off > HEADERS_MAX)
		return -1;
	ports = data + l4_off;
	if (p->tuple.proto == IPPROTO_TCP) {
		check = data + l4_off + TCP_CHECK_OFF;
		if ((void *)(check + 1) > end)
			return -1;
	} else {
		check = data + l4_off + UDP_CHECK_OFF;
		if ((void *)(check + 1) > end)
			return -1;
	}
	if ((void *)(ports + 1) > end)
		return -1;
	if (p->tuple.family == FAMILY_V4) {
		ip = data + l3_off;
		if ((void *)(ip + 1) > end)
			return -1;
		addrs = csum_fold32((__u64)csum_change(p->tuple.saddr.w, f->saddr.w, 1) +
				    csum_change(p->tuple.daddr.w, f->daddr.w, 1));
		ip->saddr = f->saddr.w[0];
		ip->daddr = f->daddr.w[0];
		ip->ttl = p->ttl - hops;
		ip->check = ipv4_check(p, addrs, hops);
	} else {
		ip6 = data + l3_off;
		if ((void *)(ip6 + 1) > end)
			return -1;
		addrs = addrs_change(&p->tuple.saddr, &p->tuple.daddr, &f->saddr, &f->daddr);
		__builtin_memcpy(&ip6->saddr, &f->saddr, sizeof(f->saddr));
		__builtin_memcpy(&ip6->daddr, &f->daddr, sizeof(f->daddr));
		ip6->hop_limit = p->ttl - hops;
	}
	old.p[0] = p->tuple.sport;
	old.p[1] = p->tuple.dport;
	new.p[0] = f->sport;
	new.p[1] = f->dport;
	*ports = new;
	*check = l4_check(*check, p->tuple.proto, partial, addrs,
			  csum_change(&old.word, &new.word, 1));
	return 0;
}

/*
 * nat_rewrite by stores into the packet, because a helper call costs more than its work.
 * Handles TCP and UDP with headers in the linear part and without CHECKSUM_COMPLETE. Returns 0,
 * or -1 if it has written nothing and the helpers must be used.
 */
__noinline int nat_rewrite_in_place(struct __sk_buff *skb, const struct packet *p,
				    const struct flow *f, __u8 hops)
{
	int summed;

	if (!p || !f || !bpf_cast_to_kern_ctx || p->flags & (PACKET_NO_L4 | PACKET_ECHO))
		return -1;
	summed = ip_summed(skb);
	if (summed == CHECKSUM_COMPLETE)
		return -1;
	return nat_store((void *)(long)skb->data, (void *)(long)skb->data_end, p, f, hops,
			 summed == CHECKSUM_PARTIAL);
}

/* nat_rewrite by helper calls, for any packet. */
__noinline int nat_rewrite_by_helpers(struct __sk_buff *skb, const struct packet *p,
				      const struct flow *f, __u8 hops)
{
	union ports old, new;
	__u32 check, change;
	__u64 flags;

	if (!p || !f)
		return -1;
	change = addrs_change(&p->tuple.saddr, &p->tuple.daddr, &f->saddr, &f->daddr);
	if (nat_addrs(skb, p, &f->saddr, &f->daddr, change, hops))
		return -1;
	if (p->flags & PACKET_NO_L4)
		return 0;
	check = p->l4_off + l4_check_off(p->tuple.proto);
	flags = l4_flags(p->tuple.family, p->tuple.proto);
	/* ICMP of IPv4 has no pseudo header. */
	if (p->tuple.proto != IPPROTO_ICMP &&
	    bpf_l4_csum_replace(skb, check, 0, change, flags | BPF_F_PSEUDO_HDR))
		return -1;
	old.p[0] = p->tuple.sport;
	old.p[1] = p->tuple.dport;
	new.p[0] = f->sport;
	new.p[1] = f->dport;
	if (old.word == new.word)
		return 0;
	change = csum_change(&old.word, &new.word, 1);
	if (bpf_l4_csum_replace(skb, check, 0, change, flags & ~BPF_F_IPV6))
		return -1;
	if (!(p->flags & PACKET_ECHO))
		return bpf_skb_store_bytes(skb, p->l4_off, &new, sizeof(new), 0);
	/* The other port is ECHO_NO_PORT before and after: the change is the identifier's. */
	new.p[0] = echo_id(new.p[0], new.p[1]);
	return bpf_skb_store_bytes(skb, p->l4_off + ECHO_ID_OFF, &new.p[0], sizeof(new.p[0]), 0);
}

/*
 * Rewrites the packet as its flow entry says, and decrements the TTL by hops. The caller
 * has checked the TTL. Returns 0, or -1 if the packet is not writable.
 */
static __always_inline int nat_rewrite(struct __sk_buff *skb, const struct packet *p,
				       const struct flow *f, __u8 hops)
{
	if (dsr && unlikely(p->flags & PACKET_TRANSLATED))
		return hops ? nat_addrs(skb, p, &f->saddr, &f->daddr, 0, hops) : 0;
	if (!nat_rewrite_in_place(skb, p, f, hops))
		return 0;
	return nat_rewrite_by_helpers(skb, p, f, hops);
}

/* Decrements the TTL of a packet and changes nothing else. */
static __always_inline int nat_decrement_ttl(struct __sk_buff *skb, const struct packet *p)
{
	return nat_addrs(skb, p, &p->tuple.saddr, &p->tuple.daddr, 0, 1);
}

#endif
