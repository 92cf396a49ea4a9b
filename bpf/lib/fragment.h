/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Later fragments carry no ports: the first one leaves them here for the
 * others to follow. A later fragment that overtakes the first is left to the
 * stack, as one of a stranger would be.
 */
#ifndef SPILLWAY_FRAGMENT_H
#define SPILLWAY_FRAGMENT_H

#include "parse.h"

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
	if (!first)
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
	};

	fragment_key(p, &key);
	bpf_map_update_elem(&fragments, &key, &first, BPF_ANY);
}

#endif
