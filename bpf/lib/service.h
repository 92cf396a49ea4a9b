/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * A packet's way through a tc hook:
 *
 *   parse -> known flow?  -> find the way -> rewrite -> take the way
 *                 \ no: a Service's address? -> choose an endpoint -> new flow ^
 *
 * Replies of flows that go through the stack are rewritten behind it, at
 * egress; all else is done at ingress.
 */
#ifndef SPILLWAY_SERVICE_H
#define SPILLWAY_SERVICE_H

#include "fragment.h"
#include "helper.h"
#include "icmp.h"
#include "reply.h"
#include "untracked.h"

enum hook {
	FROM_NETWORK,
	FROM_POD,
	EGRESS,
};

static __always_inline int drop(enum verdict verdict)
{
	count(verdict);
	return TC_ACT_SHOT;
}

static __always_inline int pass(enum verdict verdict)
{
	count(verdict);
	return NEXT;
}

/* The device of the pod that has sent the packet, or 0, the network: see source_device. */
static __always_inline __u32 hook_device(const struct __sk_buff *skb, enum hook hook)
{
	return hook == FROM_POD ? skb->ifindex : 0;
}

/* May an entry be applied at this hook? */
static __always_inline int flow_applies(const struct flow *f, enum hook hook)
{
	int behind_stack = (f->flags & (FLOW_REPLY | FLOW_STACK)) == (FLOW_REPLY | FLOW_STACK);

	/* Of the node's own processes it is the other way round. */
	if (f->helper == HELPER_NODE)
		behind_stack = !(f->flags & FLOW_REPLY);
	return hook == EGRESS ? behind_stack : !behind_stack;
}

/* What becomes of a packet that its way does not take. */
__noinline int refuse(struct __sk_buff *skb, struct scratch *m)
{
	struct settings *s = get_settings();

	if (!m || !s)
		return TC_ACT_SHOT;
	if (m->way.kind == WAY_TOO_BIG)
		return answer_too_big(skb, &m->packet, &m->answer, m->way.mtu);
	if (m->way.kind == WAY_TTL)
		return answer_ttl(skb, &m->packet, &m->answer, s);
	return drop(DROP_NO_ROUTE);
}

static __always_inline int pod_policed(const struct addr *addr, __u8 family)
{
	struct pod *pod = pod_lookup(addr, family);

	return pod && pod->flags & POD_POLICED;
}

/*
 * Does the pod that a flow leads to have to be reached through netfilter by now? A policy
 * may select it since, or another pod has its address. From here on the flow goes
 * through the stack. Not its answers before a packet of the client's: netfilter would take
 * the first of them for a new connection of the pod's.
 */
static __always_inline int flow_meets_policy(struct flow *f, struct flow *entry,
					     const struct packet *p)
{
	struct tuple twin_key;
	struct backend *b;
	struct flow *twin;
	__u32 id;

	if (!entry || (f->flags & (FLOW_REPLY | FLOW_SNAT)) || !pod_policed(&f->daddr, p->tuple.family))
		return 0;
	id = entry->backend;
	b = bpf_map_lookup_elem(&backends, &id);
	if (b && b->flags & BACKEND_OPEN)
		return 0;
	flow_twin_key(&twin_key, f, &p->tuple);
	twin = bpf_map_lookup_elem(&flows, &twin_key);
	if (!twin || !flow_is_twin(twin, &p->tuple))
		return 0;
	entry->flags |= FLOW_STACK;
	twin->flags |= FLOW_STACK;
	been_set(BEEN_STACK_FLOW);
	return 1;
}

/*
 * Is the way that the flow's packets took last good for this one? Once a second it is
 * asked for again, and the packet that asks goes by the kernel's neighbour table, which
 * so learns that the neighbour is in use.
 */
static __always_inline int flow_way_known(const struct __sk_buff *skb, const struct packet *p,
					  const struct flow *f)
{
	return f->way_seen == p->time && !(p->flags & PACKET_SYN) &&
	       (f->way_kind == WAY_POD || (p->ttl > 1 && packet_size(skb, p) <= f->way_mtu));
}

