/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The two entries of a flow: their keys, what one says of the other, and how both are deleted. */
#ifndef SPILLWAY_FLOW_ENTRY_H
#define SPILLWAY_FLOW_ENTRY_H

#include "../dsr/flow.h"
#include "../events/endpoint_load.h"
#include "../lookup/next_hop.h"
#include "../lookup/pod.h"
#include "../scratch.h"

static __always_inline void tuple_mirror(struct tuple *out, const struct tuple *t)
{
	out->saddr = t->daddr;
	out->daddr = t->saddr;
	out->sport = t->dport;
	out->dport = t->sport;
	out->proto = t->proto;
	out->family = t->family;
	out->pad = 0;
}

static __always_inline int flow_confirmed(const struct flow *f)
{
	return f->flags & FLOW_CONFIRMED && f->state != FLOW_CLOSED;
}

/* Is this the forward entry of a request, whose answers may come from any port? */
static __always_inline int flow_is_request(const struct flow *f)
{
	return f->helper == HELPER_REQUEST && !(f->flags & FLOW_REPLY);
}

/*
 * Returns the reply entry of a request that an answer from any port may belong to. Sets
 * *key to its key.
 */
static __always_inline struct flow *request_at(const struct tuple *answer, struct tuple *key)
{
	*key = *answer;
	key->sport = 0;
	return bpf_map_lookup_elem(&flows, key);
}

/*
 * Keeps an entry from being the next that the kernel evicts. The LRU
 * (kernel/bpf/bpf_lru_list.c) first evicts entries that were never looked up. In a full
 * table that would be the newest flow, before its reply arrives.
 */
static __always_inline void flow_protect(const struct tuple *key)
{
	bpf_map_lookup_elem(&flows, key);
}

/*
 * Fills the key of the reverse entry: the mirror image of the tuple after translation, or
 * with port 0 for answers from any port.
 */
static __always_inline void flow_reverse_key(struct tuple *out, const struct flow *f,
					     const struct tuple *key)
{
	int asks = f->helper == HELPER_REQUEST && !(f->flags & FLOW_REPLY);

	out->saddr = f->daddr;
	out->daddr = f->saddr;
	out->sport = asks ? 0 : f->dport;
	out->dport = f->sport;
	out->proto = key->proto;
	out->family = key->family;
	out->pad = 0;
}

/* Is the entry at this key the reverse entry of the flow with the key *mine? */
static __always_inline int flow_is_reverse(const struct flow *reverse, const struct tuple *mine)
{
	return addr_equal(&reverse->saddr, &mine->daddr) &&
	       addr_equal(&reverse->daddr, &mine->saddr) && reverse->sport == mine->dport &&
	       (reverse->dport == mine->sport || (flow_is_request(reverse) && !mine->sport));
}

/*
 * Deletes both entries of the flow with this slot. Returns 0, or -1 if the key has another
 * flow by now, or another CPU deletes it.
 */
static __always_inline int flow_delete(struct tuple *key, __u32 slot, struct tuple *reverse_key)
{
	struct flow *f = bpf_map_lookup_elem(&flows, key), *reverse;

	/* One CPU wins: slots are unique, even if the memory is another entry's by now. */
	if (!f || slot == SLOT_NONE ||
	    __sync_val_compare_and_swap(&f->slot, slot, SLOT_NONE) != slot)
		return -1;
	if (balance_by_load && f->flags & FLOW_COUNTED && f->state != FLOW_CLOSED)
		load_add_flow(f->backend, -1);
	flow_reverse_key(reverse_key, f, key);
	reverse = bpf_map_lookup_elem(&flows, reverse_key);
	if (reverse && reverse->slot == slot)
		bpf_map_delete_elem(&flows, reverse_key);
	return bpf_map_delete_elem(&flows, key);
}

/* Fills an entry that does not change packets with this tuple. */
static __always_inline void flow_identity(struct flow *f, const struct tuple *t, __u16 flags,
					  __u8 helper, __be16 helper_port)
{
	__builtin_memset(f, 0, sizeof(*f));
	f->saddr = t->saddr;
	f->daddr = t->daddr;
	f->sport = t->sport;
	f->dport = t->dport;
	f->flags = flags;
	f->helper = helper;
	f->helper_port = helper_port;
	f->state = FLOW_NEW;
	f->seen = now();
	f->opened = f->seen;
	f->in_ifindex = source_device(t);
}

