/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Looks up the endpoints of a Service. */
#ifndef SPILLWAY_LOOKUP_ENDPOINT_H
#define SPILLWAY_LOOKUP_ENDPOINT_H

#include "../events/endpoint_load.h"

/* Slots to try while the agent rearranges a set. */
#define SLOT_TRIES 4

static __always_inline __u8 route_member(__u8 route)
{
	return route == ROUTE_LOCAL ? BACKEND_LOCAL_POLICY : BACKEND_CLUSTER_POLICY;
}

/* Returns the backend with this id, unless it has left the Service or the set. */
static __always_inline struct backend *backend_valid(__u32 id, __u32 service, __u8 member)
{
	struct backend *b = bpf_map_lookup_elem(&backends, &id);

	if (!b || b->service != service || !(b->flags & member))
		return NULL;
	return b;
}

/* An endpoint and its id in the map backends. */
struct backend_choice {
	struct backend *backend; /* NULL: none */
	__u32 id;
	bool counted;  /* its load counts the flow */
	bool measured; /* and has the time of the flow's handshake */
	bool dsr;      /* the Service asks for dsr/receive.h */
};

/* Returns the id in a slot of a set, or NULL. */
static __always_inline __u32 *slot_at(__u32 service, __u8 route, __u32 slot)
{
	struct slot_key key = { .service = service, .slot = slot };

	if (route == ROUTE_LOCAL)
		key.slot |= SLOT_LOCAL;
	return bpf_map_lookup_elem(&slots, &key);
}

static __always_inline struct backend_choice backend_at(__u32 service, __u8 route, __u32 n,
							__u32 hash)
{
	struct backend_choice choice = {};
	__u32 *slot;

	for (int i = 0; i < SLOT_TRIES; i++) {
		slot = slot_at(service, route, (hash + i) % n);
		if (!slot)
			continue;
		choice.id = *slot;
		choice.backend = backend_valid(choice.id, service, route_member(route));
		if (choice.backend)
			break;
	}
	return choice;
}

/*
 * Chooses the better one of two slots, each as likely as with backend_at. Two are nearly as
 * good as all (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001): an
 * endpoint that is new, or that many nodes take for the best one, does not get all flows.
 */
static __always_inline struct backend_choice backend_by_load(const struct service *s, __u32 service,
							     __u8 route, __u32 n, __u32 hash)
{
	__u32 slot = hash % n, *id = slot_at(service, route, slot), *other = NULL;
	struct backend_choice choice = {};

	if (n > 1) {
		slot += 1 + mix(hash_seed, hash) % (n - 1);
		other = slot_at(service, route, slot < n ? slot : slot - n);
	}
	if (id && other && load_prefers(s->flags, *other, *id))
		id = other;
	if (id) {
		choice.id = *id;
		choice.backend = backend_valid(choice.id, service, route_member(route));
	}
	if (!choice.backend) /* the agent rearranges the set */
		choice = backend_at(service, route, n, hash);
	choice.counted = true;
	choice.measured = s->flags & SERVICE_LATENCY;
	return choice;
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

#endif
