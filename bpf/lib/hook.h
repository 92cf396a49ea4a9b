/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The tc hooks, the ends of a packet's path, and the entries that apply at a hook. */
#ifndef SPILLWAY_HOOK_H
#define SPILLWAY_HOOK_H

#include "base.h"

enum hook {
	FROM_NETWORK,
	FROM_POD,
	EGRESS,
};

/*
 * What a step of the path returns beside the actions of TC: the packet is not
 * finished, and the caller goes on.
 */
enum serve_result {
	SERVE_NOT_MINE = -2, /* the step does not apply to the packet */
	SERVE_STRAY = -3,    /* serve_stray handles the packet */
};

static __always_inline int drop(enum verdict verdict)
{
	count(verdict);
	return TC_ACT_SHOT;
}

static __always_inline int pass(enum verdict verdict)
{
	count(verdict);
	return NEXT;
}

/* The device of the pod that has sent the packet, or 0, the network: see source_device. */
static __always_inline __u32 hook_device(const struct __sk_buff *skb, enum hook hook)
{
	return hook == FROM_POD ? skb->ifindex : 0;
}

/* May an entry be applied at this hook? */
static __always_inline int flow_applies(const struct flow *f, enum hook hook)
{
	int behind_stack = (f->flags & (FLOW_REPLY | FLOW_STACK)) == (FLOW_REPLY | FLOW_STACK);

	/* Of the node's own processes it is the other way round. */
	if (f->helper == HELPER_NODE)
		behind_stack = !(f->flags & FLOW_REPLY);
	return hook == EGRESS ? behind_stack : !behind_stack;
}

#endif