static __always_inline void flow_forget_next_hop(struct flow *f)
{
	f->next_hop_mtu = 0;
	f->next_hop_seen = 0;
	f->next_hop_ifindex = 0;
	f->next_hop_kind = 0;
	__builtin_memset(f->next_hop_macs, 0, sizeof(f->next_hop_macs));
}

/* Begins the flow of a packet from this device to daddr. It keeps its source for now. */
static __always_inline void flow_begin(struct scratch *m, const struct addr *daddr, __be16 dport,
				       __u32 device)
{
	const struct packet *p = &m->packet;
	struct flow *f = &m->pair.flow;

	f->saddr = p->tuple.saddr;
	f->daddr = *daddr;
	f->sport = p->tuple.sport;
	f->dport = dport;
	f->seen = p->time;
	f->state = FLOW_NEW;
	f->opened = p->time;
	f->helper = HELPER_NONE;
	f->end = END_UNKNOWN; /* and REQUEST_SENT */
	__builtin_memset(&f->tcp, 0, sizeof(f->tcp));
	f->helper_port = dport; /* flow_record_first replaces it for TCP */
	f->in_ifindex = device;
	flow_forget_next_hop(f);
}

/*
 * Stores the next hop of a packet in the entry of its flow, for a second. Packets that travel
 * within datagrams look it up each time. A fragment's way is not that of other packets:
 * dsr_choose_encapsulation.
 */
static __always_inline void flow_keep_next_hop(struct flow *entry, const struct packet *p,
					       const struct next_hop *hop)
{
	if (dsr_remote(entry) && (hop->by_gue || is_fragment(p)))
		return;
	if (hop->kind != NEXT_HOP_POD && !(hop->kind == NEXT_HOP_NEIGH && hop->neighbor_known))
		return;
	entry->next_hop_mtu = hop->mtu;
	entry->next_hop_ifindex = hop->ifindex;
	entry->next_hop_kind = hop->kind == NEXT_HOP_POD ? NEXT_HOP_POD : NEXT_HOP_LINK;
	__builtin_memcpy(entry->next_hop_macs, hop->macs, sizeof(hop->macs));
	entry->next_hop_seen = p->time;
}

/* Fills the TCP state of the other side with the copies that s has of it. */
static __always_inline void tcp_make_reverse(struct tcp_side *reverse, const struct tcp_side *s)
{
	__builtin_memset(reverse, 0, sizeof(*reverse));
	reverse->end = s->ack;
	reverse->ack = s->end;
	reverse->window = s->peer_window;
	reverse->peer_window = s->window;
	reverse->scale = s->peer_scale;
	reverse->peer_scale = s->scale;
}

/* Fills the reverse entry of f, which has this key. */
static __always_inline void flow_make_reverse(struct flow *reverse, const struct flow *f,
					      const struct tuple *key)
{
	reverse->saddr = key->daddr;
	reverse->daddr = key->saddr;
	reverse->sport = key->dport;
	/* The entry of answers from any port has port 0 in its key. */
	reverse->dport = f->helper == HELPER_REQUEST && f->flags & FLOW_REPLY ? f->helper_port
									      : key->sport;
	reverse->helper = f->helper;
	reverse->end = f->end;
	reverse->backend = f->backend;
	reverse->service = f->service;
	reverse->seen = f->seen;
	reverse->opened = f->opened;
	reverse->slot = f->slot;
	reverse->in_ifindex = addr_device(&f->daddr, key->family);
	reverse->state = f->state;
	reverse->flags = (f->flags &
			  (FLOW_STACK | FLOW_SNAT | FLOW_RESET | FLOW_STREAM | FLOW_CONFIRMED |
			   FLOW_TRACKED | FLOW_REPORTED | FLOW_WATCHED | FLOW_COUNTED | FLOW_DSR)) |
			 (f->flags & FLOW_REPLY ? 0 : FLOW_REPLY);
	if (f->flags & FLOW_TO_POD)
		reverse->flags |= FLOW_REVERSE_TO_POD;
	if (f->flags & FLOW_REVERSE_TO_POD)
		reverse->flags |= FLOW_TO_POD;
	if (f->flags & FLOW_FIN)
		reverse->flags |= FLOW_REVERSE_FIN;
	if (f->flags & FLOW_REVERSE_FIN)
		reverse->flags |= FLOW_FIN;
	if (key->proto == IPPROTO_TCP) {
		tcp_make_reverse(&reverse->tcp, &f->tcp);
	} else {
		__builtin_memset(&reverse->tcp, 0, sizeof(reverse->tcp));
		reverse->helper_port = f->helper_port;
	}
	flow_forget_next_hop(reverse);
}

#endif
