/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* What is known of the ways to endpoints on other nodes: do packets arrive, and do answers? */
#ifndef SPILLWAY_DSR_PATH_H
#define SPILLWAY_DSR_PATH_H

#include "../base.h"

/*
 * Returns how packets tell the node of an endpoint about the Service, or NULL if it is unknown.
 * Without a port, the entries are those of an agent that had one.
 */
static __always_inline struct dsr_encapsulation *dsr_encapsulation_of(const struct addr *endpoint,
								      __u8 family)
{
	struct addr_key key = { .addr = *endpoint, .family = family };

	return dsr_port ? bpf_map_lookup_elem(&dsr_encapsulations, &key) : NULL;
}

/* Can the endpoint answer clients, as far as is known? */
static __always_inline bool dsr_path_works(__u32 backend, __u32 time)
{
	struct dsr_path *path = bpf_map_lookup_elem(&dsr_paths, &backend);

	return !path || path->failures < DSR_FAILURES || time - path->failed > DSR_RETRY_SECONDS;
}

/*
 * Counts that a client has got an answer of the endpoint. An answer outweighs one failure: an
 * attacker must send one packet for each failed client to make the path look healthy.
 */
__noinline int dsr_path_count_answer(__u32 backend, __u32 time)
{
	struct dsr_path *path = bpf_map_lookup_elem(&dsr_paths, &backend);
	struct dsr_path first = { .answered = time };

	if (!path)
		return bpf_map_update_elem(&dsr_paths, &backend, &first, BPF_NOEXIST);
	if (path->failures)
		__sync_fetch_and_add(&path->failures, -1);
	path->answered = time;
	return 0;
}

/* Counts that a client has repeated its SYN. */
__noinline int dsr_path_count_failure(__u32 backend, __u32 time)
{
	struct dsr_path *path = bpf_map_lookup_elem(&dsr_paths, &backend);
	struct dsr_path first = { .failures = 1, .failed = time };

	if (!path)
		return bpf_map_update_elem(&dsr_paths, &backend, &first, BPF_NOEXIST);
	if (path->failures < DSR_FAILURES_MAX)
		__sync_fetch_and_add(&path->failures, 1);
	path->failed = time;
	return 0;
}

#endif
