/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Which step a packet takes at a tc hook: that of a flow that is known, of one
 * that a TFTP server's answer begins (helper.h), of a Service's (service.h).
 */
#ifndef SPILLWAY_HANDLE_H
#define SPILLWAY_HANDLE_H

#include "service.h"

/*
 * May the answer to a request through the stack pass by it? Netfilter takes it for
 * the first packet of a connection of the endpoint's, to which other rules apply
 * than to answers: it might masquerade it, or drop it for a policy that allows
 * answers. That it let the request pass says that it would let the answer.
 */
static __always_inline int answer_may_pass(struct __sk_buff *skb, struct scratch *m,
					   const struct flow *request, int hook)
{
	struct tuple *asked = &m->icmp.key;

	if (hook == EGRESS || !(request->flags & FLOW_STACK) || request->helper == HELPER_NODE)
		return 0;
	tuple_mirror(asked, &m->packet.tuple);
	asked->dport = request->helper_port;
	return conntrack_knows(skb, asked);
}

/*
 * A datagram of no flow: the answer to a request, from a port that the server has
 * chosen, or -2.
 */
__noinline int serve_answer(struct __sk_buff *skb, struct settings *s, int hook)
{
	struct scratch *m = get_scratch();
	struct flow *request, *f;
	struct packet *p;
	__u32 time = now();
	int pass_by;

	if (!m || !s)
		return -2;
	p = &m->packet;
	f = &m->pair.flow;
	if (hook != EGRESS && source_device(&p->tuple) != hook_device(skb, hook))
		return pass(PASS_SOURCE);
	request = helper_request(&p->tuple, &m->pair.reply_key, s, time);
	if (!request || !p->tuple.sport)
		return -2;
	if (p->tuple.sport == request->helper_port) {
		/* From the port that was asked: no other is opened. */
		if (request->helper != HELPER_REQUEST || !flow_applies(request, hook))
			return -2;
		request->seen = time;
		flow_touch_twin(request, &m->pair.reply_key, time);
		if (request->state == FLOW_NEW)
			flow_answered(request, &m->pair.reply_key);
		*f = *request;
		return flow_forward(skb, m, hook, request);
	}
	pass_by = answer_may_pass(skb, m, request, hook);
	if (!pass_by && !flow_applies(request, hook))
		return -2;
	/* Counted once, and where the request was: not if only passed on here. */
	if (request->helper == HELPER_REQUEST && request->end != END_ANSWERED) {
		count(HELPER_ANSWERED);
		/*
		 * The client's entry has never been looked up: a full table would evict it
		 * long before this one, which would keep the node's port for nobody.
		 */
		flow_touch_twin(request, &m->pair.reply_key, request->seen);
	}
	if (!helper_answer_counts(request))
		return drop(DROP_HELPER_ANSWERS);
	helper_fill(&p->tuple, request, &m->pair, time, pass_by);
	if (helper_store(&p->tuple, &m->pair, s))
		return drop(FLOW_CONFLICT);
	return flow_forward(skb, m, hook, NULL);
}

/*
 * What the stack sends may have a source port that is a flow's: MASQUERADE chooses
 * ports without asking here, and so do sockets. The answers would be the flow's, so
 * the packet gets another port on its way out, and its answers this one on theirs.
 * -2: nobody has its port.
 */
__noinline int serve_taken(struct __sk_buff *skb, struct settings *s)
{
	struct scratch *m = get_scratch();
	struct flow *holder;
	struct tuple *t;

	if (!m || !s)
		return -2;
	t = &m->packet.tuple;
	tuple_mirror(&m->pair.reply_key, t);
	holder = bpf_map_lookup_elem(&flows, &m->pair.reply_key);
	if (!holder && t->proto == IPPROTO_UDP && been(BEEN_HELPER))
		holder = request_at(&m->pair.reply_key, &m->pair.holder_key);
	if (!holder || (holder->flags & (FLOW_REPLY | FLOW_SNAT)) != (FLOW_REPLY | FLOW_SNAT) ||
	    flow_dead(holder, t->proto, s, now()))
		return -2;
	flow_as_is(&m->pair.flow, t, FLOW_SNAT | FLOW_STACK, HELPER_NODE, t->dport);
	m->pair.ports = PORTS_SNAT;
	flow_begin(skb, m);
	been_set(BEEN_NODE_HELPER);
	if (flow_create(skb, t, &m->pair, 1, s) != FLOW_CREATED)
		return drop(DROP_SNAT_PORTS);
	count(PORT_CHANGED);
	return flow_forward(skb, m, EGRESS, NULL);
}

