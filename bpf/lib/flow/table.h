/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The flow table. The first packet creates a flow, which times out by its state. Each
 * direction has an entry. The map is an LRU: when it is full, the kernel evicts the oldest
 * flows and no packet is refused.
 *
 *   client:c -> service:s   forward entry   becomes  client':c' -> endpoint:e
 *   endpoint:e -> client':c' reply entry    becomes  service:s  -> client:c
 */
#ifndef SPILLWAY_FLOW_TABLE_H
#define SPILLWAY_FLOW_TABLE_H

#include "../lookup/conntrack.h"
#include "../lookup/connected_socket.h"
#include "../events/report.h"
#include "tcp.h"

/* Seconds after which no client repeats an answered request. */
#define TFTP_IDLE_SECONDS 5

/* A datagram in a later second, within so many seconds, shows that a flow continues. */
#define STREAM_START_SECONDS 2

/* The result of a flow lookup. */
enum flow_lookup {
	LOOKUP_FOUND,
	LOOKUP_NONE,	   /* no entry */
	LOOKUP_STALE,	   /* the flow is over: replace it */
	LOOKUP_SUPERSEDED, /* drop the packet */
	LOOKUP_SOURCE,	   /* the source does not belong to the device */
	LOOKUP_DSR, /* the flow stays, but the packet is of another connection: TCP_DSR */
};

/*
 * Keeps the reverse entry fresh in the LRU while only one direction has packets, and
 * restores it if it was evicted. Returns -1 if another flow has its tuple by now.
 */
static __always_inline int flow_refresh_reverse(struct flow *f, const struct tuple *key, __u32 time)
{
	struct flow_pair *pair;
	struct tuple reverse_key;
	struct flow *reverse;

	flow_reverse_key(&reverse_key, f, key);
	reverse = bpf_map_lookup_elem(&flows, &reverse_key);
	if (reverse) {
		if (!flow_is_reverse(reverse, key)) {
			count(FLOW_CONFLICT);
			return -1;
		}
		reverse->seen = time;
		reverse->flags |= f->flags & FLOW_STREAM;
		tcp_share(f, reverse);
		return 0;
	}
	pair = get_flow_pair();
	if (!pair)
		return -1;
	flow_make_reverse(&pair->reply, f, key);
	pair->reply.seen = time;
	if (bpf_map_update_elem(&flows, &reverse_key, &pair->reply, BPF_NOEXIST)) {
		count(FLOW_CONFLICT);
		return -1;
	}
	flow_protect(&reverse_key);
	count(FLOW_REVIVED);
	return 0;
}

/*
 * Does a client repeat its SYN to an endpoint that was removed? Then the SYN starts a new flow.
 * Until the client has acknowledged an answer there is no connection to keep: the endpoint has not
 * answered, or its answer was lost.
 */
static __always_inline int syn_lost_endpoint(const struct flow *f, const struct packet *p)
{
	__u32 backend = f->backend; /* before 6.2 a key must not be a caller's memory */

	return packet_syn(p) && !(f->flags & FLOW_REPLY) && f->state <= FLOW_SYN_RECV && backend &&
	       !bpf_map_lookup_elem(&backends, &backend);
}

/* Applies a TCP packet that concerns both entries of its flow. */
__noinline int flow_tcp(struct __sk_buff *skb, struct flow *f, const struct packet *p,
			struct settings *s)
{
	struct tuple reverse_key;
	struct flow *reverse;

	if (!f || !p || !s)
		return TCP_IGNORED;
	if (syn_lost_endpoint(f, p))
		return TCP_RENEWS;
	flow_reverse_key(&reverse_key, f, &p->tuple);
	reverse = bpf_map_lookup_elem(&flows, &reverse_key);
	if (!reverse || !flow_is_reverse(reverse, &p->tuple))
		return flow_confirmed(f) ? TCP_COUNTS : TCP_IGNORED;
	return tcp_advance(skb, f, reverse, p, s);
}

/* Marks a flow of UDP or ICMP as answered. */
__noinline int flow_mark_answered(struct flow *f, const struct tuple *key)
{
	struct tuple reverse_key;
	struct flow *reverse;

	if (!f || !key)
		return 0;
	flow_reverse_key(&reverse_key, f, key);
	reverse = bpf_map_lookup_elem(&flows, &reverse_key);
	if (reverse && flow_is_reverse(reverse, key))
		flow_set_state(f, reverse, FLOW_ESTABLISHED);
	return 0;
}

