/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The first packet of a flow: looks up the Service, chooses an endpoint, creates the flow. */
#ifndef SPILLWAY_SERVE_FIRST_PACKET_H
#define SPILLWAY_SERVE_FIRST_PACKET_H

#include "../dsr/dsr.h"
#include "../flow/create.h"
#include "../flow/plan.h"
#include "../flow/socket_service.h"
#include "../lookup/pod.h"
#include "bypass.h"
#include "leaving_flow.h"
#include "without_flow.h"

/* What happens to a packet of no flow. */
enum decision {
	NOT_OURS,
	FORGED,	      /* the source does not belong to the device */
	TO_NETFILTER, /* netfilter knows the connection */
	LEAVES,	      /* of a pod to the outside: leaving_flow.h */
	BYPASS,	      /* to or from an endpoint's own address, or by a do-not-track policy */
	DROPPED,      /* by the Service's source ranges or traffic policy */
	NO_ENDPOINT,
	NO_SERVICE,    /* a connected UDP socket has asked for one that is gone */
	ENDPOINT_GONE, /* during the choice */
	CHOSEN,	       /* an endpoint, for a packet that need not be the first of a flow */
};

/* What the lookups of a packet of no flow have found. */
struct found {
	struct frontend *fe; /* NULL: none */
	bool by_socket;	     /* see find_socket_service */
	bool from_endpoint;
	enum verdict drop;	      /* for DROPPED */
	struct backend_choice choice; /* for CHOSEN */
};

/* Decides by the frontend of a Service. */
static __always_inline enum decision decide_service(struct __sk_buff *skb, const struct packet *p,
						    const struct settings *s, enum hook hook,
						    struct found *found)
{
	const struct frontend *fe = found->fe;
	const struct tuple *t = &p->tuple;
	struct affinity_client client = { .addr = &t->saddr, .family = t->family };
	__u8 route = hook == FROM_POD ? fe->internal_route : fe->external_route;

	/*
	 * The socket's old endpoint may have answered once more when it was gone. Netfilter
	 * takes this packet for the reply to that answer.
	 */
	if (!found->by_socket && conntrack_has(skb, p, CONNTRACK_TRANSLATED))
		return TO_NETFILTER;
	if (packet_syn(p) && s->flags & SETTING_ASK_CONNTRACK && conntrack_runs(skb, t))
		return TO_NETFILTER;
	if (service_check(fe, t, route, &found->drop) == DROP)
		return DROPPED;
	if (route == ROUTE_REJECT)
		return NO_ENDPOINT;
	found->choice = backend_select(fe->service, route, tuple_hash(t), t, client,
				       t->proto == IPPROTO_UDP ? AFFINITY_AT_ONCE
							       : AFFINITY_ON_CONFIRM);
	return found->choice.backend ? CHOSEN : ENDPOINT_GONE;
}

/* Looks up a packet of no flow, and decides. */
static __always_inline enum decision decide(struct __sk_buff *skb, const struct packet *p,
					    const struct settings *s, enum hook hook,
					    struct found *found)
{
	const struct tuple *t = &p->tuple;
	struct frontend_match match = frontend_lookup(&t->daddr, t->dport, t->proto, t->family);
	struct asked asked = {};

	/* A TCP socket stays with an endpoint that any Service has. */
	if (hook == FROM_POD && (!match.fe || (t->proto == IPPROTO_UDP && !is_service(match.fe))))
		find_socket_service(skb, p, &asked);
	/* While the programs drain, they have no Services, and another proxy may have this one. */
	if (asked.gone && !(s->flags & SETTING_DRAINS))
		return source_belongs(t, hook_device(skb, hook)) ? NO_SERVICE : FORGED;
	found->by_socket = asked.fe != NULL;
	found->fe = asked.fe ? asked.fe : match.fe;
	if (!found->fe && match.node_addr)
		return NOT_OURS;
	found->from_endpoint = !found->fe && is_endpoint(&t->saddr, t->sport, t->proto, t->family);
	if (!found->fe && !found->from_endpoint &&
	    !(s->flags & (SETTING_UNTRACKED | SETTING_EGRESS)))
		return NOT_OURS;
	if (!source_belongs(t, hook_device(skb, hook)))
		return FORGED;
	if (is_service(found->fe))
		return decide_service(skb, p, s, hook, found);
	if (hook == FROM_POD && packet_begins(p) &&
	    pod_leaves(s, &t->saddr, &t->daddr, t->family) &&
	    !(s->flags & SETTING_UNTRACKED && untracked_may_bypass(p, hook)))
		return LEAVES;
	return BYPASS;
}

/* Has the Service a SYN filter (xdp/syn_filter.h)? */
static __noinline bool has_syn_filter(__u32 service)
{
	struct service *s = bpf_map_lookup_elem(&services, &service);

	return s && s->syn_limit;
}

/*
 * Plans a flow for a client's own connection to an endpoint's address, although its destination
 * stays. It needs one if a Service's flow has its reply tuple: then it gets another source port, or
 * the Service's address would be put into its replies. Not with DSR: later packets of the two
 * connections look alike. Returns true, and fills m->own, if it needs one.
 */
