/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The flow of a pod's connection to the outside: it has the node's address and a port that no other
 * connection to the destination has, and no endpoint. From then on it is a flow like others.
 */
#ifndef SPILLWAY_EGRESS_LEAVING_FLOW_H
#define SPILLWAY_EGRESS_LEAVING_FLOW_H

#include "../flow/plan.h"
#include "../lookup/conntrack.h"
#include "../nat/forward.h"
#include "leave.h"

/*
 * Must netfilter handle the connection? It knows those that began before egress was switched on.
 * A datagram may be a pod's answer to a client that netfilter knows: without the lookup (before
 * 5.18) datagrams are left to it.
 */
static __always_inline bool egress_of_netfilter(struct __sk_buff *skb, const struct tuple *t)
{
	if (!has_ct_lookup)
		return t->proto != IPPROTO_TCP;
	return conntrack_continues(skb, t);
}

/*
 * Does the next hop lead to other machines by a device whose packets from_network sees? An unknown
 * neighbor is the stack's: it tells the pod if no host has the address.
 */
static __always_inline bool next_hop_leads_out(const struct next_hop *hop)
{
	__u32 ifindex = hop->ifindex;

	return hop->kind == NEXT_HOP_NEIGH && hop->neighbor_known &&
	       bpf_map_lookup_elem(&uplinks, &ifindex);
}

/*
 * Finds the route by this source. Returns GO_ON, or WITHOUT_FLOW where the stack knows what to do:
 * it has no route, the packet stays here, or the node must answer it, with its own address.
 */
static __always_inline enum step egress_route(struct __sk_buff *skb, struct scratch *m,
					      const struct addr *saddr)
{
	if (plan_route(skb, m, saddr, &m->pair.flow.daddr))
		return WITHOUT_FLOW;
	return next_hop_leads_out(&m->next_hop) ? GO_ON : WITHOUT_FLOW;
}

/* Plans the flow: fills pair.flow and next_hop. Returns GO_ON or WITHOUT_FLOW. */
static __always_inline enum step egress_plan(struct __sk_buff *skb, struct scratch *m,
					     const struct settings *s)
{
	const struct tuple *t = &m->packet.tuple;
	struct flow *f = &m->pair.flow;
	enum step step;

	plan_begin(m, &t->daddr, t->dport, skb->ifindex);
	f->service = SERVICE_EGRESS;
	f->backend = 0;
	f->helper = HELPER_NONE;
	f->end = END_UNKNOWN;
	f->flags = FLOW_SNAT | FLOW_REVERSE_TO_POD;
	step = egress_route(skb, m, &t->saddr);
	if (step != GO_ON)
		return step;
	if (node_addr(&f->saddr, m->next_hop.ifindex, t->family, s) ||
	    xfrm_selects(s, &t->saddr, &t->daddr, t->family) ||
	    xfrm_selects(s, &f->saddr, &t->daddr, t->family))
		return WITHOUT_FLOW;
	/* As in plan_source: the route may depend on the source. */
	step = egress_route(skb, m, &f->saddr);
	if (step != GO_ON)
		return step;
	m->packet.flags |= PACKET_ROUTED;
	m->pair.source = SOURCE_PORT_RANDOM;
	m->pair.ports = PORTS_SNAT;
	flow_record_first(skb, m);
	report_plan(s, f);
	return GO_ON;
}

/* Handles the first packet of a pod's connection to the outside. */
__noinline int serve_leaving(struct __sk_buff *skb, struct settings *s)
{
	struct scratch *m = get_scratch();

	if (!m || !s)
		return NEXT;
	if (egress_of_netfilter(skb, &m->packet.tuple))
		return pass(PASS_CONNTRACK);
	if (egress_plan(skb, m, s) != GO_ON)
		return pass(PASS_OTHER);
	feature_mark(FEATURE_EGRESS);
	if (flow_create(skb, m, false, s) == DROP)
		return drop_reported(s, SERVICE_EGRESS,
				     m->drop == DROP_SNAT_PORTS ? DROP_EGRESS_PORTS : m->drop,
				     REPORT_PLANNED);
	egress_mark_port(m->pair.flow.sport);
	count(EGRESS_CREATED);
	report_opened(skb, s, &m->pair, false);
	return flow_forward(skb, m, FROM_POD, NULL);
}

#endif
