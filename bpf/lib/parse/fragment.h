/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Later fragments carry no ports: the first one leaves them here for the
 * others to follow. A later fragment that overtakes the first is left to the
 * stack, as one of a stranger would be.
 */
#ifndef SPILLWAY_FRAGMENT_H
#define SPILLWAY_FRAGMENT_H

#include "packet.h"

/*
 * For how long after the first fragment the others may come. Stacks wait longer
 * (RFC 791: 15 s, Linux: 30 s), but IPv4 has 65,536 ids for two hosts, and one
 * that comes again must not lead to where the old datagram went (RFC 4963). 5 s
 * are enough for 64 KiB at 128 kbit/s.
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
	/* IPv6's later fragments name the first extension header (RFC 8200, 4.5). */
	if (p->tuple.family == FAMILY_V4)
		key->proto = p->tuple.proto;
}

/* Ports of a later fragment into the tuple; 0, or -1 when they are not known. */
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

static __always_inline void fragment_remember(const struct packet *p)
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
