/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The state of a TCP connection, as its packets show it. A packet changes the state
 * only if its numbers fit the connection; others are forwarded, for the endpoints
 * judge them too, and change nothing. The rules are those of the endpoints:
 *
 *   ACK      of the client acknowledges the SYN-ACK, whose number only a client that
 *            exists has seen
 *   segment  ends within a window of the sender's last byte (RFC 9293, 3.4)
 *   RST      is at the byte that the other side expects, or behind the sender's last
 *            one (RFC 5961, 3.2); a segment that fits and comes later undoes it
 *   FIN      counts when the other side has acknowledged it; data beyond it undo it
 *   SYN      reopens a connection that is over, see flow_reopens
 *
 * One entry's lookup has to do for a packet in the middle of a connection. What bounds
 * it is therefore copied between the two entries, once a second and when a segment
 * does not fit. So the window counts from the sender's last byte, not from what
 * the other side has acknowledged: at most one window more than conntrack allows.
 */
#ifndef SPILLWAY_FLOW_TCP_H
#define SPILLWAY_FLOW_TCP_H

#include "../lookup/endpoint.h"
#include "../lookup/pod.h"
#include "../scratch.h"
#include "source.h"
#include "unconfirmed.h"

#define TCP_NO_SCALE 0xff
#define TCP_MAX_SCALE 14 /* RFC 7323, 2.3 */
#define TCP_OPTIONS_MAX 40
#define TCPOPT_EOL 0
#define TCPOPT_NOP 1
#define TCPOPT_WINDOW 3

/* What a packet does to the memory of its flow. */
enum tcp_verdict {
	TCP_IGNORED = 0, /* forwarded, and the flow is as idle as before */
	TCP_COUNTS = 1,	 /* of this connection */
	TCP_RENEWS = 2,	 /* the SYN of another one */
};

static __always_inline int seq_before(__u32 a, __u32 b)
{
	return (__s32)(a - b) < 0;
}

/* Does the segment end within the window? A keepalive repeats a byte (RFC 9293, 3.8.4). */
static __always_inline int tcp_fits(const struct tcp_side *s, const struct packet *p)
{
	__u32 span = s->peer_window + 1;

	return p->seq_end - (s->end - span) <= 2 * span;
}

/* Takes in a segment that fits. */
static __always_inline void tcp_learn(struct tcp_side *s, const struct packet *p)
{
	__u32 window = (__u32)p->window << (s->scale & 15);

	if (seq_before(s->end, p->seq_end))
		s->end = p->seq_end;
	if (p->flags & PACKET_ACK && p->ack - s->ack <= s->window)
		s->ack = p->ack;
	if (s->window < window)
		s->window = window;
}

/* A segment in the middle of a connection needs no other entry than its own. */
static __always_inline int tcp_plain(struct flow *f, const struct packet *p)
{
	if (f->state != FLOW_ESTABLISHED ||
	    p->flags & (PACKET_SYN | PACKET_FIN | PACKET_RST | PACKET_NO_L4) ||
	    (f->flags & (FLOW_FIN | FLOW_REVERSE_FIN | FLOW_TRACKED)) != FLOW_TRACKED ||
	    !tcp_fits(&f->tcp, p))
		return 0;
	tcp_learn(&f->tcp, p);
	return 1;
}

/* The window scale of a SYN, or TCP_NO_SCALE. */
__noinline int tcp_scale(struct __sk_buff *skb, const struct packet *p)
{
	__u32 off, end;
	__u8 opt[3];

	if (!p)
		return TCP_NO_SCALE;
	off = p->l4_off + sizeof(struct tcphdr);
	end = p->l4_off + p->header;
	for (int i = 0; i < TCP_OPTIONS_MAX && off < end; i++) {
		if (load(skb, off, opt, 1) || opt[0] == TCPOPT_EOL)
			break;
		if (opt[0] == TCPOPT_NOP) {
			off++;
			continue;
		}
		if (off + 2 > end || load(skb, off, opt, 2) || opt[1] < 2)
			break;
		if (opt[0] == TCPOPT_WINDOW) {
			if (opt[1] != 3 || off + 3 > end || load(skb, off, opt, 3))
				break;
			return opt[2] < TCP_MAX_SCALE ? opt[2] : TCP_MAX_SCALE;
		}
		off += opt[1];
	}
	return TCP_NO_SCALE;
}

