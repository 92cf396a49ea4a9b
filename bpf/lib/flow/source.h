/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Counts the confirmed flows of each client, and of each /64 network of IPv6. */
#ifndef SPILLWAY_FLOW_SOURCE_H
#define SPILLWAY_FLOW_SOURCE_H

#include "../parse/packet.h"

/* Returns the hash of a client's address. */
static __always_inline __u32 source_hash(const struct addr *client)
{
	return addr_hash(client);
}

/* Returns the hash of a client's /64: one IPv6 host may have all addresses of it. */
static __always_inline __u32 network_hash(const struct addr *client)
{
	return mix(mix(~hash_seed, client->w[0]), client->w[1]);
}

static __always_inline __u32 *source_count(__u32 hash)
{
	__u32 index = hash % SOURCES;

	return bpf_map_lookup_elem(&sources, &index);
}

/* Has the client, or its network, its share of confirmed flows? */
static __always_inline int source_full(const struct addr *client, __u8 family)
{
	__u32 *n = source_count(source_hash(client));

	if (n && *n >= source_max)
		return 1;
	if (family == FAMILY_V4)
		return 0;
	n = source_count(network_hash(client));
	return n && *n >= source_max + source_max / 2;
}

static __always_inline void source_count_add(__u32 hash, __s32 n)
{
	__u32 *count = source_count(hash);

	if (count && (n > 0 || *count))
		__sync_fetch_and_add(count, n);
}

static __always_inline const struct addr *flow_client(const struct flow *f, const struct packet *p)
{
	return f->flags & FLOW_REPLY ? &f->daddr : &p->tuple.saddr;
}

static __always_inline void source_add(const struct flow *f, const struct packet *p, __s32 n)
{
	const struct addr *client = flow_client(f, p);

	source_count_add(source_hash(client), n);
	if (p->tuple.family == FAMILY_V6)
		source_count_add(network_hash(client), n);
}

#endif
