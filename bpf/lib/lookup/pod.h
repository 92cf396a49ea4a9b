/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Looks up the pods of this node: their devices, and their need for netfilter. */
#ifndef SPILLWAY_LOOKUP_POD_H
#define SPILLWAY_LOOKUP_POD_H

#include "service.h"

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

/* That of a packet's source. */
static __always_inline __u32 source_device(const struct tuple *t)
{
	return addr_device(&t->saddr, t->family);
}

static __always_inline int pod_traverses_netfilter(const struct addr *addr, __u8 family)
{
	struct pod *pod = pod_lookup(addr, family);

	return pod && pod->flags & POD_TRAVERSES_NETFILTER;
}

/* Is this a pod's address, and may the pod's packets pass by netfilter? */
static __always_inline int pod_may_bypass(const struct addr *addr, __u8 family)
{
	struct pod *pod = pod_lookup(addr, family);

	if (!pod)
		return range_allows(RANGE_PODS, addr, family);
	return !(pod->flags & POD_TRAVERSES_NETFILTER);
}

#endif
