/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The tc hooks: the final results of a packet, and the entries that apply at each hook. */
#ifndef SPILLWAY_HOOK_H
#define SPILLWAY_HOOK_H

#include "base.h"

enum hook {
	FROM_NETWORK,
	FROM_POD,
	FROM_STACK,
};

/*
 * What follows a step of a packet. A verdict is an outcome, and none of them means that the packet
 * goes on. A step that may send or drop the packet itself returns the TC action, or one of these:
 * no TC action has their values.
 */
enum step {
	GO_ON = -2,	   /* the next step follows */
	DROP = -3,	   /* drop it: scratch memory has the verdict */
	REFUSE = -4,	   /* its next hop is unusable: refuse */
	WITHOUT_FLOW = -5, /* serve_without_flow; pair.flow.backend is its endpoint */
	ANSWER_PROBE = -6, /* dsr_answer_probe */
	LEAVE = -7,	   /* of a pod to the outside: serve_leaving */
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
	return hook == FROM_STACK ? behind_stack : !behind_stack;
}

#endif
