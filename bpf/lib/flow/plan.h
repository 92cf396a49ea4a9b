/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Plans a new flow in scratch memory: its source address and port, its next hop, IPsec, the need
 * for netfilter, and its state after the first packet. flow/create.h stores it.
 */
#ifndef SPILLWAY_FLOW_PLAN_H
#define SPILLWAY_FLOW_PLAN_H

#include "../dsr/send.h"
#include "../hook.h"
#include "../lookup/next_hop.h"
#include "create.h"

/*
 * Must netfilter see the packets of this flow? Then their source address stays. The pod is
 * found by the address, because an EndpointSlice may name another node.
 */
static __always_inline int needs_stack(const struct packet *p, const struct backend *b,
				       bool on_this_node, enum hook hook, const struct settings *s)
{
	struct pod *pod;

	if (b->flags & BACKEND_HOST_NETWORK)
		return 1;
	pod = pod_lookup(&b->addr, p->tuple.family);
	if (on_this_node && (!pod || !(pod->flags & POD_REACHABLE)))
		return 1;
	/* The packet leaves the pod network: the CNI may masquerade the pod. */
	if (hook == FROM_POD && !on_this_node &&
	    !range_contains(RANGE_PODS, &b->addr, p->tuple.family))
		return 1;
	if (hook == FROM_POD && (s->flags & SETTING_BYPASS_NEVER ||
				 pod_traverses_netfilter(&p->tuple.saddr, p->tuple.family)))
		return 1;
	if (!on_this_node)
		return 0;
	if (s->flags & SETTING_BYPASS_NEVER)
		return 1;
	return !(b->flags & BACKEND_ALLOWS_ANY) &&
	       (b->flags & BACKEND_TRAVERSES_NETFILTER || pod->flags & POD_TRAVERSES_NETFILTER);
}

/*
 * Decides about a flow that an IPsec policy may select. The stack encrypts by the addresses
 * that it sees. A policy for the client and the Service's address cannot apply, because the
 * stack sees the endpoint's address. And the stack cannot forward a packet whose source is
 * the node's own address.
 */
static __always_inline enum step plan_xfrm(const struct settings *s, struct scratch *m)
{
	const struct tuple *t = &m->packet.tuple;
	struct flow *f = &m->pair.flow;

	if (xfrm_selects(s, &t->saddr, &t->daddr, t->family))
		return drop_for(m, DROP_XFRM);
	if (!xfrm_selects(s, &f->saddr, &f->daddr, t->family))
		return GO_ON;
	if (f->flags & FLOW_SNAT)
		return drop_for(m, DROP_XFRM);
	f->flags |= FLOW_STACK;
	return GO_ON;
}

/* Stores the first packet's sequence number and TCP state in the new flow. */
static __always_inline void flow_record_first(struct __sk_buff *skb, struct scratch *m)
{
	struct flow *f = &m->pair.flow;

	m->pair.seq = m->packet.seq;
	if (m->packet.tuple.proto != IPPROTO_TCP)
		return;
	f->flags |= FLOW_TRACKED;
	tcp_begin(skb, &f->tcp, &m->packet);
}

/* What a new flow has to do with DSR. */
enum dsr_role {
	DSR_NONE,
	DSR_RECEIVES, /* this node receives it, and an endpoint on another node answers */
	DSR_ANSWERS,  /* another node has received it, and an endpoint of this node answers */
};

/*
 * Fills the flow towards an endpoint. Replaces the source address where the replies would
 * not come back through this node: the endpoint and the client are on other machines, or
 * the endpoint is the client. With DSR, the replies go to the client without this node.
 * Returns GO_ON, DROP or REFUSE.
 */
static __always_inline enum step plan_source(struct __sk_buff *skb, struct scratch *m,
					     const struct backend *b, enum hook hook,
					     enum dsr_role role, const struct settings *s)
{
	struct packet *p = &m->packet;
	struct flow *f = &m->pair.flow;
	bool hairpin = addr_equal(&p->tuple.saddr, &b->addr);
	bool on_this_node = b->flags & BACKEND_ON_THIS_NODE;

