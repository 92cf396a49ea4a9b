/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Rewrites a packet as its flow entry says, and sends it to its next hop. */
#ifndef SPILLWAY_NAT_FORWARD_H
#define SPILLWAY_NAT_FORWARD_H

#include "../answer/answer.h"
#include "../dsr/send.h"
#include "../flow/table.h"
#include "../hook.h"
#include "../parse/fragment.h"
#include "rewrite.h"

static __always_inline int macs_store(struct __sk_buff *skb, const __u8 *macs)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;

	if (data + ETH_ALEN * 2 > end)
		return -1;
	__builtin_memcpy(data, macs, ETH_ALEN * 2);
	return 0;
}

/* Adds an Ethernet header, without addresses, to a packet that came without one. */
static __always_inline int header_add(struct __sk_buff *skb)
{
	__be16 protocol = skb->protocol;

	return bpf_skb_change_head(skb, ETH_HLEN, 0) ||
	       bpf_skb_store_bytes(skb, offsetof(struct ethhdr, h_proto), &protocol,
				   sizeof(protocol), 0);
}

/* Sends a rewritten packet to a pod (NEXT_HOP_POD) or a known neighbor (NEXT_HOP_LINK). */
static __always_inline int redirect_frame(struct __sk_buff *skb, const struct packet *p, __u32 kind,
					  __u32 ifindex, const __u8 *macs, enum verdict verdict)
{
	if ((unlikely(!p->l3_off) && header_add(skb)) || macs_store(skb, macs)) {
		count(DROP_REWRITE);
		return TC_ACT_SHOT;
	}
	count(verdict);
	if (kind == NEXT_HOP_LINK) {
		skb->tc_index = TC_INDEX_DONE;
		return bpf_redirect(ifindex, 0);
	}
	/* On a port of a bridge, the frame was for the bridge and not for the port. */
	if (skb->pkt_type != PACKET_HOST)
		bpf_skb_change_type(skb, PACKET_HOST);
	return bpf_redirect_peer(ifindex, 0);
}

/*
 * Has the device of a NEXT_HOP_NEIGH no link-layer header? bpf_redirect_neigh would send the
 * packet with the header of the device that it came from.
 */
static __always_inline int next_hop_is_l3(const struct next_hop *hop)
{
	__u32 ifindex = hop->ifindex;

	if (hop->neighbor_known)
		return !(hop->macs[0] | hop->macs[1] | hop->macs[2] | hop->macs[3] | hop->macs[4] |
			 hop->macs[5]);
	return bpf_map_lookup_elem(&l3_devices, &ifindex) != NULL;
}

/* Sends a rewritten packet to its next hop. */
static __always_inline int redirect_packet(struct __sk_buff *skb, const struct packet *p,
					   struct next_hop *hop, enum verdict verdict)
{
	if (hop->kind == NEXT_HOP_POD)
		return redirect_frame(skb, p, NEXT_HOP_POD, hop->ifindex, hop->macs, verdict);
	if (hop->kind == NEXT_HOP_NEIGH && next_hop_is_l3(hop))
		return redirect_frame(skb, p, NEXT_HOP_LINK, hop->ifindex, hop->macs, verdict);
	if (hop->kind == NEXT_HOP_NEIGH) {
		/* Linux 6.18 drops a packet without a header here. */
		if (unlikely(!p->l3_off) && header_add(skb)) {
			count(DROP_REWRITE);
			return TC_ACT_SHOT;
		}
		skb->tc_index = TC_INDEX_DONE;
		count(verdict);
		return bpf_redirect_neigh(hop->ifindex, &hop->neigh, sizeof(hop->neigh), 0);
	}
	count(TRANSLATED_STACK);
	return NEXT;
}

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