/* Finds the way of a flow's packets, and leaves it in the flow's entry for a second. */
static __noinline void flow_way(struct __sk_buff *skb, struct scratch *m, struct flow *entry)
{
	struct flow *f = &m->pair.flow;
	struct packet *p = &m->packet;
	struct way *way = &m->way;

	if (flow_meets_policy(f, entry, p)) {
		way->kind = WAY_STACK;
		return;
	}
	if (!(f->flags & FLOW_TO_POD) || !way_pod(&f->daddr, p->tuple.family, way))
		way_route(skb, p, &f->saddr, &f->daddr, way);
	if (!entry ||
	    !(way->kind == WAY_POD || (way->kind == WAY_OUT && way->neighbour_known)))
		return;
	entry->way_mtu = way->mtu;
	entry->way_ifindex = way->ifindex;
	entry->way_kind = way->kind == WAY_POD ? WAY_POD : WAY_LINK;
	__builtin_memcpy(entry->way_macs, way->macs, sizeof(way->macs));
	entry->way_seen = p->time;
}

/*
 * Rewrites a packet as pair->flow says and sends it on. entry is where the flow
 * is kept, NULL if it was made just now.
 */
static __always_inline int flow_forward(struct __sk_buff *skb, struct scratch *m, enum hook hook,
					struct flow *entry)
{
	struct flow *f = &m->pair.flow;
	struct packet *p = &m->packet;
	struct way *way = &m->way;

	if (unlikely(p->flags & PACKET_FIRST_FRAGMENT))
		fragment_remember(p);
	if (hook == EGRESS) {
		if (nat_rewrite_by_helpers(skb, p, f, 0))
			return drop(DROP_REWRITE);
		return pass(TRANSLATED_EGRESS);
	}
	if (f->flags & FLOW_STACK) {
		way->kind = WAY_STACK;
	} else if (likely(flow_way_known(skb, p, f))) {
		if (nat_rewrite(skb, p, f, f->way_kind == WAY_LINK))
			return drop(DROP_REWRITE);
		return way_send(skb, f->way_kind, f->way_ifindex, f->way_macs, TRANSLATED_DIRECT);
	} else {
		flow_way(skb, m, entry);
	}
	if (way_refuses(way))
		return refuse(skb, m);
	if (nat_rewrite(skb, p, f, way->kind == WAY_OUT))
		return drop(DROP_REWRITE);
	return way_take(skb, way, TRANSLATED_DIRECT);
}

/* The node's address as seen by whatever lies beyond an interface. */
static __always_inline int snat_addr(struct addr *out, __u32 ifindex, __u8 family,
				     const struct settings *s)
{
	struct uplink *own = bpf_map_lookup_elem(&uplinks, &ifindex);

	if (own)
		*out = family == FAMILY_V4 ? own->v4 : own->v6;
	if (!own || addr_zero(out))
		*out = family == FAMILY_V4 ? s->node_v4 : s->node_v6;
	return addr_zero(out) ? -1 : 0;
}

/*
 * Must netfilter see the packets of this flow? Its source stays as it is then. Which
 * pod it is about is told by the address: an EndpointSlice may name another node.
 */
static __always_inline int needs_stack(const struct packet *p, const struct backend *b, int here,
				       enum hook hook, const struct settings *s)
{
	struct pod *pod;

	if (b->flags & BACKEND_HOST)
		return 1;
	pod = pod_lookup(&b->addr, p->tuple.family);
	if (here && (!pod || !(pod->flags & POD_REACHABLE)))
		return 1;
	/* Leaving the pod network: the CNI may masquerade the pod. */
	if (hook == FROM_POD && !here && !range_allows(RANGE_PODS, &b->addr, p->tuple.family))
		return 1;
	if (hook == FROM_POD && (s->flags & SETTING_BYPASS_NEVER ||
				 pod_policed(&p->tuple.saddr, p->tuple.family)))
		return 1;
	if (!here)
		return 0;
	if (s->flags & SETTING_BYPASS_NEVER)
		return 1;
	return !(b->flags & BACKEND_OPEN) &&
	       (b->flags & BACKEND_POLICED || pod->flags & POD_POLICED);
}