	flow_begin(m, &b->addr, b->port, hook_device(skb, hook));
	f->service = b->service;
	if (!on_this_node) {
		/* There is no flow without a next hop: its source address is unknown. */
		if (next_hop_try_route(skb, p, &p->tuple.saddr, &b->addr, &m->next_hop))
			return REFUSE;
		/*
		 * A device that is not external: the endpoint is a pod of this node,
		 * although its EndpointSlice names another.
		 */
		on_this_node = m->next_hop.kind == NEXT_HOP_NEIGH &&
			       !bpf_map_lookup_elem(&uplinks, &m->next_hop.ifindex);
	}
	f->flags = (on_this_node ? FLOW_TO_POD : 0) | (hook == FROM_POD ? FLOW_REVERSE_TO_POD : 0);
	if (role == DSR_RECEIVES && !on_this_node) {
		f->flags |= FLOW_DSR;
		return GO_ON;
	}
	if (b->flags & BACKEND_WATCHED && p->tuple.proto == IPPROTO_TCP)
		f->flags |= FLOW_WATCHED;
	if (!hairpin && needs_stack(p, b, on_this_node, hook, s)) {
		f->flags |= FLOW_STACK;
		return GO_ON;
	}
	if (!hairpin && !(s->flags & SETTING_MASQUERADE_ALL) && (on_this_node || hook == FROM_POD))
		return GO_ON;
	f->flags |= FLOW_SNAT;
	if (node_addr(&f->saddr, on_this_node ? 0 : m->next_hop.ifindex, p->tuple.family, s))
		return drop_for(m, DROP_NO_SNAT_ADDR);
	/*
	 * The route may depend on the source: a rule, an IPv6 route with a source prefix, the hash
	 * of a multipath route. And the source depends on the route's device.
	 */
	if (!on_this_node && next_hop_try_route(skb, p, &f->saddr, &b->addr, &m->next_hop))
		return REFUSE;
	return GO_ON;
}

/*
 * Decides about the source port. Sockets of pods and nodes connect directly to endpoints
 * (sock/translate.h), and other nodes use the ports of their own lists. This node has no entry
 * for such connections. A flow with the same address must not use their ports, or it would
 * get their replies. Ports of pods below 1024 stay, because servers check them.
 */
static __always_inline void plan_port(const struct packet *p, struct flow_pair *pair,
				      enum hook hook)
{
	const struct flow *f = &pair->flow;

	pair->source = SOURCE_PORT_RANDOM;
	pair->ports = PORTS_SNAT;
	if (f->flags & FLOW_DSR) {
		pair->source = SOURCE_PORT_EXACT;
	} else if (f->flags & FLOW_SNAT) {
		return;
	} else if (hook == FROM_POD) {
		if (bpf_ntohs(p->tuple.sport) < 1024)
			pair->source = SOURCE_PORT_KEEP;
	} else {
		pair->ports = PORTS_NETWORK;
		if (!in_cluster(&p->tuple.saddr, p->tuple.family))
			pair->source = SOURCE_PORT_KEEP;
	}
}

/*
 * Plans the flow of a packet to an endpoint: fills pair.flow, the lists of its source port, and
 * next_hop. Returns GO_ON, DROP, REFUSE, or WITHOUT_FLOW if a packet that may get no flow is for an
 * endpoint of this node.
 */
static __always_inline enum step plan_new(struct __sk_buff *skb, struct scratch *m,
					  const struct backend *b, enum hook hook,
					  enum dsr_role role, const struct settings *s)
{
	struct packet *p = &m->packet;
	struct flow *f = &m->pair.flow;
	enum step step = plan_source(skb, m, b, hook, role, s);

	if (step == GO_ON)
		step = plan_xfrm(s, m);
	if (step != GO_ON)
		return step;
	if (role == DSR_ANSWERS)
		f->flags |= FLOW_DSR;
	if (!(f->flags & FLOW_TO_POD))
		p->flags |= PACKET_ROUTED;
	plan_port(p, &m->pair, hook);
	if (dsr_remote(f))
		return dsr_begin(skb, m) ? REFUSE : GO_ON;
	if (p->flags & PACKET_STATELESS)
		return WITHOUT_FLOW;
	if (role == DSR_ANSWERS && !packet_begins(p))
		f->state = FLOW_ESTABLISHED;
	else
		flow_record_first(skb, m);
	report_plan(s, f);
	return GO_ON;
}

#endif
