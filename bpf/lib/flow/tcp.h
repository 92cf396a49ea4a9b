/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The state of a TCP connection, derived from its packets. A packet changes the state only
 * if its numbers are valid for the connection. Other packets are forwarded without effect,
 * because the endpoints check them too. The rules are those of the endpoints:
 *
 *   ACK      the client's ACK acknowledges the SYN-ACK: a forger of the client's address has
 *            not received its number
 *   segment  ends within a window of the sender's last byte (RFC 9293, 3.4)
 *   RST      with the number that the other side expects: closes the flow at once, since that
 *            side accepts it (RFC 5961, 3.2). Only new data of its sender cancels it: what both
 *            sent before may come late. With the number after the sender's last byte: a later
 *            valid segment cancels it. An RST that rejects an ACK of no SYN of the client's
 *            leaves the handshake open (RFC 9293, 3.10.7.3)
 *   FIN      counts after the other side has acknowledged it; data beyond it cancel it
 *   SYN      reopens a connection that has ended, see flow_reopens
 *
 * A packet in the middle of a connection may cost only one lookup. So the two entries copy
 * their bounds to each other, once a second and when a segment does not fit. The window
 * therefore starts at the sender's last byte, and not at the last acknowledged byte. A
 * segment that leaves a gap is compared with both entries: forged segments that skip bytes
 * move the end by at most one window.
 */
#ifndef SPILLWAY_FLOW_TCP_H
#define SPILLWAY_FLOW_TCP_H

#include "../lookup/pod.h"
#include "../scratch.h"
#include "client_share.h"
#include "endpoint_select.h"
#include "unconfirmed.h"

#define TCP_NO_SCALE 0xff
#define TCP_MAX_SCALE 14 /* RFC 7323, 2.3 */
#define TCP_OPTIONS_MAX 40
#define TCPOPT_EOL 0
#define TCPOPT_NOP 1
#define TCPOPT_WINDOW 3

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

/* Updates the state with a segment that fits. */
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

/* Applies a segment in the middle of a connection. Returns 0 if it needs both entries. */
static __always_inline int tcp_apply_in_order(struct flow *f, const struct packet *p)
{
	if (f->state != FLOW_ESTABLISHED ||
	    p->flags & (PACKET_SYN | PACKET_FIN | PACKET_RST | PACKET_NO_L4) ||
	    (f->flags & (FLOW_FIN | FLOW_REVERSE_FIN | FLOW_TRACKED)) != FLOW_TRACKED ||
	    seq_before(f->tcp.end, p->seq) || !tcp_fits(&f->tcp, p))
		return 0;
	tcp_learn(&f->tcp, p);
	return 1;
}

/* Returns the window scale of a SYN, or TCP_NO_SCALE. */
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

/* Starts the state of a side with its first SYN. */
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

/*
 * Applies another SYN of the client, repeated or new: the endpoint chooses one of them. The first
 * one changes nothing when it is repeated: then the state still shows that there was another one.
 */
static __always_inline void tcp_begin_retry(struct __sk_buff *skb, struct tcp_side *s,
					    const struct packet *p)
{
	__u32 isn = s->isn;
	__u8 scale = s->first_scale;

	if (p->seq == isn || p->seq_end == s->end)
		return;
	tcp_begin(skb, s, p);
	s->isn = isn;
	s->first_scale = scale;
}

/* Copies each side's window into the other side's entry, where it bounds segments. */
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
 * Confirms the flow of a client that has proved its address: a flood no longer evicts it.
 * The flow of a client over its share stays unconfirmed, but works: an endpoint and a
 * forger together could fill another client's share.
 */
static __always_inline void flow_confirm(struct flow *f, struct flow *reverse,
					 const struct packet *p)
{
	if (client_share_full(flow_client(f, p), p->tuple.family)) {
		count(FLOW_OVER_SHARE);
		return;
	}
	f->flags |= FLOW_CONFIRMED;
	reverse->flags |= FLOW_CONFIRMED;
	client_share_add(f, p, 1);
}

/* Closes a connection: its flow joins the unconfirmed flows. */
static __always_inline void flow_close(struct flow *f, struct flow *reverse, const struct packet *p)
{
	struct flow_pair *pair = get_flow_pair();
	int counted = flow_confirmed(f);
	__u32 old = f->slot, slot;

	flow_set_state(f, reverse, FLOW_CLOSED);
	if (!pair || !counted)
		return;
	client_share_add(f, p, -1);
	pair->reply_key = p->tuple;
	slot = unconfirmed_admit(&pair->reply_key, p->time, false);
	if (old != SLOT_NONE && __sync_val_compare_and_swap(&f->slot, old, slot) == old)
		reverse->slot = slot;
}