/* A packet of no flow that leaves: its port may be a flow's, or it asks a TFTP server. */
__noinline int serve_egress(struct __sk_buff *skb, struct settings *s)
{
	struct scratch *m = get_scratch();
	const struct tuple *t;
	struct frontend *fe;
	int ret;

	if (!m)
		return NEXT;
	t = &m->packet.tuple;
	if (been(BEEN_SNAT) && packet_begins(&m->packet)) {
		ret = serve_taken(skb, s);
		if (ret != -2)
			return ret;
	}
	if (t->proto == IPPROTO_UDP && been(BEEN_NODE_HELPER)) {
		fe = frontend_exact(&t->daddr, t->dport, t->proto, t->family);
		if (fe && fe->flags & FRONTEND_ENDPOINT && fe->flags & FRONTEND_TFTP)
			helper_expect_node(skb, t, &m->pair);
	}
	return pass(PASS_OTHER);
}

/* Deletes the flow of the packet, which is over. */
__noinline int flow_forget(const struct packet *p)
{
	struct flow_pair *room = get_flow_pair();
	struct flow *f;

	if (!room || !p)
		return 0;
	room->holder_key = p->tuple;
	f = bpf_map_lookup_elem(&flows, &room->holder_key);
	if (f)
		flow_delete(&room->holder_key, f->slot, &room->twin_key);
	return 0;
}

static __always_inline int handle(struct __sk_buff *skb, enum hook hook)
{
	struct settings *s = get_settings();
	struct scratch *m = get_scratch();
	enum flow_miss miss;
	struct packet *p;
	struct flow *f;
	int ret;

	if (!m || !s)
		return NEXT;
	/* The device of the VLAN has hooks of its own, if the node is a member of it. */
	if (unlikely(skb->vlan_present))
		return pass(PASS_VLAN);
	p = &m->packet;
	__builtin_memset(&p->tuple, 0, sizeof(p->tuple));
	p->flags = 0;
	p->l3_off = ETH_HLEN;
	p->time = now();
	ret = parse(skb, p);
	if (unlikely(ret != PARSE_OK))
		return pass(ret == PARSE_OTHER ? PASS_OTHER : PASS_MALFORMED);
	if (unlikely(p->flags & PACKET_ICMP_ERROR))
		return relay_error(skb, s, hook);
	if (unlikely(p->flags & PACKET_NO_L4) && fragment_follow(p))
		return pass(PASS_FRAGMENT);
	if (hook == EGRESS && !packet_begins(p) && !been(BEEN_STACK_FLOW | BEEN_NODE_HELPER))
		return pass(PASS_OTHER);

	miss = flow_find(skb, p, s, hook == EGRESS ? ANY_DEVICE : hook_device(skb, hook), &f);
	if (miss == FLOW_FOUND && f) {
		if (unlikely(!flow_applies(f, hook)))
			return pass(PASS_OTHER);
		if (unlikely(flow_asks(f)))
			helper_asked_again(f, &p->tuple, &m->pair.reply_key);
		/* What is behind it, nothing from here on looks at. */
		__builtin_memcpy(&m->pair.flow, f, offsetof(struct flow, tcp));
		return flow_forward(skb, m, hook, f);
	}
	if (miss == MISS_SUPERSEDED)
		return drop(FLOW_CONFLICT);
	if (miss == MISS_SOURCE)
		return pass(PASS_SOURCE);
	if (miss == MISS_STALE)
		flow_forget(p);
	if (p->tuple.proto == IPPROTO_UDP && been(BEEN_HELPER)) {
		ret = serve_answer(skb, s, hook);
		if (ret != -2)
			return ret;
	}
	if (hook == EGRESS)
		return serve_egress(skb, s);
	ret = serve(skb, s, hook);
	return ret == STRAY ? serve_stray(skb, hook) : ret;
}

#endif
