/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Flows with DSR at the node that receives their packets, and their state. The endpoint is on
 * another node, which answers the client. So this node sees the client's packets alone.
 */
#ifndef SPILLWAY_DSR_FLOW_H
#define SPILLWAY_DSR_FLOW_H

#include "../parse/packet.h"
#include "path.h"

/* Idle seconds after which an answered flow is taken to be unused. */
#define USE_IDLE_SECONDS 2

/* Was the endpoint's node to answer the client when this node stored the flow? */
static __always_inline bool flow_began_dsr(const struct flow *f)
{
	return (f->flags & (FLOW_DSR | FLOW_TO_POD | FLOW_REVERSE_TO_POD)) == FLOW_DSR;
}

/* Does the endpoint's node, another one, answer the client of this flow? */
static __always_inline bool dsr_remote(const struct flow *f)
{
	return dsr && flow_began_dsr(f);
}

/*
 * Seconds in which all datagrams of a flow say which Service they are for: the first may be lost.
 */
#define DSR_UDP_SECONDS 2

static __always_inline bool dsr_udp_is_new(const struct flow *f, const struct packet *p)
{
	return p->tuple.proto == IPPROTO_UDP && p->time - f->opened <= DSR_UDP_SECONDS;
}

/*
 * Does a packet of such a flow say which Service it is for? A SYN does. So do the first datagrams,
 * and later the first of each second, which alone is looked up here.
 */
static __always_inline bool dsr_names_service(const struct packet *p)
{
	return p->tuple.proto == IPPROTO_UDP || packet_syn(p);
}

/*
 * Does a client's SYN wait for the answer of its endpoint? When the client repeats it, the flow
 * tells that there was none. So segments of unknown connections, which may be forged, do not end
 * the flow before.
 */
static __always_inline bool dsr_syn_waits(const struct flow *f, const struct flow *by, __u32 time)
{
	return f->state == FLOW_NEW && by->state == FLOW_SYN_RECV &&
	       (__s32)(time - f->opened) <= USE_IDLE_SECONDS;
}

/*
 * Has another CPU just stored the flow of a client's SYN, which this flow must not replace? With
 * DSR both have the same reply tuple, and a forger may have sent the packet of this one.
 */
static __always_inline bool dsr_just_begun(const struct flow *owner, const struct flow *reply)
{
	return dsr_remote(reply) && dsr_remote(owner) && owner->state == FLOW_NEW &&
	       owner->opened == reply->seen;
}

/*
 * Does the flow that another CPU has just stored give way to this one? With DSR, a flow without a
 * SYN gives way to that of a SYN, and both to one with the node's address. So a forged packet that
 * comes at the same time does not decide how a client's SYN goes.
 */
static __always_inline bool dsr_gives_way(const struct flow *other, const struct flow *f)
{
	return dsr_remote(other) &&
	       (!dsr_remote(f) || (f->state == FLOW_NEW && other->state != FLOW_NEW));
}

/* The effect of a packet on its flow. */
enum tcp_verdict {
	TCP_IGNORED = 0, /* forwarded; the flow's idle time continues */
	TCP_COUNTS = 1,	 /* belongs to this connection */
	TCP_RENEWS = 2,	 /* the SYN of a new connection */
	TCP_DSR = 3,	 /* of another connection, whose endpoint answers the client itself */
};

/* Does a packet leave the state of such a flow as it is? */
static __always_inline int dsr_is_unchanged(const struct flow *f, const struct packet *p)
{
	return f->state == FLOW_ESTABLISHED &&
	       !(p->flags & (PACKET_SYN | PACKET_FIN | PACKET_RST | PACKET_NO_L4));
}

/*
 * Returns the state of such a flow after a packet that is no SYN. If this node has seen no SYN
 * either, a forger may have sent the packet: until another one follows in a later second, the flow
 * is kept for a short time, as in a handshake.
 */
