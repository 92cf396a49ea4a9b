/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Takes a packet through the steps of a tc hook. See tc.bpf.c for the map of the files. */
#ifndef SPILLWAY_TC_H
#define SPILLWAY_TC_H

#include "egress/leave.h"
#include "lookup/port_filter.h"
#include "serve.h"
#include "nat/from_stack.h"
#include "nat/icmp_error.h"
#include "answer/syn_challenge.h"

/*
 * Deletes the flow of the packet, which is over. Another CPU may have replaced it: slot is the old
 * one's.
 */
__noinline int flow_forget(const struct packet *p, __u32 slot)
{
	struct flow_pair *pair = get_flow_pair();
	struct flow *f;

	if (!pair || !p)
		return 0;
	pair->other_key = p->tuple;
	f = bpf_map_lookup_elem(&flows, &pair->other_key);
	if (!f || f->slot != slot)
		return 0;
	if (f->flags & FLOW_REPORTED)
		report_stale(f);
	flow_delete(&pair->other_key, slot, &pair->reverse_key);
	return 0;
}

/*
 * Has the endpoint answered none of the client's SYNs so far? After a SYN that went with the node's
 * address, later ones do too, until a connection was established: who forges the end of a handshake
 * must not lead the client back to a path that may not work.
 */
static __always_inline bool flow_unanswered(const struct flow *f)
{
	if (dsr_remote(f))
		return f->state == FLOW_NEW;
	return (f->flags & (FLOW_SNAT | FLOW_REPLY | FLOW_CONFIRMED)) == FLOW_SNAT;
}

/* Handles a packet of a known flow. */
static __always_inline int handle_flow(struct __sk_buff *skb, struct scratch *m, struct flow *f,
				       enum hook hook)
{
	if (unlikely(!flow_applies(f, hook)))
		return pass(PASS_OTHER);
	if (traffic_counted(f) && !dsr_remote(f))
		report_packet(skb, f);
	if (unlikely(flow_is_request(f)))
		tftp_request_repeated(f, &m->packet.tuple, &m->pair.reply_key);
	/* flow_forward reads only the fields before tcp. */
	__builtin_memcpy(&m->pair.flow, f, offsetof(struct flow, tcp));
	return flow_forward(skb, m, hook, f);
}

/* Handles a packet of no flow. */
static __always_inline int handle_first(struct __sk_buff *skb, const struct packet *p,
					struct settings *s, enum hook hook)
{
	int ret;

	if (dsr && unlikely(p->flags & PACKET_TRANSLATED))
		return serve_dsr(skb, s);
	if (hook == FROM_NETWORK && unlikely(syn_is_left(p))) {
		ret = serve_challenge(skb);
		if (ret != GO_ON)
			return ret;
	}
	if (p->tuple.proto == IPPROTO_UDP && feature_seen(FEATURE_HELPER)) {
		ret = serve_tftp_answer(skb, s, hook);
		if (ret != GO_ON)
			return ret;
	}
	if (hook == FROM_STACK)
		return serve_from_stack(skb, s);
	ret = serve(skb, s, hook);
	/* Not calls of serve: the frames of all active calls share the stack. */
	if (ret == LEAVE)
		return serve_leaving(skb, s);
	return ret == WITHOUT_FLOW ? serve_without_flow(skb, hook) : ret;
}

/* Handles a packet of these programs' business. */
static __always_inline int handle_packet(struct __sk_buff *skb, struct scratch *m,
					 struct settings *s, enum hook hook)
{
	struct packet *p = &m->packet;
	struct flow *f;
	int ret;

	__u32 device = hook == FROM_STACK ? ANY_DEVICE : hook_device(skb, hook);
	enum flow_miss miss = flow_find(skb, p, s, device, &f);

	if (dsr && hook == FROM_NETWORK)
		miss = dsr_find(skb, m, s, miss, &f);
	if (dsr && hook == FROM_NETWORK && miss == MISS_DSR) {
		p->flags |= PACKET_STATELESS;
		ret = serve(skb, s, hook);
		if (ret != WITHOUT_FLOW)
			return ret;
	}
	switch (miss) {
	case MISS_DSR:
	case FLOW_FOUND:
		return f ? handle_flow(skb, m, f, hook) : NEXT;
	case MISS_SUPERSEDED:
		return drop(DROP_HELPER_CONFLICT);
	case MISS_SOURCE:
		return drop(DROP_SOURCE);
	case MISS_STALE:
		if (!f)
			break;
		if (dsr && packet_syn(p) && flow_unanswered(f))
			p->flags |= PACKET_REPEATED;
		flow_forget(p, f->slot);
		break;
	case MISS_NONE:
		break;
	}
	return handle_first(skb, p, s, hook);
}

