/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Looks up whether a packet may have its source. */
#ifndef SPILLWAY_LOOKUP_SOURCE_H
#define SPILLWAY_LOOKUP_SOURCE_H

#include "../hook.h"
#include "../parse/packet.h"
#include "pod.h"

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
