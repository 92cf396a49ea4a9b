/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * How a packet gets to its new destination without the stack: into a pod of
 * this node, or out by the interface that the routing table names.
 */
#ifndef SPILLWAY_REDIRECT_H
#define SPILLWAY_REDIRECT_H

#include "answer.h"
#include "lookup.h"
#include "nat.h"

struct way {
	enum way_kind kind;
	__u32 ifindex;
	__u32 mtu;
	__u32 neighbour_known; /* WAY_OUT: macs are the next hop's and the interface's */
	__u8 macs[ETH_ALEN * 2]; /* destination, source */
	struct bpf_redir_neigh next_hop; /* WAY_OUT */
};

static __always_inline int way_refuses(const struct way *way)
{
	return way->kind == WAY_TOO_BIG || way->kind == WAY_TTL || way->kind == WAY_NONE;
}

static __always_inline void fib_fill(struct bpf_fib_lookup *fib, struct __sk_buff *skb,
				     const struct packet *p, const struct addr *saddr,
				     const struct addr *daddr)
{
	__builtin_memset(fib, 0, sizeof(*fib));
	fib->ifindex = skb->ifindex;
	fib->l4_protocol = p->tuple.proto;
	fib->tot_len = packet_size(skb, p);
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

static __always_inline void way_out(struct way *way, const struct bpf_fib_lookup *fib, int known)
{
	way->kind = WAY_OUT;
	way->ifindex = fib->ifindex;
	way->neighbour_known = known;
	if (known) {
		__builtin_memcpy(way->macs, fib->dmac, ETH_ALEN);
		__builtin_memcpy(way->macs + ETH_ALEN, fib->smac, ETH_ALEN);
	}
	/* The gateway, or the destination itself; family may differ (RFC 5549). */
	way->next_hop.nh_family = fib->family;
	if (fib->family == AF_INET)
		way->next_hop.ipv4_nh = fib->ipv4_dst;
	else
		__builtin_memcpy(way->next_hop.ipv6_nh, fib->ipv6_dst,
				 sizeof(way->next_hop.ipv6_nh));
}

/* The way into a pod of this node. 0: daddr is none, or it cannot be reached so. */
static __always_inline int way_pod(const struct addr *daddr, __u8 family, struct way *way)
{
	struct pod *pod = pod_lookup(daddr, family);

	if (!pod || !(pod->flags & POD_REACHABLE))
		return 0;
	way->kind = WAY_POD;
	way->ifindex = pod->ifindex;
	__builtin_memcpy(way->macs, pod->mac, ETH_ALEN);
	__builtin_memcpy(way->macs + ETH_ALEN, pod->gateway_mac, ETH_ALEN);
	return 1;
}

/* The way out by the routing table. The packet is not touched. */
__noinline int way_route(struct __sk_buff *skb, const struct packet *p, const struct addr *saddr,
			 const struct addr *daddr, struct way *way)
{
	struct bpf_fib_lookup params, *fib = &params;
	long ret;

	if (!p || !saddr || !daddr || !way)
		return -1;
	way->ifindex = 0;
	__builtin_memset(&way->next_hop, 0, sizeof(way->next_hop));
	if (p->ttl <= 1) {
		way->kind = WAY_TTL;
		return 0;
	}
	fib_fill(fib, skb, p, saddr, daddr);
	ret = bpf_fib_lookup(skb, fib, sizeof(*fib), 0);
	if (ret == BPF_FIB_LKUP_RET_FRAG_NEEDED) {
		if (p->flags & PACKET_DF) {
			way->kind = WAY_TOO_BIG;
			way->mtu = fib->mtu_result;
			return 0;
		}
		/* A tunnel fragments outside; elsewhere the stack would have to. */
		fib_fill(fib, skb, p, saddr, daddr);
		fib->tot_len = 0;
		ret = bpf_fib_lookup(skb, fib, sizeof(*fib), 0);
		/* Now it is the device's MTU that is said to be less; the way is there. */
		if (ret == BPF_FIB_LKUP_RET_FRAG_NEEDED)
			ret = BPF_FIB_LKUP_RET_SUCCESS;
	}
	if (ret == BPF_FIB_LKUP_RET_SUCCESS || ret == BPF_FIB_LKUP_RET_NO_NEIGH) {
		int known = ret == BPF_FIB_LKUP_RET_SUCCESS;

		/* What was asked with a length is answered with the MTU. */
		way->mtu = known ? fib->mtu_result : 0;
		way_out(way, fib, known);
	} else if (ret == BPF_FIB_LKUP_RET_NOT_FWDED || ret == BPF_FIB_LKUP_RET_FWD_DISABLED) {
		way->kind = WAY_STACK;
	} else {
		way->kind = WAY_NONE;
	}
	return 0;
}

static __always_inline void way_find(struct __sk_buff *skb, const struct packet *p,
				     const struct addr *saddr, const struct addr *daddr,
				     struct way *way)
{
	if (!way_pod(daddr, p->tuple.family, way))
		way_route(skb, p, saddr, daddr, way);
}

static __always_inline int macs_store(struct __sk_buff *skb, const __u8 *macs)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (data + ETH_ALEN * 2 > end)
		return -1;
	__builtin_memcpy(data, macs, ETH_ALEN * 2);
	return 0;
}

/*
 * Sends the packet, already rewritten, to a pod (WAY_POD) or to a neighbour (WAY_LINK) whose
 * device and addresses are known.
 */
static __always_inline int way_send(struct __sk_buff *skb, __u32 kind, __u32 ifindex,
				    const __u8 *macs, enum verdict verdict)
{
	if (macs_store(skb, macs)) {
		count(DROP_REWRITE);
		return TC_ACT_SHOT;
	}
	count(verdict);
	if (kind == WAY_LINK) {
		skb->tc_index = DONE_TC_INDEX;
		return bpf_redirect(ifindex, 0);
	}
	/* On a bridge's port the frame was for the bridge, not for the port. */
	if (skb->pkt_type != PACKET_HOST)
		bpf_skb_change_type(skb, PACKET_HOST);
	return bpf_redirect_peer(ifindex, 0);
}

/* Sends the packet, already rewritten, on its way. */
static __always_inline int way_take(struct __sk_buff *skb, struct way *way, enum verdict verdict)
{
	if (way->kind == WAY_POD)
		return way_send(skb, WAY_POD, way->ifindex, way->macs, verdict);
	if (way->kind == WAY_OUT) {
		skb->tc_index = DONE_TC_INDEX;
		count(verdict);
		return bpf_redirect_neigh(way->ifindex, &way->next_hop, sizeof(way->next_hop), 0);
	}
	count(TRANSLATED_STACK);
	return NEXT;
}

#endif
