/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* From an address that a client connects to, to an endpoint. */
#ifndef SPILLWAY_LOOKUP_H
#define SPILLWAY_LOOKUP_H

#include "base.h"

/* How often to try another slot while the agent is rearranging a set. */
#define SLOT_TRIES 4

static __always_inline struct frontend *frontend_exact(const struct addr *addr, __be16 port,
						       __u8 proto, __u8 family)
{
	struct frontend_key key = {
		.addr = *addr,
		.port = port,
		.proto = proto,
		.family = family,
	};

	/* At the zero address are the NodePorts; nobody connects to it. */
	if (addr_zero(addr))
		return NULL;
	return bpf_map_lookup_elem(&frontends, &key);
}

/* Also finds NodePorts, by any of the node's addresses; *own says that it is one. */
static __always_inline struct frontend *frontend_lookup(const struct addr *addr, __be16 port,
							__u8 proto, __u8 family, int *own)
{
	struct frontend_key key = {
		.port = port,
		.proto = proto,
		.family = family,
	};
	struct addr_key node = {
		.addr = *addr,
		.family = family,
	};
	struct frontend *fe;
	__u32 *flags;

	*own = 0;
	fe = frontend_exact(addr, port, proto, family);
	if (fe)
		return fe;
	flags = bpf_map_lookup_elem(&node_addrs, &node);
	if (!flags)
		return NULL;
	*own = 1;
	if (!(*flags & NODE_ADDR_NODEPORT))
		return NULL;
	return bpf_map_lookup_elem(&frontends, &key);
}

/* Does loadBalancerSourceRanges let this client in? */
static __always_inline int range_allows(__u32 service, const struct addr *client, __u8 family)
{
	struct range_key key = {
		.prefixlen = 64 + (family == FAMILY_V4 ? 32 : 128),
		.service = service,
		.family = family,
		.addr = *client,
	};

	return bpf_map_lookup_elem(&source_ranges, &key) != NULL;
}

static __always_inline __u8 route_member(__u8 route)
{
	return route == ROUTE_LOCAL ? BACKEND_LOCAL : BACKEND_CLUSTER;
}

/* A backend that is still what it was when it was chosen. */
static __always_inline struct backend *backend_valid(__u32 id, __u32 service, __u8 member)
{
	struct backend *b = bpf_map_lookup_elem(&backends, &id);

	if (!b || b->service != service || !(b->flags & member))
		return NULL;
	return b;
}

static __always_inline struct backend *backend_at(__u32 service, __u8 route, __u32 n, __u32 hash,
						  __u32 *id)
{
	struct slot_key key = { .service = service };
	struct backend *b;
	__u32 *slot;

	for (int i = 0; i < SLOT_TRIES; i++) {
		key.slot = (hash + i) % n;
		if (route == ROUTE_LOCAL)
			key.slot |= SLOT_LOCAL;
		slot = bpf_map_lookup_elem(&slots, &key);
		if (!slot)
			continue;
		*id = *slot;
		b = backend_valid(*id, service, route_member(route));
		if (b)
			return b;
	}
	return NULL;
}

static __always_inline void affinity_key(struct affinity_key *key, __u32 service,
					 const struct addr *client, __u8 family, __u64 cookie)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->service = service;
	key->family = family;
	if (cookie) {
		key->by_cookie = 1;
		key->client.w[0] = cookie;
		key->client.w[1] = cookie >> 32;
	} else {
		key->client = *client;
	}
}

/*
 * The endpoint that a client was given last, if its time is not over; *id is set with
 * it. Else *hash stands in for it until another is remembered, so that all
 * connections which a client opens at once get the same one.
 */
static __always_inline struct backend *affinity_recall(const struct affinity_key *key, __u32 timeout,
						       __u8 route, __u32 time, __u32 *hash, __u32 *id)
{
	struct affinity *last = bpf_map_lookup_elem(&affinities, key);
	struct backend *b;

	if (!key->by_cookie)
		*hash = mix(addr_hash(&key->client), last ? last->seen : 0);
	/* Whole seconds: rather up to one too long than too short. */
	if (!last || (__s32)(time - last->seen) > (__s32)timeout)
		return NULL;
	b = backend_valid(last->backend, key->service, route_member(route));
	if (b) {
		*id = last->backend;
		last->seen = time;
	}
	return b;
}

static __always_inline void affinity_remember(const struct affinity_key *key, __u32 backend,
					      __u32 time)
{
	struct affinity next = { .backend = backend, .seen = time };

	bpf_map_update_elem(&affinities, key, &next, BPF_ANY);
}

/* Remembers the endpoint of a client that is known to exist: TCP. */
static __always_inline void affinity_confirm(__u32 service, __u32 backend,
					     const struct addr *client, __u8 family, __u32 time)
{
	struct service *s = bpf_map_lookup_elem(&services, &service);
	struct affinity_key key;

	if (!s || !s->affinity)
		return;
	affinity_key(&key, service, client, family, 0);
	affinity_remember(&key, backend, time);
}

/*
 * Chooses an endpoint; *id is set with it. client is the client's address, or
 * cookie (not 0) tells clients apart where no address is known yet: a socket
 * that connects has none. sure says that the client is who it claims to be, so that
 * what it is given may be remembered at once: else forged packets would push
 * out what other clients were given.
 */
static __always_inline struct backend *backend_select(__u32 service, __u8 route, __u32 hash,
						      const struct addr *client, __u8 family,
						      __u64 cookie, int sure, __u32 *id)
{
	struct service *s = bpf_map_lookup_elem(&services, &service);
	struct affinity_key key;
	struct backend *b;
	__u32 n, time;

	if (!s)
		return NULL;
	n = route == ROUTE_LOCAL ? s->count[1] : s->count[0];
	if (!n)
		return NULL;
	if (!s->affinity)
		return backend_at(service, route, n, hash, id);

	time = now();
	affinity_key(&key, service, client, family, cookie);
	b = affinity_recall(&key, s->affinity, route, time, &hash, id);
	if (b)
		return b;
	b = backend_at(service, route, n, hash, id);
	if (b && sure)
		affinity_remember(&key, *id, time);
	return b;
}

static __always_inline void socket_key(struct socket_key *key, __u64 cookie, __u8 proto,
				       const struct addr *addr, __be16 port, __u8 dir)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->cookie = cookie;
	key->addr = *addr;
	key->port = port;
	key->proto = proto;
	key->dir = dir;
}

static __always_inline struct pod *pod_lookup(const struct addr *addr, __u8 family)
{
	struct addr_key key = {
		.addr = *addr,
		.family = family,
	};

	return bpf_map_lookup_elem(&pods, &key);
}

/*
 * The device by which packets from this address come: that of the pod of this node that
 * has it, or 0, the network. A pod may have an address without being reachable without
 * the stack.
 */
static __always_inline __u32 addr_device(const struct addr *addr, __u8 family)
{
	struct pod *pod = pod_lookup(addr, family);

	return pod ? pod->ifindex : 0;
}

#endif
