/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The flow table. A flow is made on its first packet, ages by its state, and is
 * found again by either direction. The map is an LRU: when it is full, the
 * oldest flows go, and no packet is refused.
 *
 *   client:c -> service:s   forward entry   becomes  client':c' -> endpoint:e
 *   endpoint:e -> client':c' reply entry    becomes  service:s  -> client:c
 */
#ifndef SPILLWAY_FLOW_H
#define SPILLWAY_FLOW_H

#include "conntrack.h"
#include "lru.h"
#include "nat.h"

/* Source ports tried before a packet is given up: with 97 of 100 taken, 0.04 %. */
#define PORT_TRIES 256

/* Room for what does not fit on a program's stack. */
struct flow_pair {
	struct flow flow;
	struct flow reply;
	struct tuple reply_key;
	struct tuple holder_key; /* of another flow that has the reply tuple */
	__u32 seq;		 /* of the first packet, if it is a SYN */
};

/* Seconds after which nobody repeats a request that was answered. */
#define HELPER_REST 5

/* Seconds, at least one whole one, after which a question is taken to be over that was answered. */
#define ANSWER_REST 2

#define SUPERSEDED 2

/* The one that the program is at work on: service.h keeps it. */
static __always_inline struct flow_pair *get_flow_pair(void);

static __always_inline void tuple_mirror(struct tuple *out, const struct tuple *t)
{
	out->saddr = t->daddr;
	out->daddr = t->saddr;
	out->sport = t->dport;
	out->dport = t->sport;
	out->proto = t->proto;
	out->family = t->family;
	out->pad = 0;
}

/* Is this the entry of requests whose answers come from any port? */
static __always_inline int flow_asks(const struct flow *f)
{
	return f->helper == HELPER_REQUEST && !(f->flags & FLOW_REPLY);
}

/* The reply entry of a request that an answer from any port may belong to; *key is its key. */
static __always_inline struct flow *request_at(const struct tuple *answer, struct tuple *key)
{
	*key = *answer;
	key->sport = 0;
	return bpf_map_lookup_elem(&flows, key);
}

/* Fills an entry that leaves packets with this tuple as they are. */
static __always_inline void flow_as_is(struct flow *f, const struct tuple *t, __u8 flags, __u8 helper,
				       __be16 helper_port)
{
	__builtin_memset(f, 0, sizeof(*f));
	f->saddr = t->saddr;
	f->daddr = t->daddr;
	f->sport = t->sport;
	f->dport = t->dport;
	f->flags = flags;
	f->helper = helper;
	f->helper_port = helper_port;
	f->state = FLOW_NEW;
	f->seen = now();
}

/*
 * The key of a flow entry's twin: the mirror image of what packets become, but
 * for answers from any port.
 */
static __always_inline void flow_twin_key(struct tuple *out, const struct flow *f,
					  const struct tuple *key)
{
	out->saddr = f->daddr;
	out->daddr = f->saddr;
	out->sport = flow_asks(f) ? 0 : f->dport;
	out->dport = f->sport;
	out->proto = key->proto;
	out->family = key->family;
	out->pad = 0;
}

static __always_inline __u32 flow_timeout(const struct flow *f, __u8 proto,
					  const struct settings *s)
{
	if (proto == IPPROTO_UDP)
		return f->state == FLOW_NEW ? s->timeout_udp_new : s->timeout_udp;
	switch (f->state) {
	case FLOW_NEW:
		return s->timeout_new;
	case FLOW_ESTABLISHED:
		return s->timeout_tcp;
	case FLOW_CLOSING:
		return s->timeout_closing;
	}
	return s->timeout_closed;
}

static __always_inline int flow_dead(const struct flow *f, __u8 proto, const struct settings *s,
				     __u32 time)
{
	/* seen may be ahead of time: another CPU wrote it a moment ago. */
	return (__s32)(time - f->seen) > (__s32)flow_timeout(f, proto, s);
}