/* Forgets the RSTs of both sides. */
static __always_inline void tcp_cancel_reset(struct flow *f, struct flow *reverse)
{
	f->flags &= ~FLOW_RESET;
	reverse->flags &= ~FLOW_RESET;
	f->tcp.reset = 0;
	reverse->tcp.reset = 0;
}

/* Did one side accept the other's RST, which this packet need not follow? */
static __always_inline int tcp_reset_stands(const struct flow *f, const struct flow *reverse,
					    const struct packet *p)
{
	return f->flags & FLOW_RESET &&
	       (reverse->tcp.reset || (f->tcp.reset && !seq_before(f->tcp.end, p->seq_end)));
}

/* Resumes a connection that looked closed or closing. */
static __always_inline void flow_resume(struct flow *f, struct flow *reverse,
					const struct packet *p)
{
	if (f->state == FLOW_CLOSED && f->flags & FLOW_CONFIRMED)
		client_share_add(f, p, 1);
	flow_set_state(f, reverse,
		       f->flags & (FLOW_FIN | FLOW_REVERSE_FIN) ? FLOW_CLOSING : FLOW_ESTABLISHED);
}

/*
 * Applies an endpoint's packet before the client's ACK. The last such packet counts. The
 * client's ACK shows which SYN the endpoint accepted, and that the endpoint's packet was
 * genuine.
 */