static __always_inline bool plan_own_connection(struct scratch *m, const struct settings *s)
{
	const struct tuple *t = &m->packet.tuple;
	struct flow *f;

	if (!packet_syn(&m->packet) || s->flags & SETTING_DRAINS)
		return false;
	tuple_mirror(&m->pair.reply_key, t);
	f = bpf_map_lookup_elem(&flows, &m->pair.reply_key);
	if (!f || (f->flags & (FLOW_REPLY | FLOW_DSR)) != FLOW_REPLY ||
	    flow_may_be_over(f, t->proto) || !is_for_here(t))
		return false;
	backend_here(&m->own, &t->daddr, t->dport, t->family);
	m->own.service = 0;
	return true;
}

/* Creates the flow of a Service's first packet to an endpoint, and forwards the packet. */
static __always_inline int serve_new(struct __sk_buff *skb, struct scratch *m,
				     const struct found *found, enum hook hook, enum dsr_role role,
				     struct settings *s)
{
	enum flow_helper helper = found->fe->flags & FRONTEND_TFTP ? HELPER_REQUEST : HELPER_NONE;
	struct flow *f = &m->pair.flow;
	enum step step;
	bool remote;

	if (helper) {
		feature_mark(FEATURE_HELPER);
		count(HELPER_ASKED);
	}
	step = plan_new(skb, m, found->choice.backend, hook, role, s);
	f->helper = helper;
	if (step == REFUSE)
		return refuse(skb, m);
	if (step == WITHOUT_FLOW)
		return step;
	remote = dsr_remote(f);
	if (step == GO_ON && remote && m->packet.flags & PACKET_STATELESS)
		return flow_forward(skb, m, hook, NULL);
	if (found->choice.counted)
		f->flags |= FLOW_COUNTED;
	if (step == DROP || flow_create(skb, m, remote, s) == DROP)
		return drop_reported(s, f->service, m->drop, REPORT_PLANNED);
	if (!remote)
		report_opened(skb, s, &m->pair, balance_by_load && found->choice.measured);
	return flow_forward(skb, m, hook, NULL);
}

/* Answers a packet to a Service without endpoints. */
static __always_inline int serve_reject(struct __sk_buff *skb, struct scratch *m,
					const struct settings *s)
{
	if (m->packet.tuple.proto != IPPROTO_TCP)
		return answer_unreachable(skb, &m->packet, &m->answer, s);
	return answer_rst(skb, &m->packet, &m->rst, REJECTED_RST);
}

/* Handles the first packet of a flow, or a packet of no flow. */
__noinline int serve(struct __sk_buff *skb, struct settings *s, enum hook hook)
{
	struct scratch *m = get_scratch();
	struct found found = {};
	enum dsr_role role = DSR_NONE;

	if (!m || !s)
		return NEXT;
	switch (decide(skb, &m->packet, s, hook, &found)) {
	case NOT_OURS:
		return pass(PASS_OTHER);
	case FORGED:
		/*
		 * The stack has no socket at a Service's port, and would answer the owner of
		 * the address with an RST or an ICMP error.
		 */
		if (!is_service(found.fe))
			return pass(PASS_SOURCE);
		return drop_reported(s, found.fe->service, DROP_SOURCE, REPORT_PACKET);
	case TO_NETFILTER:
		return pass(PASS_CONNTRACK);
	case LEAVES:
		return LEAVE;
	case BYPASS:
		if (unlikely(found.fe && plan_own_connection(m, s))) {
			m->pair.flow.backend = 0;
			found.choice.backend = &m->own;
			break;
		}
		return serve_bypass(skb, m, s, hook, found.fe, found.from_endpoint);
	case DROPPED:
		return drop_reported(s, found.fe->service, found.drop, REPORT_PACKET);
	case NO_ENDPOINT:
		report_refusal(s, found.fe->service,
			       m->packet.tuple.proto == IPPROTO_UDP ? REJECTED_ICMP : REJECTED_RST,
			       REPORT_PACKET);
		return serve_reject(skb, m, s);
	case NO_SERVICE:
		report_refusal(s, 0, REJECTED_ICMP, REPORT_PACKET);
		return serve_reject(skb, m, s);
	case ENDPOINT_GONE:
		return drop_reported(s, found.fe->service, DROP_NO_BACKEND, REPORT_PACKET);
	case CHOSEN:
		/*
		 * XDP does not parse such a SYN, and clients send none: it would evade the filter.
		 */
		if (hook == FROM_NETWORK && packet_syn(&m->packet) &&
		    unlikely(m->packet.flags & (PACKET_OPTIONS | PACKET_FIRST_FRAGMENT)) &&
		    has_syn_filter(found.fe->service))
			return drop_reported(s, found.fe->service, DROP_SYN_FORM, REPORT_PACKET);
		m->pair.flow.backend = found.choice.id;
		if (dsr && found.choice.dsr && hook == FROM_NETWORK && dsr_plan(&m->packet))
			role = DSR_RECEIVES;
		/* With DSR it may have begun at another node, or have lost its flow here. */
		if (role == DSR_NONE && !packet_begins(&m->packet))
			return WITHOUT_FLOW;
		break;
	}
	return serve_new(skb, m, &found, hook, role, s);
}

#endif
