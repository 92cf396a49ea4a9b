/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Counts the packets and bytes of flows and of their Services.
 */
#ifndef SPILLWAY_FLOW_ACCOUNTING_H
#define SPILLWAY_FLOW_ACCOUNTING_H

#include "../events/events.h"
#include "../scratch.h"

/* Returns what a packet counts: a GSO packet is several. */
static __always_inline struct traffic traffic_of(const struct __sk_buff *skb,
						 const struct packet *p)
{
	struct traffic t = {
		.packets = skb->gso_segs ? skb->gso_segs : 1,
		.bytes = skb->len - p->l3_off,
	};

	return t;
}

/* Adds to the counters of the flow of the packet in scratch memory, in its direction. */
static __always_inline void flow_bytes_add(struct scratch *m, struct traffic first)
{
	struct traffic *n;

	n = bpf_map_lookup_elem(&flow_bytes, &m->packet.tuple);
	if (!n && !bpf_map_update_elem(&flow_bytes, &m->packet.tuple, &first, BPF_NOEXIST))
		return;
	if (!n)
		n = bpf_map_lookup_elem(&flow_bytes, &m->packet.tuple);
	if (!n)
		return;
	__sync_fetch_and_add(&n->packets, first.packets);
	__sync_fetch_and_add(&n->bytes, first.bytes);
}

/* Does a packet of this flow add to counters? */
static __always_inline bool traffic_counted(const struct flow *f)
{
	return service_packets || (count_bytes && f->flags & FLOW_REPORTED);
}

/*
 * Counts a packet of a flow. The constants of config.h remove the call where nothing is
 * counted. The counters of a flow need one more lookup, of 40 bytes, and two atomic additions:
 * the packets of one direction mostly arrive at one CPU, and so the cache line stays there.
 * Per-CPU counters would multiply the memory of each flow by the number of CPUs. Those of a
 * Service are per CPU, because all its flows share them.
 */
static __always_inline void traffic_add(struct scratch *m, struct flow *f, struct traffic t)
{
	struct service_counts *n;
	__u32 dir;

	/* The agent may have turned events off since the flow began. */
	if (count_bytes && f->flags & FLOW_REPORTED && flow_events_wanted())
		flow_bytes_add(m, t);
	if (!service_packets || !f->service)
		return;
	n = service_counters_get(f->service);
	if (!n)
		return;
	dir = f->flags & FLOW_REPLY ? TO_CLIENT : TO_ENDPOINT;
	n->packets[dir] += t.packets;
	n->bytes[dir] += t.bytes;
}

#endif
