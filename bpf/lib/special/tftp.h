/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * TFTP (RFC 1350): the server answers a request from a port of its own choice,
 * and the rest of the transfer is between that port and the client's.
 *
 *   request  client:c  -> service:69    forward entry   becomes  client':c' -> endpoint:69
 *   answers  endpoint:* -> client':c'   reply entry     key with port 0
 *
 *   the first answer from a port t makes two more:
 *            endpoint:t -> client':c'   becomes  service:t  -> client:c
 *            client:c -> service:t      becomes  client':c' -> endpoint:t
 *
 * The reply entry of the request is taken for all ports of the endpoint at once,
 * so no other client of it can be given client':c' while the request may be
 * answered. The client finds the server's own port t, as with the kernel's
 * nf_nat_tftp. What the request says is the server's to judge: nothing of it is
 * read here. A request that is never answered is two entries that age.
 *
 * A client may also ask the endpoint itself: a socket hook translated it, or
 * another node. Netfilter sees neither question nor answer then, so that no
 * other rule takes the answer, which begins a connection as far as it can tell,
 * for one to masquerade: HELPER_DIRECT, and entries that change nothing.
 *
 * What a process of the node asks goes through the node's netfilter, and a CNI may
 * masquerade it, by which it gets another source port:
 *
 *   process N:c ── netfilter ── N:c' ── to_network ──> endpoint:69
 *   endpoint:t -> N:c'   from_network: N:c         netfilter: a new connection, let in
 *   N:c -> endpoint:t    to_network:   N:c'        the answer to that: not masqueraded
 */
#ifndef SPILLWAY_SPECIAL_TFTP_H
#define SPILLWAY_SPECIAL_TFTP_H

#include "../act/forward.h"

/*
 * Ports of a server that may answer one packet of a request. RFC 1350 has one; a
 * request that was sent again while it was being answered may get two.
 */
#define HELPER_ANSWERS 16

/*
 * The entry of a request that a datagram may be the answer to, or NULL; *key is
 * then the entry's.
 */
static __always_inline struct flow *helper_request(const struct tuple *answer, struct tuple *key,
						   const struct settings *s, __u32 time)
{
	struct flow *f = request_at(answer, key);

	if (!f || f->helper == HELPER_NONE || flow_dead(f, key->proto, s, time))
		return NULL;
	return f;
}

/*
 * Another port of the server answers: may it? Else one request could fill the table.
 */
static __always_inline int helper_answer_counts(struct flow *request)
{
	request->progress = REQUEST_ANSWERED;
	if (request->answers >= HELPER_ANSWERS)
		return 0;
	request->answers++;
	return 1;
}

/* The client asks again, or next, by the same port: as many ports may answer that. */
static __always_inline void helper_request_repeated(const struct flow *f, const struct tuple *key,
					       struct tuple *request_key)
{
	struct flow *request;

	flow_reverse_key(request_key, f, key);
	request = bpf_map_lookup_elem(&flows, request_key);
	if (request && request->progress == REQUEST_ANSWERED && flow_is_reverse(request, key))
		request->answers = 0;
}

/* Stores pair->flow at pair->reply_key, an entry without a reverse entry. */
static __always_inline void helper_store_alone(struct flow_pair *pair)
{
	struct flow *f = &pair->flow;

	f->slot = unconfirmed_admit(&pair->reply_key, &pair->holder_key, &pair->reverse_key, f->seen);
	bpf_map_update_elem(&flows, &pair->reply_key, f, BPF_ANY);
	flow_protect(&pair->reply_key);
}

/*
 * A client's packet to an endpoint itself was passed by netfilter: so are the
 * answers to it. to_pod: the client is a pod of this node, and so is the endpoint.
 */
static __always_inline void helper_expect_direct(const struct tuple *t, struct flow_pair *pair,
						 __u8 to_pod)
{
	struct flow *f = &pair->flow;

	tuple_mirror(&pair->reply_key, t);
	flow_identity(f, &pair->reply_key, FLOW_REPLY | to_pod, HELPER_DIRECT, t->dport);
	pair->reply_key.sport = 0;
	helper_store_alone(pair);
	feature_mark(FEATURE_HELPER);
}

/*
 * A process of the node asks an endpoint, and its packet has another port than its
 * socket: the answers to it go to the socket's.
 */
static __always_inline void helper_expect_node(struct __sk_buff *skb, const struct tuple *t,
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
	helper_store_alone(pair);
}

/* Fills pair->flow, the entry of the answer, and its reverse, pair->reply. */
static __always_inline void helper_fill(const struct tuple *answer, const struct flow *request,
					struct flow_pair *pair, __u32 time, bool direct)
{
	struct flow *f = &pair->flow;

