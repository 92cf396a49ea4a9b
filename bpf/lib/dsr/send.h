/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * DSR at the node that receives a packet: may a new flow have it, and how does the endpoint's node
 * learn which Service the packet is for?
 */
#ifndef SPILLWAY_DSR_SEND_H
#define SPILLWAY_DSR_SEND_H

#include "../flow/table.h"
#include "gue.h"

/*
 * Finds out whether a packet of a flow with DSR must travel within a datagram, and whether it fits.
 * One that does not fit is answered even if it may be fragmented: the endpoint's node reads no
 * fragments of datagrams. Those of the client pass as they are, as they always do.
 */
static __noinline void dsr_choose_encapsulation(struct __sk_buff *skb, struct scratch *m)
{
	struct next_hop *hop = &m->next_hop;
	struct packet *p = &m->packet;
	struct dsr_encapsulation *c;
	__u32 mtu;

	hop->by_gue = false;
	if (is_fragment(p) || (hop->kind != NEXT_HOP_NEIGH && hop->kind != NEXT_HOP_TOO_BIG))
		return;
	c = dsr_encapsulation_of(&m->pair.flow.daddr, p->tuple.family);
	if (!c || c->kind != DSR_BY_GUE)
		return;
	hop->by_gue = true;
	mtu = c->mtu;
	if (hop->mtu && hop->mtu < mtu)
		mtu = hop->mtu;
	mtu -= gue_room(p->tuple.family);
	if (packet_size(skb, p) > mtu) {
		hop->kind = NEXT_HOP_TOO_BIG;
		hop->mtu = mtu;
	}
}

/*
 * Has the packet room for the option? The first packet of a flow has: dsr_carries. The MTU is
 * unknown until the neighbor is known. A packet with options of the client's own gets no other: of
 * IPv4 headers, only those with this option alone are read, and an IPv6 Hop-by-Hop Options header
 * must stay the first (RFC 8200, 4.1).
 */
static __always_inline bool dsr_fits(const struct __sk_buff *skb, const struct packet *p,
				     const struct next_hop *hop)
{
	__u32 mtu = hop->mtu ? hop->mtu : IPV6_MIN_MTU;

	if (p->flags & PACKET_OPTIONS)
		return false;
	return packet_syn(p) ||
	       (!skb->gso_size && packet_size(skb, p) + dsr_room(p->tuple.family) <= mtu);
}

/*
 * Tells the endpoint's node which Service a packet is for, if that node may not know it. Returns
 * GO_ON or DROP. Fragments travel as they are.
 */
static __always_inline enum step dsr_name_service(struct __sk_buff *skb, struct scratch *m,
						  const struct flow *entry)
{
	const struct packet *p = &m->packet;
	const struct next_hop *hop = &m->next_hop;
	bool first = !is_fragment(p) && (!entry || dsr_names_service(p));
	enum step step;

	if (hop->by_gue) {
		step = gue_add(skb);
		if (step == GO_ON)
			count(DSR_ENCAPSULATED);
	} else if (first && dsr_fits(skb, p, hop)) {
		step = dsr_add(skb) ? drop_for(m, DROP_REWRITE) : GO_ON;
	} else {
		return GO_ON;
	}
	if (first && step == GO_ON)
		count(DSR_ANNOUNCED);
	return step;
}

/*
 * Deletes the flow with this reply entry, pair->reply_key, if its client has ended the connection.
 * The forward entry knows that: no reply passes here. Returns 1 if it did.
 */
static __always_inline int dsr_forget_ended(struct flow_pair *pair, const struct flow *reply)
{
	struct flow *f;

	if (!dsr_remote(reply))
		return 0;
	flow_reverse_key(&pair->other_key, reply, &pair->reply_key);
	f = bpf_map_lookup_elem(&flows, &pair->other_key);
	if (f && f->state <= FLOW_ESTABLISHED)
		return 0;
	return !flow_delete(&pair->reply_key, reply->slot, &pair->reverse_key);
}

/*
 * Has the first packet of a flow room for the option? A SYN without data has, and so has a datagram
 * that all networks forward (RFC 8200, 5). A packet in the middle of a connection needs none.
 */
static __always_inline bool dsr_carries(const struct packet *p)
{
	if (p->tuple.proto == IPPROTO_UDP)
		return p->l3_len + dsr_room(p->tuple.family) <= IPV6_MIN_MTU;
	return p->tuple.proto == IPPROTO_TCP && (!packet_syn(p) || p->seq_end == p->seq + 1);
}

/*
 * Plans whether the packet's new flow is one of DSR. Returns 1 if it is. The client must be outside
 * the cluster: this node, or a node or pod that the endpoint's node knows, would take the answer
 * for a forged one. Another flow of the client's port with the endpoint keeps it: the endpoint
 * could not tell the two apart. A path on which clients got no answers gets no SYN for a while. A
 * SYN with data may have no room for the option. A packet in the middle of a connection has no
 * other way: it may get no flow, and then has PACKET_STATELESS.
 */
__noinline int dsr_plan(struct packet *p)
{
	struct flow_pair *pair = get_flow_pair();
	struct dsr_encapsulation *how;
	struct backend *b;
	struct flow *other;

	if (!p || !pair || !dsr_carries(p) ||
	    p->flags & (PACKET_OPTIONS | PACKET_NO_L4 | PACKET_FIRST_FRAGMENT | PACKET_REPEATED) ||
	    (packet_syn(p) && !dsr_path_works(pair->flow.backend, p->time)) ||
	    in_cluster(&p->tuple.saddr, p->tuple.family))
		return 0;
	b = bpf_map_lookup_elem(&backends, &pair->flow.backend);
	if (!b || b->flags & BACKEND_ON_THIS_NODE)
		return 0;
	how = dsr_encapsulation_of(&b->addr, b->family);
	if (how && how->kind == DSR_BY_NOTHING && packet_begins(p))
		return 0;
	tuple_mirror(&pair->reply_key, &p->tuple);
	pair->reply_key.saddr = b->addr;
	pair->reply_key.sport = b->port;
	other = bpf_map_lookup_elem(&flows, &pair->reply_key);
	if (!other || flow_is_reverse(other, &p->tuple) || dsr_forget_ended(pair, other))
		return 1;
	if (packet_begins(p))
		return 0;
	p->flags |= PACKET_STATELESS;
	return 1;
}

/*
 * Completes a new flow with DSR with the next hop that plan_source has found. Returns 0, or -1 if
 * the packet is too long for it.
 */
static __always_inline int dsr_begin(struct __sk_buff *skb, struct scratch *m)
{
	struct packet *p = &m->packet;
	struct flow *f = &m->pair.flow;

	dsr_start(f, p);
	if (f->flags & FLOW_STACK)
		return 0;
	dsr_choose_encapsulation(skb, m);
	if (next_hop_unusable(&m->next_hop))
		return -1;
	flow_keep_next_hop(f, p, &m->next_hop);
	return 0;
}

#endif
