/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Looks up the packets that do-not-track policies leave untracked at pods of this node. The
 * agent adds an entry after netfilter has the policy, and deletes it before netfilter's.
 */
#ifndef SPILLWAY_LOOKUP_UNTRACKED_H
#define SPILLWAY_LOOKUP_UNTRACKED_H

#include "../parse/packet.h"
#include "pod.h"

_Static_assert(UNTRACKED_RULES == 4, "pod_leaves_untracked looks at each");

/* Does a rule allow this peer? */
static __always_inline int rule_has_peer(const struct untracked_rule *rule, const struct addr *peer,
					 __u8 family)
{
	struct untracked_pod_key pod = {
		.addr = *peer,
		.family = family,
		.rule = rule->id,
	};

	if (!rule->peers)
		return 0;
	if (rule->peers & UNTRACKED_ANY)
		return 1;
	if (rule->peers & UNTRACKED_PODS && bpf_map_lookup_elem(&untracked_pods, &pod))
		return 1;
	return rule->peers & UNTRACKED_BLOCKS &&
	       range_longest(&untracked_blocks, rule->id, peer, family);
}

/*
 * Does a policy leave packets between a pod's port and a peer untracked, and would
 * netfilter deliver them? A NetworkPolicy that selects the pod may deny them.
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
	const struct untracked_rule *rules;
	struct pod *pod;

	if (!ports)
		return 0;
	pod = pod_lookup(addr, t->family);
	if (!pod || !(pod->flags & POD_REACHABLE) ||
	    (pod->flags & (POD_TRAVERSES_NETFILTER | POD_DENY_RULE_ONLY)) ==
		    POD_TRAVERSES_NETFILTER)
		return 0;
	/* Unrolled: Linux 6.1 rejects the loop that the compiler generates. */
	rules = ports->rules;
	return rule_has_peer(&rules[0], peer, t->family) ||
	       rule_has_peer(&rules[1], peer, t->family) ||
	       rule_has_peer(&rules[2], peer, t->family) ||
	       rule_has_peer(&rules[3], peer, t->family);
}

#endif