/* Applies a datagram or an ICMP echo of a known flow. */
static __always_inline void flow_udp(struct flow *f, const struct packet *p)
{
	if (f->state == FLOW_NEW) {
		if (f->flags & FLOW_REPLY)
			flow_mark_answered(f, &p->tuple);
		return;
	}
	if (f->seen != p->time && (__s32)(p->time - f->seen) <= STREAM_START_SECONDS)
		f->flags |= FLOW_STREAM;
}

/* May the flow be over? A flow of UDP or ICMP does not say when it ends. */
static __always_inline int flow_may_be_over(const struct flow *f, __u8 proto)
{
	return f->state == FLOW_CLOSED || proto != IPPROTO_TCP;
}

/*
 * Deletes the flow of a reply if netfilter uses its tuple for a connection of its own by now:
 * MASQUERADE chooses ports without looking up flows. While netfilter may also translate for
 * Services, every reply is checked, otherwise the first one of each second. A client that
 * continues gets a new flow with another port.
 */
static __always_inline int flow_yield_to_conntrack(struct __sk_buff *skb, const struct flow *f,
						   const struct packet *p, const struct settings *s)
{
	struct flow_pair *pair;
	struct flow *node;

	if (!flow_may_be_over(f, p->tuple.proto) ||
	    (f->flags & (FLOW_REPLY | FLOW_STACK)) != FLOW_REPLY)
		return 0;
	if (!(s->flags & SETTING_ASK_CONNTRACK) && (f->seen == p->time || !(f->flags & FLOW_SNAT)))
		return 0;
	if (!conntrack_sees_as_reply(skb, &p->tuple))
		return 0;
	pair = get_flow_pair();
	if (!pair)
		return 0;
	/* The stack's packet got another port when it left the node: serve_port_conflict. */
	tuple_mirror(&pair->other_key, &p->tuple);
	node = bpf_map_lookup_elem(&flows, &pair->other_key);
	if (node && node->helper == HELPER_NODE)
		return 0;
	pair->other_key = p->tuple;
	return !flow_delete(&pair->other_key, f->slot, &pair->reverse_key);
}

/*
 * Has another request got the node's port of this transfer? After a pause, a packet may be
 * the answer to that request, from a server that has finished the transfer and reuses its
 * port: it is dropped. A client that continues the transfer keeps its entries fresh.
 */
static __always_inline int flow_superseded(const struct flow *f, const struct tuple *key,
					   __u32 time)
{
	struct flow *request;
	struct tuple asked;

	if (f->helper != HELPER_DATA ||
	    (f->flags & (FLOW_REPLY | FLOW_SNAT)) != (FLOW_REPLY | FLOW_SNAT) ||
	    (__s32)(time - f->seen) < TFTP_IDLE_SECONDS)
		return 0;
	request = request_at(key, &asked);
	return request && !(addr_equal(&request->daddr, &f->daddr) && request->dport == f->dport);
}

/* Any device: the programs at ingress have checked packets of flows. */
#define ANY_DEVICE 0xffffffff

/*
 * Moves the source of the flow to this device, if the address is there now. Returns 0 if it is not:
 * the packet is forged.
 */
static __always_inline int flow_move_source(struct flow *f, const struct tuple *t, __u32 device)
{
	if (source_device(t) != device)
		return 0;
	f->in_ifindex = device;
	return 1;
}

/*
 * Has no Service changed since the UDP flow was compared with its own? At the node of an endpoint
 * that another node has chosen (dsr/receive.h), that node knows.
 */
static __always_inline bool flow_is_checked(const struct flow *f, __u32 changes)
{
	return !f->backend || (f->checked && f->checked == changes);
}

/* Returns the frontend of a UDP flow's packet, or NULL if no Service has it. */
static __always_inline struct frontend *flow_frontend(struct __sk_buff *skb, const struct tuple *t)
{
	struct frontend *fe = frontend_lookup(&t->daddr, t->dport, t->proto, t->family).fe;
	struct socket_peer *peer;

	if (is_service(fe))
		return fe;
	peer = socket_asked(skb, t);
	return peer ? socket_frontend(&peer->addr, peer->port, t) : NULL;
}

/*
 * Compares a UDP flow with its Service: the flow continues while its endpoint serves and the
 * address that the client asks is still the Service's. Returns 1 if it continues.
 */
static __noinline int flow_check(struct __sk_buff *skb, struct flow *f, const struct tuple *t)
{
	__u32 changes = service_changes_now(); /* before the lookups */
	__u32 backend = f->backend;	       /* before 6.2 a key must not be a caller's memory */
	struct frontend *fe;

	if (flow_is_checked(f, changes))
		return 1;
	if (!bpf_map_lookup_elem(&backends, &backend))
		return 0;
	fe = flow_frontend(skb, t);
	if (!fe || fe->service != f->service)
		return 0;
	f->checked = changes;
	return 1;
}

