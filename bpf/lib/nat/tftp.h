/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * TFTP (RFC 1350): the server answers a request from a port of its own choice. The rest of
 * the transfer uses that port and the client's. client':c' is the client's address and port
 * after translation: with SNAT the node's, otherwise client:c or another port of the client.
 *
 *   request  client:c  -> service:69    forward entry   becomes  client':c' -> endpoint:69
 *   answers  endpoint:* -> client':c'   reply entry     key with port 0
 *
 *   the first answer from a port t adds two more:
 *            endpoint:t -> client':c'   becomes  service:t  -> client:c
 *            client:c -> service:t      becomes  client':c' -> endpoint:t
 *
 * The reply entry of a request reserves all ports of the endpoint at once. So no other
 * client of the endpoint gets client':c' while the request may be answered. The client sees
 * the server's own port t, as with the kernel's nf_nat_tftp. The programs do not read the
 * content of a request. A request without an answer is two entries that time out.
 *
 * A client may also ask the endpoint's own address, after translation by a socket hook or
 * by another node. Netfilter must then see neither the request nor the answer: to netfilter
 * the answer starts a connection, and a rule might masquerade it. HELPER_OWN is the
 * entry for that. It changes nothing in the packets.
 *
 * A request of the node's own processes traverses the node's netfilter. If the CNI
 * masquerades it, it gets another source port:
 *
 *   packet               hook          becomes              in netfilter
 *   N:c' -> endpoint:69  to_network    the same             before: N:c masqueraded to N:c'
 *   endpoint:t -> N:c'   from_network  endpoint:t -> N:c    after: new connection, allowed
 *   N:c -> endpoint:t    to_network    N:c' -> endpoint:t   before: its reply, not masqueraded
 */
#ifndef SPILLWAY_NAT_TFTP_H
#define SPILLWAY_NAT_TFTP_H

#include "forward.h"
#include "../events/report.h"

/*
 * Maximum number of server ports that may answer one packet of a request. RFC 1350 allows
 * one. A request that is repeated while the server answers it may get two.
 */
#define TFTP_ANSWERS_MAX 16

/*
 * Returns the live entry of the request that a datagram may answer, or NULL. Sets *key to
 * the entry's key.
 */
static __always_inline struct flow *tftp_request(const struct tuple *answer, struct tuple *key,
						 const struct settings *s, __u32 time)
{
	struct flow *f = request_at(answer, key);

	if (!f || f->helper == HELPER_NONE || flow_dead(f, key->proto, s, time))
		return NULL;
	return f;
}

/*
 * Counts another server port that answers a request. Returns 1 if the answer is admitted,
 * and 0 beyond the maximum, because one request could otherwise fill the table.
 */
static __always_inline int tftp_answer_admit(struct flow *request)
{
	request->progress = REQUEST_ANSWERED;
	if (request->answers >= TFTP_ANSWERS_MAX)
		return 0;
	request->answers++;
	return 1;
}

/* Resets the count of answers when the client sends a request again from the same port. */
static __always_inline void tftp_request_repeated(const struct flow *f, const struct tuple *key,
						  struct tuple *request_key)
{
	struct flow *request;

	flow_reverse_key(request_key, f, key);
	request = bpf_map_lookup_elem(&flows, request_key);
	if (request && request->progress == REQUEST_ANSWERED && flow_is_reverse(request, key))
		request->answers = 0;
}

/* Stores pair->flow at pair->reply_key, without a reverse entry. */
static __always_inline void tftp_store_alone(struct flow_pair *pair)
{
	struct flow *f = &pair->flow;

	f->slot = unconfirmed_admit(&pair->reply_key, f->seen, false);
	bpf_map_update_elem(&flows, &pair->reply_key, f, BPF_ANY);
	flow_protect(&pair->reply_key);
}

/*
 * Stores the entry for answers to a request that went directly to the endpoint and bypassed
 * netfilter, so that the answers bypass it too. to_pod has FLOW_TO_POD and
 * FLOW_REVERSE_TO_POD if the client or the endpoint is a pod of this node.
 */
