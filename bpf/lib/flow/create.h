/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Which tuple the answers of a new flow have, and so from which port its packets go:
 * the client's, unless another flow, a socket of this node or netfilter has that one.
 */
#ifndef SPILLWAY_REPLY_H
#define SPILLWAY_REPLY_H

#include "table.h"

/* Source ports tried before a packet is given up: with 97 of 100 taken, 0.04 %. */
#define PORT_TRIES 256

/* Ports that are tried before a flow has to make room: the best one of those met. */
#define VICTIM_TRIES 16

/* With fewer ports than this, one client may use them all. */
#define PORTS_SHARED 256

/*
 * May the client use this port of the list? Three quarters of all, by its hash, and of
 * those of IPv6 seven eighths, by its network's, so that none can take those of the others.
 */
static __always_inline int port_allowed(const struct tuple *key, __u32 index)
{
	if (!(mix(source_hash(&key->saddr), index) & 3))
		return 0;
	return key->family == FAMILY_V4 || mix(network_hash(&key->saddr), index) & 7;
}

/*
 * A random port of a list; 0 is one that the client may not use. The lists have no port in
 * common: where an address is kept, the same address may come by a port of another node's
 * choice, or of its own socket, to the same endpoint, and nothing here knows of it.
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

/* Does a socket of this node own the tuple that an endpoint's answer would have? */
static __always_inline int socket_owns(struct __sk_buff *skb, const struct tuple *answer)
{
	struct bpf_sock_tuple t = {};
	struct bpf_sock *sk;
	__u32 len;

	len = sock_tuple(&t, answer);
	if (answer->proto == IPPROTO_TCP)
		sk = bpf_skc_lookup_tcp(skb, &t, len, BPF_F_CURRENT_NETNS, 0);
	else
		sk = bpf_sk_lookup_udp(skb, &t, len, BPF_F_CURRENT_NETNS, 0);
	if (!sk)
		return 0;
	bpf_sk_release(sk);
	return 1;
}

/*
 * Can a closed TCP connection's port serve a new connection at once? Yes if the endpoint
 * has forgotten the old one, or takes the SYN of the new one in TIME-WAIT. An RST counts
 * only if the endpoint sent it or accepts it. After a second no packet is in flight.
 */
static __always_inline int port_reusable(const struct flow *f, __u32 time, __u32 seq)
{
	if (f->flags & FLOW_RESET || f->end == END_CLIENT_FIRST || seq_before(f->tcp.ack, seq))
		return 1;
	return (__s32)(time - f->seen) >= 2;
}

/* Values of flow_victim_rank above every age. */
#define VICTIM_CLOSED 0xfffffffe
#define VICTIM_REUSABLE 0xffffffff

/*
 * How well may the flow of a reply entry be replaced where ports are short? 0: not at
 * all. Best is a closed connection, rested if there is one: at worst the new client repeats
 * its SYN (RFC 5961, 4.2), while a handshake that is replaced fails. If the ports had to wait
 * for a timeout, short connections to one endpoint would have a ceiling: ports / timeout.
 * Then comes the oldest of the unconfirmed ones, among them those that an RST ended: a
 * handshake, or a question and its answer, takes a moment. What has gone on by UDP
 * keeps its port (RFC 4787, REQ-5) until it rests and there is nothing else. A TFTP
 * request that has been answered needs it only to be asked again.
 */
static __always_inline __u32 flow_victim_rank(const struct flow *f, __u8 proto, __u32 time, __u32 seq)
{
	__u32 age;

	if (f->slot == SLOT_CLAIMED)
		return 0;
	if (f->state == FLOW_CLOSED && !tcp_was_opening(f))
		return port_reusable(f, time, seq) ? VICTIM_REUSABLE : VICTIM_CLOSED;
	if (flow_confirmed(f) || flow_streams(f, time))
		return 0;
	if (f->helper == HELPER_REQUEST &&
	    !(f->progress == REQUEST_ANSWERED && (__s32)(time - f->seen) >= HELPER_IDLE_SECONDS))
		return 0;
	if (f->helper >= HELPER_DATA || f->flags & FLOW_STREAM)
		return 1;
	age = unconfirmed_age(f->slot);
	return age > 1 ? age : 1;
}

/*
 * Takes the reply tuple from the flow that has it, whose packets must not take part in
 * a connection that has the tuple now. 0: it is ours.
 */
static __always_inline int reply_replace(struct flow_pair *pair, __u32 slot)
{
	pair->holder_key = pair->reply_key;
	if (flow_delete(&pair->holder_key, slot, &pair->reverse_key))
		return -1;
	/* Another CPU may have been faster. */
	return bpf_map_update_elem(&flows, &pair->reply_key, &pair->reply, BPF_NOEXIST);
}

/*
 * Takes pair's reply tuple if no live flow has it, or if it is this flow's own: its
 * forward half was evicted, or a SYN reopens the connection. 0: it is ours.
 */
static __always_inline int reply_claim(struct flow_pair *pair, const struct tuple *key,
				       const struct settings *s)
{
	struct tuple *reply_key = &pair->reply_key;
	struct flow *holder, *reply = &pair->reply;
	__u32 spare;

	if (!bpf_map_update_elem(&flows, reply_key, reply, BPF_NOEXIST))
		return 0;
	holder = bpf_map_lookup_elem(&flows, reply_key);
	if (!holder)
		return -1;
	if (flow_is_reverse(holder, key) || flow_dead(holder, reply_key->proto, s, reply->seen))
		return reply_replace(pair, holder->slot);
	spare = flow_victim_rank(holder, reply_key->proto, reply->seen, pair->seq);
	if (spare > pair->victim_rank) {
		pair->victim_rank = spare;
		pair->victim_slot = holder->slot;
		pair->victim_port = reply_key->dport;
	}
	return -1;
}

