/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Which tuple the answers of a new flow have, and so from which port its packets go:
 * the client's, unless another flow, a socket of this node or netfilter has that one.
 */
#ifndef SPILLWAY_REPLY_H
#define SPILLWAY_REPLY_H

#include "flow.h"

/* Source ports tried before a packet is given up: with 97 of 100 taken, 0.04 %. */
#define PORT_TRIES 256

static __always_inline __be16 random_port(const struct settings *s)
{
	__u32 key = s->snat_ports ? bpf_get_prandom_u32() % s->snat_ports : 0;
	__u16 *port = bpf_map_lookup_elem(&snat_ports, &key);

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

/* Attempts at a port before a closed flow has to make room. */
#define YIELD_RESET 16
#define YIELD_CLOSED 32

/*
 * May a closed flow lose its tuple before its time? Else short connections to one
 * endpoint had a ceiling: ports / time-out. At once, if the endpoint has forgotten
 * the tuple or takes the SYN of the new connection in TIME-WAIT; where nobody knows
 * whether the last ACK has come, after a second. A TFTP request that has been
 * answered needs it only to be asked again: the transfer has entries of its own.
 * Datagrams do not say when they end; but a question that has its answer, as DNS
 * has them, is over when nothing follows. What has gone on for longer keeps its
 * port for its whole time (RFC 4787, REQ-5).
 */
static __always_inline int flow_may_yield(const struct flow *f, __u8 proto, __u32 time, int attempt,
					  __u32 seq)
{
	if (f->helper == HELPER_REQUEST)
		return f->end == END_ANSWERED && attempt >= YIELD_RESET &&
		       (__s32)(time - f->seen) >= HELPER_REST;
	if (attempt < YIELD_RESET)
		return 0;
	if (proto == IPPROTO_UDP)
		return f->state == FLOW_ESTABLISHED && f->helper == HELPER_NONE &&
		       !(f->flags & FLOW_STREAM) && (__s32)(time - f->seen) >= ANSWER_REST;
	if (f->state != FLOW_CLOSED)
		return 0;
	if (f->flags & FLOW_RESET || f->end == END_FORGOTTEN)
		return 1;
	if (attempt < YIELD_CLOSED)
		return 0;
	if (f->end == END_TIME_WAIT && (__s32)(seq - f->way_ifindex) > 0)
		return 1;
	return (__s32)(time - f->seen) >= 1;
}

/*
 * Lets the flow whose reply entry is deleted look for it: its own packets must not
 * take part in a connection that now has the tuple. Of an entry that was not seen
 * in this second the next packet does.
 */
static __always_inline void flow_alert_twin(const struct flow *f, const struct tuple *key,
					    struct tuple *twin_key)
{
	struct flow *twin;

	flow_twin_key(twin_key, f, key);
	twin = bpf_map_lookup_elem(&flows, twin_key);
	if (twin && flow_is_twin(twin, key))
		twin->seen--;
}

/*
 * Takes pair's reply tuple if nobody alive has it, or if it is this flow's own: its
 * forward half was evicted, or a SYN reopens the connection. 0: it is ours.
 */
static __always_inline int reply_claim(struct flow_pair *pair, const struct tuple *key,
				       const struct settings *s, int attempt)
{
	struct tuple *reply_key = &pair->reply_key;
	struct flow *holder, *reply = &pair->reply;

	if (!bpf_map_update_elem(&flows, reply_key, reply, BPF_NOEXIST))
		return 0;
	holder = bpf_map_lookup_elem(&flows, reply_key);
	if (!holder)
		return -1;
	if (flow_is_twin(holder, key))
		return bpf_map_update_elem(&flows, reply_key, reply, BPF_ANY);
	if (!flow_dead(holder, reply_key->proto, s, reply->seen)) {
		if (!flow_may_yield(holder, reply_key->proto, reply->seen, attempt, pair->seq))
			return -1;
		flow_alert_twin(holder, reply_key, &pair->holder_key);
	}
	bpf_map_delete_elem(&flows, reply_key);
	/* Atomic again: of two that find the same corpse only one gets its place. */
	return bpf_map_update_elem(&flows, reply_key, reply, BPF_NOEXIST);
}

/*
 * A packet to an endpoint itself, not to a Service: the answer must not be taken
 * for that of a Service's flow which has left its tuple behind. A flow of
 * datagrams does not say when it ends: who asked last gets the answer, and if the
 * flow was not over, its next packet makes its reply entry again. The two tuples
 * are room for keys.
 */
static __always_inline void flow_make_room(const struct tuple *direct, struct tuple *reply_key,
					   struct tuple *key, int any_port)
{
	struct flow *f;

	tuple_mirror(reply_key, direct);
	if (any_port)
		reply_key->sport = 0;
	f = bpf_map_lookup_elem(&flows, reply_key);
	if (!f || !(f->flags & FLOW_REPLY) || !flow_may_be_over(f, direct->proto))
		return;
	flow_alert_twin(f, reply_key, key);
	bpf_map_delete_elem(&flows, reply_key);
}

/*
 * One try at a reply tuple: attempt 0 is by the client's port, the others by
 * random ones. Not static: the verifier looks at it once, not once for each turn
 * of the loop around it. 0: it is ours.
 */
__noinline int reply_try(struct __sk_buff *skb, struct tuple *key, struct settings *s, int attempt)
{
	struct flow_pair *pair = get_flow_pair();

	if (!pair || !key || !s)
		return -1;
	if (attempt) {
		pair->reply_key.dport = random_port(s);
		if (pair->flow.flags & FLOW_SNAT && socket_owns(skb, &pair->reply_key))
			return -1;
		if (pair->flow.helper == HELPER_NODE && key->proto == IPPROTO_UDP &&
		    been(BEEN_HELPER) && request_at(&pair->reply_key, &pair->holder_key))
			return -1;
	}
	return reply_claim(pair, key, s, attempt) ? -1 : 0;
}

/*
 * Would netfilter take the answers with a reply tuple that is ours for those of a
 * connection of its own? Then it is given back. In the stack nf_nat looks after
 * that itself. Not a part of reply_try: before Linux 6.12 the frames of all calls
 * under way share 512 bytes.
 */
__noinline int reply_contested(struct __sk_buff *skb, struct settings *s)
{
	struct flow_pair *pair = get_flow_pair();
	unsigned long status = 0;

	if (!pair || !s || !has_ct_lookup)
		return 0;
	if (pair->flow.flags & FLOW_STACK && pair->flow.helper != HELPER_NODE)
		return 0;
	if (!(pair->flow.flags & FLOW_SNAT) && !(s->flags & SETTING_ASK_CONNTRACK))
		return 0;
	if (conntrack_find(skb, &pair->reply_key, &status) != IP_CT_DIR_REPLY)
		return 0;
	bpf_map_delete_elem(&flows, &pair->reply_key);
	return 1;
}

/* Tries until a reply tuple is ours; -1 if none seems to be free. */
__noinline int reply_search(struct __sk_buff *skb, struct tuple *key, struct settings *s,
			    int new_port)
{
	int first = new_port ? 1 : 0;

	for (int i = 0; i < PORT_TRIES; i++) {
		if (!reply_try(skb, key, s, first + i) && !reply_contested(skb, s))
			return 0;
	}
	return -1;
}

/*
 * Stores the flow pair->flow, whose packets have the key; its sport is still the
 * client's. It stays unless another flow to the same endpoint has it, or with
 * new_port: then it is random among the free ones. renew: the key's old entry is
 * to be replaced. On success pair->flow is what the table holds.
 */
static __always_inline enum verdict flow_create(struct __sk_buff *skb, struct tuple *key,
						struct flow_pair *pair, int new_port, int renew,
						struct settings *s)
{
	struct flow *f = &pair->flow, *other;
	int keep;

	flow_make_twin(&pair->reply, f, key);
	flow_twin_key(&pair->reply_key, f, key);
	if (reply_search(skb, key, s, new_port))
		return DROP_SNAT_PORTS;
	f->sport = pair->reply_key.dport;
	/* At once: room for the other entry could be made at the cost of this one. */
	keep = newcomer(f->seen);
	if (keep)
		flow_keep(&pair->reply_key);
	if (!bpf_map_update_elem(&flows, key, f, renew ? BPF_ANY : BPF_NOEXIST)) {
		if (keep)
			flow_keep(key);
		count(FLOW_CREATED);
		if (f->flags & FLOW_STACK)
			been_set(BEEN_STACK_FLOW);
		if (f->flags & FLOW_SNAT)
			been_set(BEEN_SNAT);
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
