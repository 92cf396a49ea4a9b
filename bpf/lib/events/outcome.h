/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Counts the TCP handshakes of watched endpoints, so that the agent can leave out those that
 * do not answer. Of all endpoints it counts the handshakes of sockets that fail, which the agent
 * reports (docs/runbooks/endpoint-refuses.md). An answer restarts the counts, so one working
 * client keeps an endpoint in use. Two CPUs may write at once, and lose one handshake of several.
 */
#ifndef SPILLWAY_EVENTS_OUTCOME_H
#define SPILLWAY_EVENTS_OUTCOME_H

#include "../base.h"

/* A client has sent its first packet to the endpoint. */
__noinline int outcome_opened(__u32 backend)
{
	struct outcome *o = bpf_map_lookup_elem(&outcomes, &backend);
	struct outcome first = { .since = bpf_ktime_get_ns(), .unanswered = 1 };

	if (!o)
		return bpf_map_update_elem(&outcomes, &backend, &first, BPF_NOEXIST);
	if (!o->since)
		o->since = first.since;
	__sync_fetch_and_add(&o->unanswered, 1);
	return 0;
}

/* The endpoint has accepted a connection. An endpoint without failures has no entry. */
__noinline int outcome_answered(__u32 backend)
{
	struct outcome *o = bpf_map_lookup_elem(&outcomes, &backend);

	if (!o)
		return 0;
	for (int i = 0; i < HANDSHAKE_FAILURES; i++)
		o->failures[i].connections = o->failures[i].segments = 0;
	o->answered = bpf_ktime_get_ns();
	o->unanswered = 0;
	o->refused = 0;
	o->since = 0;
	return 0;
}

/* The endpoint has answered a first packet with an RST. */
__noinline int outcome_refused(__u32 backend)
{
	struct outcome *o = bpf_map_lookup_elem(&outcomes, &backend);

	if (o)
		__sync_fetch_and_add(&o->refused, 1);
	return 0;
}

#endif