/* The side that sends a first SYN. */
static __always_inline void tcp_begin(struct __sk_buff *skb, struct tcp_side *s,
				      const struct packet *p)
{
	__builtin_memset(s, 0, sizeof(*s));
	s->end = p->seq_end;
	s->isn = p->seq;
	s->window = p->window;
	s->scale = tcp_scale(skb, p);
	s->first_scale = s->scale;
}

/* The client repeats its SYN, or another one has come: the endpoint chooses one. */
static __always_inline void tcp_begin_retry(struct __sk_buff *skb, struct tcp_side *s,
					    const struct packet *p)
{
	__u32 isn = s->isn;
	__u8 scale = s->first_scale;

	if (p->seq_end == s->end)
		return;
	tcp_begin(skb, s, p);
	s->isn = isn;
	s->first_scale = scale;
}

/* Shares between both directions what bounds the other. */
static __always_inline void tcp_share(struct flow *f, struct flow *reverse)
{
	f->tcp.peer_window = reverse->tcp.window;
	reverse->tcp.peer_window = f->tcp.window;
}

static __always_inline void flow_set_state(struct flow *f, struct flow *reverse, __u8 state)
{
	f->state = state;
	reverse->state = state;
}

/*
 * The client is known to exist: from now on no flood replaces its flow. Not if it has its
 * share of them. It still gets its connection: an endpoint that helps a forger can make
 * another's share seem full.
 */
static __always_inline void flow_confirm(struct flow *f, struct flow *reverse, const struct packet *p)
{
	if (source_full(flow_client(f, p), p->tuple.family)) {
		count(FLOW_OVER_SHARE);
		return;
	}
	f->flags |= FLOW_CONFIRMED;
	reverse->flags |= FLOW_CONFIRMED;
	source_add(f, p, 1);
}

/* A connection is over: it takes its place among the unconfirmed flows. */
static __always_inline void flow_close(struct flow *f, struct flow *reverse, const struct packet *p)
{
	struct flow_pair *pair = get_flow_pair();
	int counted = flow_confirmed(f);
	__u32 old = f->slot, slot;

	flow_set_state(f, reverse, FLOW_CLOSED);
	if (!pair || !counted)
		return;
	source_add(f, p, -1);
	pair->reply_key = p->tuple;
	slot = unconfirmed_admit(&pair->reply_key, &pair->holder_key, &pair->reverse_key, p->time);
	if (old != SLOT_CLAIMED && __sync_val_compare_and_swap(&f->slot, old, slot) == old)
		reverse->slot = slot;
}

/* A connection goes on that seemed to be closed, or to be closing. */
static __always_inline void flow_resume(struct flow *f, struct flow *reverse, const struct packet *p)
{
	if (f->state == FLOW_CLOSED && f->flags & FLOW_CONFIRMED)
		source_add(f, p, 1);
	flow_set_state(f, reverse, f->flags & (FLOW_FIN | FLOW_REVERSE_FIN) ? FLOW_CLOSING
								       : FLOW_ESTABLISHED);
}

/*
 * A packet of the endpoint's before the client has confirmed: the last one counts. Which SYN
 * the endpoint has taken, and whether this is its packet at all, shows when the client agrees.
 */
static __always_inline void tcp_accept(struct __sk_buff *skb, struct flow *f, struct flow *reverse,
				       const struct packet *p)
{
	struct tcp_side *client = &reverse->tcp, *endpoint = &f->tcp;

	if (p->flags & PACKET_SYN) {
		tcp_begin(skb, endpoint, p);
		/* Both offer the option, or neither scales (RFC 7323, 2.2). */
		if (p->ack != client->end && p->ack == client->isn + 1)
			client->scale = client->first_scale;
		if (endpoint->scale == TCP_NO_SCALE || client->scale == TCP_NO_SCALE) {
			endpoint->scale = 0;
			client->scale = 0;
		}
		endpoint->peer_scale = client->scale;
		client->peer_scale = endpoint->scale;
	} else {
		endpoint->isn = p->seq - 1;
		endpoint->end = p->seq_end;
	}
	endpoint->ack = p->ack;
	flow_set_state(f, reverse, FLOW_SYN_RECV);
}

