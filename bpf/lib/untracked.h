/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Which packets of pods here a do-not-track policy leaves untracked. The agent writes
 * an entry when netfilter holds the policy, and takes it away before netfilter's goes.
 */
#ifndef SPILLWAY_UNTRACKED_H
#define SPILLWAY_UNTRACKED_H

#include "lookup.h"
#include "parse.h"

/* Is this one of a rule's peers? */
static __always_inline int rule_has_peer(const struct untracked_rule *rule,
					 const struct addr *peer, __u8 family)
{
	struct untracked_pod_key pod = {
		.addr = *peer,
		.family = family,
		.rule = rule->id,
	};
	struct range_key range = {
		.prefixlen = 64 + (family == FAMILY_V4 ? 32 : 128),
		.service = rule->id,
		.family = family,
		.addr = *peer,
	};

	if (rule->peers & UNTRACKED_ANYBODY)
		return 1;
	if (rule->peers & UNTRACKED_PODS && bpf_map_lookup_elem(&untracked_pods, &pod))
		return 1;
	return rule->peers & UNTRACKED_BLOCKS && bpf_map_lookup_elem(&untracked_blocks, &range);
}

/*
 * Does a policy leave packets untracked between a port of a pod here and a peer, and
 * would they reach the pod, whoever else polices pods?
 */
static __always_inline int pod_leaves_untracked(const struct addr *addr, __be16 port,
						const struct tuple *t, const struct addr *peer)
{
	struct frontend_key key = {
		.addr = *addr,
		.port = port,
		.proto = t->proto,
		.family = t->family,
	};
	struct untracked_port *ports = bpf_map_lookup_elem(&untracked_ports, &key);
	struct pod *pod;
	int found = 0;

	if (!ports)
		return 0;
	pod = pod_lookup(addr, t->family);
	if (!pod || !(pod->flags & POD_REACHABLE) ||
	    (pod->flags & (POD_POLICED | POD_GUARDED)) == POD_POLICED)
		return 0;
	for (int i = 0; i < UNTRACKED_RULES && !found; i++)
		found = ports->rules[i].peers && rule_has_peer(&ports->rules[i], peer, t->family);
	return found;
}

#endif
