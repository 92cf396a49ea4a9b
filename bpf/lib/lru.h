/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * How a new flow outlives its first moments in a full table.
 *
 * The kernel's LRU (kernel/bpf/bpf_lru_list.c) has an active and an inactive list,
 * and gives up from the inactive one's end. What is new comes to its head, unless it
 * has been looked up by then. It refills a CPU's free entries by up to 128 at a time,
 * and for that moves 128 from the active list's end: to the inactive list, or, if
 * they were looked up since they came, to the active one's head. Where most flows are
 * in use nearly all of them were: the inactive list then holds only what is new, and
 * the flow made last is the first to go, before its answer has come. Of 32 requests
 * at once 30 were lost that way.
 *
 * So a new entry is looked up, and survives as the others do. Not so of a flood: of
 * flows that nobody has answered only so many a second are kept, and the others are
 * left to go first, lest they push out connections that are idle.
 */
#ifndef SPILLWAY_LRU_H
#define SPILLWAY_LRU_H

#include "base.h"

struct newcomers {
	__u32 second; /* seconds since boot; the count is of this one */
	__s32 count;  /* flows made in it, without those that were answered in it */
};

/* Not pinned: there is nothing to be remembered of it. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct newcomers);
} newcomers SEC(".maps");

/* Of this second; CPUs that meet at its beginning may lose some of the count. */
static __always_inline struct newcomers *newcomers_of(__u32 time)
{
	__u32 zero = 0;
	struct newcomers *n = bpf_map_lookup_elem(&newcomers, &zero);

	if (n && n->second != time) {
		n->second = time;
		n->count = 0;
	}
	return n;
}

/* Keeps the entry from being the next that is given up. */
static __always_inline void flow_keep(const struct tuple *key)
{
	bpf_map_lookup_elem(&flows, key);
}

/* A flow is made: may it be kept? */
static __always_inline int newcomer(__u32 time)
{
	struct newcomers *n = newcomers_of(time);

	if (!n)
		return 0;
	__sync_fetch_and_add(&n->count, 1);
	return n->count <= (__s32)newcomers_max;
}

/* A flow has its first answer. */
static __always_inline void newcomer_answered(__u32 time)
{
	struct newcomers *n = newcomers_of(time);

	if (n)
		__sync_fetch_and_add(&n->count, -1);
}

#endif