/* Do IPsec policies (xfrm) select packets between the two, or may they? */
static __always_inline int xfrm_selects(const struct settings *s, const struct addr *a,
					const struct addr *b, __u8 family)
{
	if (!(s->flags & SETTING_XFRM))
		return 0;
	return (range_allows(RANGE_XFRM_SRC, a, family) && range_allows(RANGE_XFRM_DST, b, family)) ||
	       (range_allows(RANGE_XFRM_SRC, b, family) && range_allows(RANGE_XFRM_DST, a, family));
}

/*
 * The stack encrypts by the addresses that it sees. The client's packets and the
 * answers have the Service's there, which a flow through the stack has not; and a
 * source that is the node's own cannot be sent through the stack.
 */
static __always_inline enum verdict xfrm_plan(const struct settings *s, const struct packet *p,
					      struct flow *f)
{
	__u8 family = p->tuple.family;

	if (xfrm_selects(s, &p->tuple.saddr, &p->tuple.daddr, family))
		return DROP_XFRM;
	if (!xfrm_selects(s, &f->saddr, &f->daddr, family))
		return FLOW_CREATED;
	if (f->flags & FLOW_SNAT)
		return DROP_XFRM;
	f->flags |= FLOW_STACK;
	return FLOW_CREATED;
}

/* What a new flow remembers of its first packet. */
static __always_inline void flow_begin(struct __sk_buff *skb, struct scratch *m)
{
	struct flow *f = &m->pair.flow;

	m->pair.seq = m->packet.seq;
	__builtin_memset(&f->tcp, 0, sizeof(f->tcp));
	if (m->packet.tuple.proto != IPPROTO_TCP)
		return;
	f->flags |= FLOW_TRACKED;
	tcp_begin(skb, &f->tcp, &m->packet);
}

/*
 * Fills the flow towards an endpoint. The source is replaced where the answer
 * would not come back through here: the endpoint is on another machine and the
 * client too, or the endpoint is the client.
 */
static __always_inline enum verdict flow_plan(struct __sk_buff *skb, struct scratch *m,
					      const struct backend *b, enum hook hook,
					      const struct settings *s)
{
	struct packet *p = &m->packet;
	struct flow *f = &m->pair.flow;
	int hairpin = addr_equal(&p->tuple.saddr, &b->addr);
	int here = b->flags & BACKEND_HERE;

	f->saddr = p->tuple.saddr;
	f->daddr = b->addr;
	f->sport = p->tuple.sport;
	f->dport = b->port;
	f->service = b->service;
	f->seen = p->time;
	f->state = FLOW_NEW;
	f->helper_port = b->port;
	f->answers = 0;
	f->in_ifindex = hook_device(skb, hook);
	flow_forget_way(f);
	if (!here) {
		way_route(skb, p, &p->tuple.saddr, &b->addr, &m->way);
		/* No flow then: which address it should have is not known. */
		if (way_refuses(&m->way))
			return DROP_NO_ROUTE;
		/* Not towards the network: a pod of this node, whatever its EndpointSlice says. */
		here = m->way.kind == WAY_OUT && !bpf_map_lookup_elem(&uplinks, &m->way.ifindex);
	}
	f->flags = (here ? FLOW_TO_POD : 0) | (hook == FROM_POD ? FLOW_TWIN_TO_POD : 0);
	if (!hairpin && needs_stack(p, b, here, hook, s)) {
		f->flags |= FLOW_STACK;
		return FLOW_CREATED;
	}
	if (!hairpin && !(s->flags & SETTING_MASQUERADE_ALL) && (here || hook == FROM_POD))
		return FLOW_CREATED;
	f->flags |= FLOW_SNAT;
	if (snat_addr(&f->saddr, here ? 0 : m->way.ifindex, p->tuple.family, s))
		return DROP_NO_SNAT_ADDR;
	return FLOW_CREATED;
}

