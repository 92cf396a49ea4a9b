/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The state of an SCTP association, derived from the first chunk of its packets. Each side
 * chooses a random verification tag for the packets that it gets (RFC 9260, 8.5). A packet
 * changes the state only with the tag of its direction:
 *
 *   INIT                client     no tag; contains the endpoint's: NEW
 *   INIT ACK            endpoint   contains the client's tag: SYN_RECV
 *   COOKIE ECHO, data   client     proves that the client exists: ESTABLISHED
 *   SHUTDOWN ACK        either     LAST_ACK
 *   SHUTDOWN COMPLETE,  either     CLOSED; may have the other direction's tag (flag T)
 *   ABORT
 *   any other           either     cancels the end of an association
 *
 * The endpoint answers every INIT, also a forged one or that of a client that has restarted,
 * and keeps no state before the COOKIE ECHO. So two handshakes are known: the first or
 * proven one (tag), and the last one (other_tag). A packet with the client's tag of the other
 * handshake proves that one.
 *
 * Packets with another tag are forwarded, because the endpoints check it. Secondary addresses
 * of a multi-homed host are not read.
 */
#ifndef SPILLWAY_FLOW_SCTP_H
#define SPILLWAY_FLOW_SCTP_H

#include "tcp.h"

/* Fills the tags of the other direction, except those of another handshake. */
static __always_inline void sctp_make_reverse(struct sctp_side *reverse, const struct sctp_side *s)
{
	reverse->tag = s->peer_tag;
	reverse->peer_tag = s->tag;
}

/* Stores the tags of a handshake that the endpoint has answered. f is the endpoint's entry. */
static __always_inline void sctp_accept(struct flow *f, struct flow *client, const struct packet *p)
{
	__be32 tag = p->sctp.tag, client_tag = p->sctp.init_tag;

	if (!client->sctp.tag) {
		f->sctp.tag = tag;
		f->sctp.peer_tag = client_tag;
		client->sctp.tag = client_tag;
		client->sctp.peer_tag = tag;
	} else if (client->sctp.tag != client_tag) {
		f->sctp.other_tag = tag;
		client->sctp.other_tag = client_tag;
	}
	if (f->state == FLOW_NEW)
		flow_set_state(f, client, FLOW_SYN_RECV);
}

/* Has the client the tag of a handshake? If it is the other one, that one is proven now. */
static __always_inline int sctp_proves(struct flow *f, struct flow *endpoint, __be32 tag)
{
	__be32 old = endpoint->sctp.tag;

	if (!tag)
		return 0;
	if (tag == f->sctp.tag)
		return 1;
	if (tag != f->sctp.other_tag)
		return 0;
	endpoint->sctp.tag = endpoint->sctp.other_tag;
	endpoint->sctp.other_tag = old;
	endpoint->sctp.peer_tag = tag;
	f->sctp.other_tag = f->sctp.tag;
	f->sctp.tag = tag;
	f->sctp.peer_tag = endpoint->sctp.tag;
	return 1;
}

/* Applies the first packet of the client that has the endpoint's tag. */
static __always_inline void sctp_establish(struct flow *f, struct flow *endpoint,
					   const struct packet *p)
{
	flow_set_state(f, endpoint, FLOW_ESTABLISHED);
	flow_confirm(f, endpoint, p);
	affinity_confirm(f->service, f->backend, &p->tuple.saddr, p->tuple.family, p->time);
}

/* Applies the end of an association. No endpoint waits in a state such as TIME-WAIT. */
static __always_inline int sctp_close(struct flow *f, struct flow *reverse, const struct packet *p)
{
	int reflected = p->sctp.chunk_flags & SCTP_TAG_REFLECTED;

	if (!p->sctp.tag || p->sctp.tag != (reflected ? reverse->sctp.tag : f->sctp.tag))
		return f->state <= FLOW_SYN_RECV || f->state == FLOW_CLOSED ? TCP_IGNORED : TCP_COUNTS;
	f->end = END_CLIENT_FIRST;
	reverse->end = END_CLIENT_FIRST;
	flow_close(f, reverse, p);
	return TCP_COUNTS;
}

/* Applies a packet to both entries of its association. */
static __always_inline int sctp_advance(struct flow *f, struct flow *reverse,
					const struct packet *p)
{
	int reply = f->flags & FLOW_REPLY;

	switch (p->sctp.chunk) {
	case SCTP_INIT:
		if (f->state <= FLOW_SYN_RECV || reply || !packet_syn(p))
			return TCP_IGNORED;
		return f->state == FLOW_CLOSED ? TCP_RENEWS : tcp_syn_in_connection(f, reverse, p);
	case SCTP_INIT_ACK:
		if (reply)
			sctp_accept(f, reverse, p);
		return TCP_IGNORED;
	case SCTP_ABORT:
	case SCTP_SHUTDOWN_COMPLETE:
		return sctp_close(f, reverse, p);
	}
	if (f->state == FLOW_SYN_RECV && reply && p->sctp.chunk == SCTP_COOKIE_ACK) {
		/* Forged INITs have hidden the client's handshake: the flow stays unconfirmed. */
		f->sctp.tag = p->sctp.tag;
		reverse->sctp.peer_tag = p->sctp.tag;
		flow_set_state(f, reverse, FLOW_ESTABLISHED);
		return TCP_COUNTS;
	}
	if (reply ? !p->sctp.tag || p->sctp.tag != f->sctp.tag
		  : !sctp_proves(f, reverse, p->sctp.tag))
		return f->state <= FLOW_SYN_RECV || f->state == FLOW_CLOSED ? TCP_IGNORED : TCP_COUNTS;
	if (f->state <= FLOW_SYN_RECV && reply)
		return TCP_IGNORED;
	if (f->state > FLOW_SYN_RECV && p->sctp.chunk == SCTP_SHUTDOWN_ACK) {
		if (f->state != FLOW_CLOSED)
			flow_set_state(f, reverse, FLOW_LAST_ACK);
	} else if (f->state != FLOW_ESTABLISHED) {
		if (reply || f->flags & FLOW_CONFIRMED)
			flow_resume(f, reverse, p);
		else
			sctp_establish(f, reverse, p);
	}
	return TCP_COUNTS;
}

#endif