	__builtin_memset(f, 0, sizeof(*f));
	f->saddr = request->saddr;
	f->daddr = request->daddr;
	f->sport = answer->sport;
	f->dport = request->dport;
	f->backend = request->backend;
	f->service = request->service;
	f->flags = request->flags & ~(FLOW_STREAM | (direct ? FLOW_STACK : 0));
	f->state = FLOW_NEW;
	f->seen = time;
	f->in_ifindex = source_device(answer);
	f->slot = unconfirmed_admit(answer, &pair->holder_key, &pair->reverse_key, time);
	f->helper = request->helper == HELPER_NODE ? HELPER_NODE : HELPER_DATA;
	flow_make_reverse(&pair->reply, f, answer);
	flow_reverse_key(&pair->reply_key, f, answer);
}

/*
 * Stores the pair. An entry in the client's direction that is there already is of
 * an earlier transfer through the same ports, or of another flow that lives: the
 * answer is nobody's then. 0, or -1.
 */
static __always_inline int helper_store(const struct tuple *answer, struct flow_pair *pair,
					const struct settings *s)
{
	struct flow *holder;

	if (bpf_map_update_elem(&flows, &pair->reply_key, &pair->reply, BPF_NOEXIST)) {
		holder = bpf_map_lookup_elem(&flows, &pair->reply_key);
		if (holder && holder->helper < HELPER_DATA &&
		    !flow_dead(holder, answer->proto, s, pair->flow.seen))
			return -1;
		if (bpf_map_update_elem(&flows, &pair->reply_key, &pair->reply, BPF_ANY))
			return -1;
	}
	flow_protect(&pair->reply_key);
	if (bpf_map_update_elem(&flows, answer, &pair->flow, BPF_ANY))
		return -1;
	flow_protect(answer);
	holder = bpf_map_lookup_elem(&flows, &pair->reply_key);
	if (holder && holder->slot == pair->flow.slot)
		return 0;
	/* Another CPU has replaced the flow when it had but one entry. */
	bpf_map_delete_elem(&flows, answer);
	return -1;
}

/*
 * May the answer to a request through the stack pass by it? Netfilter takes it for
 * the first packet of a connection of the endpoint's, to which other rules apply
 * than to answers: it might masquerade it, or drop it for a policy that allows
 * answers. That it let the request pass says that it would let the answer.
 */
static __always_inline int answer_may_bypass(struct __sk_buff *skb, struct scratch *m,
					   const struct flow *request, enum hook hook)
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
__noinline int serve_helper_answer(struct __sk_buff *skb, struct settings *s, enum hook hook)
{
	struct scratch *m = get_scratch();
	struct flow *request, *f;
	struct packet *p;
	__u32 time = now();
	bool bypass;

	if (!m || !s)
		return SERVE_NOT_MINE;
	p = &m->packet;
	f = &m->pair.flow;
	if (hook != EGRESS && source_device(&p->tuple) != hook_device(skb, hook))
		return pass(PASS_SOURCE);
	request = helper_request(&p->tuple, &m->pair.reply_key, s, time);
	if (!request || !p->tuple.sport)
		return SERVE_NOT_MINE;
	if (p->tuple.sport == request->helper_port) {
		/* From the port that was asked: no other is opened. */
		if (request->helper != HELPER_REQUEST || !flow_applies(request, hook))
			return SERVE_NOT_MINE;
		request->seen = time;
		flow_refresh_reverse(request, &m->pair.reply_key, time);
		if (request->state == FLOW_NEW)
			flow_answered(request, &m->pair.reply_key);
		*f = *request;
		return flow_forward(skb, m, hook, request);
	}
	bypass = answer_may_bypass(skb, m, request, hook);
	if (!bypass && !flow_applies(request, hook))
		return SERVE_NOT_MINE;
	/* Counted once, and where the request was: not if only passed on here. */
	if (request->helper == HELPER_REQUEST && request->progress != REQUEST_ANSWERED) {
		count(HELPER_ANSWERED);
		/*
		 * The client's entry has never been looked up: a full table would evict it
		 * long before this one, which would keep the node's port for nobody.
		 */
		flow_refresh_reverse(request, &m->pair.reply_key, request->seen);
	}
	if (!helper_answer_counts(request))
		return drop(DROP_HELPER_ANSWERS);
	helper_fill(&p->tuple, request, &m->pair, time, bypass);
	if (helper_store(&p->tuple, &m->pair, s))
		return drop(FLOW_CONFLICT);
	return flow_forward(skb, m, hook, NULL);
}

#endif