/* Is the entry at this key the twin of the flow that becomes *mine? */
static __always_inline int flow_is_twin(const struct flow *twin, const struct tuple *mine)
{
	return addr_equal(&twin->saddr, &mine->daddr) && addr_equal(&twin->daddr, &mine->saddr) &&
	       twin->sport == mine->dport &&
	       (twin->dport == mine->sport || (flow_asks(twin) && !mine->sport));
}

static __always_inline void flow_forget_way(struct flow *f)
{
	f->way_mtu = 0;
	f->way_seen = 0;
	f->way_ifindex = 0;
	f->way_kind = 0;
	__builtin_memset(f->way_macs, 0, sizeof(f->way_macs));
}

/* The twin's entry, from the point of view of that direction. */
static __always_inline void flow_make_twin(struct flow *twin, const struct flow *f,
					   const struct tuple *key)
{
	twin->saddr = key->daddr;
	twin->daddr = key->saddr;
	twin->sport = key->dport;
	/* The entry of answers from any port has port 0 in its key. */
	twin->dport = f->helper == HELPER_REQUEST && f->flags & FLOW_REPLY ? f->helper_port
									   : key->sport;
	twin->helper_port = f->helper_port;
	twin->helper = f->helper;
	twin->end = f->helper == HELPER_REQUEST ? f->end : END_UNKNOWN;
	twin->backend = f->backend;
	twin->service = f->service;
	twin->seen = f->seen;
	twin->state = f->state;
	twin->flags = (f->flags & (FLOW_STACK | FLOW_SNAT | FLOW_RESET)) |
		      (f->flags & FLOW_REPLY ? 0 : FLOW_REPLY);
	if (f->flags & FLOW_TO_POD)
		twin->flags |= FLOW_TWIN_TO_POD;
	if (f->flags & FLOW_TWIN_TO_POD)
		twin->flags |= FLOW_TO_POD;
	if (f->flags & FLOW_FIN)
		twin->flags |= FLOW_TWIN_FIN;
	if (f->flags & FLOW_TWIN_FIN)
		twin->flags |= FLOW_FIN;
	flow_forget_way(twin);
}

/*
 * Keeps the twin fresh in the LRU while only one direction is busy, and makes it
 * again if it was evicted. -1: meanwhile another flow was given its tuple.
 */
static __always_inline int flow_touch_twin(struct flow *f, const struct tuple *key, __u32 time)
{
	struct flow_pair *room;
	struct tuple twin_key;
	struct flow *twin;

	flow_twin_key(&twin_key, f, key);
	twin = bpf_map_lookup_elem(&flows, &twin_key);
	if (twin) {
		if (!flow_is_twin(twin, key)) {
			count(FLOW_CONFLICT);
			return -1;
		}
		twin->seen = time;
		twin->flags |= f->flags & FLOW_STREAM;
		return 0;
	}
	room = get_flow_pair();
	if (!room)
		return -1;
	flow_make_twin(&room->reply, f, key);
	room->reply.seen = time;
	if (bpf_map_update_elem(&flows, &twin_key, &room->reply, BPF_NOEXIST)) {
		count(FLOW_CONFLICT);
		return -1;
	}
	flow_keep(&twin_key);
	count(FLOW_REVIVED);
	return 0;
}

/* Writes a change of state to both directions. */
static __always_inline void flow_set_state(struct flow *f, const struct tuple *key, __u8 state,
					   __u8 own, __u8 others)
{
	struct tuple twin_key;
	struct flow *twin;

	f->state = state;
	f->flags |= own;
	flow_twin_key(&twin_key, f, key);
	twin = bpf_map_lookup_elem(&flows, &twin_key);
	if (twin && flow_is_twin(twin, key)) {
		twin->state = state;
		twin->flags |= others;
	}
}

/*
 * A packet of a closed connection, or the one that closes it: what does the
 * endpoint still know of it? The reply entry says so, since who looks for a free
 * tuple finds that one. Who closes first waits (TIME-WAIT), and the other forgets.
 */
