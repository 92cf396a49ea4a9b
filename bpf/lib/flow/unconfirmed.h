/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Flows of clients that may not exist. Any host can send a first packet with any source
 * address, and the endpoint answers it. So neither packet proves that the client exists.
 * The ACK that completes a TCP handshake does. UDP has no such packet: its flows stay
 * unconfirmed. So does a connection that is over.
 *
 * The length of the ring `unconfirmed` limits the number of these flows. Each new one takes
 * the next slot. The flow that had the slot is deleted if it is still unconfirmed. So a
 * flood ends unconfirmed flows, the oldest first, and never a confirmed one: the LRU of the
 * table evicts nothing until confirmed flows alone fill it. A flow that was answered and
 * used a moment ago moves to the new slot instead. So a flood that no endpoint answers does
 * not end it.
 *
 * A flow's slot is a number that counts up, modulo the length of the ring. It identifies
 * the flow, and the difference of two slots shows the older flow.
 *
 * Flows with DSR have a ring of their own at the node that receives them (dsr/flow.h). Nothing
 * shows that such a flow was answered. So forged ones end others of their kind alone, and the
 * connections of other Services end none of them.
 */
#ifndef SPILLWAY_FLOW_UNCONFIRMED_H
#define SPILLWAY_FLOW_UNCONFIRMED_H

#include "../scratch.h"
#include "entry.h"

/* Idle seconds after which a continuing UDP flow is taken to be over. */
#define STREAM_IDLE_SECONDS 10

/* Slots to try for one whose flow may be replaced. */
#define ADMIT_TRIES 4

static __always_inline __u32 *unconfirmed_counter(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&unconfirmed_next, &zero);
}

/* Returns the number of flows created after the one with this slot. */
static __always_inline __u32 unconfirmed_age(__u32 slot)
{
	__u32 *next = unconfirmed_counter();

	return next ? *next - slot : 0;
}

/* Does a UDP flow continue? */
static __always_inline int flow_streams(const struct flow *f, __u32 time)
{
	return f->flags & FLOW_STREAM && (__s32)(time - f->seen) <= STREAM_IDLE_SECONDS;
}

/* Is an answered flow in use? */
static __always_inline int flow_in_use(const struct flow *f, __u32 time)
{
	if (f->state == FLOW_ESTABLISHED || f->helper >= HELPER_DATA)
		return (__s32)(time - f->seen) <= USE_IDLE_SECONDS || flow_streams(f, time);
	return 0;
}

/* Moves a flow to a new slot of the ring. The map entry stays. Returns 0 if it has moved. */
static __always_inline int flow_move(struct flow *f, const struct tuple *key, __u32 from, __u32 to,
				     struct tuple *reverse_key)
{
	struct flow *reverse;

	if (__sync_val_compare_and_swap(&f->slot, from, to) != from)
		return -1;
	flow_reverse_key(reverse_key, f, key);
	reverse = bpf_map_lookup_elem(&flows, reverse_key);
	if (reverse && reverse->slot == from)
		reverse->slot = to;
	return 0;
}

/* A constant: it needs no register, and so no stack. */
static __always_inline __u32 ring_length(bool remote)
{
	return remote ? dsr_flows_max : unconfirmed_max;
}

/* Returns the number of the next slot of a ring. */
static __always_inline __u32 *ring_next(bool remote)
{
	__u32 zero = 0;

	return remote ? bpf_map_lookup_elem(&one_way_next, &zero) : unconfirmed_counter();
}

/*
 * Returns the slot of a new flow with this key, and deletes the unconfirmed flow that had
 * the slot. A call: its caller needs the stack for other things later. The loop is unrolled: before
 * 6.4 the verifier takes some loops for endless ones (back-edge), by the order of instructions.
 */
static __noinline __u32 unconfirmed_admit(const struct tuple *key, __u32 time, bool remote)
{
	struct flow_pair *pair = get_flow_pair();
	struct tuple *old_key, *reverse_key;
	__u32 *next = ring_next(remote), slot = SLOT_NONE, before, index;
	struct tuple *place;
	struct flow *old;

	if (!pair || !next || !ring_length(remote))
		return SLOT_NONE;
	old_key = &pair->other_key;
	reverse_key = &pair->reverse_key;
#pragma unroll
	for (int i = 0; i < ADMIT_TRIES; i++) {
		slot = __sync_fetch_and_add(next, 1);
		before = slot - ring_length(remote);
		/* One ring after the other. */
		index = slot % ring_length(remote) + (remote ? unconfirmed_max : 0);
		place = bpf_map_lookup_elem(&unconfirmed, &index);
		if (!place)
			return SLOT_NONE;
		*old_key = *place;
		old = bpf_map_lookup_elem(&flows, old_key);
		if (!old || old->slot != before || flow_confirmed(old) ||
		    (remote && !dsr_remote(old)))
			break;
		if (i + 1 < ADMIT_TRIES &&
		    (flow_in_use(old, time) || (remote && dsr_syn_waits(old, &pair->flow, time))) &&
		    !flow_move(old, old_key, before, slot, reverse_key))
			continue;
		if (!flow_delete(old_key, before, reverse_key))
			count(FLOW_REPLACED);
		break;
	}
	*place = *key;
	return slot;
}

#endif