/*
 * A packet to an endpoint itself, not to a Service: the answer must not be taken
 * for that of a Service's flow which has left its tuple behind. A flow of
 * datagrams does not say when it ends: who asked last gets the answer, and if the
 * flow was not over, its next packet makes it again.
 */
static __always_inline void flow_release_reply_tuple(const struct tuple *direct, struct flow_pair *pair,
					   bool any_port)
{
	struct tuple *reply_key = &pair->reply_key;
	struct flow *f;

	tuple_mirror(reply_key, direct);
	if (any_port)
		reply_key->sport = 0;
	f = bpf_map_lookup_elem(&flows, reply_key);
	if (f && f->flags & FLOW_REPLY && flow_may_be_over(f, direct->proto))
		flow_delete(reply_key, f->slot, &pair->reverse_key);
}

/* May a random port be the source of the flow to be made? */
static __always_inline int port_usable(struct __sk_buff *skb, struct flow_pair *pair, __u8 proto)
{
	if (!pair->reply_key.dport)
		return 0;
	if (pair->flow.flags & FLOW_SNAT && socket_owns(skb, &pair->reply_key))
		return 0;
	return !(pair->flow.helper == HELPER_NODE && proto == IPPROTO_UDP && feature_seen(FEATURE_HELPER) &&
		 request_at(&pair->reply_key, &pair->holder_key));
}

/*
 * One try at a reply tuple: attempt 0 is by the client's port, the others by random
 * ones, or by that of a flow that may be replaced. Not static: the verifier looks at it
 * once, not once for each turn of the loop around it. 0: it is ours.
 */
__noinline int reply_try(struct __sk_buff *skb, struct tuple *key, struct settings *s, int attempt)
{
	struct flow_pair *pair = get_flow_pair();

	if (!pair || !key || !s)
		return -1;
	if (attempt >= VICTIM_TRIES && pair->victim_port) {
		pair->reply_key.dport = pair->victim_port;
		pair->victim_port = 0;
		pair->victim_rank = 0;
		if (reply_replace(pair, pair->victim_slot))
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
	return reply_claim(pair, key, s) ? -1 : 0;
}

/*
 * Would netfilter take the answers with a reply tuple that is ours for those of a
 * connection of its own? Then it is given back: a client that speaks to the endpoint
 * itself would get them as the Service's. Not a part of reply_try: before Linux 6.12
 * the frames of all calls under way share 512 bytes.
 */
__noinline int reply_contested(struct __sk_buff *skb)
{
	struct flow_pair *pair = get_flow_pair();
	unsigned long status = 0;

	if (!pair || !has_ct_lookup)
		return 0;
	if (conntrack_find(skb, &pair->reply_key, &status) != IP_CT_DIR_REPLY)
		return 0;
	bpf_map_delete_elem(&flows, &pair->reply_key);
	return 1;
}

/* The source port that a new flow gets towards its endpoint. */
enum source_port {
	SOURCE_PORT_KEEP, /* the client's, unless another flow to the endpoint has it */
	SOURCE_PORT_RANDOM,
};

/* Tries until a reply tuple is ours; -1 if none seems to be free. */
__noinline int reply_search(struct __sk_buff *skb, struct tuple *key, struct settings *s,
			    enum source_port source)
{
	int first = source == SOURCE_PORT_RANDOM ? 1 : 0;

	for (int i = 0; i < PORT_TRIES; i++) {
		if (!reply_try(skb, key, s, first + i) && !reply_contested(skb))
			return 0;
	}
	return -1;
}

/*
 * Stores the flow pair->flow, whose packets have the key; its sport is still the
 * client's. It stays unless another flow to the same endpoint has it, or with
 * new_port: then it is random among the free ones. On success pair->flow is what the
 * table holds.
 */
static __always_inline enum verdict flow_create(struct __sk_buff *skb, struct tuple *key,
						struct flow_pair *pair, enum source_port source,
						struct settings *s)
{
	struct flow *f = &pair->flow, *other;

	f->slot = unconfirmed_admit(key, &pair->holder_key, &pair->reverse_key, f->seen);
	flow_make_reverse(&pair->reply, f, key);
	flow_reverse_key(&pair->reply_key, f, key);
	pair->victim_port = 0;
	pair->victim_rank = 0;
	if (reply_search(skb, key, s, source))
		return DROP_SNAT_PORTS;
	f->sport = pair->reply_key.dport;
	/* At once: room for the other entry could be made at the cost of this one. */
	flow_protect(&pair->reply_key);
	if (!bpf_map_update_elem(&flows, key, f, BPF_NOEXIST)) {
		flow_protect(key);
		/* Another CPU may have replaced the flow when it had but one entry. */
		other = bpf_map_lookup_elem(&flows, &pair->reply_key);
		if (!other || other->slot != f->slot) {
			bpf_map_delete_elem(&flows, key);
			return DROP_SNAT_PORTS;
		}
		count(FLOW_CREATED);
		if (f->flags & FLOW_STACK)
			feature_mark(FEATURE_STACK_FLOW);
		if (f->flags & FLOW_SNAT)
			feature_mark(FEATURE_SNAT);
		return FLOW_CREATED;
	}
	/* Another CPU was faster with the same first packet: its flow is the one. */
	bpf_map_delete_elem(&flows, &pair->reply_key);
	other = bpf_map_lookup_elem(&flows, key);
	if (!other)
		return DROP_FLOW_TABLE;
	*f = *other;
	return FLOW_CREATED;
}

#endif