__noinline int flow_ending(struct flow *f, const struct packet *p)
{
	struct tuple twin_key;
	struct flow *twin;

	if (!f || !p)
		return 0;
	flow_twin_key(&twin_key, f, &p->tuple);
	twin = bpf_map_lookup_elem(&flows, &twin_key);
	if (!twin || !flow_is_twin(twin, &p->tuple))
		return 0;
	if (f->flags & FLOW_RESET) {
		/* Somebody goes on: the RST may not have been believed (RFC 5961). */
		f->flags &= ~FLOW_RESET;
		twin->flags &= ~FLOW_RESET;
	} else if (p->flags & PACKET_FIN) {
		f->end = END_UNKNOWN;
		twin->end = END_LAST_ACK;
		twin->way_seen = 0;
		twin->way_ifindex = p->seq;
	} else if (f->end == END_LAST_ACK && p->flags & PACKET_ACK) {
		if (f->flags & FLOW_REPLY)
			f->end = END_TIME_WAIT;
		else
			twin->end = END_FORGOTTEN;
	}
	return 0;
}

/* What a packet of a known flow does to its state. */
static __always_inline void flow_advance(struct flow *f, const struct packet *p)
{
	int closed;

	if (f->state == FLOW_NEW && f->flags & FLOW_REPLY) {
		flow_set_state(f, &p->tuple, FLOW_ESTABLISHED, 0, 0);
		newcomer_answered(f->seen);
	}
	closed = f->state == FLOW_CLOSED;
	if (p->flags & PACKET_RST) {
		flow_set_state(f, &p->tuple, FLOW_CLOSED, FLOW_RESET, FLOW_RESET);
		return;
	}
	if (p->flags & PACKET_FIN && !(f->flags & FLOW_FIN)) {
		/* After an RST it stays closed. */
		closed |= f->flags & FLOW_TWIN_FIN;
		flow_set_state(f, &p->tuple, closed ? FLOW_CLOSED : FLOW_CLOSING, FLOW_FIN,
			       FLOW_TWIN_FIN);
	}
	if (closed)
		flow_ending(f, p);
}

/* Is a flow over, or might it be? Datagrams do not say when they end. */
static __always_inline int flow_may_be_over(const struct flow *f, __u8 proto)
{
	return f->state >= FLOW_CLOSING || proto == IPPROTO_UDP;
}

/*
 * Gives the tuple of an answer up if netfilter has meanwhile taken it for a
 * connection of its own: MASQUERADE chooses ports without asking here. While
 * netfilter may translate for Services too every answer is looked at, else the
 * first one in a second. A client that goes on gets a new flow, by another port.
 */
static __always_inline int flow_yields(struct __sk_buff *skb, const struct flow *f,
				       const struct packet *p, const struct settings *s, __u32 time)
{
	struct tuple twin_key;
	struct flow *twin;

	if ((f->flags & (FLOW_REPLY | FLOW_STACK)) != FLOW_REPLY ||
	    !flow_may_be_over(f, p->tuple.proto))
		return 0;
	if (!(s->flags & SETTING_ASK_CONNTRACK) && (f->seen == time || !(f->flags & FLOW_SNAT)))
		return 0;
	if (!conntrack_claims(skb, &p->tuple))
		return 0;
	/* What netfilter sent from here has got another port on its way: serve_taken. */
	tuple_mirror(&twin_key, &p->tuple);
	twin = bpf_map_lookup_elem(&flows, &twin_key);
	if (twin && twin->helper == HELPER_NODE)
		return 0;
	flow_twin_key(&twin_key, f, &p->tuple);
	twin = bpf_map_lookup_elem(&flows, &twin_key);
	if (twin && flow_is_twin(twin, &p->tuple))
		bpf_map_delete_elem(&flows, &twin_key);
	bpf_map_delete_elem(&flows, &p->tuple);
	return 1;
}

