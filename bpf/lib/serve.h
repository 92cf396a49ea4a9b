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

/* What happens to a packet of no flow. */
enum decision {
	NOT_OURS,
	FORGED,	       /* the source does not belong to the device: the stack decides */
	TO_NETFILTER,  /* netfilter knows the connection */
	PASS_BY,       /* to or from an endpoint's own address, or by a do-not-track policy */
	OUT_OF_RANGE,  /* loadBalancerSourceRanges */
	NOT_ON_NODE,   /* Local traffic policy, no endpoint on this node */
	NO_ENDPOINT,
	ENDPOINT_GONE, /* during the choice */
	NEW_FLOW,
	STRAY,	       /* TCP, and not the first packet of a connection */
};

/* What the lookups of a packet of no flow have found. */
struct found {
	struct frontend *fe; /* NULL: none */
	bool from_endpoint;
	struct backend_choice choice; /* for NEW_FLOW and STRAY */
};

/* Decides by the frontend of a Service. */
static __always_inline enum decision decide_service(struct __sk_buff *skb, const struct packet *p,
						    enum hook hook, struct found *found)
{
	const struct frontend *fe = found->fe;
	const struct tuple *t = &p->tuple;
	__u8 route = hook == FROM_POD ? fe->internal_route : fe->external_route;

	if (conntrack_has(skb, p, CONNTRACK_TRANSLATED))
		return TO_NETFILTER;
	if (fe->flags & FRONTEND_RANGES && !range_contains(fe->service, &t->saddr, t->family))
		return OUT_OF_RANGE;
	if (route == ROUTE_DROP)
		return NOT_ON_NODE;
	if (route == ROUTE_REJECT)
		return NO_ENDPOINT;
	found->choice = backend_select(fe->service, route, tuple_hash(t), &t->saddr, t->family, 0,
				       t->proto == IPPROTO_UDP ? AFFINITY_AT_ONCE :
				       AFFINITY_ON_CONFIRM);
	if (!found->choice.backend)
		return ENDPOINT_GONE;
	return packet_begins(p) ? NEW_FLOW : STRAY;
}

/* Looks up a packet of no flow, and decides. */
static __always_inline enum decision decide(struct __sk_buff *skb, const struct packet *p,
					    const struct settings *s, enum hook hook,
					    struct found *found)
{
	const struct tuple *t = &p->tuple;
	struct frontend_match match = serve_frontend(skb, t, hook);

	found->fe = match.fe;
	if (!match.fe && match.node_addr)
		return NOT_OURS;
	found->from_endpoint = !match.fe && is_endpoint(&t->saddr, t->sport, t->proto, t->family);
	if (!match.fe && !found->from_endpoint && !(s->flags & SETTING_UNTRACKED))
		return NOT_OURS;
	if (!source_belongs(skb, t, hook))
		return FORGED;
	if (!match.fe || match.fe->flags & FRONTEND_ENDPOINT)
		return PASS_BY;
	return decide_service(skb, p, hook, found);
}

/* Creates the flow of a Service's first packet to an endpoint, and forwards the packet. */
static __always_inline int serve_new(struct __sk_buff *skb, struct scratch *m,
				     const struct found *found, enum hook hook, struct settings *s)
{
	struct packet *p = &m->packet;
	struct port_plan port;
	enum verdict verdict;

	m->pair.flow.helper = found->fe->flags & FRONTEND_TFTP ? HELPER_REQUEST : HELPER_NONE;
	m->pair.flow.end = END_UNKNOWN; /* and REQUEST_SENT */
	if (m->pair.flow.helper) {
		feature_mark(FEATURE_HELPER);
		count(HELPER_ASKED);
	}
	verdict = flow_plan(skb, m, found->choice.backend, hook, s);
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

/* Answers a packet to a Service without endpoints. */
static __always_inline int serve_reject(struct __sk_buff *skb, struct scratch *m,
					const struct settings *s)
{
	if (m->packet.tuple.proto == IPPROTO_UDP)
		return answer_unreachable(skb, &m->packet, &m->answer, s);
	return answer_rst(skb, &m->packet, &m->rst, REJECTED_RST);
}

/* Handles the first packet of a flow, or a packet of no flow. */
__noinline int serve(struct __sk_buff *skb, struct settings *s, enum hook hook)
{
	struct scratch *m = get_scratch();
	struct found found = {};

	if (!m || !s)
		return NEXT;
	switch (decide(skb, &m->packet, s, hook, &found)) {
	case NOT_OURS:
		return pass(PASS_OTHER);
	case FORGED:
		return pass(PASS_SOURCE);
	case TO_NETFILTER:
		return pass(PASS_CONNTRACK);
	case PASS_BY:
		return serve_bypass(skb, m, s, hook, found.fe != NULL, found.from_endpoint,
				    found.fe && found.fe->flags & FRONTEND_TFTP);
	case OUT_OF_RANGE:
		return drop(DROP_SOURCE_RANGE);
	case NOT_ON_NODE:
		return drop(DROP_POLICY_LOCAL);
	case NO_ENDPOINT:
		return serve_reject(skb, m, s);
	case ENDPOINT_GONE:
		return drop(DROP_NO_BACKEND);
	case NEW_FLOW:
		m->pair.flow.backend = found.choice.id;
		return serve_new(skb, m, &found, hook, s);
	case STRAY:
		m->pair.flow.backend = found.choice.id;
		return SERVE_STRAY;
	}
	return NEXT;
}

#endif