/* Is this a pod's address, and may the pod's packets pass by netfilter? */
static __always_inline int pod_may_pass(const struct addr *addr, __u8 family)
{
	struct pod *pod = pod_lookup(addr, family);

	if (!pod)
		return range_allows(RANGE_PODS, addr, family);
	return !(pod->flags & POD_POLICED);
}

static __always_inline int is_endpoint(const struct addr *addr, __be16 port, __u8 proto,
				       __u8 family)
{
	struct frontend *fe = frontend_exact(addr, port, proto, family);

	return fe && fe->flags & FRONTEND_ENDPOINT;
}

/*
 * May a packet between a pod that is an endpoint and another pod or node pass by
 * netfilter? It is Service traffic that a socket or another node has translated, or
 * that might as well have been.
 *
 * What a pod sends to an endpoint at a node's own address is not meant here: a
 * CNI that masquerades would replace its source.
 */
static __always_inline int may_pass_direct(const struct settings *s, const struct tuple *t,
					   int to_endpoint)
{
	const struct addr *endpoint = to_endpoint ? &t->daddr : &t->saddr;
	const struct addr *peer = to_endpoint ? &t->saddr : &t->daddr;

	return !(s->flags & SETTING_BYPASS_NEVER) && pod_may_pass(endpoint, t->family) &&
	       (pod_may_pass(peer, t->family) || range_allows(RANGE_PEERS, peer, t->family));
}

/*
 * Does a do-not-track policy allow this packet? Netfilter would neither track nor
 * translate it. Answers come from pods here alone.
 */
__noinline int may_pass_untracked(const struct packet *p, int hook)
{
	const struct tuple *t;

	if (!p)
		return 0;
	t = &p->tuple;
	if (pod_leaves_untracked(&t->daddr, t->dport, t, &t->saddr))
		return !pod_policed(&t->saddr, t->family);
	return hook == FROM_POD && pod_leaves_untracked(&t->saddr, t->sport, t, &t->daddr) &&
	       !pod_policed(&t->daddr, t->family);
}

/*
 * Sends a packet on: nothing is rewritten and nothing remembered. Where the stack
 * knows better, -2.
 */
static __always_inline int pass_by(struct __sk_buff *skb, struct scratch *m, int hook,
				   enum verdict verdict)
{
	struct packet *p = &m->packet;
	const struct tuple *t = &p->tuple;

	way_find(skb, p, &t->saddr, &t->daddr, &m->way);
	if (m->way.kind != WAY_POD && (hook == FROM_NETWORK || m->way.kind != WAY_OUT))
		return -2;
	/* Out is to the network: a pod of this node that is not known yet may be policed. */
	if (m->way.kind == WAY_OUT && !bpf_map_lookup_elem(&uplinks, &m->way.ifindex))
		return -2;
	if (unlikely(p->flags & PACKET_FIRST_FRAGMENT))
		fragment_remember(p);
	if (m->way.kind == WAY_OUT && nat_decrement_ttl(skb, p))
		return drop(DROP_REWRITE);
	return way_take(skb, &m->way, verdict);
}