/*
 * Has the node's port of a transfer been given to another request meanwhile (see
 * flow_may_yield)? What comes after a rest may then be the answer to that, by
 * a server that has ended the transfer and uses its port again: it is nobody's.
 * A client that goes on with the transfer makes its entries be fresh.
 */
static __always_inline int flow_superseded(const struct flow *f, const struct tuple *key,
					   __u32 time)
{
	struct flow *request;
	struct tuple asked;

	if (f->helper != HELPER_DATA ||
	    (f->flags & (FLOW_REPLY | FLOW_SNAT)) != (FLOW_REPLY | FLOW_SNAT) ||
	    (__s32)(time - f->seen) < HELPER_REST)
		return 0;
	request = request_at(key, &asked);
	return request && !(addr_equal(&request->daddr, &f->daddr) && request->dport == f->dport);
}

/*
 * The live entry of a packet's flow, or NULL: a packet of no flow, or the first
 * one of a new flow with an old tuple, and then *stale is set; SUPERSEDED: one to drop.
 */
static __always_inline struct flow *flow_find(struct __sk_buff *skb, const struct packet *p,
					      const struct settings *s, int *stale)
{
	struct flow *f = bpf_map_lookup_elem(&flows, &p->tuple);
	__u32 time = now();

	*stale = f != NULL;
	if (!f)
		return NULL;
	if (flow_dead(f, p->tuple.proto, s, time))
		return NULL;
	if (flow_superseded(f, &p->tuple, time)) {
		*stale = SUPERSEDED;
		return NULL;
	}
	/* RFC 9293, 3.6.1: a SYN may reopen a connection in TIME-WAIT. */
	if (f->state >= FLOW_CLOSING && (p->flags & (PACKET_SYN | PACKET_ACK)) == PACKET_SYN)
		return NULL;
	/*
	 * A datagram must not follow an endpoint that is gone, unless no other could
	 * make anything of it.
	 */
	if (p->tuple.proto == IPPROTO_UDP && !(f->flags & FLOW_REPLY) && f->helper < HELPER_DATA &&
	    !bpf_map_lookup_elem(&backends, &f->backend))
		return NULL;
	if (flow_yields(skb, f, p, s, time)) {
		*stale = 0;
		return NULL;
	}
	if (f->seen != time) {
		if (p->tuple.proto == IPPROTO_UDP && f->state == FLOW_ESTABLISHED &&
		    (__s32)(time - f->seen) <= ANSWER_REST)
			f->flags |= FLOW_STREAM;
		if (flow_touch_twin(f, &p->tuple, time))
			return NULL;
		/* Only now: else the next packet of this second would not look for the twin. */
		f->seen = time;
	}
	flow_advance(f, p);
	return f;
}

static __always_inline __be16 random_port(const struct settings *s)
{
	__u32 key = s->snat_ports ? bpf_get_prandom_u32() % s->snat_ports : 0;
	__u16 *port = bpf_map_lookup_elem(&snat_ports, &key);

	return port ? bpf_htons(*port) : 0;
}

