/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Counts the handshakes of sockets that fail, where events/outcome.h counts those that succeed. */
#ifndef SPILLWAY_SOCK_FAILED_HANDSHAKE_H
#define SPILLWAY_SOCK_FAILED_HANDSHAKE_H

#include "../base.h"

static const struct outcome no_outcome;

/*
 * The handshake of a client's socket has failed. again is false for the first failure of its
 * connection. Entries are made here, so endpoints that work cost no memory.
 */
static __noinline int outcome_failed(__u32 backend, const struct addr *client,
				     enum handshake_failure how, bool again)
{
	__u64 time = bpf_ktime_get_ns(), longest = HANDSHAKE_UNANSWERED_SECONDS * NSEC_PER_SEC;
	struct outcome *o = bpf_map_lookup_elem(&outcomes, &backend);
	struct handshake_failures *f;

	if (!o) {
		bpf_map_update_elem(&outcomes, &backend, &no_outcome, BPF_NOEXIST);
		o = bpf_map_lookup_elem(&outcomes, &backend);
	}
	if (!o || !client)
		return 0;
	f = &o->failures[how == HANDSHAKE_UNANSWERED];
	if (how == HANDSHAKE_REFUSED) {
		longest = HANDSHAKE_REFUSED_SECONDS * NSEC_PER_SEC;
		/* An RST is an answer. */
		o->failures[HANDSHAKE_UNANSWERED].connections = 0;
		o->failures[HANDSHAKE_UNANSWERED].segments = 0;
	}
	if (!f->segments || (__s64)(time - f->last) > (__s64)longest) {
		f->first = time;
		f->connections = 0;
		f->segments = 0;
	}
	f->last = time;
	o->client = *client;
	__sync_fetch_and_add(&f->segments, 1);
	if (!again || !f->connections)
		__sync_fetch_and_add(&f->connections, 1);
	return 0;
}

#endif
