/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Packets to and from addresses of endpoints themselves, and packets that a do-not-track
 * policy allows: they may bypass netfilter.
 */
#ifndef SPILLWAY_SERVE_BYPASS_H
#define SPILLWAY_SERVE_BYPASS_H

#include "../flow/create.h"
#include "../lookup/untracked.h"
#include "../nat/tftp.h"

/*
 * May a packet between an endpoint's pod and another pod or node bypass netfilter? It is
 * Service traffic that a socket hook or another node has translated, or equivalent to it.
 *
 * A pod's packet to an endpoint with a node's own address is excluded: a CNI that
 * masquerades would replace its source.
 */
static __always_inline int endpoint_may_bypass(const struct settings *s, const struct tuple *t,
					       bool to_endpoint)
{
	const struct addr *endpoint = to_endpoint ? &t->daddr : &t->saddr;
	const struct addr *peer = to_endpoint ? &t->saddr : &t->daddr;

	return !(s->flags & SETTING_BYPASS_NEVER) && pod_may_bypass(endpoint, t->family) &&
	       (pod_may_bypass(peer, t->family) || range_contains(RANGE_PEERS, peer, t->family));
}

/*
 * Does a do-not-track policy allow this packet? Netfilter would neither track nor translate
 * it. Only replies from pods of this node qualify.
 */
__noinline int untracked_may_bypass(const struct packet *p, enum hook hook)
{
	const struct tuple *t;

	if (!p)
		return 0;
	t = &p->tuple;
	if (pod_leaves_untracked(&t->daddr, t->dport, t, &t->saddr))
		return !pod_traverses_netfilter(&t->saddr, t->family);
	return hook == FROM_POD && pod_leaves_untracked(&t->saddr, t->sport, t, &t->daddr) &&
	       !pod_traverses_netfilter(&t->daddr, t->family);
}

/*
 * Forwards a packet unchanged, past netfilter, and stores nothing. Returns GO_ON
 * where the stack must handle it.
 */
static __always_inline int bypass_netfilter(struct __sk_buff *skb, struct scratch *m,
					    enum hook hook, enum verdict verdict)
{
	struct packet *p = &m->packet;
	const struct tuple *t = &p->tuple;

	next_hop_find(skb, p, &t->saddr, &t->daddr, &m->next_hop);
	if (m->next_hop.kind != NEXT_HOP_POD &&
	    (hook == FROM_NETWORK || m->next_hop.kind != NEXT_HOP_NEIGH))
		return GO_ON;
	/*
	 * This must lead to the network. A pod of this node that the agent does not know
	 * yet may need netfilter.
	 */
	if (m->next_hop.kind == NEXT_HOP_NEIGH &&
	    !bpf_map_lookup_elem(&uplinks, &m->next_hop.ifindex))
		return GO_ON;
	if (unlikely(p->flags & PACKET_FIRST_FRAGMENT))
		fragment_remember(p);
	if (m->next_hop.kind == NEXT_HOP_NEIGH && nat_decrement_ttl(skb, p))
		return drop(DROP_REWRITE);
	return redirect_packet(skb, p, &m->next_hop, verdict);
}

/*
 * Handles a packet that is not for a Service's address. endpoint is the entry of its destination if
 * that is an endpoint's own address, or NULL.
 */
static __always_inline int serve_bypass(struct __sk_buff *skb, struct scratch *m,
					const struct settings *s, enum hook hook,
					const struct frontend *endpoint, bool from_endpoint)
{
	bool to_endpoint = endpoint != NULL, to_tftp = endpoint && endpoint->flags & FRONTEND_TFTP;
	const struct tuple *t = &m->packet.tuple;
	enum verdict verdict = PASS_OTHER;
	int ret;

	if (to_endpoint || from_endpoint) {
		/* Netfilter may have to translate an endpoint's reply back. */
		if (s->flags & SETTING_ASK_CONNTRACK &&
		    conntrack_has(skb, &m->packet, CONNTRACK_ANY_ENTRY))
			return pass(PASS_CONNTRACK);
		if (packet_begins(&m->packet)) {
			tuple_mirror(&m->pair.reply_key, t);
			if (s->flags & SETTING_ASK_CONNTRACK &&
			    conntrack_sees_as_reply(skb, &m->pair.reply_key))
				return pass(PASS_CONNTRACK);
			flow_release_reply_tuple(t, &m->pair, to_tftp);
		}
		/*
		 * The first packet of a connection that netfilter sees must not be a reply.
		 * Netfilter would take it for the first packet of a connection of the
		 * endpoint, and a CNI that masquerades pods would translate it.
		 */
		if (to_endpoint && has_ct_lookup && s->flags & SETTING_DRAINS)
			return pass(PASS_OTHER);
		if (endpoint_may_bypass(s, t, to_endpoint))
			verdict = PASSED_DIRECT;
	}
	if (verdict == PASS_OTHER && s->flags & SETTING_UNTRACKED &&
	    !(s->flags & (SETTING_BYPASS_NEVER | SETTING_DRAINS)) &&
	    untracked_may_bypass(&m->packet, hook))
		verdict = PASSED_UNTRACKED;
	if (verdict == PASS_OTHER)
		return pass(PASS_OTHER);
	if (xfrm_selects(s, &t->saddr, &t->daddr, t->family))
		return pass(PASS_OTHER);
	ret = bypass_netfilter(skb, m, hook, verdict);
	if (ret == GO_ON)
		return pass(PASS_OTHER);
	if (to_tftp && verdict == PASSED_DIRECT)
		tftp_expect_own(
			t, &m->pair,
			(hook == FROM_POD ? FLOW_TO_POD : 0) |
				(m->next_hop.kind == NEXT_HOP_POD ? FLOW_REVERSE_TO_POD : 0));
	return ret;
}

#endif