/* Does a socket of this node own the tuple that an endpoint's answer would have? */
static __always_inline int socket_owns(struct __sk_buff *skb, const struct tuple *answer)
{
	struct bpf_sock_tuple t = {};
	struct bpf_sock *sk;
	__u32 len;

	len = sock_tuple(&t, answer);
	if (answer->proto == IPPROTO_TCP)
		sk = bpf_skc_lookup_tcp(skb, &t, len, BPF_F_CURRENT_NETNS, 0);
	else
		sk = bpf_sk_lookup_udp(skb, &t, len, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return 0;
	bpf_sk_release(sk);
	return 1;
}

/* Attempts at a port before a closed flow has to make room. */
#define YIELD_RESET 16
#define YIELD_CLOSED 32

/*
 * May a closed flow lose its tuple before its time? Else short connections to one
 * endpoint had a ceiling: ports / time-out. At once, if the endpoint has forgotten
 * the tuple or takes the SYN of the new connection in TIME-WAIT; where nobody knows
 * whether the last ACK has come, after a second. A TFTP request that has been
 * answered needs it only to be asked again: the transfer has entries of its own.
 * Datagrams do not say when they end; but a question that has its answer, as DNS
 * has them, is over when nothing follows. What has gone on for longer keeps its
 * port for its whole time (RFC 4787, REQ-5).
 */
static __always_inline int flow_may_yield(const struct flow *f, __u8 proto, __u32 time, int attempt,
					  __u32 seq)
{
	if (f->helper == HELPER_REQUEST)
		return f->end == END_ANSWERED && attempt >= YIELD_RESET &&
		       (__s32)(time - f->seen) >= HELPER_REST;
	if (attempt < YIELD_RESET)
		return 0;
	if (proto == IPPROTO_UDP)
		return f->state == FLOW_ESTABLISHED && f->helper == HELPER_NONE &&
		       !(f->flags & FLOW_STREAM) && (__s32)(time - f->seen) >= ANSWER_REST;
	if (f->state != FLOW_CLOSED)
		return 0;
	if (f->flags & FLOW_RESET || f->end == END_FORGOTTEN)
		return 1;
	if (attempt < YIELD_CLOSED)
		return 0;
	if (f->end == END_TIME_WAIT && (__s32)(seq - f->way_ifindex) > 0)
		return 1;
	return (__s32)(time - f->seen) >= 1;
}

/*
 * Lets the flow whose reply entry is deleted look for it: its own packets must not
 * take part in a connection that now has the tuple. Of an entry that was not seen
 * in this second the next packet does.
 */
static __always_inline void flow_alert_twin(const struct flow *f, const struct tuple *key,
					    struct tuple *twin_key)
{
	struct flow *twin;

	flow_twin_key(twin_key, f, key);
	twin = bpf_map_lookup_elem(&flows, twin_key);
	if (twin && flow_is_twin(twin, key))
		twin->seen--;
}

/*
 * Takes pair's reply tuple if nobody alive has it, or if it is this flow's own: its
 * forward half was evicted, or a SYN reopens the connection. 0: it is ours.
 */
static __always_inline int reply_claim(struct flow_pair *pair, const struct tuple *key,
				       const struct settings *s, int attempt)
{
	struct tuple *reply_key = &pair->reply_key;
	struct flow *holder, *reply = &pair->reply;

	if (!bpf_map_update_elem(&flows, reply_key, reply, BPF_NOEXIST))
		return 0;
	holder = bpf_map_lookup_elem(&flows, reply_key);
	if (!holder)
		return -1;
	if (flow_is_twin(holder, key))
		return bpf_map_update_elem(&flows, reply_key, reply, BPF_ANY);
	if (!flow_dead(holder, reply_key->proto, s, reply->seen)) {
		if (!flow_may_yield(holder, reply_key->proto, reply->seen, attempt, pair->seq))
			return -1;
		flow_alert_twin(holder, reply_key, &pair->holder_key);
	}
	bpf_map_delete_elem(&flows, reply_key);
	/* Atomic again: of two that find the same corpse only one gets its place. */
	return bpf_map_update_elem(&flows, reply_key, reply, BPF_NOEXIST);
}

/*
 * A packet to an endpoint itself, not to a Service: the answer must not be taken
 * for that of a Service's flow which has left its tuple behind. A flow of
 * datagrams does not say when it ends: who asked last gets the answer, and if the
 * flow was not over, its next packet makes its reply entry again. The two tuples
 * are room for keys.
 */
static __always_inline void flow_make_room(const struct tuple *direct, struct tuple *reply_key,
					   struct tuple *key, int any_port)
{
	struct flow *f;

	tuple_mirror(reply_key, direct);
	if (any_port)
		reply_key->sport = 0;
	f = bpf_map_lookup_elem(&flows, reply_key);
	if (!f || !(f->flags & FLOW_REPLY) || !flow_may_be_over(f, direct->proto))
		return;
	flow_alert_twin(f, reply_key, key);
	bpf_map_delete_elem(&flows, reply_key);
}

/*
 * One try at a reply tuple: attempt 0 is by the client's port, the others by
 * random ones. Not static: the verifier looks at it once, not once for each turn
 * of the loop around it. 0: it is ours.
 */
__noinline int reply_try(struct __sk_buff *skb, struct tuple *key, struct settings *s, int attempt)
{
	struct flow_pair *pair = get_flow_pair();

	if (!pair || !key || !s)
		return -1;
	if (attempt) {
		pair->reply_key.dport = random_port(s);
		if (pair->flow.flags & FLOW_SNAT && socket_owns(skb, &pair->reply_key))
			return -1;
		if (pair->flow.helper == HELPER_NODE && key->proto == IPPROTO_UDP &&
		    been(BEEN_HELPER) && request_at(&pair->reply_key, &pair->holder_key))
			return -1;
	}
	return reply_claim(pair, key, s, attempt) ? -1 : 0;
}

/*
 * Would netfilter take the answers with a reply tuple that is ours for those of a
 * connection of its own? Then it is given back. In the stack nf_nat looks after
 * that itself. Not a part of reply_try: before Linux 6.12 the frames of all calls
 * under way share 512 bytes.
 */
__noinline int reply_contested(struct __sk_buff *skb, struct settings *s)
{
	struct flow_pair *pair = get_flow_pair();
	unsigned long status = 0;

	if (!pair || !s || !has_ct_lookup)
		return 0;
	if (pair->flow.flags & FLOW_STACK && pair->flow.helper != HELPER_NODE)
		return 0;
	if (!(pair->flow.flags & FLOW_SNAT) && !(s->flags & SETTING_ASK_CONNTRACK))
		return 0;
	if (conntrack_find(skb, &pair->reply_key, &status) != IP_CT_DIR_REPLY)
		return 0;
	bpf_map_delete_elem(&flows, &pair->reply_key);
	return 1;
}

/* Tries until a reply tuple is ours; -1 if none seems to be free. */
__noinline int reply_search(struct __sk_buff *skb, struct tuple *key, struct settings *s,
			    int new_port)
{
	int first = new_port ? 1 : 0;

	for (int i = 0; i < PORT_TRIES; i++) {
		if (!reply_try(skb, key, s, first + i) && !reply_contested(skb, s))
			return 0;
	}
	return -1;
}

/*
 * Stores the flow pair->flow, whose packets have the key; its sport is still the
 * client's. It stays unless another flow to the same endpoint has it, or with
 * new_port: then it is random among the free ones. renew: the key's old entry is
 * to be replaced. On success pair->flow is what the table holds.
 */
static __always_inline enum verdict flow_create(struct __sk_buff *skb, struct tuple *key,
						struct flow_pair *pair, int new_port, int renew,
						struct settings *s)
{
	struct flow *f = &pair->flow, *other;
	int keep;

	flow_make_twin(&pair->reply, f, key);
	flow_twin_key(&pair->reply_key, f, key);
	if (reply_search(skb, key, s, new_port))
		return DROP_SNAT_PORTS;
	f->sport = pair->reply_key.dport;
	/* At once: room for the other entry could be made at the cost of this one. */
	keep = newcomer(f->seen);
	if (keep)
		flow_keep(&pair->reply_key);
	if (!bpf_map_update_elem(&flows, key, f, renew ? BPF_ANY : BPF_NOEXIST)) {
		if (keep)
			flow_keep(key);
		count(FLOW_CREATED);
		if (f->flags & FLOW_STACK)
			been_set(BEEN_STACK_FLOW);
		if (f->flags & FLOW_SNAT)
			been_set(BEEN_SNAT);
		return FLOW_CREATED;
	}
	/* Another CPU was faster with the same first packet: its flow is the one. */
	bpf_map_delete_elem(&flows, &pair->reply_key);
	other = bpf_map_lookup_elem(&flows, key);
	if (!other)
		return DROP_FLOW_TABLE;
	*f = *other;
	return FLOW_CREATED;
}

#endif