/* Does a datagram of the same second as the last one leave the state of its flow as it is? */
static __always_inline int udp_is_unchanged(const struct flow *f, const struct settings *s)
{
	if (f->state == FLOW_NEW || f->helper != HELPER_NONE)
		return 0;
	return f->flags & FLOW_REPLY ? !(s->flags & SETTING_ASK_CONNTRACK)
				     : flow_is_checked(f, service_changes_now());
}

/*
 * Applies a packet in the middle of a flow that had a packet in the same second: it changes nothing
 * but the bounds of TCP in its own entry. Returns 0 if it is another packet: flow_advance.
 */
static __always_inline int flow_advance_busy(struct flow *f, const struct packet *p,
					     const struct settings *s, __u32 device)
{
	if (f->seen != p->time || (device != ANY_DEVICE && f->in_ifindex != device))
		return 0;
	if (p->tuple.proto != IPPROTO_TCP)
		return udp_is_unchanged(f, s);
	return dsr_remote(f) ? dsr_is_unchanged(f, p) : tcp_apply_in_order(f, p);
}

/* Applies a packet to the state of its flow. A flow that is over gives way to a new one. */
static __noinline enum flow_lookup flow_advance(struct __sk_buff *skb, struct flow *f,
						const struct packet *p, struct settings *s,
						__u32 device)
{
	int counts = TCP_COUNTS;

	if (device != ANY_DEVICE && f->in_ifindex != device &&
	    !flow_move_source(f, &p->tuple, device))
		return LOOKUP_SOURCE;
	if (flow_dead(f, p->tuple.proto, s, p->time))
		return LOOKUP_STALE;
	if (flow_superseded(f, &p->tuple, p->time))
		return LOOKUP_SUPERSEDED;
	if (flow_yield_to_conntrack(skb, f, p, s))
		return LOOKUP_NONE;
	if (p->tuple.proto != IPPROTO_TCP) {
		/*
		 * A datagram must not follow an endpoint that was deleted, or a Service that has
		 * lost the address, except in a transfer, which no other endpoint knows.
		 */
		if (!(f->flags & FLOW_REPLY) && f->helper < HELPER_DATA &&
		    !flow_check(skb, f, &p->tuple))
			return LOOKUP_STALE;
		flow_udp(f, p);
	} else if (unlikely(p->flags & PACKET_NO_L4)) {
		/* A later fragment has no sequence numbers. */
		counts = TCP_IGNORED;
	} else if (dsr_remote(f)) {
		counts = dsr_advance(f, p);
		if (counts == TCP_RENEWS)
			return LOOKUP_STALE;
	} else if (!dsr && packet_syn(p) && flow_began_dsr(f)) {
		/* Of a run with keys. This one saw nothing that tells whether it is over. */
		return LOOKUP_STALE;
	} else if (!tcp_apply_in_order(f, p)) {
		if (flow_reopens(f, p))
			return LOOKUP_STALE;
		counts = flow_tcp(skb, f, p, s);
		if (counts == TCP_RENEWS)
			return LOOKUP_STALE;
		if (counts == TCP_DSR)
			return LOOKUP_DSR;
	}
	if (counts == TCP_COUNTS && f->seen != p->time) {
		if (flow_refresh_reverse(f, &p->tuple, p->time))
			return LOOKUP_STALE;
		/*
		 * Not before: the next packet of this second would not look up the other
		 * entry.
		 */
		f->seen = p->time;
	}
	return LOOKUP_FOUND;
}

/*
 * Finds the live entry of a packet's flow and sets *found. device is the device of the pod
 * that has sent the packet, 0 for the network, or ANY_DEVICE.
 */
static __always_inline enum flow_lookup flow_find(struct __sk_buff *skb, const struct packet *p,
						  struct settings *s, __u32 device,
						  struct flow **found)
{
	struct flow *f = bpf_map_lookup_elem(&flows, &p->tuple);
	enum flow_lookup result;
	__u8 before;

	*found = f;
	if (!f)
		return LOOKUP_NONE;
	if (likely(flow_advance_busy(f, p, s, device)))
		return LOOKUP_FOUND;
	before = f->state;
	result = flow_advance(skb, f, p, s, device);
	if (result == LOOKUP_FOUND && f->state != before)
		report_change(skb, f, p, before);
	return result;
}

#endif
