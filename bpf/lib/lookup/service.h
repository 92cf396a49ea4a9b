/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Looks up Service addresses, the addresses of endpoints, and prefixes: those of clients, of the
 * cluster, and of IPsec (xfrm) policies.
 */
#ifndef SPILLWAY_LOOKUP_SERVICE_H
#define SPILLWAY_LOOKUP_SERVICE_H

#include "../hook.h"

static __always_inline struct frontend *frontend_exact(const struct addr *addr, __be16 port,
						       __u8 proto, __u8 family)
{
	struct frontend_key key = {
		.addr = *addr,
		.port = port,
		.proto = proto,
		.family = family,
	};

	/* This key is a NodePort's. No client connects to the zero address. */
	if (addr_zero(addr))
		return NULL;
	return bpf_map_lookup_elem(&frontends, &key);
}

/* Looks up a NodePort. NodePorts have the zero address. */
static __always_inline struct frontend *frontend_nodeport(__be16 port, __u8 proto, __u8 family)
{
	struct frontend_key key = {
		.port = port,
		.proto = proto,
		.family = family,
	};

	return bpf_map_lookup_elem(&frontends, &key);
}

/* The result of frontend_lookup. */
struct frontend_match {
	struct frontend *fe; /* NULL: not an address and port of a Service or an endpoint */
	bool node_addr;	     /* the address is the node's own */
};

/* Looks up a frontend. Finds NodePorts by any address of the node. */
static __always_inline struct frontend_match frontend_lookup(const struct addr *addr, __be16 port,
							     __u8 proto, __u8 family)
{
	struct addr_key node = {
		.addr = *addr,
		.family = family,
	};
	struct frontend_match match = {};
	__u32 *flags;

	match.fe = frontend_exact(addr, port, proto, family);
	if (match.fe)
		return match;
	flags = bpf_map_lookup_elem(&node_addrs, &node);
	if (!flags)
		return match;
	match.node_addr = true;
	if (*flags & NODE_ADDR_NODEPORT)
		match.fe = frontend_nodeport(port, proto, family);
	return match;
}

static __always_inline int is_endpoint(const struct addr *addr, __be16 port, __u8 proto,
				       __u8 family)
{
	struct frontend *fe = frontend_exact(addr, port, proto, family);

	return fe && fe->flags & FRONTEND_ENDPOINT;
}

/* Returns the value of the longest prefix of this scope that has the address, or NULL. */
static __always_inline void *range_longest(void *ranges, __u32 scope, const struct addr *addr,
					   __u8 family)
{
	struct range_key key = {
		.prefixlen = 64 + (family == FAMILY_V4 ? 32 : 128),
		.scope = scope,
		.family = family,
		.addr = *addr,
	};

	return bpf_map_lookup_elem(ranges, &key);
}

/* Is the address in a prefix of RANGE_*? */
static __always_inline int range_contains(__u32 scope, const struct addr *addr, __u8 family)
{
	return range_longest(&cluster_ranges, scope, addr, family) != NULL;
}

/* Is the address in a Service's loadBalancerSourceRanges? */
static __always_inline int service_allows(__u32 service, const struct addr *addr, __u8 family)
{
	return range_longest(&source_ranges, service, addr, family) != NULL;
}

/* Returns the number of changes of Services, or 0: unknown. */
static __always_inline __u32 service_changes_now(void)
{
	__u32 zero = 0, *n = bpf_map_lookup_elem(&service_changes, &zero);

	return n ? *n : 0;
}

/* Is this the address of a Service, and not only an endpoint's own? */
static __always_inline bool is_service(const struct frontend *fe)
{
	return fe && !(fe->flags & FRONTEND_ENDPOINT);
}

/* Checks whether a Service drops the packets of this client. Returns GO_ON, or DROP and *drop. */
static __always_inline enum step service_check(const struct frontend *fe, const struct tuple *t,
					       __u8 route, enum verdict *drop)
{
	if (fe->flags & FRONTEND_RANGES && !service_allows(fe->service, &t->saddr, t->family)) {
		*drop = DROP_SOURCE_RANGE;
		return DROP;
	}
	if (route == ROUTE_DROP) {
		*drop = DROP_POLICY_LOCAL;
		return DROP;
	}
	return GO_ON;
}

/* Is this the address of a pod or of another node? */
static __always_inline int in_cluster(const struct addr *addr, __u8 family)
{
	return range_contains(RANGE_PODS, addr, family) ||
	       range_contains(RANGE_PEERS, addr, family);
}

/* May an IPsec policy select packets between the two addresses? */
static __always_inline int xfrm_selects(const struct settings *s, const struct addr *a,
					const struct addr *b, __u8 family)
{
	if (!(s->flags & SETTING_XFRM))
		return 0;
	return (range_contains(RANGE_XFRM_SRC, a, family) &&
		range_contains(RANGE_XFRM_DST, b, family)) ||
	       (range_contains(RANGE_XFRM_SRC, b, family) &&
		range_contains(RANGE_XFRM_DST, a, family));
}

#endif
