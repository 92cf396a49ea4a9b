/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* DSR at the node of an endpoint: packets that another node has received. See dsr.h. */
#ifndef SPILLWAY_DSR_RECEIVE_H
#define SPILLWAY_DSR_RECEIVE_H

#include "../nat/forward.h"
#include "../flow/plan.h"
#include "../lookup/pod.h"

/* Is the option true? */
static __always_inline bool dsr_valid(const struct dsr_connection *c, __u64 tag)
{
	if (dsr_tag(c, 0) == tag)
		return true;
	return dsr_previous_key0 | dsr_previous_key1 && dsr_tag(c, 1) == tag;
}

static __always_inline int parse_at(struct __sk_buff *skb, struct packet *p, __u32 l3_off)
{
	__builtin_memset(&p->tuple, 0, sizeof(p->tuple));
	p->flags = 0;
	p->l3_off = l3_off;
	return parse(skb, p);
}

/* Is this a probe of another node's agent? No Service has port 0. */
static __always_inline bool dsr_is_probe(const struct tuple *t)
{
	return !t->dport && t->proto == IPPROTO_UDP;
}

/* Gives a packet without its option the tuple that it had at the node that received it. */
static __always_inline enum step dsr_received(struct packet *p, const struct tuple *t)
{
	p->tuple = *t;
	p->flags |= PACKET_DSR | PACKET_TRANSLATED;
	return GO_ON;
}

/*
 * Reads and removes the option of a packet for an endpoint of this node. The packet in scratch
 * memory then has the tuple that it had at the receiving node, and PACKET_TRANSLATED. A packet for
 * an endpoint elsewhere stays as it is. Returns GO_ON, DROP or ANSWER_PROBE.
 */
__noinline int dsr_receive(struct __sk_buff *skb)
{
	struct scratch *m = get_scratch();
	struct packet *p;
	struct tuple t;
	__u64 tag;

	if (!m)
		return DROP;
	p = &m->packet;
	if (!is_for_here(&p->tuple))
		return GO_ON;
	t = p->tuple;
	if (t.family == FAMILY_V4) {
		if (load(skb, p->l3_off, &m->dsr.header, sizeof(struct dsr_ipv4)))
			return drop_for(m, DROP_REWRITE);
		tag = dsr_read(&m->dsr.header.v4.option, &t, &m->dsr.connection);
	} else {
		if (load(skb, p->l3_off, &m->dsr.header, sizeof(struct dsr_ipv6)))
			return drop_for(m, DROP_REWRITE);
		tag = dsr_read(&m->dsr.header.v6.option, &t, &m->dsr.connection);
	}
	if (p->flags & PACKET_NO_L4 || !dsr_valid(&m->dsr.connection, tag))
		return drop_for(m, DROP_DSR);
	if (dsr_remove(skb, p, &m->dsr.header))
		return drop_for(m, DROP_REWRITE);
	return dsr_is_probe(&t) ? ANSWER_PROBE : dsr_received(p, &t);
}

/*
 * Decapsulates a packet for an endpoint of this node, as dsr_receive removes an option. A datagram
 * without a valid tag is unchanged: a pod may use the port. A sender with a valid tag controls the
 * inner packet, so it is accepted only if its endpoint is the destination of the datagram.
 */
__noinline int dsr_receive_gue(struct __sk_buff *skb)
{
	struct scratch *m = get_scratch();
	struct addr endpoint;
	const void *option;
	struct packet *p;
	struct tuple t;
	__u32 l3_off;
	__u64 tag;

	if (!m)
		return DROP;
	p = &m->packet;
	if (!is_for_here(&p->tuple))
		return GO_ON;
	option = gue_load(skb, p, &m->dsr.header);
	if (!option)
		return GO_ON;
	endpoint = p->tuple.daddr;
	l3_off = p->l3_off;
	if (parse_at(skb, p, l3_off + gue_room(p->tuple.family)) != PARSE_OK ||
	    p->flags & (PACKET_NO_L4 | PACKET_FIRST_FRAGMENT | PACKET_ICMP_ERROR |
			PACKET_ECHO | PACKET_DSR_OPTION) ||
	    !addr_equal(&p->tuple.daddr, &endpoint))
		return drop_for(m, DROP_DSR);
	t = p->tuple;
	tag = dsr_read(option, &t, &m->dsr.connection);
	if (!dsr_valid(&m->dsr.connection, tag))
		return drop_for(m, DROP_DSR);
	if (dsr_is_probe(&t)) /* goes back as it came */
		return parse_at(skb, p, l3_off) == PARSE_OK ? ANSWER_PROBE
							    : drop_for(m, DROP_REWRITE);
	if (gue_remove(skb, p))
		return drop_for(m, DROP_REWRITE);
	return dsr_received(p, &t);
}

/*
 * Sends a probe back to its agent, in the endpoint's name: one within a datagram as it came. The
 * agent knows by the data which of its probes has arrived. An exchange of source and destination
 * changes no checksum.
 */