static __always_inline void tftp_expect_own(const struct tuple *t, struct flow_pair *pair,
					    __u8 to_pod)
{
	struct flow *f = &pair->flow;

	tuple_mirror(&pair->reply_key, t);
	flow_identity(f, &pair->reply_key, FLOW_REPLY | to_pod, HELPER_OWN, t->dport);
	pair->reply_key.sport = 0;
	tftp_store_alone(pair);
	feature_mark(FEATURE_HELPER);
}

/*
 * Stores the entry for answers to a request of the node, if its packet has another source
 * port than its socket. The entry leads answers to the socket's port.
 */
static __always_inline void tftp_expect_node(struct __sk_buff *skb, const struct tuple *t,
					     struct flow_pair *pair)
{
	struct bpf_sock *sk = skb->sk;
	struct flow *f = &pair->flow;
	__be16 port;

	if (!sk)
		return;
	sk = bpf_sk_fullsock(sk);
	if (!sk)
		return;
	port = bpf_htons(sk->src_port);
	if (port == t->sport)
		return;
	tuple_mirror(&pair->reply_key, t);
	flow_identity(f, &pair->reply_key, FLOW_REPLY | FLOW_STACK, HELPER_NODE, t->dport);
	f->dport = port;
	pair->reply_key.sport = 0;
	tftp_store_alone(pair);
}

/* Fills pair->flow, the entry of the answer, and pair->reply, its reverse entry. */
static __always_inline void tftp_fill(const struct tuple *answer, const struct flow *request,
				      struct flow_pair *pair, __u32 time, bool bypass)
{
	struct flow *f = &pair->flow;

	__builtin_memset(f, 0, sizeof(*f));
	f->saddr = request->saddr;
	f->daddr = request->daddr;
	f->sport = answer->sport;
	f->dport = request->dport;
	f->backend = request->backend;
	f->service = request->service;
	f->flags = request->flags & ~(FLOW_STREAM | (bypass ? FLOW_STACK : 0));
	f->state = FLOW_NEW;
	f->seen = time;
	f->opened = time;
	f->in_ifindex = source_device(answer);
	f->slot = unconfirmed_admit(answer, time, false);
	f->helper = request->helper == HELPER_NODE ? HELPER_NODE : HELPER_DATA;
	flow_make_reverse(&pair->reply, f, answer);
	flow_reverse_key(&pair->reply_key, f, answer);
}

/*
 * Stores the pair. Returns 0, or -1 if a live flow has the client's direction. An entry of
 * an earlier transfer through the same ports is replaced.
 */
static __always_inline int tftp_store(const struct tuple *answer, struct flow_pair *pair,
				      const struct settings *s)
{
	struct flow *owner;

	if (bpf_map_update_elem(&flows, &pair->reply_key, &pair->reply, BPF_NOEXIST)) {
		owner = bpf_map_lookup_elem(&flows, &pair->reply_key);
		if (owner && owner->helper < HELPER_DATA &&
		    !flow_dead(owner, answer->proto, s, pair->flow.seen))
			return -1;
		if (bpf_map_update_elem(&flows, &pair->reply_key, &pair->reply, BPF_ANY))
			return -1;
	}
	flow_protect(&pair->reply_key);
	if (bpf_map_update_elem(&flows, answer, &pair->flow, BPF_ANY))
		return -1;
	flow_protect(answer);
	owner = bpf_map_lookup_elem(&flows, &pair->reply_key);
	if (owner && owner->slot == pair->flow.slot)
		return 0;
	/* Another CPU replaced the flow when only one of its entries was stored. */
	bpf_map_delete_elem(&flows, answer);
	return -1;
}

/*
 * May the answer to a request through the stack bypass netfilter? Netfilter would take it
 * for the first packet of a connection of the endpoint, and apply the rules of new
 * connections: masquerade it, or drop it although a policy allows replies. If netfilter
 * accepted the request, it would accept a reply.
 */
