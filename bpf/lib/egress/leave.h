/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Egress: which packets of pods leave the cluster with the node's address. Without these programs
 * the CNI's masquerade rule gives it to them, and conntrack may give two connections that begin at
 * the same time one port: one of them loses its first packet.
 *
 * The agent decides (internal/decisions/egress): cluster_ranges has the destinations that are left
 * to netfilter (RANGE_KEEP), and pods have POD_LEAVES.
 */
#ifndef SPILLWAY_EGRESS_LEAVE_H
#define SPILLWAY_EGRESS_LEAVE_H

#include "../lookup/pod.h"
#include "../parse/packet.h"

/* Returns the byte of a port in egress_ports. */
static __always_inline __u8 *egress_port(__be16 port)
{
	__u16 n = bpf_ntohs(port);
	__u32 index = n / EGRESS_PORTS_OF_VALUE;
	struct egress_ports *ports = bpf_map_lookup_elem(&egress_ports, &index);

	return ports ? &ports->used[n % EGRESS_PORTS_OF_VALUE] : NULL;
}

/* Has a flow of egress ever had this source port? Few packets of others pass this test. */
static __always_inline bool egress_has_port(__be16 port)
{
	__u8 *used = egress_port(port);

	return used && *used;
}

/* Lets answers to this port pass the test. */
static __always_inline void egress_mark_port(__be16 port)
{
	__u8 *used = egress_port(port);

	if (used && !*used)
		*used = 1;
}

/* May a pod's packet be of a flow of egress, or begin one? */
static __always_inline bool egress_may_leave(const struct packet *p)
{
	struct settings *s = get_settings();

	if (!s || !(s->flags & SETTING_EGRESS || feature_seen(FEATURE_EGRESS)))
		return false;
	/* A connection goes on although its destination was left to netfilter since. */
	return s->flags & SETTING_EGRESS_KEPT ||
	       !range_contains(RANGE_KEEP, &p->tuple.daddr, p->tuple.family);
}

/*
 * Does a pod's new connection to this address get the node's address here? Netfilter must see the
 * packets of pods that a NetworkPolicy selects, and those that IPsec may encrypt.
 */
static __always_inline bool pod_leaves(const struct settings *s, const struct addr *saddr,
				       const struct addr *daddr, __u8 family)
{
	const __u32 bits = POD_LEAVES | POD_REACHABLE | POD_TRAVERSES_NETFILTER;
	struct pod *pod;

	if ((s->flags & (SETTING_EGRESS | SETTING_BYPASS_NEVER | SETTING_DRAINS)) != SETTING_EGRESS)
		return false;
	pod = pod_lookup(saddr, family);
	return pod && (pod->flags & bits) == (POD_LEAVES | POD_REACHABLE) &&
	       !range_contains(RANGE_KEEP, daddr, family);
}

#endif