/* A packet for no Service's address. */
static __always_inline int serve_other(struct __sk_buff *skb, struct scratch *m,
				       const struct settings *s, int hook, int to_endpoint,
				       int from_endpoint, int to_helped)
{
	const struct tuple *t = &m->packet.tuple;
	enum verdict verdict = PASS_OTHER;
	int ret;

	if (to_endpoint || from_endpoint) {
		/* What an endpoint answers, netfilter may have to translate back. */
		if (s->flags & SETTING_ASK_CONNTRACK && conntrack_owns(skb, &m->packet, 1))
			return pass(PASS_CONNTRACK);
		if (packet_begins(&m->packet)) {
			tuple_mirror(&m->pair.reply_key, t);
			if (s->flags & SETTING_ASK_CONNTRACK &&
			    conntrack_claims(skb, &m->pair.reply_key))
				return pass(PASS_CONNTRACK);
			flow_make_room(t, &m->pair, to_helped);
		}
		/*
		 * Of a connection that has passed by netfilter the first packet that comes
		 * there must not be an answer: it would be taken for the first one of a
		 * connection of the endpoint's, and masqueraded where a CNI does that to pods.
		 */
		if (to_endpoint && has_ct_lookup && s->flags & SETTING_DRAINS)
			return pass(PASS_OTHER);
		if (may_pass_direct(s, t, to_endpoint))
			verdict = PASSED_DIRECT;
	}
	if (verdict == PASS_OTHER && s->flags & SETTING_UNTRACKED &&
	    !(s->flags & (SETTING_BYPASS_NEVER | SETTING_DRAINS)) && may_pass_untracked(&m->packet, hook))
		verdict = PASSED_UNTRACKED;
	if (verdict == PASS_OTHER)
		return pass(PASS_OTHER);
	if (xfrm_selects(s, &t->saddr, &t->daddr, t->family))
		return pass(PASS_OTHER);
	ret = pass_by(skb, m, hook, verdict);
	if (ret == -2)
		return pass(PASS_OTHER);
	if (to_helped && verdict == PASSED_DIRECT)
		helper_expect_direct(t, &m->pair, (hook == FROM_POD ? FLOW_TO_POD : 0) |
				     (m->way.kind == WAY_POD ? FLOW_TWIN_TO_POD : 0));
	return ret;
}

/*
 * A datagram of a pod's connected socket to an endpoint that is gone: the
 * frontend that the socket had asked for, if the endpoint was chosen for it. The
 * socket cannot be told of another endpoint, but its packets can go there.
 */
static __always_inline struct frontend *frontend_of_socket(struct __sk_buff *skb,
							   const struct tuple *t)
{
	struct socket_peer *peer;
	struct socket_key key;
	__u64 cookie;
	int own;

	/* The socket stays with the packet on its way out of the pod (4.19). */
	cookie = bpf_get_socket_cookie(skb);
	if (!cookie)
		return NULL;
	socket_key(&key, cookie, t->proto, &t->daddr, t->dport, SOCKET_REVERSE);
	peer = bpf_map_lookup_elem(&sockets, &key);
	if (!peer || bpf_map_lookup_elem(&backends, &peer->backend))
		return NULL;
	return frontend_lookup(&peer->addr, peer->port, t->proto, t->family, &own);
}

/* Is this an address of the cluster: a pod's, or another node's? */
static __always_inline int in_cluster(const struct addr *addr, __u8 family)
{
	return range_allows(RANGE_PODS, addr, family) || range_allows(RANGE_PEERS, addr, family);
}

/*
 * Must the source port change, and from which list? Sockets of pods and nodes connect to
 * endpoints directly (see socket.h), and other nodes send from their own lists. Of
 * that nothing is known here: a flow for the same address keeps off these ports, or the
 * answers of such a connection would be its own. Ports of pods below 1024 stay: servers
 * look at them.
 */
static __always_inline int needs_port(const struct packet *p, const struct flow *f, enum hook hook,
				      enum port_list *list)
{
	*list = f->flags & FLOW_SNAT || hook == FROM_POD ? PORTS_SNAT : PORTS_NETWORK;
	if (f->flags & FLOW_SNAT)
		return 1;
	if (hook == FROM_POD)
		return bpf_ntohs(p->tuple.sport) >= 1024;
	return in_cluster(&p->tuple.saddr, p->tuple.family);
}

