/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The tc hooks: the final results of a packet, and the entries that apply at each hook. */
#ifndef SPILLWAY_HOOK_H
#define SPILLWAY_HOOK_H

#include "base.h"

enum hook {
	FROM_NETWORK,
	FROM_POD,
	EGRESS,
};

/*
 * The results of a step beside the TC actions: the packet is not finished, and the caller
 * continues with the next step.
 */
enum serve_result {
	SERVE_NOT_MINE = -2, /* the step does not apply to the packet */
	SERVE_STRAY = -3,    /* serve_stray must handle it; pair.flow.backend is its endpoint */
	SERVE_NO_ROUTE = -4, /* handle must drop it: the FIB has no next hop */
};

/* Marks packets that these programs have sent: the egress program of the device lets them out. */
#define TC_INDEX_DONE 0x5357

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

/*
 * Returns the device of the pod that has sent the packet, or 0 for the network. It is
 * comparable with source_device.
 */
static __always_inline __u32 hook_device(const struct __sk_buff *skb, enum hook hook)
{
	return hook == FROM_POD ? skb->ifindex : 0;
}

/* Does an entry apply at this hook? */
static __always_inline int flow_applies(const struct flow *f, enum hook hook)
{
	int behind_stack = (f->flags & (FLOW_REPLY | FLOW_STACK)) == (FLOW_REPLY | FLOW_STACK);

	/* The node's own processes send at egress and receive at ingress. */
	if (f->helper == HELPER_NODE)
		behind_stack = !(f->flags & FLOW_REPLY);
	return hook == EGRESS ? behind_stack : !behind_stack;
}

#endif
