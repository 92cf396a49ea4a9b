/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Sends a packet to its next hop, without the stack. */
#ifndef SPILLWAY_ACT_REDIRECT_H
#define SPILLWAY_ACT_REDIRECT_H

#include "../lookup/next_hop.h"
#include "answer.h"

static __always_inline int macs_store(struct __sk_buff *skb, const __u8 *macs)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (data + ETH_ALEN * 2 > end)
		return -1;
	__builtin_memcpy(data, macs, ETH_ALEN * 2);
	return 0;
}

/* Sends a rewritten packet to a pod (NEXT_HOP_POD) or a known neighbor (NEXT_HOP_LINK). */
static __always_inline int redirect_frame(struct __sk_buff *skb, __u32 kind, __u32 ifindex,
					  const __u8 *macs, enum verdict verdict)
{
	if (macs_store(skb, macs)) {
		count(DROP_REWRITE);
		return TC_ACT_SHOT;
	}
	count(verdict);
	if (kind == NEXT_HOP_LINK) {
		skb->tc_index = TC_INDEX_DONE;
		return bpf_redirect(ifindex, 0);
	}
	/* On a port of a bridge, the frame was for the bridge and not for the port. */
	if (skb->pkt_type != PACKET_HOST)
		bpf_skb_change_type(skb, PACKET_HOST);
	return bpf_redirect_peer(ifindex, 0);
}

/* Sends a rewritten packet to its next hop. */
static __always_inline int redirect_packet(struct __sk_buff *skb, struct next_hop *hop,
					   enum verdict verdict)
{
	if (hop->kind == NEXT_HOP_POD)
		return redirect_frame(skb, NEXT_HOP_POD, hop->ifindex, hop->macs, verdict);
	if (hop->kind == NEXT_HOP_NEIGH) {
		skb->tc_index = TC_INDEX_DONE;
		count(verdict);
		return bpf_redirect_neigh(hop->ifindex, &hop->neigh, sizeof(hop->neigh), 0);
	}
	count(TRANSLATED_STACK);
	return NEXT;
}

#endif
