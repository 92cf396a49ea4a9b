/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The flow of a pod's connection to the outside: it has the node's address and a port that no other
 * connection to the destination has, and no endpoint. From then on it is a flow like others.
 */
#ifndef SPILLWAY_SERVE_LEAVING_FLOW_H
#define SPILLWAY_SERVE_LEAVING_FLOW_H

#include "../egress/leave.h"
#include "../flow/plan.h"
#include "../lookup/conntrack.h"
#include "../nat/forward.h"

/*
 * Must netfilter handle the connection? It knows those that began before egress was switched on.
 * A datagram may be a pod's answer to a client that netfilter knows: without the lookup (before
 * 5.18) datagrams are left to it. An echo request is no answer, and the lookup does not know ICMP
 * (net/netfilter/nf_conntrack_bpf.c): a ping that began before goes on here, with another
 * identifier.
 */
static __always_inline bool egress_of_netfilter(struct __sk_buff *skb, const struct tuple *t)
{
	if (!has_ct_lookup)
		return t->proto == IPPROTO_UDP;
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
	if (next_hop_try_route(skb, &m->packet, saddr, &m->pair.flow.daddr, &m->next_hop))
		return WITHOUT_FLOW;
	return next_hop_leads_out(&m->next_hop) ? GO_ON : WITHOUT_FLOW;
}

/*
 * Addresses of the node that a connection may try. The first is that of the pod's group, the others
 * are for want of a port.
 */
#define EGRESS_TRIES 4

/*
 * Returns the node's address for the try, or NULL where that of the route's device is meant. The
 * groups next to each other have all addresses in turn, but not the last and the first.
 */
static __always_inline struct addr *egress_address(const struct tuple *t, __u32 try)
{
	bool v4 = t->family == FAMILY_V4;
	__u32 group = bpf_ntohl(v4 ? t->saddr.w[0] : t->saddr.w[3]) % EGRESS_POD_GROUPS;
	__u32 near = group + EGRESS_TRIES > EGRESS_POD_GROUPS ? group - try : group + try;
	__u32 index = (v4 ? 0 : EGRESS_POD_GROUPS) + near % EGRESS_POD_GROUPS;
	struct addr *own = bpf_map_lookup_elem(&egress_addresses, &index);

	return own && !addr_zero(own) ? own : NULL;
}

/* Fills the source address of pair.flow. Returns 0, or -1 if the node has none. */
static __always_inline int egress_source(struct scratch *m, const struct settings *s, __u32 try)
{
	const struct addr *own = egress_address(&m->packet.tuple, try);

	if (!own)
		return node_addr(&m->pair.flow.saddr, m->next_hop.ifindex, m->packet.tuple.family,
				 s);
	m->pair.flow.saddr = *own;
	return 0;
}

/* Plans the flow: fills pair.flow and next_hop. Returns GO_ON or WITHOUT_FLOW. */
static __always_inline enum step egress_plan(struct __sk_buff *skb, struct scratch *m,
					     const struct settings *s, __u32 try)
{
	const struct tuple *t = &m->packet.tuple;
	struct flow *f = &m->pair.flow;
	enum step step;

	flow_begin(m, &t->daddr, t->dport, skb->ifindex);
	f->service = SERVICE_EGRESS;
	f->backend = 0;
	f->flags = FLOW_SNAT | FLOW_REVERSE_TO_POD;
	step = egress_route(skb, m, &t->saddr);
	if (step != GO_ON)
		return step;
	if (egress_source(m, s, try) || xfrm_selects(s, &t->saddr, &t->daddr, t->family) ||
	    xfrm_selects(s, &f->saddr, &t->daddr, t->family))
		return WITHOUT_FLOW;
	/* As in plan_source: the route may depend on the source. */
	step = egress_route(skb, m, &f->saddr);
	if (step != GO_ON)
		return step;
	feature_mark(FEATURE_EGRESS);
	m->packet.flags |= PACKET_ROUTED;
	m->pair.source = SOURCE_PORT_RANDOM;
	m->pair.ports = PORTS_SNAT;
	flow_record_first(skb, m);
	report_plan(s, f);
	return GO_ON;
}

/* Plans and stores the flow, with one address. Returns GO_ON, WITHOUT_FLOW or DROP. */
__noinline int egress_try(struct __sk_buff *skb, struct settings *s, __u32 try)
{
	struct scratch *m = get_scratch();
	enum step step;

	if (!m || !s)
		return WITHOUT_FLOW;
	step = egress_plan(skb, m, s, try);
	if (step != GO_ON)
		return step;
	if (!try)
		flow_admit(m, false);
	return flow_reserve(skb, m, s, try > 0);
}

/* Has the node an address for this try that was not tried yet? */
static __always_inline bool egress_may_retry(const struct scratch *m, __u32 try)
{
	const struct addr *first = egress_address(&m->packet.tuple, 0);
	const struct addr *own = egress_address(&m->packet.tuple, try);

	return m->drop == DROP_SNAT_PORTS && first && own && !addr_equal(own, first);
}

/* Plans and stores the flow. Returns GO_ON, WITHOUT_FLOW or DROP. */
static __always_inline int egress_open(struct __sk_buff *skb, struct scratch *m,
				       struct settings *s)
{
	int step = egress_try(skb, s, 0);

	for (__u32 try = 1; try < EGRESS_TRIES; try++) {
		if (step != DROP || !egress_may_retry(m, try))
			break;
		step = egress_try(skb, s, try);
	}
	return step;
}

/* Handles the first packet of a pod's connection to the outside. */
__noinline int serve_leaving(struct __sk_buff *skb, struct settings *s)
{
	struct scratch *m = get_scratch();
	int step;

	if (!m || !s)
		return NEXT;
	if (egress_of_netfilter(skb, &m->packet.tuple))
		return pass(PASS_CONNTRACK);
	step = egress_open(skb, m, s);
	if (step == WITHOUT_FLOW)
		return pass(PASS_OTHER);
	if (step == DROP)
		return drop_reported(s, SERVICE_EGRESS,
				     m->drop == DROP_SNAT_PORTS ? DROP_EGRESS_PORTS : m->drop,
				     REPORT_PLANNED);
	egress_mark_port(m->pair.flow.sport);
	count(EGRESS_CREATED);
	report_opened(skb, s, &m->pair, false);
	return flow_forward(skb, m, FROM_POD, NULL);
}

#endif
