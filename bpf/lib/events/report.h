/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Reports what happens to packets and flows: as events, and in their counters.
 * The flow table calls report_change where the state of a flow changes, so flow/tcp.h knows
 * nothing of events. Flows that time out or that the kernel evicts make no packet: the
 * agent's sweep reports them.
 */
#ifndef SPILLWAY_EVENTS_REPORT_H
#define SPILLWAY_EVENTS_REPORT_H

#include "events.h"
#include "../flow/accounting.h"
#include "../flow/timeout.h"
#include "../flow/unconfirmed.h"
#include "../hook.h"
#include "outcome.h"
#include "../scratch.h"

/* Fills an event with the ends of the flow that has this entry. */
static __always_inline void event_of_flow(struct event *e, const struct flow *f,
					  const struct tuple *key)
{
	e->proto = key->proto;
	e->family = key->family;
	e->service = f->service;
	e->backend = f->backend;
	e->opened = f->opened;
	if (f->flags & FLOW_REPLY) {
		e->client = f->daddr;
		e->client_port = f->dport;
		e->service_addr = f->saddr;
		e->service_port = f->sport;
		e->endpoint = key->saddr;
		e->endpoint_port = key->sport;
	} else {
		e->client = key->saddr;
		e->client_port = key->sport;
		e->service_addr = key->daddr;
		e->service_port = key->dport;
		e->endpoint = f->daddr;
		e->endpoint_port = f->dport;
	}
}

__noinline int report_packet(struct __sk_buff *skb, struct flow *f)
{
	struct scratch *m = get_scratch();

	if (m && f)
		traffic_add(m, f, traffic_of(skb, &m->packet));
	return 0;
}

/* Decides whether the events of a new flow are reported. */
static __always_inline void report_plan(const struct settings *s, struct flow *f)
{
	if (s->flags & SETTING_EVENTS_FLOWS && event_take(f->service, false))
		f->flags |= FLOW_REPORTED;
}

/* Reports the flow of the packet in scratch memory, which this CPU has just stored. */
__noinline int flow_opened(struct __sk_buff *skb)
{
	struct scratch *m = get_scratch();
	struct handshake *h;
	struct event *e;
	struct flow *f;
	__u32 index;

	if (!m)
		return 0;
	f = &m->pair.flow;
	if (unconfirmed_max && f->slot != SLOT_NONE) {
		index = f->slot % unconfirmed_max;
		h = bpf_map_lookup_elem(&handshakes, &index);
		if (h) {
			h->time = bpf_ktime_get_ns();
			h->slot = f->slot;
		}
	}
	if (f->flags & FLOW_WATCHED)
		outcome_opened(f->backend);
	if (service_metrics)
		service_count_connection(f->service);
	report_packet(skb, f);
	if (!(f->flags & FLOW_REPORTED))
		return 0;
	e = event_reserve(EVENT_OPENED);
	if (!e)
		return 0;
	event_of_flow(e, f, &m->packet.tuple);
	event_submit(e);
	return 0;
}

/* Another CPU may have stored the flow of the same packet: flow_create. */
static __always_inline void report_opened(struct __sk_buff *skb, const struct settings *s,
					  const struct flow_pair *pair, bool measured)
{
	if (pair->reply.slot != pair->flow.slot)
		return;
	if (balance_by_load && pair->flow.flags & FLOW_COUNTED)
		load_add_flow(pair->flow.backend, 1);
	if (s->flags & SETTING_EVENTS_FLOWS || service_metrics || measured ||
	    pair->flow.flags & FLOW_WATCHED)
		flow_opened(skb);
}

/* Returns the nanoseconds since the first packet of an unanswered flow, or 0. */
static __always_inline __u64 flow_handshake(const struct flow *f, __u64 time)
{
	struct handshake *h;
	__u32 index;

	if (!unconfirmed_max)
		return 0;
	index = f->slot % unconfirmed_max;
	h = bpf_map_lookup_elem(&handshakes, &index);
	return h && h->slot == f->slot && h->time ? time - h->time : 0;
}

/*
 * Reports the end of the flow of the packet in scratch memory. A connection that continues
 * after that is not reported again.
 */
static __always_inline void report_closed(struct scratch *m, struct flow *f, enum event_end end)
{
	struct tuple *reverse_key = &m->pair.reply_key;
	__u32 dir = f->flags & FLOW_REPLY ? TO_CLIENT : TO_ENDPOINT;
	struct traffic *own = NULL, *other = NULL;
	struct flow *reverse;
	struct event *e;

	flow_reverse_key(reverse_key, f, &m->packet.tuple);
	reverse = bpf_map_lookup_elem(&flows, reverse_key);
	if (reverse)
		reverse->flags &= ~FLOW_REPORTED;
	f->flags &= ~FLOW_REPORTED;
	if (count_bytes) {
		own = bpf_map_lookup_elem(&flow_bytes, &m->packet.tuple);
		other = bpf_map_lookup_elem(&flow_bytes, reverse_key);
	}
	e = event_reserve(EVENT_CLOSED);
	if (!e)
		return;
	event_of_flow(e, f, &m->packet.tuple);
	e->end = end;
	if (own) {
		e->packets[dir & 1] = own->packets;
		e->bytes[dir & 1] = own->bytes;
	}
	if (other) {
		e->packets[!dir] = other->packets;
		e->bytes[!dir] = other->bytes;
	}
	event_submit(e);
	if (!count_bytes)
		return;
	bpf_map_delete_elem(&flow_bytes, &m->packet.tuple);
	bpf_map_delete_elem(&flow_bytes, reverse_key);
}