static __always_inline void tcp_accept(struct __sk_buff *skb, struct flow *f, struct flow *reverse,
				       const struct packet *p)
{
	struct tcp_side *client = &reverse->tcp, *endpoint = &f->tcp;

	if (p->flags & PACKET_SYN) {
		tcp_begin(skb, endpoint, p);
		/* Window scaling needs the option from both sides (RFC 7323, 2.2). */
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
 * Does the client's packet acknowledge the endpoint's last packet, and continue where the
 * endpoint expects it? f is the client's entry, reverse the endpoint's.
 */
static __always_inline int tcp_confirms(const struct flow *f, const struct flow *reverse,
					const struct packet *p)
{
	__u32 first = reverse->tcp.isn + 1;

	return !(f->flags & FLOW_REPLY) && p->flags & PACKET_ACK &&
	       p->ack - first <= reverse->tcp.end - first &&
	       p->seq - reverse->tcp.ack <= reverse->tcp.window;
}

/* Applies a packet before the client has acknowledged the SYN-ACK. */
static __always_inline int tcp_handshake(struct __sk_buff *skb, struct flow *f,
					 struct flow *reverse, const struct packet *p)
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
		return tcp_misfit(f, p);
	tcp_cancel_reset(f, reverse);
	f->tcp.end = reverse->tcp.ack;
	f->tcp.ack = p->ack;
	tcp_share(f, reverse);
	flow_set_state(f, reverse, FLOW_ESTABLISHED);
	flow_confirm(f, reverse, p);
	affinity_confirm(f->service, f->backend, &p->tuple.saddr, p->tuple.family, p->time);
	return TCP_COUNTS;
}

/* Is an RST valid? RFC 5961, 3.2, and RFC 9293, 3.10.7.3 for a connection in its handshake. */
static __always_inline int tcp_resets(const struct flow *f, const struct flow *reverse,
				      const struct packet *p)
{
	int reply = f->flags & FLOW_REPLY;

	if (f->state == FLOW_NEW && reply)
		return p->flags & PACKET_ACK &&
		       (p->ack == reverse->tcp.isn + 1 || p->ack == reverse->tcp.end);
	/*
	 * One of the client's SYNs may be forged. Until the endpoint accepts one of them,
	 * the client's RST must fit the first and the last.
	 */
	if (f->state == FLOW_NEW)
		return p->seq == f->tcp.end && p->seq == f->tcp.isn + 1;
	if (f->state == FLOW_SYN_RECV)
		return p->seq == (reply ? f->tcp.end : reverse->tcp.ack);
	if (!(f->flags & FLOW_TRACKED) && !p->seq)
		return 0; /* no number is known yet */
	return p->seq == f->tcp.end || p->seq == reverse->tcp.ack;
}

/*
 * Does the client reject an ACK that is of none of its SYNs? The endpoint still has the state
 * of an older connection from this port. The RST ends that one, and the client repeats its
 * SYN: on another port it could meet the next old connection.
 */
static __always_inline int tcp_rejects_ack(const struct flow *f, const struct packet *p)
{
	return f->state == FLOW_SYN_RECV && !(f->flags & FLOW_REPLY) && p->seq != f->tcp.end &&
	       p->seq != f->tcp.isn + 1;
}

/*
 * Has the other side acknowledged all bytes before the RST? Then it expects this number. An
 * RST that only follows the sender's last byte may be forged, since forged segments can move
 * that byte: the flow keeps its port until the timeout, and a later segment cancels the RST.
 */
static __always_inline int tcp_reset_proved(const struct flow *f, const struct flow *reverse,
					    const struct packet *p)
{
	return f->state <= FLOW_SYN_RECV || f->state == FLOW_CLOSED || p->seq == reverse->tcp.ack;
}

/*
 * Handles a SYN in the middle of a connection. The endpoint answers it with an ACK, and a
 * client without the connection answers the ACK with an RST (RFC 5961, 4.2). A missing RST
 * proves nothing: a forger can prevent its SYN from arriving. But if the endpoint was a pod
 * of this node and its address is now at another device, or at none, the pod was deleted and
 * the SYN starts a new connection.
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

/* Applies a FIN, the ACK of a FIN, and data beyond a FIN. */
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
		flow_set_state(f, reverse,
			       f->flags & FLOW_REVERSE_FIN ? FLOW_LAST_ACK : FLOW_CLOSING);
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

/*
 * Applies a segment after the handshake. Returns 0 if it does not fit the state that the other
 * direction has shown so far.
 */
static __always_inline int tcp_apply_segment(struct flow *f, struct flow *reverse,
					     const struct packet *p, const struct settings *s)
{
	if (f->flags & FLOW_TRACKED) {
		tcp_share(f, reverse);
		/* The other side's window bounds how far forged segments can move the end. */
		if (tcp_fits(&f->tcp, p) &&
		    !seq_before(reverse->tcp.ack + reverse->tcp.window + 1, p->seq_end)) {
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

/* Did an RST close a connection in its handshake? The RST may have been forged. */
static __always_inline int tcp_was_opening(const struct flow *f)
{
	return f->state == FLOW_CLOSED && (f->flags & (FLOW_RESET | FLOW_CONFIRMED)) == FLOW_RESET;
}

/* May the connection's handshake still complete? */
static __always_inline int tcp_opening(const struct flow *f)
{
	return f->state <= FLOW_SYN_RECV || tcp_was_opening(f);
}

/* Applies a packet to both entries of its connection. */
static __always_inline int tcp_advance(struct __sk_buff *skb, struct flow *f, struct flow *reverse,
				       const struct packet *p, const struct settings *s)
{
	int verdict;

	if (p->flags & PACKET_RST) {
		if (!tcp_resets(f, reverse, p))
			return tcp_opening(f) ? tcp_misfit(f, p) : TCP_IGNORED;
		if (tcp_rejects_ack(f, p)) {
			flow_set_state(f, reverse, FLOW_NEW);
			return TCP_IGNORED;
		}
		if (tcp_reset_proved(f, reverse, p)) {
			flow_close(f, reverse, p);
			f->tcp.reset = 1;
		} else {
			flow_set_state(f, reverse, FLOW_LAST_ACK);
		}
		f->flags |= FLOW_RESET;
		reverse->flags |= FLOW_RESET;
		return TCP_COUNTS;
	}
	if (tcp_opening(f)) {
		verdict = tcp_handshake(skb, f, reverse, p);
		if (verdict != TCP_COUNTS)
			return verdict;
	} else if (p->flags & PACKET_SYN) {
		return tcp_syn_in_connection(f, reverse, p);
	}
	if (tcp_reset_stands(f, reverse, p))
		return TCP_IGNORED;
	if (!tcp_apply_segment(f, reverse, p, s))
		return f->state == FLOW_CLOSED ? TCP_IGNORED : TCP_COUNTS;
	if (f->flags & FLOW_RESET) {
		/* The RST was not valid: the connection continues. */
		tcp_cancel_reset(f, reverse);
		flow_resume(f, reverse, p);
	}
	tcp_finish(f, reverse, p);
	return TCP_COUNTS;
}

/* May a client's SYN start a new connection in place of one that has ended? */
static __always_inline int flow_reopens(const struct flow *f, const struct packet *p)
{
	if (!(f->state == FLOW_CLOSED || f->flags & FLOW_RESET) || !packet_syn(p))
		return 0;
	/* RFC 6191: in TIME-WAIT, if its number is beyond those already used. */
	return f->flags & FLOW_RESET || f->end == END_CLIENT_FIRST ||
	       seq_before(f->tcp.end, p->seq);
}

#endif
