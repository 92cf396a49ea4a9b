/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Rewrites a packet as its flow entry says, and sends it to its next hop. */
#ifndef SPILLWAY_NAT_FORWARD_H
#define SPILLWAY_NAT_FORWARD_H

#include "../dsr/send.h"
#include "../flow/table.h"
#include "../hook.h"
#include "../parse/fragment.h"
#include "rewrite.h"
#include "redirect.h"

/*
 * Answers a packet whose next hop is unusable, or returns DROP: a report needs more stack than
 * there is here.
 */
__noinline int refuse(struct __sk_buff *skb, struct scratch *m)
{
	struct settings *s = get_settings();
	struct flow *f;

	if (!m || !s)
		return TC_ACT_SHOT;
	f = &m->pair.flow;
	if (m->next_hop.kind == NEXT_HOP_TOO_BIG)
		return answer_too_big(skb, &m->packet, &m->answer, m->next_hop.mtu);
	/* The answer comes from a Service's address, but from a hop on the way to the outside. */
	if (m->next_hop.kind == NEXT_HOP_TTL_EXCEEDED && f->service == SERVICE_EGRESS &&
	    !(f->flags & FLOW_REPLY))
		return pass(PASS_OTHER);
	if (m->next_hop.kind == NEXT_HOP_TTL_EXCEEDED)
		return answer_ttl(skb, &m->packet, &m->answer, s);
	return drop_for(m, DROP_NO_ROUTE);
}

/*
 * Makes a flow that has bypassed netfilter traverse it from now on, if it must: a policy may select
 * the pod since, or another pod may have its address. Returns 1 if it must. Replies go on bypassing
 * netfilter until the client sends a packet: netfilter would take the first reply for a new
 * connection of the pod. A pod of another node traverses netfilter there (needs_stack), also if a
 * false EndpointSlice says that it is here.
 */
static __always_inline int flow_make_traverse(struct flow *f, struct flow *entry,
					      const struct packet *p)
{
	struct tuple reverse_key;
	struct backend *b;
	struct flow *reverse;
	__u32 id;

	if (!entry || (f->flags & (FLOW_REPLY | FLOW_SNAT | FLOW_TO_POD)) != FLOW_TO_POD ||
	    !pod_traverses_netfilter(&f->daddr, p->tuple.family))
		return 0;
	id = entry->backend;
	b = bpf_map_lookup_elem(&backends, &id);
	if (b && b->flags & BACKEND_ALLOWS_ANY)
		return 0;
	flow_reverse_key(&reverse_key, f, &p->tuple);
	reverse = bpf_map_lookup_elem(&flows, &reverse_key);
	if (!reverse || !flow_is_reverse(reverse, &p->tuple))
		return 0;
	entry->flags |= FLOW_STACK;
	reverse->flags |= FLOW_STACK;
	feature_mark(FEATURE_STACK_FLOW);
	return 1;
}

/*
 * Is the flow's last next hop valid for this packet? Once a second the programs look it up
 * again, and that packet uses the kernel's neighbor table. So the kernel learns that the
 * neighbor is in use.
 */
static __always_inline int flow_next_hop_fresh(const struct __sk_buff *skb, const struct packet *p,
					       const struct flow *f)
{
	return f->next_hop_seen == p->time && !(p->flags & PACKET_SYN) &&
	       (f->next_hop_kind == NEXT_HOP_POD ||
		(p->ttl > 1 && packet_size(skb, p) <= f->next_hop_mtu));
}

/*
 * Is this an answer to a pod of this node whose address another pod, at this device, has by now?
 * The other entry has the device of the pod that asked.
 */
static __always_inline bool pod_replaced(struct scratch *m, __u32 device)
{
	struct flow_pair *pair = &m->pair;
	struct flow *f = &pair->flow, *asked;

	if (!(f->flags & FLOW_REPLY))
		return false;
	flow_reverse_key(&pair->reverse_key, f, &m->packet.tuple);
	asked = bpf_map_lookup_elem(&flows, &pair->reverse_key);
	return asked && asked->in_ifindex && asked->in_ifindex != device;
}

