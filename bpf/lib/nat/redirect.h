/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Sends a packet to its next hop, without the stack. */
#ifndef SPILLWAY_NAT_REDIRECT_H
#define SPILLWAY_NAT_REDIRECT_H

#include "../lookup/next_hop.h"
#include "../answer/answer.h"

static __always_inline int macs_store(struct __sk_buff *skb, const __u8 *macs)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (data + ETH_ALEN * 2 > end)
		return -1;
	__builtin_memcpy(data, macs, ETH_ALEN * 2);
	return 0;
}

/* Adds an Ethernet header, without addresses, to a packet that came without one. */
static __always_inline int header_add(struct __sk_buff *skb)
{
	__be16 protocol = skb->protocol;

	return bpf_skb_change_head(skb, ETH_HLEN, 0) ||
	       bpf_skb_store_bytes(skb, offsetof(struct ethhdr, h_proto), &protocol,
				   sizeof(protocol), 0);
}

/* Sends a rewritten packet to a pod (NEXT_HOP_POD) or a known neighbor (NEXT_HOP_LINK). */
static __always_inline int redirect_frame(struct __sk_buff *skb, const struct packet *p, __u32 kind,
					  __u32 ifindex, const __u8 *macs, enum verdict verdict)
{
	if ((unlikely(!p->l3_off) && header_add(skb)) || macs_store(skb, macs)) {
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

/*
 * Has the device of a NEXT_HOP_NEIGH no link-layer header? bpf_redirect_neigh would send the
 * packet with the header of the device that it came from.
 */
static __always_inline int next_hop_is_l3(const struct next_hop *hop)
{
	__u32 ifindex = hop->ifindex;

	if (hop->neighbor_known)
		return !(hop->macs[0] | hop->macs[1] | hop->macs[2] | hop->macs[3] | hop->macs[4] |
			 hop->macs[5]);
	return bpf_map_lookup_elem(&l3_devices, &ifindex) != NULL;
}

/* Sends a rewritten packet to its next hop. */
static __always_inline int redirect_packet(struct __sk_buff *skb, const struct packet *p,
					   struct next_hop *hop, enum verdict verdict)
{
	if (hop->kind == NEXT_HOP_POD)
		return redirect_frame(skb, p, NEXT_HOP_POD, hop->ifindex, hop->macs, verdict);
	if (hop->kind == NEXT_HOP_NEIGH && next_hop_is_l3(hop))
		return redirect_frame(skb, p, NEXT_HOP_LINK, hop->ifindex, hop->macs, verdict);
	if (hop->kind == NEXT_HOP_NEIGH) {
		/* Linux 6.18 drops a packet without a header here. */
		if (unlikely(!p->l3_off) && header_add(skb)) {
			count(DROP_REWRITE);
			return TC_ACT_SHOT;
		}
		skb->tc_index = TC_INDEX_DONE;
		count(verdict);
		return bpf_redirect_neigh(hop->ifindex, &hop->neigh, sizeof(hop->neigh), 0);
	}
	count(TRANSLATED_STACK);
	return NEXT;
}

#endif
