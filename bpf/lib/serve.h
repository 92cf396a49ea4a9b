/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The first packet of a flow: looks up the Service, chooses an endpoint, creates the flow. */
#ifndef SPILLWAY_SERVE_H
#define SPILLWAY_SERVE_H

#include "flow/create.h"
#include "flow/plan.h"
#include "special/bypass.h"
#include "special/stray.h"

/*
 * Returns the frontend that a pod's connected UDP socket asked for, if its endpoint is
 * gone. The socket keeps the old endpoint's address, but its packets can go to another
 * endpoint.
 */
static __noinline struct frontend *frontend_of_socket(struct __sk_buff *skb,
							   const struct tuple *t)
{
	struct socket_peer *peer;
	struct socket_key key;
	__u64 cookie;

	/* The packet keeps its socket on the path out of the pod (4.19). */
	cookie = bpf_get_socket_cookie(skb);
	if (!cookie)
		return NULL;
	socket_key(&key, cookie, t->proto, &t->daddr, t->dport, SOCKET_REVERSE);
	peer = bpf_map_lookup_elem(&sockets, &key);
	if (!peer || bpf_map_lookup_elem(&backends, &peer->backend))
		return NULL;
	return frontend_lookup(&peer->addr, peer->port, t->proto, t->family).fe;
}

/* May packets of this hook have this source? If not, the stack decides. */
static __always_inline int source_belongs(struct __sk_buff *skb, const struct tuple *t,
					  enum hook hook)
{
	struct addr_key own = {
		.addr = t->saddr,
		.family = t->family,
	};

	return !martian_source(t) && source_device(t) == hook_device(skb, hook) &&
	       !bpf_map_lookup_elem(&node_addrs, &own);
}

/* Looks up the frontend of a packet. */
static __always_inline struct frontend_match
serve_frontend(struct __sk_buff *skb, const struct tuple *t, enum hook hook)
{
	struct frontend_match match = frontend_lookup(&t->daddr, t->dport, t->proto, t->family);
	struct frontend *asked;

	if ((match.fe && !(match.fe->flags & FRONTEND_ENDPOINT)) || hook != FROM_POD ||
	    t->proto != IPPROTO_UDP)
		return match;
	asked = frontend_of_socket(skb, t);
	if (asked)
		match.fe = asked;
	return match;
}

/* Creates the flow of a Service's first packet to an endpoint, and forwards the packet. */
static __always_inline int serve_new(struct __sk_buff *skb, struct scratch *m,
				     const struct backend *b, enum hook hook, struct settings *s)
{
	struct packet *p = &m->packet;
	struct port_plan port;
	enum verdict verdict;

	verdict = flow_plan(skb, m, b, hook, s);
	if (verdict == FLOW_CREATED)
		verdict = xfrm_plan(s, p, &m->pair.flow);
	if (verdict == DROP_NO_ROUTE)
		return refuse(skb, m);
	if (verdict != FLOW_CREATED)
		return drop(verdict);
	flow_record_first(skb, m);
	port = plan_port(p, &m->pair.flow, hook);
	m->pair.ports = port.list;
	verdict = flow_create(skb, &p->tuple, &m->pair, port.source, s);
	if (verdict != FLOW_CREATED)
		return drop(verdict);
	return flow_forward(skb, m, hook, NULL);
}

/* Handles the first packet of a flow, or a packet of no flow. */
__noinline int serve(struct __sk_buff *skb, struct settings *s, enum hook hook)
{
	struct scratch *m = get_scratch();
	struct frontend_match match;
	struct backend_choice choice;
	struct packet *p;
	struct frontend *fe;
	__u8 route;
	bool udp, from_endpoint;

	if (!m || !s)
		return NEXT;
	p = &m->packet;
	match = serve_frontend(skb, &p->tuple, hook);
	fe = match.fe;
	if (!fe && match.node_addr)
		return pass(PASS_OTHER);
	from_endpoint = !fe && is_endpoint(&p->tuple.saddr, p->tuple.sport, p->tuple.proto,
					   p->tuple.family);
	/* Most packets that have nothing to do with a Service leave here. */
	if (!fe && !from_endpoint && !(s->flags & SETTING_UNTRACKED))
		return pass(PASS_OTHER);
	if (!source_belongs(skb, &p->tuple, hook))
		return pass(PASS_SOURCE);
	if (!fe || fe->flags & FRONTEND_ENDPOINT)
		return serve_bypass(skb, m, s, hook, fe != NULL, from_endpoint,
				    fe && fe->flags & FRONTEND_TFTP);
	if (conntrack_has(skb, p, CONNTRACK_TRANSLATED))
		return pass(PASS_CONNTRACK);
	if (fe->flags & FRONTEND_RANGES &&
	    !range_contains(fe->service, &p->tuple.saddr, p->tuple.family))
		return drop(DROP_SOURCE_RANGE);
	udp = p->tuple.proto == IPPROTO_UDP;
	route = hook == FROM_POD ? fe->internal_route : fe->external_route;
	if (route == ROUTE_DROP)
		return drop(DROP_POLICY_LOCAL);
	if (route == ROUTE_REJECT) {
		if (!udp)
			return answer_rst(skb, p, &m->rst, REJECTED_RST);
		return answer_unreachable(skb, p, &m->answer, s);
	}
	choice = backend_select(fe->service, route, tuple_hash(&p->tuple), &p->tuple.saddr,
				p->tuple.family, 0, udp ? AFFINITY_AT_ONCE : AFFINITY_ON_CONFIRM);
	if (!choice.backend)
		return drop(DROP_NO_BACKEND);
	m->pair.flow.backend = choice.id;
	if (!packet_begins(p))
		return SERVE_STRAY;
	m->pair.flow.helper = fe->flags & FRONTEND_TFTP ? HELPER_REQUEST : HELPER_NONE;
	m->pair.flow.end = END_UNKNOWN; /* and REQUEST_SENT */
	if (m->pair.flow.helper) {
		feature_mark(FEATURE_HELPER);
		count(HELPER_ASKED);
	}
	return serve_new(skb, m, choice.backend, hook, s);
}

#endif
