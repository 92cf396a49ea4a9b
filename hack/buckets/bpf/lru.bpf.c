// SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause)
/*
 * The current layout: two entries a flow in an LRU hash, with the values of bpf/abi.h. The lookups
 * and writes are those of bpf/lib/flow, in the same order. Left out is what both layouts need:
 * services, next hops, sockets, conntrack, events, shares of clients.
 */
#include "common.h"

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1);
	__type(key, struct tuple);
	__type(value, struct flow);
} flows SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tuple);
} unconfirmed SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} unconfirmed_next SEC(".maps");

/* As scratch.h: both entries are too large for the stack. */
struct pair {
	struct flow flow;
	struct flow reply;
	struct tuple key;
	struct tuple reply_key;
	struct tuple other_key;
	struct tuple reverse_key;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pair);
} scratch SEC(".maps");

const volatile __u32 ring_length = 1;

static __always_inline void reverse_key_of(struct tuple *out, const struct flow *f,
					   const struct tuple *key)
{
	out->saddr = f->daddr;
	out->daddr = f->saddr;
	out->sport = f->dport;
	out->dport = f->sport;
	out->proto = key->proto;
	out->family = key->family;
	out->pad = 0;
}

static __always_inline bool is_reverse(const struct flow *reverse, const struct tuple *mine)
{
	return addr_equal(&reverse->saddr, &mine->daddr) &&
	       addr_equal(&reverse->daddr, &mine->saddr) && reverse->sport == mine->dport &&
	       reverse->dport == mine->sport;
}

static __always_inline bool confirmed(const struct flow *f)
{
	return f->flags & FLOW_CONFIRMED && f->state != FLOW_CLOSED;
}

/* flow_delete of unconfirmed.h. */
static __always_inline int flow_delete(struct tuple *key, __u32 slot, struct tuple *reverse_key)
{
	struct flow *f = bpf_map_lookup_elem(&flows, key), *reverse;

	if (!f || slot == SLOT_NONE ||
	    __sync_val_compare_and_swap(&f->slot, slot, SLOT_NONE) != slot)
		return -1;
	reverse_key_of(reverse_key, f, key);
	reverse = bpf_map_lookup_elem(&flows, reverse_key);
	if (reverse && reverse->slot == slot)
		bpf_map_delete_elem(&flows, reverse_key);
	return bpf_map_delete_elem(&flows, key);
}

/* unconfirmed_admit of unconfirmed.h, of a flow that is not in use. */
static __always_inline __u32 admit(struct run *r, struct pair *p)
{
	__u32 zero = 0, slot, index;
	__u32 *next = bpf_map_lookup_elem(&unconfirmed_next, &zero);
	struct tuple *place;
	struct flow *old;

	if (!next || !ring_length)
		return SLOT_NONE;
	slot = __sync_fetch_and_add(next, 1);
	index = slot % ring_length;
	place = bpf_map_lookup_elem(&unconfirmed, &index);
	if (!place)
		return SLOT_NONE;
	p->other_key = *place;
	old = bpf_map_lookup_elem(&flows, &p->other_key);
	if (old && old->slot == slot - ring_length && !confirmed(old) &&
	    !flow_delete(&p->other_key, slot - ring_length, &p->reverse_key))
		r->replaced++;
	*place = p->key;
	return slot;
}

static __always_inline void fill(struct flow *f, const struct facts *a, const struct run *r)
{
	__builtin_memset(f, 0, sizeof(*f));
	f->saddr = a->client;
	f->daddr = a->endpoint;
	f->sport = a->client_port;
	f->dport = a->endpoint_port;
	if (a->snat_port) {
		addr_fill(&f->saddr, NODE, r->flags & RUN_IPV6);
		f->sport = a->snat_port;
		f->flags = FLOW_SNAT;
	}
	f->flags |= FLOW_TO_POD | FLOW_TRACKED;
	f->state = FLOW_NEW;
	f->seen = r->time;
	f->opened = r->time;
	f->backend = a->backend;
	f->service = a->service.w[0];
	f->tcp.end = 1;
	f->tcp.isn = 1;
	f->tcp.window = 65535;
}

/* flow_make_reverse of table.h. */
static __always_inline void make_reverse(struct flow *reverse, const struct flow *f,
					 const struct tuple *key)
{
	__builtin_memset(reverse, 0, sizeof(*reverse));
	reverse->saddr = key->daddr;
	reverse->daddr = key->saddr;
	reverse->sport = key->dport;
	reverse->dport = key->sport;
	reverse->backend = f->backend;
	reverse->service = f->service;
	reverse->seen = f->seen;
	reverse->opened = f->opened;
	reverse->slot = f->slot;
	reverse->state = f->state;
	reverse->flags = (f->flags & ~FLOW_TO_POD) | FLOW_REPLY | FLOW_REVERSE_TO_POD;
	reverse->tcp.end = f->tcp.ack;
	reverse->tcp.ack = f->tcp.end;
	reverse->tcp.window = f->tcp.peer_window;
	reverse->tcp.peer_window = f->tcp.window;
}

