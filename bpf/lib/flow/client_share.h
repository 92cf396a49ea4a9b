/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Counts the confirmed flows of each client, and of each /64 network of IPv6. */
#ifndef SPILLWAY_FLOW_CLIENT_SHARE_H
#define SPILLWAY_FLOW_CLIENT_SHARE_H

#include "../parse/packet.h"

/* Returns the hash of a client's /64: one IPv6 host may have all addresses of it. */
static __always_inline __u32 client_network_hash(const struct addr *client)
{
	return mix(mix(~hash_seed, client->w[0]), client->w[1]);
}

static __always_inline __u32 *client_flows(__u32 hash)
{
	__u32 index = hash % SOURCES;

	return bpf_map_lookup_elem(&sources, &index);
}

/* Has the client, or its network, its share of confirmed flows? */
static __always_inline int client_share_full(const struct addr *client, __u8 family)
{
	__u32 *n = client_flows(addr_hash(client));

	if (n && *n >= client_flows_max)
		return 1;
	if (family == FAMILY_V4)
		return 0;
	n = client_flows(client_network_hash(client));
	return n && *n >= client_flows_max + client_flows_max / 2;
}

static __always_inline void client_flows_add(__u32 hash, __s32 n)
{
	__u32 *count = client_flows(hash);

	if (count && (n > 0 || *count))
		__sync_fetch_and_add(count, n);
}

static __always_inline const struct addr *flow_client(const struct flow *f, const struct packet *p)
{
	return f->flags & FLOW_REPLY ? &f->daddr : &p->tuple.saddr;
}

static __always_inline void client_share_add(const struct flow *f, const struct packet *p, __s32 n)
{
	const struct addr *client = flow_client(f, p);

	client_flows_add(addr_hash(client), n);
	if (p->tuple.family == FAMILY_V6)
		client_flows_add(client_network_hash(client), n);
}

#endif