__noinline int dsr_answer_probe(struct __sk_buff *skb)
{
	struct scratch *m = get_scratch();
	struct {
		struct addr saddr;
		struct addr daddr;
	} v6, v6_back;
	struct {
		__be32 saddr;
		__be32 daddr;
	} v4, v4_back;
	__be16 ports[2], back[2];
	struct packet *p;
	int ret;

	if (!m)
		return TC_ACT_SHOT;
	p = &m->packet;
	if (!source_belongs(&p->tuple, 0))
		return drop(DROP_SOURCE);
	if (p->tuple.family == FAMILY_V4) {
		ret = load(skb, p->l3_off + offsetof(struct iphdr, saddr), &v4, sizeof(v4));
		v4_back.saddr = v4.daddr;
		v4_back.daddr = v4.saddr;
		ret = ret
			      ?: bpf_skb_store_bytes(skb, p->l3_off + offsetof(struct iphdr, saddr),
						     &v4_back, sizeof(v4_back), 0);
	} else {
		ret = load(skb, p->l3_off + offsetof(struct ipv6hdr, saddr), &v6, sizeof(v6));
		v6_back.saddr = v6.daddr;
		v6_back.daddr = v6.saddr;
		ret = ret
			      ?: bpf_skb_store_bytes(skb,
						     p->l3_off + offsetof(struct ipv6hdr, saddr),
						     &v6_back, sizeof(v6_back), 0);
	}
	ret = ret ?: load(skb, p->l4_off, ports, sizeof(ports));
	back[0] = ports[1];
	back[1] = ports[0];
	if (ret || bpf_skb_store_bytes(skb, p->l4_off, back, sizeof(back), 0))
		return drop(DROP_REWRITE);
	count(DSR_PROBED);
	return answer_send(skb, p);
}

/*
 * Takes from a packet what the node that received it first has added. Returns GO_ON, or the TC
 * action of a packet that ends here.
 */
static __always_inline int dsr_unwrap(struct __sk_buff *skb, struct scratch *m)
{
	enum step step = GO_ON;

	if (unlikely(m->packet.flags & PACKET_DSR_OPTION))
		step = dsr_receive(skb);
	else if (unlikely(gue_possible(&m->packet)))
		step = dsr_receive_gue(skb);
	if (step == ANSWER_PROBE)
		return dsr_answer_probe(skb);
	return step == DROP ? drop(m->drop) : GO_ON;
}

/*
 * Finds the flow of a later packet, which has no option: it goes to an endpoint whose answers to
 * this client have another source. Changes the tuple as dsr_receive does. Returns 1 if it did.
 */
static __always_inline int dsr_follow(struct scratch *m)
{
	struct tuple *t = &m->packet.tuple, *key = &m->pair.reply_key;
	struct flow *reply;

	if ((t->proto != IPPROTO_TCP && t->proto != IPPROTO_UDP) || packet_syn(&m->packet))
		return 0;
	tuple_mirror(key, t);
	reply = bpf_map_lookup_elem(&flows, key);
	if (!reply || (reply->flags & (FLOW_DSR | FLOW_REPLY)) != (FLOW_DSR | FLOW_REPLY) ||
	    !addr_equal(&reply->daddr, &t->saddr) || reply->dport != t->sport)
		return 0;
	/* By the addresses that the later fragments have. */
	if (unlikely(m->packet.flags & PACKET_FIRST_FRAGMENT))
		fragment_remember(&m->packet);
	t->daddr = reply->saddr;
	t->dport = reply->sport;
	m->packet.flags |= PACKET_TRANSLATED;
	return 1;
}

/* Fills the endpoint that the option of the packet in scratch memory names. */
static __always_inline void dsr_backend(const struct scratch *m, struct backend *b)
{
	const struct dsr_connection *c = &m->dsr.connection;
	struct frontend *fe;

	backend_here(b, &c->endpoint, c->endpoint_port, c->family);
	/* This agent may learn of the Service later than the other one. */
	fe = frontend_exact(&c->service, c->service_port, c->proto, c->family);
	if (!fe)
		fe = frontend_nodeport(c->service_port, c->proto, c->family);
	b->service = fe ? fe->service : 0;
}

/*
 * Has the other node sent a datagram of this flow to another endpoint? That node compares the flow
 * with its Service, and this one does not.
 */
static __always_inline bool dsr_endpoint_differs(const struct scratch *m, const struct flow *f)
{
	const struct dsr_connection *c = &m->dsr.connection;

	return m->packet.flags & PACKET_DSR && m->packet.tuple.proto == IPPROTO_UDP && f &&
	       !(addr_equal(&f->daddr, &c->endpoint) && f->dport == c->endpoint_port);
}

/* Completes the lookup of a packet's flow, whose result is known so far. */
static __always_inline enum flow_lookup dsr_find(struct __sk_buff *skb, struct scratch *m,
						 struct settings *s, enum flow_lookup result,
						 struct flow **f)
{
	if (result == LOOKUP_NONE && dsr_follow(m))
		result = flow_find(skb, &m->packet, s, hook_device(skb, FROM_NETWORK), f);
	return result == LOOKUP_FOUND && dsr_endpoint_differs(m, *f) ? LOOKUP_STALE : result;
}

/*
 * Creates the flow of a packet with an option. One that is no SYN belongs to a connection that this
 * node does not know: it was lost here, or ended. The endpoint answers, with data or an RST.
 */
__noinline int serve_dsr(struct __sk_buff *skb, struct settings *s)
{
	struct scratch *m = get_scratch();
	struct backend b = {};
	struct flow *f;

	if (!m || !s)
		return NEXT;
	f = &m->pair.flow;
	if (!(m->packet.flags & PACKET_DSR)) /* its flow is over */
		return pass(PASS_OTHER);
	if (!source_belongs(&m->packet.tuple, 0))
		return drop(DROP_SOURCE);
	dsr_backend(m, &b);
	if (!is_endpoint(&b.addr, b.port, m->dsr.connection.proto, b.family))
		return drop_reported(s, b.service, DROP_NO_BACKEND, REPORT_PACKET);
	f->backend = 0;
	/* No REFUSE: the endpoint is on this node. */
	if (plan_new(skb, m, &b, FROM_NETWORK, DSR_ANSWERS, s) == DROP ||
	    flow_create(skb, m, false, s) == DROP)
		return drop_reported(s, f->service, m->drop, REPORT_PLANNED);
	report_opened(skb, s, &m->pair, false);
	return flow_forward(skb, m, FROM_NETWORK, NULL);
}

#endif
