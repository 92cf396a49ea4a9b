/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Finds the next hop of a packet: a pod of this node, or the result of the FIB lookup. */
#ifndef SPILLWAY_LOOKUP_NEXT_HOP_H
#define SPILLWAY_LOOKUP_NEXT_HOP_H

#include "../parse/packet.h"
#include "pod.h"

#define IP_MAX_MTU 0xffff

struct next_hop {
	enum next_hop_kind kind;
	__u32 ifindex;
	__u32 mtu;
	__u32 neighbor_known;	      /* NEXT_HOP_NEIGH: macs is valid */
	__u8 macs[ETH_ALEN * 2];      /* destination, source */
	struct bpf_redir_neigh neigh; /* NEXT_HOP_NEIGH */
	struct bpf_fib_lookup fib;    /* memory of next_hop_route, which the stack lacks */
	bool by_gue;		      /* the packet travels within a datagram: dsr/gue.h */
};

/*
 * Returns the length of the datagram on the wire, in bytes, with its IP header. A GSO
 * packet leaves the node as segments, each with all headers.
 */
static __always_inline __u32 packet_size(const struct __sk_buff *skb, const struct packet *p)
{
	__u32 header = sizeof(struct udphdr);

	if (unlikely(p->flags & PACKET_NO_L4))
		header = 0;
	else if (p->tuple.proto == IPPROTO_TCP)
		header = p->header;

	return skb->gso_size ? p->l4_off - p->l3_off + header + skb->gso_size : p->l3_len;
}

/* Returns in *out the node's source address towards an interface. -1: there is none. */
static __always_inline int node_addr(struct addr *out, __u32 ifindex, __u8 family,
				     const struct settings *s)
{
	struct uplink *own = bpf_map_lookup_elem(&uplinks, &ifindex);

	if (own)
		*out = family == FAMILY_V4 ? own->v4 : own->v6;
	if (!own || addr_zero(out))
		*out = family == FAMILY_V4 ? s->node_v4 : s->node_v6;
	return addr_zero(out) ? -1 : 0;
}

static __always_inline int next_hop_unusable(const struct next_hop *hop)
{
	return hop->kind == NEXT_HOP_TOO_BIG || hop->kind == NEXT_HOP_TTL_EXCEEDED ||
	       hop->kind == NEXT_HOP_NO_ROUTE;
}

/* Leaves the packet to the stack. */
static __always_inline void next_hop_stack(struct next_hop *hop)
{
	hop->kind = NEXT_HOP_STACK;
	hop->by_gue = false;
}

/* len: bytes of the datagram; 0: its length does not matter. */
static __always_inline void fib_fill(struct bpf_fib_lookup *fib, __u32 ifindex, __u32 len,
				     const struct packet *p, const struct addr *saddr,
				     const struct addr *daddr)
{
	__builtin_memset(fib, 0, sizeof(*fib));
	fib->ifindex = ifindex;
	fib->l4_protocol = p->tuple.proto;
	fib->tot_len = len;
	if (p->tuple.family == FAMILY_V4) {
		fib->family = AF_INET;
		fib->ipv4_src = saddr->w[0];
		fib->ipv4_dst = daddr->w[0];
	} else {
		fib->family = AF_INET6;
		__builtin_memcpy(fib->ipv6_src, saddr, sizeof(*saddr));
		__builtin_memcpy(fib->ipv6_dst, daddr, sizeof(*daddr));
	}
}

static __always_inline void next_hop_neigh(struct next_hop *hop, const struct bpf_fib_lookup *fib,
					   bool known)
{
	hop->kind = NEXT_HOP_NEIGH;
	hop->ifindex = fib->ifindex;
	hop->neighbor_known = known;
	if (known) {
		__builtin_memcpy(hop->macs, fib->dmac, ETH_ALEN);
		__builtin_memcpy(hop->macs + ETH_ALEN, fib->smac, ETH_ALEN);
	}
	/* The gateway, or the destination itself. Its family may differ (RFC 5549). */
	hop->neigh.nh_family = fib->family;
	if (fib->family == AF_INET)
		hop->neigh.ipv4_nh = fib->ipv4_dst;
	else
		__builtin_memcpy(hop->neigh.ipv6_nh, fib->ipv6_dst, sizeof(hop->neigh.ipv6_nh));
}

/*
 * Finds a pod of this node. Returns 0 if daddr is not a pod's, or the pod is not reachable
 * without the stack.
 */
