/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Flow events for the agent, in a ring buffer, and counters by Service. Both are off unless
 * the agent asks for them. The limits below apply before an event is built, so a flood of
 * one Service costs little and leaves room for the events of others.
 *
 *    sample   one of event_sample flows is reported; its flow has FLOW_REPORTED
 *    rate     each Service has a token bucket for its flows and one for its refusals
 *    ring     an event that does not fit is counted, per CPU
 */
#ifndef SPILLWAY_EVENTS_EVENTS_H
#define SPILLWAY_EVENTS_EVENTS_H

#include "../base.h"

static __always_inline void event_count(enum event_count which)
{
	__u32 key = which;
	__u64 *n = bpf_map_lookup_elem(&event_counts, &key);

	if (n)
		*n += 1;
}

/* Takes one token of a Service, or returns 0. Two CPUs may both get the last one, which does no
 * harm. */
static __always_inline int event_rate_take(__u32 service, bool refusal)
{
	struct event_rate_key key = { .service = service, .refusals = refusal };
	struct event_rate *rate, first = { .time = bpf_ktime_get_coarse_ns() };

	if (!event_interval)
		return 1;
	rate = bpf_map_lookup_elem(&event_rates, &key);
	if (!rate) {
		first.credit = NSEC_PER_SEC - event_interval;
		bpf_map_update_elem(&event_rates, &key, &first, BPF_ANY);
		return 1;
	}
	if ((__s64)(first.time - rate->time) > 0) {
		rate->credit += first.time - rate->time;
		rate->time = first.time;
	}
	if (rate->credit > NSEC_PER_SEC)
		rate->credit = NSEC_PER_SEC;
	if (rate->credit < event_interval)
		return 0;
	rate->credit -= event_interval;
	return 1;
}

/* Does the agent want events of flows? */
static __always_inline bool flow_events_wanted(void)
{
	struct settings *s = get_settings();

	return s && s->flags & SETTING_EVENTS_FLOWS;
}

/* Does the agent want events of the flows of this Service? */
static __always_inline bool flow_events_selected(__u32 service)
{
	struct settings *s = get_settings();

	return s && (!(s->flags & SETTING_EVENTS_SELECTED) ||
		     bpf_map_lookup_elem(&reported_services, &service));
}

/* Decides whether this flow, or this refusal, of a Service is reported, and counts if not. */
__noinline int event_take(__u32 service, bool refusal)
{
	if (!refusal && !flow_events_selected(service))
		return 0;
	if ((refusal || event_sample <= 1 || bpf_get_prandom_u32() % event_sample == 0) &&
	    event_rate_take(service, refusal))
		return 1;
	event_count(EVENTS_LEFT_OUT);
	return 0;
}

/* Returns an empty event in the ring, or NULL. The caller must call event_submit. */
static __always_inline struct event *event_reserve(enum event_kind kind)
{
	struct event *e = bpf_ringbuf_reserve(&events, sizeof(*e), 0);

	if (!e) {
		event_count(EVENTS_LOST);
		return NULL;
	}
	__builtin_memset(e, 0, sizeof(*e));
	e->kind = kind;
	e->time = bpf_ktime_get_ns();
	return e;
}

/* The agent reads at intervals. To wake it for each event would cost more than the event. */
static __always_inline void event_submit(struct event *e)
{
	bool full = bpf_ringbuf_query(&events, BPF_RB_AVAIL_DATA) >= events_wakeup;

	bpf_ringbuf_submit(e, full ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP);
	event_count(EVENTS_STORED);
}

static const struct service_counts no_counters;

/*
 * Returns the counters of a Service on this CPU, or NULL if the map is full. They are made
 * with the first connection, so Services without clients take no memory.
 */
static __always_inline struct service_counts *service_counters_get(__u32 service)
{
	struct service_counts *n = bpf_map_lookup_elem(&service_counters, &service);

	if (n)
		return n;
	bpf_map_update_elem(&service_counters, &service, &no_counters, BPF_NOEXIST);
	n = bpf_map_lookup_elem(&service_counters, &service);
	if (!n)
		event_count(SERVICES_UNCOUNTED);
	return n;
}

__noinline int service_count_connection(__u32 service)
{
	struct service_counts *n = service_counters_get(service);

	if (n)
		n->connections++;
	return 0;
}

/* Counts a handshake of so many nanoseconds. */
__noinline int service_count_handshake(__u32 service, __u64 ns)
{
	struct service_counts *n = service_counters_get(service);
	__u32 bucket = 0;

	if (!n)
		return 0;
	for (__u64 ms = ns / 1000000; ms && bucket < HANDSHAKE_BUCKETS - 1; ms >>= 1)
		bucket++;
	if (bucket < HANDSHAKE_BUCKETS)
		n->handshakes[bucket]++;
	n->handshake_sum += ns / 1000;
	return 0;
}

__noinline int service_count_refusal(__u32 service, enum verdict verdict)
{
	struct refusal_key key = { .service = service, .verdict = verdict };
	__u64 *n = bpf_map_lookup_elem(&service_refusals, &key), one = 1;

	if (n)
		*n += 1;
	else if (bpf_map_update_elem(&service_refusals, &key, &one, BPF_NOEXIST))
		event_count(SERVICES_UNCOUNTED);
	return 0;
}

#endif
