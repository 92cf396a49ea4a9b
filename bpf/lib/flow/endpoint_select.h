/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Selects an endpoint for a new flow: with session affinity, by a table, by load or by a hash. */
#ifndef SPILLWAY_FLOW_ENDPOINT_SELECT_H
#define SPILLWAY_FLOW_ENDPOINT_SELECT_H

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

/* A client of session affinity. */
struct affinity_client {
	const struct addr *addr;
	__u64 cookie; /* of its network namespace; 0: its address identifies it */
	__u8 family;
};

static __always_inline void affinity_key(struct affinity_key *key, __u32 service,
					 struct affinity_client client)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->service = service;
	key->family = client.family;
	if (client.cookie) {
		key->by_cookie = 1;
		key->cookie[0] = client.cookie;
		key->cookie[1] = client.cookie >> 32;
	} else {
		key->client = *client.addr;
	}
}

/*
 * Returns the endpoint that the client used last, unless the affinity has timed out or
 * the endpoint has left the Service or is ejected.
 */
static __always_inline struct backend_choice affinity_recall(const struct affinity_key *key,
							     struct affinity *last, __u32 timeout,
							     __u8 route, __u32 time)
{
	struct backend_choice choice = {};

	/* In whole seconds: up to one second too long rather than too short. */
	if (!last || (__s32)(time - last->seen) > (__s32)timeout)
		return choice;
	choice.id = last->backend;
	choice.backend = backend_valid(choice.id, key->service, route_member(route));
	if (choice.backend && choice.backend->flags & BACKEND_EJECTED)
		choice.backend = NULL;
	if (choice.backend)
		last->seen = time;
	return choice;
}

static __always_inline void affinity_remember(const struct affinity_key *key, __u32 backend,
					      __u32 time)
{
	struct affinity next = { .backend = backend, .seen = time };

	bpf_map_update_elem(&affinities, key, &next, BPF_ANY);
}

/* Stores the endpoint of a TCP client after its handshake. */
static __always_inline void affinity_confirm(__u32 service, __u32 backend,
					     const struct addr *client, __u8 family, __u32 time)
{
	struct service *s = bpf_map_lookup_elem(&services, &service);
	struct affinity_key key;

	if (!s || !s->affinity)
		return;
	affinity_key(&key, service, (struct affinity_client){ .addr = client, .family = family });
	affinity_remember(&key, backend, time);
}

/* When backend_select stores a client's endpoint for session affinity. */
enum affinity_store {
	AFFINITY_AT_ONCE,
	AFFINITY_ON_CONFIRM, /* the caller calls affinity_confirm after the handshake */
};

/*
 * Chooses an endpoint of a Service. t is the packet's tuple, NULL for a socket that connects: it
 * has no address yet.
 *
 * TCP stores the endpoint only after the handshake (AFFINITY_ON_CONFIRM). Otherwise
 * packets with forged sources would evict the entries of other clients.
 */
static __always_inline struct backend_choice backend_select(__u32 service, __u8 route, __u32 hash,
							    const struct tuple *t,
							    struct affinity_client client,
							    enum affinity_store store)
{
	struct service *s = bpf_map_lookup_elem(&services, &service);
	struct backend_choice choice = {};
	struct affinity_key key;
	struct affinity *last;
	__u32 n, time;

	if (!s)
		return choice;
	n = route == ROUTE_LOCAL ? s->count[1] : s->count[0];
	if (!n)
		return choice;
	if (balance_by_load && s->flags & (SERVICE_LEAST | SERVICE_LATENCY))
		return backend_by_load(s, service, route, n, hash);
	if (t && s->flags & SERVICE_MAGLEV && route == ROUTE_CLUSTER) {
		choice = backend_at(service, route, n, maglev_hash(t));
		choice.dsr = s->flags & SERVICE_DSR;
		return choice;
	}
	if (!s->affinity)
		return backend_at(service, route, n, hash);

	time = now();
	affinity_key(&key, service, client);
	last = bpf_map_lookup_elem(&affinities, &key);
	/*
	 * Connections that a client opens at the same time get one endpoint, before it is
	 * stored.
	 */
	if (!client.cookie)
		hash = mix(addr_hash(client.addr), last ? last->seen : 0);
	choice = affinity_recall(&key, last, s->affinity, route, time);
	if (choice.backend)
		return choice;
	choice = backend_at(service, route, n, hash);
	if (choice.backend && store == AFFINITY_AT_ONCE)
		affinity_remember(&key, choice.id, time);
	return choice;
}

#endif
