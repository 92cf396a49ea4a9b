/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Creates a flow: reserves the tuple of its replies, and thereby its source port, and
 * stores both entries. The source port is the client's, unless another flow, a socket of
 * this node or netfilter uses the reply tuple.
 */
#ifndef SPILLWAY_FLOW_CREATE_H
#define SPILLWAY_FLOW_CREATE_H

#include "table.h"

/* Source ports to try before the packet is dropped: 0.04 % fail if 97 of 100 are in use. */
#define PORT_TRIES 256

/* The same for each further source address: a pod without ports must not cost much time. */
#define PORT_TRIES_AGAIN 64

/*
 * Tries of the one port that a flow may have: another CPU may take the tuple while it is replaced.
 */
#define EXACT_TRIES 3

/* Ports to try before the best flow that has one of them is replaced. */
#define REPLACE_TRIES 16

/* The maximum of newer_flows_min. */
#define NEWER_FLOWS_MAX 64

/* With fewer ports than this, one client may use all of them. */
#define PORTS_SHARED 256

/*
 * May the client use this port of the list? A client may use three quarters of the ports,
 * by its hash. A network of IPv6 may use seven eighths of those, by its hash. So no client
 * can take all ports of the others.
 */
static __always_inline int port_allowed(const struct tuple *key, __u32 index)
{
	if (!(mix(addr_hash(&key->saddr), index) & 3))
		return 0;
	return key->family == FAMILY_V4 || mix(client_network_hash(&key->saddr), index) & 7;
}

/*
 * Returns a random port of a list, or 0 for a port that the client may not use. The lists
 * have no port in common. Packets that keep their address may arrive from the same address
 * on a port that another node or the client's socket chose, towards the same endpoint, and
 * this node has no entry for them.
 */
static __always_inline __be16 random_port(const struct settings *s, const struct tuple *key,
					  enum port_list list, bool snat)
{
	__u32 first = 0, n = s->snat_ports, index;
	__u16 *port;

	if (list == PORTS_NETWORK && s->network_ports) {
		first = s->snat_ports;
		n = s->network_ports;
	}
	index = first + (n ? bpf_get_prandom_u32() % n : 0);
	if (snat && n >= PORTS_SHARED && !port_allowed(key, index))
		return 0;
	port = bpf_map_lookup_elem(&snat_ports, &index);
	return port ? bpf_htons(*port) : 0;
}

/* Deletes an entry if it is that of the flow with this slot. */
static __always_inline void flow_delete_entry(const struct tuple *key, __u32 slot)
{
	struct flow *f = bpf_map_lookup_elem(&flows, key);

	if (f && f->slot == slot)
		bpf_map_delete_elem(&flows, key);
}

/*
 * Does a socket of this node own the tuple of the endpoint's replies? No helper finds those of
 * ICMP: their next request gets another identifier (serve/from_stack.h).
 */
