/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Answers SYNs of a flood whose answer XDP could not send itself: xdp/syn_filter.h. XDP has
 * written the cookie into the acknowledgment number, which a SYN does not use. A forger does not
 * know the cookie, so it cannot have the node answer SYNs that XDP has passed. The packet's TCP
 * checksum is wrong: without these programs, the stack drops it.
 */
#ifndef SPILLWAY_ANSWER_SYN_CHALLENGE_H
#define SPILLWAY_ANSWER_SYN_CHALLENGE_H

#include "../nat/forward.h"
#include "syn_cookie.h"
#include "../scratch.h"

/* May XDP have left the answer to this packet to tc? */
static __always_inline bool syn_is_left(const struct packet *p)
{
	return syn_key0 && p->tuple.proto == IPPROTO_TCP && packet_syn(p) && p->ack &&
	       !(p->flags & (PACKET_OPTIONS | PACKET_FIRST_FRAGMENT));
}

/* Answers the client by its neighbor, for which the kernel asks if it does not know it. */
__noinline int serve_challenge(struct __sk_buff *skb)
{
	struct scratch *m = get_scratch();
	struct packet *p;

	if (!m)
		return NEXT;
	p = &m->packet;
	if (!syn_cookie_valid(p, p->ack))
		return GO_ON;
	p->ttl = 64; /* of the answer */
	next_hop_route(skb, p, &p->tuple.daddr, &p->tuple.saddr, &m->next_hop);
	if (m->next_hop.kind != NEXT_HOP_NEIGH && m->next_hop.kind != NEXT_HOP_STACK)
		return drop(DROP_NO_ROUTE);
	syn_answer_header(&m->rst.tcp, p, p->ack);
	if (answer_tcp(skb, p, &m->rst))
		return TC_ACT_SHOT;
	if (m->next_hop.kind == NEXT_HOP_NEIGH)
		return redirect_packet(skb, p, &m->next_hop, SYN_CHALLENGED);
	/*
	 * Nothing is forwarded to a link-local address, or where forwarding is off. The node sends.
	 */
	skb->tc_index = TC_INDEX_DONE;
	count(SYN_CHALLENGED);
	return bpf_redirect_neigh(skb->ifindex, NULL, 0, 0);
}

#endif