/* The program behind those of the hooks. Tail calls find it by its index. */
int handle(struct __sk_buff *skb);

#define TAIL_CALL_HANDLE 0

/* Not pinned by its name: the programs of each agent call their own (attach/tailcalls.go). */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, int(void *));
} tail_calls SEC(".maps") = {
	.values = { [TAIL_CALL_HANDLE] = (void *)&handle },
};

/* May an ICMP echo be of a flow of egress, or of the stack and have the identifier of one? */
static __always_inline bool echo_may_be_ours(const struct packet *p, enum hook hook)
{
	if (echo_is_request(&p->tuple) == (hook == FROM_NETWORK))
		return false;
	if (hook == FROM_POD)
		return egress_may_leave(p);
	return egress_has_port(echo_id(p->tuple.sport, p->tuple.dport));
}

/* May the packet that an entry program has parsed be these programs' business? */
static __always_inline bool may_be_ours(struct packet *p, enum hook hook)
{
	/* An ICMP error is looked up by the packet that it quotes. */
	if (unlikely(p->flags & (PACKET_ICMP_ERROR | PACKET_ECHO)))
		return p->flags & PACKET_ICMP_ERROR || echo_may_be_ours(p, hook);
	if (dsr && hook == FROM_NETWORK && may_be_wrapped(p))
		return true;
	if (filter_passes(p))
		return true;
	if (hook == FROM_POD)
		return egress_may_leave(p);
	/* An answer to a pod, or a packet of the stack whose port such a flow may have. */
	return egress_has_port(hook == FROM_NETWORK ? p->tuple.dport : p->tuple.sport);
}

/*
 * What an entry program does: parses the packet, and calls the program handle if the packet may be
 * ours. It writes nothing to packets: the kernel would have it make the headers of each cloned
 * packet private first, and drop the packet if that fails (bpf_unclone_prologue). All TCP data from
 * pods is cloned. l3_off is the length of the link-layer header, in bytes.
 */
static __always_inline int enter(struct __sk_buff *skb, enum hook hook, __u32 l3_off)
{
	struct scratch *m = get_scratch();
	struct packet *p;
	int ret;

	if (!m)
		return NEXT;
	/* The VLAN's device has its own hooks, if the node is a member of the VLAN. */
	if (unlikely(skb->vlan_present))
		return pass(PASS_VLAN);

	p = &m->packet;
	__builtin_memset(&p->tuple, 0, sizeof(p->tuple));
	p->flags = 0;
	p->l3_off = l3_off;
	ret = parse(skb, p);
	if (unlikely(ret != PARSE_OK))
		return pass(ret == PARSE_OTHER ? PASS_OTHER : PASS_MALFORMED);
	/* The filter compares ports. */
	if (unlikely(p->flags & PACKET_NO_L4) && fragment_follow(p))
		return pass(PASS_FRAGMENT);
	if (!may_be_ours(p, hook))
		return pass(PASS_OTHER);
	/* Without a flow for egress, only a first packet may need another source port. */
	if (hook == FROM_STACK && !(p->flags & PACKET_ICMP_ERROR) && !packet_begins(p) &&
	    !feature_seen(FEATURE_STACK_FLOW | FEATURE_NODE_HELPER))
		return pass(PASS_OTHER);
	m->hook = hook;
	bpf_tail_call_static(skb, &tail_calls, TAIL_CALL_HANDLE);
	return drop(DROP_MISSED_TAIL_CALL);
}

/* Handles a packet that an entry program has parsed. */
static __always_inline int handle_parsed(struct __sk_buff *skb)
{
	struct scratch *m = get_scratch();
	struct settings *s = get_settings();
	int ret;

	if (!m || !s)
		return NEXT;
	if (unlikely(m->packet.flags & PACKET_ICMP_ERROR))
		return relay_error(skb, m->hook);
	if (dsr && m->hook == FROM_NETWORK) {
		ret = dsr_unwrap(skb, m);
		if (ret != GO_ON)
			return ret;
	}
	m->packet.time = now();
	ret = handle_packet(skb, m, s, m->hook);
	if (unlikely(ret == DROP))
		return drop_reported(s, 0, m->drop, REPORT_FLOW);
	return ret;
}

#endif