/* Is the source one that packets of this hook may have? Else the stack judges it. */
static __always_inline int source_belongs(struct __sk_buff *skb, const struct tuple *t, int hook)
{
	struct addr_key own = {
		.addr = t->saddr,
		.family = t->family,
	};

	return !martian_source(t) && source_device(t) == hook_device(skb, hook) &&
	       !bpf_map_lookup_elem(&node_addrs, &own);
}

/* The frontend of a packet, or NULL. */
static __always_inline struct frontend *serve_frontend(struct __sk_buff *skb, const struct tuple *t,
						       int hook, int *own)
{
	struct frontend *fe = frontend_lookup(&t->daddr, t->dport, t->proto, t->family, own);
	struct frontend *asked;

	if ((fe && !(fe->flags & FRONTEND_ENDPOINT)) || hook != FROM_POD || t->proto != IPPROTO_UDP)
		return fe;
	asked = frontend_of_socket(skb, t);
	return asked ?: fe;
}

/*
 * A packet of TCP to a Service that is of no connection and begins none. Its flow may
 * have lost this half while it was idle: where nothing but the endpoint's address
 * differs between the halves, the other one is found. Else it is answered as a host
 * answers that knows nothing of the connection (RFC 9293, 3.10.7.1).
 */
__noinline int serve_stray(struct __sk_buff *skb, int hook)
{
	struct scratch *m = get_scratch();
	struct backend *b;
	struct flow *reply;
	struct tuple *key;

	if (!m)
		return NEXT;
	b = bpf_map_lookup_elem(&backends, &m->pair.flow.backend);
	if (!b)
		return drop(DROP_NO_BACKEND);
	key = &m->pair.reply_key;
	tuple_mirror(key, &m->packet.tuple);
	key->saddr = b->addr;
	key->sport = b->port;
	reply = bpf_map_lookup_elem(&flows, key);
	if (reply && flow_confirmed(reply) && flow_is_twin(reply, &m->packet.tuple)) {
		flow_touch_twin(reply, key, m->packet.time);
		m->pair.flow = *reply;
		flow_make_twin(&m->pair.reply, reply, key);
		m->pair.flow = m->pair.reply;
		return flow_forward(skb, m, hook, NULL);
	}
	if (m->packet.flags & PACKET_RST)
		return drop(DROP_NO_FLOW);
	return answer_rst(skb, &m->packet, &m->rst, REJECTED_NO_FLOW);
}

/* Makes the flow of a Service's first packet to an endpoint, and sends the packet there. */
static __always_inline int serve_new(struct __sk_buff *skb, struct scratch *m,
				     const struct backend *b, int hook, struct settings *s)
{
	struct packet *p = &m->packet;
	enum verdict verdict;

	verdict = flow_plan(skb, m, b, hook, s);
	if (verdict == FLOW_CREATED)
		verdict = xfrm_plan(s, p, &m->pair.flow);
	if (verdict == DROP_NO_ROUTE)
		return refuse(skb, m);
	if (verdict != FLOW_CREATED)
		return drop(verdict);
	flow_begin(skb, m);
	verdict = flow_create(skb, &p->tuple, &m->pair,
			      needs_port(p, &m->pair.flow, hook, &m->pair.ports), s);
	if (verdict != FLOW_CREATED)
		return drop(verdict);
	return flow_forward(skb, m, hook, NULL);
}

/* What serve gives for a packet that serve_stray is to look at. */
#define STRAY (-3)

