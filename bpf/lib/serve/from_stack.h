/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Packets of no flow that leave the node's own stack. */
#ifndef SPILLWAY_SERVE_FROM_STACK_H
#define SPILLWAY_SERVE_FROM_STACK_H

#include "../egress/leave.h"
#include "../flow/create.h"
#include "../flow/plan.h"
#include "../flow/socket_service.h"
#include "../nat/tftp.h"

/*
 * Changes the source port of a packet of the stack if a flow uses its tuple. MASQUERADE and
 * the sockets of the node choose ports without looking up flows, and the flow would get the
 * replies. Replies are translated back to the old port. Returns GO_ON if no flow
 * uses the tuple.
 */
__noinline int serve_port_conflict(struct __sk_buff *skb, struct settings *s)
{
	struct scratch *m = get_scratch();
	struct flow *owner;
	struct tuple *t;

	if (!m || !s)
		return GO_ON;
	t = &m->packet.tuple;
	tuple_mirror(&m->pair.reply_key, t);
	owner = bpf_map_lookup_elem(&flows, &m->pair.reply_key);
	if (!owner && t->proto == IPPROTO_UDP && feature_seen(FEATURE_HELPER))
		owner = request_at(&m->pair.reply_key, &m->pair.other_key);
	if (!owner || (owner->flags & (FLOW_REPLY | FLOW_SNAT)) != (FLOW_REPLY | FLOW_SNAT) ||
	    flow_dead(owner, t->proto, s, now()))
		return GO_ON;
	flow_identity(&m->pair.flow, t, FLOW_SNAT | FLOW_STACK, HELPER_NODE, t->dport);
	m->pair.source = SOURCE_PORT_RANDOM;
	m->pair.ports = PORTS_SNAT;
	flow_record_first(skb, m);
	feature_mark(FEATURE_NODE_HELPER);
	if (flow_create(skb, m, false, s) == DROP)
		return drop(DROP_SNAT_PORTS);
	egress_mark_port(m->pair.flow.sport);
	count(PORT_CHANGED);
	return flow_forward(skb, m, FROM_STACK, NULL);
}

/*
 * Checks the Service of a connected UDP socket of the node that has sent this packet to its
 * endpoint. Returns true if the Service is gone: netfilter would send the packet to the Service's
 * address, where no host answers.
 */
static __always_inline bool check_socket_service(struct __sk_buff *skb, const struct packet *p,
						 const struct settings *s)
{
	struct asked asked = {};

	if (p->tuple.proto != IPPROTO_UDP || !feature_seen(FEATURE_NODE_SOCKET) ||
	    s->flags & SETTING_DRAINS)
		return false;
	find_socket_service(skb, p, &asked);
	return asked.gone;
}

/*
 * Handles a packet of no flow at egress: a flow may use its port, it is a TFTP request, or of a
 * socket whose Service is gone.
 */
__noinline int serve_from_stack(struct __sk_buff *skb, struct settings *s)
{
	struct scratch *m = get_scratch();
	const struct tuple *t;
	struct frontend *fe;
	int ret;

	if (!m || !s)
		return NEXT;
	t = &m->packet.tuple;
	if (check_socket_service(skb, &m->packet, s))
		return drop(DROP_REJECTED_SILENT);
	if (feature_seen(FEATURE_SNAT) && packet_begins(&m->packet)) {
		ret = serve_port_conflict(skb, s);
		if (ret != GO_ON)
			return ret;
	}
	if (t->proto == IPPROTO_UDP && feature_seen(FEATURE_NODE_HELPER)) {
		fe = frontend_exact(&t->daddr, t->dport, t->proto, t->family);
		if (fe && fe->flags & FRONTEND_ENDPOINT && fe->flags & FRONTEND_TFTP)
			tftp_expect_node(skb, t, &m->pair);
	}
	return pass(PASS_OTHER);
}

#endif