static __always_inline int next_hop_pod(const struct addr *daddr, __u8 family, struct next_hop *hop)
{
	struct pod *pod = pod_lookup(daddr, family);

	if (!pod || !(pod->flags & POD_REACHABLE))
		return 0;
	hop->kind = NEXT_HOP_POD;
	hop->ifindex = pod->ifindex;
	__builtin_memcpy(hop->macs, pod->mac, ETH_ALEN);
	__builtin_memcpy(hop->macs + ETH_ALEN, pod->gateway_mac, ETH_ALEN);
	return 1;
}

/*
 * Lowers an MTU, in bytes, to that of the node's own route to an address by a device. The kernel
 * forwards by it, locked or not (ip_dst_mtu_maybe_forward, ip6_dst_mtu_maybe_forward). The FIB
 * lookup knows it only if it is locked, or an IPv4 one with net.ipv4.ip_forward_use_pmtu.
 */
static __always_inline __u32 route_mtu(const struct addr *daddr, __u8 family, __u32 ifindex,
				       __u32 mtu)
{
	__u32 *own = range_longest(&route_mtus, ifindex, daddr, family);

	return own && *own && *own < mtu ? *own : mtu;
}

/* Looks up the route in the FIB. Does not change the packet. */
__noinline int next_hop_route(struct __sk_buff *skb, const struct packet *p,
			      const struct addr *saddr, const struct addr *daddr,
			      struct next_hop *hop)
{
	__u32 size, mtu = IP_MAX_MTU;
	struct bpf_fib_lookup *fib;
	long ret;

	if (!p || !saddr || !daddr || !hop)
		return -1;
	fib = &hop->fib;
	hop->ifindex = 0;
	__builtin_memset(&hop->neigh, 0, sizeof(hop->neigh));
	if (p->ttl <= 1) {
		hop->kind = NEXT_HOP_TTL_EXCEEDED;
		return 0;
	}
	size = packet_size(skb, p);
	fib_fill(fib, skb->ifindex, size, p, saddr, daddr);
	ret = bpf_fib_lookup(skb, fib, sizeof(*fib), 0);
	if (ret == BPF_FIB_LKUP_RET_FRAG_NEEDED) {
		/* This result is without the device. */
		mtu = fib->mtu_result;
		fib_fill(fib, skb->ifindex, 0, p, saddr, daddr);
		ret = bpf_fib_lookup(skb, fib, sizeof(*fib), 0);
		/* This one is about the device's MTU. The route itself is valid. */
		if (ret == BPF_FIB_LKUP_RET_FRAG_NEEDED)
			ret = BPF_FIB_LKUP_RET_SUCCESS;
	} else if (ret == BPF_FIB_LKUP_RET_SUCCESS) {
		mtu = fib->mtu_result; /* not with an unknown neighbor */
	}
	if (ret == BPF_FIB_LKUP_RET_SUCCESS || ret == BPF_FIB_LKUP_RET_NO_NEIGH) {
		bool known = ret == BPF_FIB_LKUP_RET_SUCCESS;

		mtu = route_mtu(daddr, p->tuple.family, fib->ifindex, mtu);
		/*
		 * A tunnel fragments the outer packet. Without a tunnel, the stack would
		 * fragment.
		 */
		if (size > mtu && p->flags & PACKET_DF) {
			hop->kind = NEXT_HOP_TOO_BIG;
			hop->mtu = mtu;
			return 0;
		}
		hop->mtu = known ? mtu : 0;
		next_hop_neigh(hop, fib, known);
	} else if (ret == BPF_FIB_LKUP_RET_NOT_FWDED || ret == BPF_FIB_LKUP_RET_FWD_DISABLED) {
		hop->kind = NEXT_HOP_STACK;
	} else {
		hop->kind = NEXT_HOP_NO_ROUTE;
	}
	return 0;
}

/* Finds the route of a packet. Returns 0, or -1 if there is none for it. */
static __always_inline int next_hop_try_route(struct __sk_buff *skb, const struct packet *p,
					      const struct addr *saddr, const struct addr *daddr,
					      struct next_hop *hop)
{
	next_hop_route(skb, p, saddr, daddr, hop);
	return next_hop_unusable(hop) ? -1 : 0;
}

static __always_inline void next_hop_find(struct __sk_buff *skb, const struct packet *p,
					  const struct addr *saddr, const struct addr *daddr,
					  struct next_hop *hop)
{
	if (!next_hop_pod(daddr, p->tuple.family, hop))
		next_hop_route(skb, p, saddr, daddr, hop);
}

#endif