/*
 * Does the client agree with the endpoint's last packet? It acknowledges what that has sent,
 * and goes on where that waits for it. f is the client's entry, reverse the endpoint's.
 */
static __always_inline int tcp_confirms(const struct flow *f, const struct flow *reverse,
					const struct packet *p)
{
	__u32 first = reverse->tcp.isn + 1;

	return !(f->flags & FLOW_REPLY) && p->flags & PACKET_ACK &&
	       p->ack - first <= reverse->tcp.end - first && p->seq - reverse->tcp.ack <= reverse->tcp.window;
}

/* A packet before the client has acknowledged the SYN-ACK. */
static __always_inline int tcp_handshake(struct __sk_buff *skb, struct flow *f, struct flow *reverse,
					 const struct packet *p)
{
	if (f->flags & FLOW_REPLY) {
		if (p->flags & PACKET_ACK)
			tcp_accept(skb, f, reverse, p);
		return TCP_IGNORED;
	}
	if (packet_syn(p)) {
		if (f->state == FLOW_NEW)
			tcp_begin_retry(skb, &f->tcp, p);
		return TCP_IGNORED;
	}
	if (f->state == FLOW_NEW || p->flags & PACKET_SYN || !tcp_confirms(f, reverse, p))
		return TCP_IGNORED;
	f->flags &= ~FLOW_RESET;
	reverse->flags &= ~FLOW_RESET;
	f->tcp.end = reverse->tcp.ack;
	f->tcp.ack = p->ack;
	tcp_share(f, reverse);
	flow_set_state(f, reverse, FLOW_ESTABLISHED);
	flow_confirm(f, reverse, p);
	affinity_confirm(f->service, f->backend, &p->tuple.saddr, p->tuple.family, p->time);
	return TCP_COUNTS;
}

/* RFC 5961, 3.2; of a connection that is being opened RFC 9293, 3.10.7.3. */
static __always_inline int tcp_resets(const struct flow *f, const struct flow *reverse,
				      const struct packet *p)
{
	int reply = f->flags & FLOW_REPLY;

	if (f->state == FLOW_NEW && reply)
		return p->flags & PACKET_ACK &&
		       (p->ack == reverse->tcp.isn + 1 || p->ack == reverse->tcp.end);
	/* Of the client's SYNs one may be forged: what counts is which the endpoint took. */
	if (f->state == FLOW_NEW)
		return p->seq == f->tcp.end && p->seq == f->tcp.isn + 1;
	if (f->state == FLOW_SYN_RECV)
		return p->seq == (reply ? f->tcp.end : reverse->tcp.ack);
	if (!(f->flags & FLOW_TRACKED) && !p->seq)
		return 0; /* nothing is known yet */
	return p->seq == f->tcp.end || p->seq == reverse->tcp.ack;
}

/*
 * A SYN in the middle of a connection: the endpoint answers it with an ACK, and the
 * client, if it knows nothing of the connection, that with an RST (RFC 5961, 4.2). Silence
 * says nothing: a forger sees to it that its SYN does not arrive. But an endpoint that was
 * a pod of this node is gone when another device has its address, or none.
 */
static __always_inline int tcp_syn_in_connection(const struct flow *f, const struct flow *reverse,
				     const struct packet *p)
{
	__u32 backend = f->backend; /* before 6.2 a key must not be a caller's memory */

	if (!packet_syn(p) || f->flags & FLOW_REPLY || !(f->flags & FLOW_TO_POD) ||
	    bpf_map_lookup_elem(&backends, &backend))
		return TCP_IGNORED;
	return addr_device(&f->daddr, p->tuple.family) == reverse->in_ifindex ? TCP_IGNORED
									   : TCP_RENEWS;
}