static __always_inline int tftp_answer_may_bypass(struct __sk_buff *skb, const struct tuple *answer,
						  const struct flow *request, enum hook hook)
{
	struct tuple asked;

	if (hook == FROM_STACK || !(request->flags & FLOW_STACK) || request->helper == HELPER_NODE)
		return 0;
	tuple_mirror(&asked, answer);
	asked.dport = request->helper_port;
	return conntrack_accepted(skb, &asked);
}

/*
 * Reports the transfer in pair->flow, whose first packet is in scratch memory, and with first
 * also the answer to its request. A transfer is a flow with events of its own, but no
 * connection of the Service: the request counts as that.
 */
__noinline int report_transfer(struct __sk_buff *skb, struct flow *request, __u32 first)
{
	struct scratch *m = get_scratch();
	struct settings *s = get_settings();
	__u64 handshake = 0;
	struct event *e;

	if (!m || !s || !request)
		return 0;
	report_packet(skb, &m->pair.flow);
	if (first)
		handshake = flow_handshake(request, bpf_ktime_get_ns());
	if (service_metrics && handshake && request->service)
		service_count_handshake(request->service, handshake);
	if (!(s->flags & SETTING_EVENTS_FLOWS) || !(request->flags & FLOW_REPORTED))
		return 0;
	if (first) {
		e = event_reserve(EVENT_ANSWERED);
		if (!e)
			return 0;
		event_of_flow(e, request, &m->packet.tuple);
		e->endpoint_port = request->helper_port;
		e->handshake = handshake;
		event_submit(e);
	}
	e = event_reserve(EVENT_OPENED);
	if (!e)
		return 0;
	event_of_flow(e, &m->pair.flow, &m->packet.tuple);
	event_submit(e);
	return 0;
}

/*
 * Handles a datagram of no flow if it answers a request, from the requested port or from a
 * port of the server's choice. Returns GO_ON if it answers none.
 */
__noinline int serve_tftp_answer(struct __sk_buff *skb, struct settings *s, enum hook hook)
{
	struct scratch *m = get_scratch();
	struct flow *request, *f;
	struct packet *p;
	__u32 time = now();
	bool bypass, first;

	if (!m || !s)
		return GO_ON;
	p = &m->packet;
	f = &m->pair.flow;
	if (hook != FROM_STACK && source_device(&p->tuple) != hook_device(skb, hook))
		return GO_ON;
	request = tftp_request(&p->tuple, &m->pair.reply_key, s, time);
	if (!request || !p->tuple.sport)
		return GO_ON;
	if (p->tuple.sport == request->helper_port) {
		/* An answer from the requested port adds no entries. */
		if (request->helper != HELPER_REQUEST || !flow_applies(request, hook))
			return GO_ON;
		request->seen = time;
		flow_refresh_reverse(request, &m->pair.reply_key, time);
		if (request->state == FLOW_NEW)
			flow_mark_answered(request, &m->pair.reply_key);
		*f = *request;
		return flow_forward(skb, m, hook, request);
	}
	bypass = tftp_answer_may_bypass(skb, &p->tuple, request, hook);
	if (!bypass && !flow_applies(request, hook))
		return GO_ON;
	/*
	 * Count once, on the node that translates the request, and not where it is only
	 * forwarded.
	 */
	first = request->helper == HELPER_REQUEST && request->progress != REQUEST_ANSWERED;
	if (first) {
		count(HELPER_ANSWERED);
		/*
		 * The programs have never looked up the client's entry, so the LRU would
		 * evict it first. This entry would then hold the node's port without a flow.
		 */
		flow_refresh_reverse(request, &m->pair.reply_key, request->seen);
	}
	if (!tftp_answer_admit(request))
		return drop(DROP_HELPER_ANSWERS);
	tftp_fill(&p->tuple, request, &m->pair, time, bypass);
	if (tftp_store(&p->tuple, &m->pair, s))
		return drop(DROP_HELPER_CONFLICT);
	if (service_metrics || request->flags & FLOW_REPORTED)
		report_transfer(skb, request, first);
	return flow_forward(skb, m, hook, NULL);
}

#endif
