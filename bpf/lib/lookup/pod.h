/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Looks up the pods of this node: their devices, whether they must traverse netfilter, and whether
 * a packet may have its source.
 */
#ifndef SPILLWAY_LOOKUP_POD_H
#define SPILLWAY_LOOKUP_POD_H

#include "../parse/packet.h"
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
 * Returns the device that packets from this address must arrive on: the device of the pod
 * of this node with the address, or 0 for the network. A pod may have a device without
 * being reachable without the stack.
 */
static __always_inline __u32 addr_device(const struct addr *addr, __u8 family)
{
	struct pod *pod = pod_lookup(addr, family);

	return pod ? pod->ifindex : 0;
}

/* Returns the device that the packet's source belongs to; see addr_device. */
static __always_inline __u32 source_device(const struct tuple *t)
{
	return addr_device(&t->saddr, t->family);
}

/* Is the packet for a pod of this node, or for the node? */
static __always_inline bool is_for_here(const struct tuple *t)
{
	struct addr_key key = { .addr = t->daddr, .family = t->family };

	return bpf_map_lookup_elem(&pods, &key) || bpf_map_lookup_elem(&node_addrs, &key);
}

/* Fills an endpoint of this node with an address that is_for_here. */
static __always_inline void backend_here(struct backend *b, const struct addr *addr, __be16 port,
					 __u8 family)
{
	struct addr_key key = { .addr = *addr, .family = family };

	b->addr = *addr;
	b->port = port;
	b->family = family;
	b->flags = BACKEND_ON_THIS_NODE;
	if (bpf_map_lookup_elem(&node_addrs, &key))
		b->flags |= BACKEND_HOST_NETWORK;
}

static __always_inline int pod_traverses_netfilter(const struct addr *addr, __u8 family)
{
	struct pod *pod = pod_lookup(addr, family);

	return pod && pod->flags & POD_TRAVERSES_NETFILTER;
}

/* Is this a pod's address whose packets may bypass netfilter? */
static __always_inline int pod_may_bypass(const struct addr *addr, __u8 family)
{
	struct pod *pod = pod_lookup(addr, family);

	if (!pod)
		return range_contains(RANGE_PODS, addr, family);
	return !(pod->flags & POD_TRAVERSES_NETFILTER);
}

/*
 * Is this a source that no packet may have (RFC 1812, 5.3.7)? The stack drops such a
 * packet, and an answer would go to a group or to this node.
 */
static __always_inline int martian_source(const struct tuple *t)
{
	const struct addr *a = &t->saddr;
	__u8 net = bpf_ntohl(a->w[0]) >> 24;

	if (t->family == FAMILY_V4)
		return net == 0 || net == 127 || net >= 224;
	return net == 0xff || (!(a->w[0] | a->w[1] | a->w[2]) && bpf_ntohl(a->w[3]) <= 1);
}

/* May packets that come by this device (hook_device) have this source? */
static __always_inline int source_belongs(const struct tuple *t, __u32 device)
{
	struct addr_key own = {
		.addr = t->saddr,
		.family = t->family,
	};

	return !martian_source(t) && source_device(t) == device &&
	       !bpf_map_lookup_elem(&node_addrs, &own);
}

#endif