static __always_inline int socket_owns(struct __sk_buff *skb, const struct tuple *reply)
{
	struct bpf_sock_tuple t = {};
	struct bpf_sock *sk;
	__u32 len;

	if (is_icmp(reply->proto))
		return 0;
	len = sock_tuple(&t, reply);
	if (reply->proto == IPPROTO_TCP)
		sk = bpf_skc_lookup_tcp(skb, &t, len, BPF_F_CURRENT_NETNS, 0);
	else
		sk = bpf_sk_lookup_udp(skb, &t, len, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return 0;
	bpf_sk_release(sk);
	return 1;
}

/*
 * Can a new connection use a closed TCP connection's port at once? After FINs it can if the
 * endpoint has no state of the old one, or accepts the new SYN in TIME-WAIT. After an RST
 * the same client can. Another client waits for a second, until no packet is in flight: it
 * would get data that the endpoint has sent to the old one.
 */
static __always_inline int port_reusable(const struct flow *f, const struct tuple *key, __u32 time,
					 __u32 seq)
{
	if (f->flags & FLOW_RESET ? addr_equal(&f->daddr, &key->saddr)
				  : f->end == END_CLIENT_FIRST || seq_before(f->tcp.ack, seq))
		return 1;
	return (__s32)(time - f->seen) >= 2;
}

/*
 * Returns how many newer flows there must be before an unconfirmed one is replaced. A newer
 * one may be in the middle of its handshake: the new client had better repeat its SYN. In a
 * flood there are soon more.
 */
static __always_inline __u32 newer_flows_min(const struct settings *s)
{
	__u32 part = s->snat_ports / 16;

	return part < NEWER_FLOWS_MAX ? part : NEWER_FLOWS_MAX;
}

/* Ranks of flow_replace_rank above every age. */
#define RANK_CLOSED 0xfffffffe
#define RANK_REUSABLE 0xffffffff

/*
 * Ranks the flow of a reply entry for replacement when ports are short. 0: it must stay.
 *
 *   1. Closed connections, the reusable ones first. At worst the new client repeats its SYN
 *      (RFC 5961, 4.2), while a replaced handshake fails. If ports waited for a timeout,
 *      short connections to one endpoint would have a ceiling: ports / timeout. After an RST
 *      a port stays with its client for a second.
 *   2. The oldest unconfirmed flow, unless too few are newer, also after an RST: a handshake,
 *      or a request and its reply, takes a moment.
 *   3. UDP flows that continued after the reply, when they are idle (RFC 4787, REQ-5).
 *
 * An answered TFTP request needs its port only for a repetition of the request.
 */
static __always_inline __u32 flow_replace_rank(const struct flow *f, const struct tuple *key,
					       __u32 time, __u32 seq, const struct settings *s)
{
	__u32 age;

	if (f->slot == SLOT_NONE)
		return 0;
	if (f->state == FLOW_CLOSED && !tcp_was_opening(f)) {
		if (port_reusable(f, key, time, seq))
			return RANK_REUSABLE;
		return f->flags & FLOW_RESET ? 0 : RANK_CLOSED;
	}
	if (flow_confirmed(f) || flow_streams(f, time))
		return 0;
	if (f->helper == HELPER_REQUEST &&
	    !(f->progress == REQUEST_ANSWERED && (__s32)(time - f->seen) >= TFTP_IDLE_SECONDS))
		return 0;
	if (f->helper >= HELPER_DATA || f->flags & FLOW_STREAM)
		return 1;
	age = unconfirmed_age(f->slot);
	if (age < newer_flows_min(s))
		return 0;
	return age > 1 ? age : 1;
}

/*
 * Replaces the flow that has the reply tuple, with both its entries: its packets must not
 * join the connection that gets the tuple. Returns 0 if the tuple is ours.
 */
static __always_inline int reply_replace(struct flow_pair *pair, __u32 slot)
{
	pair->other_key = pair->reply_key;
	if (flow_delete(&pair->other_key, slot, &pair->reverse_key))
		return -1;
	/* Another CPU may have stored a flow there since. */
	return bpf_map_update_elem(&flows, &pair->reply_key, &pair->reply, BPF_NOEXIST);
}

/*
 * Reserves pair's reply tuple. Succeeds if no live flow has it, or if this flow has it: its
 * forward entry was evicted, or a SYN reopens the connection. Returns 0 if it is ours.
 */
static __always_inline int reply_reserve(struct flow_pair *pair, const struct tuple *key,
					 const struct settings *s)
{
	struct tuple *reply_key = &pair->reply_key;
	struct flow *owner, *reply = &pair->reply;
	__u32 rank;

	if (!bpf_map_update_elem(&flows, reply_key, reply, BPF_NOEXIST))
		return 0;
	owner = bpf_map_lookup_elem(&flows, reply_key);
	if (!owner)
		return -1;
	if (dsr_just_begun(owner, reply))
		return -1;
	if (flow_is_reverse(owner, key) || flow_dead(owner, reply_key->proto, s, reply->seen))
		return reply_replace(pair, owner->slot);
	rank = flow_replace_rank(owner, key, reply->seen, pair->seq, s);
	if (pair->source == SOURCE_PORT_EXACT && rank == RANK_REUSABLE)
		return reply_replace(pair, owner->slot);
	if (rank > pair->replace_rank) {
		pair->replace_rank = rank;
		pair->replace_slot = owner->slot;
		pair->replace_port = reply_key->dport;
	}
	return -1;
}

/*
 * Releases the reply tuple that a Service's flow has left behind, for a packet to the
 * endpoint's own address: its reply must not be translated. A UDP flow has no end, so the
 * last sender gets the reply. If the flow was not over, its next packet creates it again.
 */
static __always_inline void flow_release_reply_tuple(const struct tuple *t, struct flow_pair *pair,
						     bool any_port)
{
	struct tuple *reply_key = &pair->reply_key;
	struct flow *f;

	tuple_mirror(reply_key, t);
	if (any_port)
		reply_key->sport = 0;
	f = bpf_map_lookup_elem(&flows, reply_key);
	if (f && f->flags & FLOW_REPLY && flow_may_be_over(f, t->proto))
		flow_delete(reply_key, f->slot, &pair->reverse_key);
}

/* May a random port be the source port of the new flow? */
static __always_inline int port_usable(struct __sk_buff *skb, struct flow_pair *pair, __u8 proto)
{
	if (!pair->reply_key.dport)
		return 0;
	if (pair->flow.flags & FLOW_SNAT && socket_owns(skb, &pair->reply_key))
		return 0;
	return !(pair->flow.helper == HELPER_NODE && proto == IPPROTO_UDP &&
		 feature_seen(FEATURE_HELPER) && request_at(&pair->reply_key, &pair->other_key));
}

/*
 * Tries one reply tuple: the client's port for attempt 0, then random ports or the port of
 * a flow that may be replaced. A global function: the verifier checks it once, and not once
 * for each iteration of the caller's loop. Returns 0 if the tuple is ours.
 */
__noinline int reply_try(struct __sk_buff *skb, struct tuple *key, struct settings *s, int attempt)
{
	struct flow_pair *pair = get_flow_pair();
	struct flow *old;

	if (!pair || !key || !s)
		return -1;
	if (attempt >= REPLACE_TRIES && pair->replace_port) {
		pair->reply_key.dport = pair->replace_port;
		pair->replace_port = 0;
		pair->replace_rank = 0;
		/* A segment may have undone an RST, or a client may have confirmed its flow. */
		old = bpf_map_lookup_elem(&flows, &pair->reply_key);
		if (!old || !flow_replace_rank(old, key, pair->reply.seen, pair->seq, s) ||
		    reply_replace(pair, pair->replace_slot))
			return -1;
		count(FLOW_REPLACED);
		return 0;
	}
	if (attempt) {
		pair->reply_key.dport = random_port(s, key, pair->ports,
						    pair->flow.flags & FLOW_SNAT);
		if (!port_usable(skb, pair, key->proto))
			return -1;
	}
	return reply_reserve(pair, key, s) ? -1 : 0;
}

/*
 * Releases a reserved reply tuple if it is the reply direction of a conntrack entry: that
 * client speaks to the endpoint itself, and would get replies from the Service. Not a part
 * of reply_try, and without a call of conntrack_sees_as_reply: before Linux 6.12 the frames
 * of all active calls share 512 bytes.
 *
 * With SOURCE_PORT_EXACT, the stack sees the flow's packets with the same tuple. The entry may be
 * that of an earlier flow: a new SYN renews it if it has ended, and a datagram in any case.
 */
__noinline int reply_release_contested(struct __sk_buff *skb)
{
	struct flow_pair *pair = get_flow_pair();
	struct tracked found = {};

	if (!pair || !has_ct_lookup)
		return 0;
	if (conntrack_find(skb, &pair->reply_key, &found) != IP_CT_DIR_REPLY)
		return 0;
	if (pair->source == SOURCE_PORT_EXACT && !(found.status & IPS_DST_NAT) &&
	    (pair->reply_key.proto != IPPROTO_TCP || tracked_ended(&found)))
		return 0;
	bpf_map_delete_elem(&flows, &pair->reply_key);
	return 1;
}

/* Tries reply tuples until one is ours, at most tries of them. Returns -1 if none is. */
static __always_inline int reply_try_many(struct __sk_buff *skb, struct tuple *key,
					  struct settings *s, enum source_port source, int tries)
{
	int first = source == SOURCE_PORT_RANDOM ? 1 : 0;

	for (int i = 0; i < tries; i++) {
		if (!reply_try(skb, key, s, source == SOURCE_PORT_EXACT ? 0 : first + i) &&
		    !reply_release_contested(skb))
			return 0;
		if (source == SOURCE_PORT_EXACT && i + 1 == EXACT_TRIES)
			break;
	}
	return -1;
}

__noinline int reply_search(struct __sk_buff *skb, struct tuple *key, struct settings *s,
			    enum source_port source)
{
	return reply_try_many(skb, key, s, source, PORT_TRIES);
}

/* reply_search of a flow that has found none with another address. */
__noinline int reply_search_again(struct __sk_buff *skb, struct tuple *key, struct settings *s,
				  enum source_port source)
{
	return reply_try_many(skb, key, s, source, PORT_TRIES_AGAIN);
}

/*
 * Keeps the reply entry, and returns whether it is still this flow's. Another CPU may have replaced
 * the flow when only one of its entries was stored. The kernel may have evicted the entry to store
 * the other one: then it is stored again. The lookup protects it, like flow_protect.
 */
static __always_inline int reply_keep(struct flow_pair *pair)
{
	struct flow *reply = bpf_map_lookup_elem(&flows, &pair->reply_key);

	if (reply)
		return reply->slot == pair->flow.slot;
	return !bpf_map_update_elem(&flows, &pair->reply_key, &pair->reply, BPF_NOEXIST);
}

/*
 * Stores the forward entry of the flow in scratch memory. Returns 0, or -1 if another flow has the
 * key.
 */
__noinline int flow_store(const struct tuple *key)
{
	struct flow_pair *pair = get_flow_pair();
	struct flow *other;

	if (!pair || !key)
		return -1;
	pair->other_key = *key;
	if (!bpf_map_update_elem(&flows, &pair->other_key, &pair->flow, BPF_NOEXIST))
		return 0;
	other = bpf_map_lookup_elem(&flows, &pair->other_key);
	if (!dsr || !other || !dsr_gives_way(other, &pair->flow))
		return -1;
	flow_delete(&pair->other_key, other->slot, &pair->reverse_key);
	return bpf_map_update_elem(&flows, &pair->other_key, &pair->flow, BPF_NOEXIST) ? -1 : 0;
}

/* Gives pair.flow its slot among the unconfirmed flows. remote: dsr_remote. */
static __always_inline void flow_admit(struct scratch *m, bool remote)
{
	struct flow *f = &m->pair.flow;

	f->slot = unconfirmed_admit(&m->packet.tuple, f->seen, remote);
}

/* flow_create of a flow that has its slot. again: it found no port with another address. */
static __always_inline enum step flow_reserve(struct __sk_buff *skb, struct scratch *m,
					      struct settings *s, bool again)
{
	struct tuple *key = &m->packet.tuple;
	struct flow_pair *pair = &m->pair;
	struct flow *f = &pair->flow, *other;

	flow_make_reverse(&pair->reply, f, key);
	flow_reverse_key(&pair->reply_key, f, key);
	pair->replace_port = 0;
	pair->replace_rank = 0;
	if (again ? reply_search_again(skb, key, s, pair->source)
		  : reply_search(skb, key, s, pair->source))
		return drop_for(m, DROP_SNAT_PORTS);
	f->sport = pair->reply_key.dport;
	if (!flow_store(key)) {
		flow_protect(key);
		if (!reply_keep(pair)) {
			flow_delete_entry(key, f->slot);
			return drop_for(m, DROP_SNAT_PORTS);
		}
		count(FLOW_CREATED);
		if (f->flags & FLOW_STACK)
			feature_mark(FEATURE_STACK_FLOW);
		if (f->flags & FLOW_SNAT)
			feature_mark(FEATURE_SNAT);
		return GO_ON;
	}
	/* Another CPU has stored the flow of the same first packet. That flow counts. */
	flow_delete_entry(&pair->reply_key, f->slot);
	other = bpf_map_lookup_elem(&flows, key);
	if (!other)
		return drop_for(m, DROP_FLOW_TABLE);
	*f = *other;
	m->packet.flags &= ~PACKET_ROUTED;
	return GO_ON;
}

/*
 * Stores pair.flow under the tuple of the packet. Its sport is the client's, and changes if
 * pair.source is SOURCE_PORT_RANDOM or another flow to the endpoint has it. Returns DROP, or GO_ON,
 * and pair.flow is then the entry in the map. remote: dsr_remote.
 */
static __always_inline enum step flow_create(struct __sk_buff *skb, struct scratch *m, bool remote,
					     struct settings *s)
{
	flow_admit(m, remote);
	return flow_reserve(skb, m, s, false);
}

#endif