/* A lookup of flow_find that misses, then flow_create of create.h. */
SEC("tc")
int first(struct __sk_buff *skb)
{
	struct run *r = run_of_cpu();
	__u32 zero = 0;
	struct pair *p = bpf_map_lookup_elem(&scratch, &zero);
	struct flow *reply;
	struct facts a;

	if (!r || !p)
		return TC_ACT_SHOT;
	facts_fill(&a, next_flow(r), r->flags);
	tuple_there(&p->key, &a, family_of(r));
	if (bpf_map_lookup_elem(&flows, &p->key)) {
		r->missed++;
		return TC_ACT_SHOT;
	}
	fill(&p->flow, &a, r);
	p->flow.slot = admit(r, p);
	make_reverse(&p->reply, &p->flow, &p->key);
	reverse_key_of(&p->reply_key, &p->flow, &p->key);
	if (bpf_map_update_elem(&flows, &p->reply_key, &p->reply, BPF_NOEXIST)) {
		r->missed++;
		return TC_ACT_SHOT;
	}
	p->other_key = p->key;
	if (bpf_map_update_elem(&flows, &p->other_key, &p->flow, BPF_NOEXIST)) {
		r->missed++;
		return TC_ACT_SHOT;
	}
	bpf_map_lookup_elem(&flows, &p->key); /* flow_protect */
	reply = bpf_map_lookup_elem(&flows, &p->reply_key);
	if (!reply || reply->slot != p->flow.slot) {
		r->refused++;
		return TC_ACT_SHOT;
	}
	r->sum += p->flow.daddr.w[0];
	r->done++;
	return TC_ACT_OK;
}

/* Applies a packet to its flow: flow_find and flow_advance_busy, or flow_refresh_reverse. */
static __always_inline int packet(struct run *r, const struct tuple *t)
{
	struct flow *f = bpf_map_lookup_elem(&flows, t), *reverse;
	struct tuple reverse_key;
	__u32 time;

	if (!f) {
		r->missed++;
		return TC_ACT_SHOT;
	}
	if (f->in_ifindex || f->state != FLOW_ESTABLISHED || !(f->flags & FLOW_TRACKED)) {
		r->refused++;
		return TC_ACT_SHOT;
	}
	f->tcp.end += 100;
	if (f->tcp.ack - 1 < f->tcp.window)
		f->tcp.ack++;
	if (r->flags & RUN_TICK) {
		time = r->time + (__u32)r->next;
		reverse_key_of(&reverse_key, f, t);
		reverse = bpf_map_lookup_elem(&flows, &reverse_key);
		if (!reverse || !is_reverse(reverse, t)) {
			r->missed++;
			return TC_ACT_SHOT;
		}
		reverse->seen = time;
		f->tcp.peer_window = reverse->tcp.window;
		reverse->tcp.peer_window = f->tcp.window;
		f->seen = time;
	}
	/* What the rewrite reads. */
	r->sum += addr_sum(&f->saddr) + addr_sum(&f->daddr) + f->sport + f->dport +
		  f->next_hop_ifindex + f->next_hop_seen + f->next_hop_mtu +
		  *(__u64 *)f->next_hop_macs + f->service;
	r->done++;
	return TC_ACT_OK;
}

SEC("tc")
int known(struct __sk_buff *skb)
{
	struct run *r = run_of_cpu();
	struct facts a;
	struct tuple t;

	if (!r)
		return TC_ACT_SHOT;
	facts_fill(&a, next_flow(r), r->flags);
	tuple_there(&t, &a, family_of(r));
	return packet(r, &t);
}

SEC("tc")
int reply(struct __sk_buff *skb)
{
	struct run *r = run_of_cpu();
	struct facts a;
	struct tuple t;

	if (!r)
		return TC_ACT_SHOT;
	facts_fill(&a, next_flow(r), r->flags);
	tuple_back(&t, &a, family_of(r));
	return packet(r, &t);
}

/* The client's ACK of the handshake. */
SEC("tc")
int confirm(struct __sk_buff *skb)
{
	struct run *r = run_of_cpu();
	struct flow *f, *reverse;
	struct tuple t, reverse_key;
	struct facts a;

	if (!r)
		return TC_ACT_SHOT;
	facts_fill(&a, next_flow(r), r->flags);
	tuple_there(&t, &a, family_of(r));
	f = bpf_map_lookup_elem(&flows, &t);
	if (!f) {
		r->missed++;
		return TC_ACT_SHOT;
	}
	reverse_key_of(&reverse_key, f, &t);
	reverse = bpf_map_lookup_elem(&flows, &reverse_key);
	if (!reverse) {
		r->missed++;
		return TC_ACT_SHOT;
	}
	f->state = FLOW_ESTABLISHED;
	reverse->state = FLOW_ESTABLISHED;
	f->flags |= FLOW_CONFIRMED;
	reverse->flags |= FLOW_CONFIRMED;
	r->done++;
	return TC_ACT_OK;
}

SEC("tc")
int forget(struct __sk_buff *skb)
{
	struct run *r = run_of_cpu();
	struct tuple t, reverse_key;
	struct flow *f;
	struct facts a;

	if (!r)
		return TC_ACT_SHOT;
	facts_fill(&a, next_flow(r), r->flags);
	tuple_there(&t, &a, family_of(r));
	f = bpf_map_lookup_elem(&flows, &t);
	if (!f || flow_delete(&t, f->slot, &reverse_key)) {
		r->missed++;
		return TC_ACT_SHOT;
	}
	r->done++;
	return TC_ACT_OK;
}