/* Finds the next hop of a flow's packets. Returns GO_ON, or DROP. */
static __noinline int flow_next_hop(struct __sk_buff *skb, struct scratch *m, struct flow *entry)
{
	struct flow *f = &m->pair.flow;
	struct packet *p = &m->packet;
	struct next_hop *hop = &m->next_hop;

	if (flow_make_traverse(f, entry, p)) {
		next_hop_stack(hop);
		return GO_ON;
	}
	if (!(f->flags & FLOW_TO_POD) || !next_hop_pod(&f->daddr, p->tuple.family, hop))
		next_hop_route(skb, p, &f->saddr, &f->daddr, hop);
	else if (pod_replaced(m, hop->ifindex))
		return DROP;
	if (dsr_remote(f))
		dsr_choose_encapsulation(skb, m);
	if (entry)
		flow_keep_next_hop(entry, p, hop);
	return GO_ON;
}

/*
 * Addresses the frame of a pod's translated packet to the node, whose stack must route it. A
 * connected socket sends to the endpoint that it had first. If that is on the same bridge, the
 * frame has its address, and the bridge would forward it to that pod.
 */
static __noinline int frame_for_node(struct __sk_buff *skb, const struct packet *p)
{
	struct pod *pod;

	pod = pod_lookup(&p->tuple.saddr, p->tuple.family);
	if (!pod || !(pod->flags & POD_REACHABLE))
		return 0;
	return bpf_skb_store_bytes(skb, offsetof(struct ethhdr, h_dest), pod->gateway_mac, ETH_ALEN,
				   0);
}

/*
 * Rewrites a packet as pair->flow says, and forwards it. entry is the flow's entry in the
 * map, or NULL for a new flow.
 */
static __always_inline int flow_forward(struct __sk_buff *skb, struct scratch *m, enum hook hook,
					struct flow *entry)
{
	struct flow *f = &m->pair.flow;
	struct packet *p = &m->packet;
	struct next_hop *hop = &m->next_hop;

	/* That of a translated packet is remembered: dsr_follow. */
	if (unlikely(p->flags & PACKET_FIRST_FRAGMENT) && !(p->flags & PACKET_TRANSLATED))
		fragment_remember(p);
	if (hook == FROM_STACK) {
		if (nat_rewrite_by_helpers(skb, p, f, 0))
			return drop(DROP_REWRITE);
		return pass(TRANSLATED_FROM_STACK);
	}
	if (f->flags & FLOW_STACK) {
		next_hop_stack(hop);
	} else if (likely(flow_next_hop_fresh(skb, p, f)) &&
		   !(dsr_remote(f) && (!entry || dsr_udp_is_new(entry, p)))) {
		if (nat_rewrite(skb, p, f, f->next_hop_kind == NEXT_HOP_LINK))
			return drop(DROP_REWRITE);
		return redirect_frame(skb, p, f->next_hop_kind, f->next_hop_ifindex,
				      f->next_hop_macs, TRANSLATED_DIRECT);
	} else if (!(p->flags & PACKET_ROUTED) && flow_next_hop(skb, m, entry) == DROP) {
		return drop(DROP_POD_REPLACED);
	}
	if (next_hop_unusable(hop))
		return refuse(skb, m);
	if (nat_rewrite(skb, p, f, hop->kind == NEXT_HOP_NEIGH) ||
	    (hop->kind == NEXT_HOP_STACK && hook == FROM_POD && frame_for_node(skb, p)))
		return drop(DROP_REWRITE);
	if (dsr_remote(f) && dsr_name_service(skb, m, entry) == DROP)
		return drop(m->drop);
	return redirect_packet(skb, p, hop, TRANSLATED_DIRECT);
}

#endif
