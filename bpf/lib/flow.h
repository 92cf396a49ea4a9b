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
#include "scratch.h"

/* Seconds after which nobody repeats a request that was answered. */
#define HELPER_REST 5

/* Seconds, at least one whole one, after which a question is taken to be over that was answered. */
#define ANSWER_REST 2

#define SUPERSEDED 2

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

#endif
