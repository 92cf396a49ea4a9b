/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Later fragments have no ports. The first fragment stores its ports here, and the later
 * ones look them up. A later fragment that arrives before the first is left to the stack,
 * like one of an unknown flow.
 */
#ifndef SPILLWAY_PARSE_FRAGMENT_H
#define SPILLWAY_PARSE_FRAGMENT_H

#include "packet.h"

/*
 * How long later fragments may follow the first one. Stacks wait longer (RFC 791: 15 s,
 * Linux: 30 s). But IPv4 has only 65,536 ids for two hosts, and a fragment with a reused id
 * must not follow the old datagram (RFC 4963). 5 s are enough for 64 KiB at 128 kbit/s.
 */
#define FRAGMENT_TIMEOUT (5 * NSEC_PER_SEC >> FRAGMENT_CLOCK_SHIFT)

static __always_inline __u32 fragment_clock(void)
{
	return bpf_ktime_get_coarse_ns() >> FRAGMENT_CLOCK_SHIFT;
}

static __always_inline void fragment_key(const struct packet *p, struct fragment_key *key)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->saddr = p->tuple.saddr;
	key->daddr = p->tuple.daddr;
	key->id = p->fragment_id;
	key->family = p->tuple.family;
	/* Later fragments of IPv6 name the first extension header (RFC 8200, 4.5). */
	if (p->tuple.family == FAMILY_V4)
		key->proto = p->tuple.proto;
}

/* Writes the ports of a later fragment into the tuple. Returns -1 if they are unknown. */
static __always_inline int fragment_follow(struct packet *p)
{
	struct fragment_key key;
	struct fragment *first;

	fragment_key(p, &key);
	first = bpf_map_lookup_elem(&fragments, &key);
	if (!first || fragment_clock() - first->seen > FRAGMENT_TIMEOUT)
		return -1;
	p->tuple.sport = first->sport;
	p->tuple.dport = first->dport;
	p->tuple.proto = first->proto;
	return 0;
}

static __noinline void fragment_remember(const struct packet *p)
{
	struct fragment_key key;
	struct fragment first = {
		.sport = p->tuple.sport,
		.dport = p->tuple.dport,
		.proto = p->tuple.proto,
		.seen = fragment_clock(),
	};

	fragment_key(p, &key);
	bpf_map_update_elem(&fragments, &key, &first, BPF_ANY);
}

#endif
