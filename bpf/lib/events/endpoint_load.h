/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The load of endpoints, for Services that choose by it: how many flows through this node are
 * active, and how long an endpoint takes to answer the first packet. Flows that the kernel
 * evicts, or that time out, end unseen: the agent's sweep counts again, and writes the difference
 * to lost_flows and lost_sockets (internal/dataplane/ebpf/flows/loads.go).
 *
 * An endpoint has the place of its id, modulo the size of the map. Ids are never reused, so two
 * endpoints share a place only if as many others were made between them.
 */
#ifndef SPILLWAY_EVENTS_ENDPOINT_LOAD_H
#define SPILLWAY_EVENTS_ENDPOINT_LOAD_H

#include "../base.h"

/*
 * The shortest handshake of so many seconds counts. An average would not do: after one slow
 * handshake on a busy machine, an endpoint would get few flows, and so no handshake that tells
 * better. Without a handshake in this time, an endpoint counts as unmeasured.
 */
#define LOAD_MEASURED_SECONDS 10

static __always_inline struct load *load_of(__u32 backend)
{
	__u32 index = backend & loads_mask;

	return bpf_map_lookup_elem(&loads, &index);
}

/* Adds to the active flows of an endpoint in the flow table. */
__noinline int load_add_flow(__u32 backend, int n)
{
	struct load *l = load_of(backend);

	if (l)
		__sync_fetch_and_add(&l->flows, n);
	return 0;
}

/* Adds to the open sockets of an endpoint. */
__noinline int load_add_socket(__u32 backend, int n)
{
	struct load *l = load_of(backend);

	if (l)
		__sync_fetch_and_add(&l->sockets, n);
	return 0;
}

static __always_inline bool load_is_measured(const struct load *l, __u32 time)
{
	return l->measured && time - l->measured <= LOAD_MEASURED_SECONDS;
}

/* Records a handshake of so many nanoseconds. */
__noinline int load_measure(__u32 backend, __u64 ns)
{
	struct load *l = load_of(backend);
	__u64 us = ns / 1000;
	__u32 time = now();

	if (!l)
		return 0;
	if (us > 0xffffffff)
		us = 0xffffffff;
	if (load_is_measured(l, time) && us > l->handshake)
		return 0;
	l->handshake = us ? us : 1;
	l->measured = time;
	return 0;
}

/* Returns the number of active flows. The agent's corrections may be late. */
static __always_inline __u64 load_active(const struct load *l)
{
	__s32 n = l->flows - l->lost_flows + l->sockets - l->lost_sockets;

	return n > 0 ? n : 0;
}

/*
 * Is the endpoint a better than b? An endpoint without a measured handshake counts as one that
 * answers as fast as the other: it is tried again, and gets few flows if it never answers.
 */
__noinline int load_prefers(__u32 flags, __u32 a, __u32 b)
{
	struct load *la = load_of(a), *lb = load_of(b);
	__u64 cost_a, cost_b;
	__u32 time;

	if (!la || !lb)
		return 0;
	cost_a = load_active(la);
	cost_b = load_active(lb);
	if (flags & SERVICE_LATENCY) {
		time = now();
		if (load_is_measured(la, time) && load_is_measured(lb, time)) {
			cost_a = (cost_a + 1) * la->handshake;
			cost_b = (cost_b + 1) * lb->handshake;
		}
	}
	return cost_a < cost_b;
}

#endif
