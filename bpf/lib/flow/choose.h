/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Chooses an endpoint for a new flow: with session affinity, by a table, by load or by a hash. */
#ifndef SPILLWAY_FLOW_CHOOSE_H
#define SPILLWAY_FLOW_CHOOSE_H

#include "../lookup/endpoint.h"

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
		choice = backend_at(service, route, n, flow_hash(t));
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