/* The first packet of a flow, or one of no flow at all. */
__noinline int serve(struct __sk_buff *skb, struct settings *s, int hook)
{
	struct scratch *m = get_scratch();
	struct packet *p;
	struct frontend *fe;
	struct backend *b;
	__u32 id = 0;
	__u8 route;
	int own, udp, from_endpoint;

	if (!m || !s)
		return NEXT;
	p = &m->packet;
	fe = serve_frontend(skb, &p->tuple, hook, &own);
	if (!fe && own)
		return pass(PASS_OTHER);
	from_endpoint = !fe && is_endpoint(&p->tuple.saddr, p->tuple.sport, p->tuple.proto,
					   p->tuple.family);
	/* Most packets that are no Service's business leave here. */
	if (!fe && !from_endpoint && !(s->flags & SETTING_UNTRACKED))
		return pass(PASS_OTHER);
	if (!source_belongs(skb, &p->tuple, hook))
		return pass(PASS_SOURCE);
	if (!fe || fe->flags & FRONTEND_ENDPOINT)
		return serve_other(skb, m, s, hook, fe != NULL, from_endpoint,
				   fe && fe->flags & FRONTEND_TFTP);
	if (conntrack_owns(skb, p, 0))
		return pass(PASS_CONNTRACK);
	if (fe->flags & FRONTEND_RANGES &&
	    !range_allows(fe->service, &p->tuple.saddr, p->tuple.family))
		return drop(DROP_SOURCE_RANGE);
	udp = p->tuple.proto == IPPROTO_UDP;
	route = hook == FROM_POD ? fe->inside : fe->outside;
	if (route == ROUTE_DROP)
		return drop(DROP_POLICY_LOCAL);
	if (route == ROUTE_REJECT) {
		if (!udp)
			return answer_rst(skb, p, &m->rst, REJECTED_RST);
		return answer_unreachable(skb, p, &m->answer, s);
	}
	b = backend_select(fe->service, route, tuple_hash(&p->tuple), &p->tuple.saddr,
			   p->tuple.family, 0, udp, &id);
	if (!b)
		return drop(DROP_NO_BACKEND);
	m->pair.flow.backend = id;
	if (!packet_begins(p))
		return STRAY;
	m->pair.flow.helper = fe->flags & FRONTEND_TFTP ? HELPER_REQUEST : HELPER_NONE;
	m->pair.flow.end = END_UNKNOWN;
	if (m->pair.flow.helper) {
		been_set(BEEN_HELPER);
		count(HELPER_ASKED);
	}
	return serve_new(skb, m, b, hook, s);
}

/* The reply entry of a request that a server has been asked, by what it asked. */
static __always_inline struct flow *flow_of_error(const struct tuple *quoted, struct tuple *key)
{
	struct flow *f;

	*key = *quoted;
	key->sport = 0;
	f = bpf_map_lookup_elem(&flows, key);
	return f && f->helper == HELPER_REQUEST && f->helper_port == quoted->sport ? f : NULL;
}

/* An ICMP error: about one of our flows, or none of our business. */
__noinline int relay_error(struct __sk_buff *skb, struct settings *s, int hook)
{
	struct scratch *m = get_scratch();
	struct packet *p;
	struct flow *f;

	if (!m || !s)
		return NEXT;
	p = &m->packet;
	if (icmp_quoted(skb, p, &m->icmp))
		return pass(PASS_OTHER);
	f = bpf_map_lookup_elem(&flows, &m->icmp.key);
	if (!f && m->icmp.key.proto == IPPROTO_UDP)
		f = flow_of_error(&m->icmp.key, &m->pair.reply_key);
	if (!f || flow_dead(f, m->icmp.key.proto, s, now()) || !flow_applies(f, hook))
		return pass(PASS_OTHER);
	m->pair.flow = *f;
	f = &m->pair.flow;
	if (hook == EGRESS || f->flags & FLOW_STACK)
		m->way.kind = WAY_STACK;
	else
		way_find(skb, p, &p->tuple.saddr, &f->daddr, &m->way);
	/* Nothing is said about an error that cannot be forwarded (RFC 1122). */
	if (way_refuses(&m->way))
		return drop(DROP_NO_ROUTE);
	if (icmp_rewrite(skb, p, &m->icmp, f, m->way.kind == WAY_OUT))
		return drop(DROP_REWRITE);
	if (m->way.kind == WAY_STACK)
		return pass(TRANSLATED_ICMP);
	return way_take(skb, &m->way, TRANSLATED_ICMP);
}

#endif