/* A FIN, what acknowledges one, and data that show that there was none. */
static __always_inline void tcp_finish(struct flow *f, struct flow *reverse, const struct packet *p)
{
	if (f->flags & FLOW_FIN && seq_before(f->tcp.fin, p->seq_end)) {
		f->flags &= ~(FLOW_FIN | FLOW_FIN_ACKED);
		reverse->flags &= ~FLOW_REVERSE_FIN;
		flow_resume(f, reverse, p);
	}
	if (p->flags & PACKET_FIN && !(f->flags & FLOW_FIN)) {
		f->tcp.fin = p->seq_end;
		f->flags |= FLOW_FIN;
		reverse->flags |= FLOW_REVERSE_FIN;
		flow_set_state(f, reverse, f->flags & FLOW_REVERSE_FIN ? FLOW_LAST_ACK : FLOW_CLOSING);
		f->end = f->flags & FLOW_REPLY ? END_CLIENT_FIRST : END_ENDPOINT_FIRST;
		reverse->end = f->end;
	}
	/* Repeated: the last ACK was lost. */
	if (p->flags & PACKET_FIN && f->state == FLOW_CLOSED && !(f->flags & FLOW_RESET)) {
		f->flags &= ~FLOW_FIN_ACKED;
		flow_set_state(f, reverse, FLOW_LAST_ACK);
	}
	if (f->flags & FLOW_REVERSE_FIN && p->flags & PACKET_ACK && p->ack == reverse->tcp.fin)
		reverse->flags |= FLOW_FIN_ACKED;
	if (f->state == FLOW_LAST_ACK && f->flags & reverse->flags & FLOW_FIN_ACKED)
		flow_close(f, reverse, p);
}

/* Does the segment fit, by what the other direction has shown up to now? */
static __always_inline int tcp_belongs(struct flow *f, struct flow *reverse, const struct packet *p,
				       const struct settings *s)
{
	if (f->flags & FLOW_TRACKED) {
		tcp_share(f, reverse);
		if (tcp_fits(&f->tcp, p)) {
			tcp_learn(&f->tcp, p);
			return 1;
		}
		if (!(s->flags & SETTING_TCP_LIBERAL))
			return 0;
	}
	f->tcp.end = p->seq_end;
	if (p->flags & PACKET_ACK)
		f->tcp.ack = p->ack;
	return 1;
}

/* Was a connection that an RST closed still being opened? Then a forged one may have fit. */
static __always_inline int tcp_was_opening(const struct flow *f)
{
	return f->state == FLOW_CLOSED &&
	       (f->flags & (FLOW_RESET | FLOW_CONFIRMED)) == FLOW_RESET;
}

/* What a packet of a connection, with both its entries, does to its state. */
static __always_inline int tcp_advance(struct __sk_buff *skb, struct flow *f, struct flow *reverse,
				       const struct packet *p, const struct settings *s)
{
	if (p->flags & PACKET_RST) {
		if (!tcp_resets(f, reverse, p))
			return TCP_IGNORED;
		flow_close(f, reverse, p);
		f->flags |= FLOW_RESET;
		reverse->flags |= FLOW_RESET;
		return TCP_COUNTS;
	}
	if (f->state <= FLOW_SYN_RECV || tcp_was_opening(f)) {
		if (tcp_handshake(skb, f, reverse, p) == TCP_IGNORED)
			return TCP_IGNORED;
	} else if (p->flags & PACKET_SYN) {
		return tcp_syn_in_connection(f, reverse, p);
	}
	if (!tcp_belongs(f, reverse, p, s))
		return f->state == FLOW_CLOSED ? TCP_IGNORED : TCP_COUNTS;
	if (f->flags & FLOW_RESET) {
		/* The RST was not believed. */
		f->flags &= ~FLOW_RESET;
		reverse->flags &= ~FLOW_RESET;
		flow_resume(f, reverse, p);
	}
	tcp_finish(f, reverse, p);
	return TCP_COUNTS;
}

/* May a client's SYN make a new connection of one that is over? */
static __always_inline int flow_reopens(const struct flow *f, const struct packet *p)
{
	if (f->state != FLOW_CLOSED || !packet_syn(p))
		return 0;
	/* RFC 6191: one in TIME-WAIT, by numbers beyond those that it has used. */
	return f->flags & FLOW_RESET || f->end == END_CLIENT_FIRST || seq_before(f->tcp.end, p->seq);
}

#endif