static __always_inline __u8 dsr_next_state(const struct flow *f, const struct packet *p)
{
	if (p->flags & PACKET_RST)
		return FLOW_LAST_ACK;
	if (p->flags & PACKET_FIN || f->state == FLOW_CLOSING)
		return FLOW_CLOSING;
	if (f->opened == p->time && f->state != FLOW_NEW && f->state != FLOW_ESTABLISHED)
		return FLOW_SYN_RECV;
	return FLOW_ESTABLISHED;
}

/* Starts the state of such a flow. */
static __always_inline void dsr_start(struct flow *f, const struct packet *p)
{
	if (p->tuple.proto == IPPROTO_UDP) {
		f->state = FLOW_ESTABLISHED;
	} else if (packet_syn(p)) {
		f->state = FLOW_NEW;
		f->flags |= FLOW_TRACKED;
		f->tcp.isn = p->seq;
	} else {
		f->state = FLOW_SYN_RECV;
		f->state = dsr_next_state(f, p);
	}
}

/*
 * Applies a SYN. It starts a new connection, unless the flow has just begun with one. If that was
 * in an earlier second, the client has got no answer: its new flow has the node's address. Packets
 * of a connection that goes on in spite of the SYN, which was forged, follow the table: TCP_DSR.
 */
static __always_inline enum tcp_verdict dsr_advance_syn(struct flow *f, const struct packet *p)
{
	if (f->state != FLOW_NEW)
		return TCP_RENEWS;
	if (f->seen != p->time) {
		count(DSR_UNANSWERED);
		dsr_path_count_failure(f->backend, p->time);
		return TCP_RENEWS;
	}
	if (p->seq != f->tcp.isn) /* one of the two SYNs is forged: no ACK shows an answer */
		f->flags &= ~FLOW_TRACKED;
	return TCP_COUNTS;
}

/*
 * Does the packet show that the client has got an answer to its SYN? A forger does not know the
 * number that follows the SYN's. If its own SYN came first, it does: then the client's SYN starts a
 * new connection.
 */
static __always_inline bool dsr_shows_answer(const struct flow *f, const struct packet *p)
{
	return f->flags & FLOW_TRACKED && p->seq == f->tcp.isn + 1;
}

/*
 * Applies a client's packet whose answers this node does not see. Nothing proves that the client
 * exists, or that the endpoint has accepted it: the state decides the timeout, and what a SYN
 * means. After the timeout, the table leads to the same endpoint.
 */
static __always_inline enum tcp_verdict dsr_advance(struct flow *f, const struct packet *p)
{
	__u8 before = f->state, state;

	if (packet_syn(p))
		return dsr_advance_syn(f, p);
	if (before == FLOW_NEW) {
		if (!dsr_shows_answer(f, p))
			return TCP_IGNORED;
		if (!(p->flags & PACKET_RST))
			dsr_path_count_answer(f->backend, p->time);
		f->flags &= ~FLOW_TRACKED;
	}
	state = dsr_next_state(f, p);
	/* Another CPU may have replaced the flow by that of a SYN, in the same memory. */
	if (state != before)
		f->state = state;
	return TCP_COUNTS;
}

/*
 * Returns the effect of a client's packet that does not fit the handshake of its flow. It may
 * belong to a connection whose SYN went to the endpoint with the client's own address
 * (dsr/receive.h): the endpoint's answer was late, and the client has repeated its SYN, or a forger
 * has sent SYNs. That connection goes on. The packet may also be forged, so the handshake goes on
 * too.
 */
static __noinline enum tcp_verdict tcp_misfit(const struct flow *f, const struct packet *p)
{
	__u32 id = f->service; /* before 6.2 a key must not be a caller's memory */
	struct service *s;

	if (!dsr || (f->flags & (FLOW_SNAT | FLOW_REPLY)) != FLOW_SNAT || p->flags & PACKET_SYN)
		return TCP_IGNORED;
	s = bpf_map_lookup_elem(&services, &id);
	return s && s->flags & SERVICE_DSR ? TCP_DSR : TCP_IGNORED;
}

#endif
