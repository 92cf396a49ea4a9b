/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Looks up whether a packet may have its source. */
#ifndef SPILLWAY_LOOKUP_SOURCE_H
#define SPILLWAY_LOOKUP_SOURCE_H

#include "../hook.h"
#include "../parse/packet.h"
#include "pod.h"

/* May packets of this hook have this source? */
static __always_inline int source_belongs(struct __sk_buff *skb, const struct tuple *t,
					  enum hook hook)
{
	struct addr_key own = {
		.addr = t->saddr,
		.family = t->family,
	};

	return !martian_source(t) && source_device(t) == hook_device(skb, hook) &&
	       !bpf_map_lookup_elem(&node_addrs, &own);
}

#endif