/* Reports that the state of a flow has changed. f is the entry of the packet's direction. */
__noinline int report_change(struct __sk_buff *skb, struct flow *f, const struct packet *p,
			     __u32 before)
{
	struct settings *s = get_settings();
	struct scratch *m = get_scratch();
	__u64 handshake;
	struct event *e;
	bool reported, counted;

	if (!f || !p || !s || !m)
		return 0;
	counted = balance_by_load && f->flags & FLOW_COUNTED;
	if (counted && (before == FLOW_CLOSED) != (f->state == FLOW_CLOSED))
		load_add_flow(f->backend, f->state == FLOW_CLOSED ? -1 : 1);
	reported = f->flags & FLOW_REPORTED && s->flags & SETTING_EVENTS_FLOWS;
	if (f->flags & FLOW_WATCHED && f->flags & FLOW_REPLY && before == FLOW_NEW) {
		if (f->state == FLOW_CLOSED)
			outcome_refused(f->backend);
		else if (m->packet.flags & PACKET_SYN)
			outcome_answered(f->backend);
	}
	if (f->state == FLOW_CLOSED) {
		if (!reported)
			return 0;
		if (count_bytes)
			flow_bytes_add(m, traffic_of(skb, &m->packet));
		report_closed(m, f, m->packet.flags & PACKET_RST ? EVENT_END_RST : EVENT_END_FIN);
		return 0;
	}
	if ((!reported && !service_metrics && !counted) || before != FLOW_NEW ||
	    !(f->flags & FLOW_REPLY))
		return 0;
	if (f->helper == HELPER_DATA) /* the endpoint has sent the first packet: report_transfer */
		return 0;
	/* An ACK that is no SYN-ACK is of an older connection. */
	if (m->packet.tuple.proto == IPPROTO_TCP && !(m->packet.flags & PACKET_SYN))
		return 0;
	handshake = flow_handshake(f, bpf_ktime_get_ns());
	if (service_metrics && handshake)
		service_count_handshake(f->service, handshake);
	if (counted && handshake)
		load_measure(f->backend, handshake);
	if (!reported)
		return 0;
	e = event_reserve(EVENT_ANSWERED);
	if (!e)
		return 0;
	event_of_flow(e, f, &m->packet.tuple);
	e->handshake = handshake;
	event_submit(e);
	return 0;
}

/*
 * Reports the end of a flow that gives way to the packet in scratch memory: it has timed out,
 * a SYN follows its RST, or a UDP flow is no longer its Service's (flow_check).
 */
__noinline int report_stale(struct flow *f)
{
	struct settings *s = get_settings();
	struct scratch *m = get_scratch();
	enum event_end end = EVENT_END_MOVED;

	if (!f || !s || !m || !(f->flags & FLOW_REPORTED) || !(s->flags & SETTING_EVENTS_FLOWS))
		return 0;
	if (f->flags & FLOW_RESET)
		end = EVENT_END_RST;
	else if (m->packet.tuple.proto != IPPROTO_UDP ||
		 flow_dead(f, IPPROTO_UDP, s, m->packet.time))
		end = EVENT_END_TIMEOUT;
	report_closed(m, f, end);
	return 0;
}

/* What is known of a packet that is refused or dropped. */
enum report_source {
	REPORT_PACKET,	/* the packet alone: no endpoint was chosen */
	REPORT_PLANNED, /* pair->flow is the flow that was not stored */
	REPORT_FLOW,	/* the packet's flow, or else the planned one */
};

/* Reports the refusal of the packet in scratch memory. */
__noinline int refusal_store(__u32 service, enum verdict verdict, enum report_source source)
{
	struct scratch *m = get_scratch();
	struct settings *s = get_settings();
	struct flow *f = NULL;
	struct event *e;

	if (!m || !s)
		return 0;
	if (source == REPORT_FLOW)
		f = bpf_map_lookup_elem(&flows, &m->packet.tuple);
	if (!f && source != REPORT_PACKET)
		f = &m->pair.flow;
	if (f)
		service = f->service;
	if (service_metrics && service)
		service_count_refusal(service, verdict);
	if (!(s->flags & SETTING_EVENTS_REFUSED) || !event_take(service, true))
		return 0;
	e = event_reserve(verdict_refuses(verdict) ? EVENT_REFUSED : EVENT_DROPPED);
	if (!e)
		return 0;
	if (f) {
		event_of_flow(e, f, &m->packet.tuple);
	} else {
		e->client = m->packet.tuple.saddr;
		e->client_port = m->packet.tuple.sport;
		e->service_addr = m->packet.tuple.daddr;
		e->service_port = m->packet.tuple.dport;
		e->proto = m->packet.tuple.proto;
		e->family = m->packet.tuple.family;
		e->service = service;
	}
	e->verdict = verdict;
	event_submit(e);
	return 0;
}

static __always_inline void report_refusal(const struct settings *s, __u32 service,
					   enum verdict verdict, enum report_source source)
{
	if (s->flags & SETTING_EVENTS_REFUSED || service_metrics)
		refusal_store(service, verdict, source);
}

/* Drops a packet to a Service, and reports it. */
static __always_inline int drop_reported(const struct settings *s, __u32 service,
					 enum verdict verdict, enum report_source source)
{
	report_refusal(s, service, verdict, source);
	return drop(verdict);
}

#endif
