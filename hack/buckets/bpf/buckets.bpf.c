// SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause)
/*
 * The layout to compare: one entry a flow. A keyed hash of the client's address, port and protocol
 * chooses two buckets of an array. A packet of either direction has these, as its source or as its
 * destination, and so it finds the entry in the same bucket. The reply of a flow with SNAT has the
 * node's address instead: the array `ports` leads from there to the entry.
 *
 *   bucket   version, tags, ages, classes (one cache line), then WAYS entries of two lines each
 *
 * The version is a lock for those who add, delete or confirm, and a sequence lock for readers: odd
 * while a CPU writes. A packet of a known flow changes the state of its entry without the lock, as
 * in the current table.
 */
#include "common.h"

#define WAYS 8
#define LOCK_TRIES 4096
#define LOCK_TRIES_SECOND 256
#define READ_TRIES 4

enum class {
	CLASS_FREE = 0,
	CLASS_UNCONFIRMED = 1,
	CLASS_CONFIRMED = 2,
};

/* As struct tcp_side, without copies of the other direction. */
struct side {
	__u32 end;
	__u32 ack;
	__u32 window;
	union {
		__u32 isn;
		__u32 fin;
	};
};

#define THERE 0
#define BACK 1

/* The end of a struct tuple, which is compared as one word. */
struct tuple_end {
	__be16 sport;
	__be16 dport;
	__u8 proto;
	__u8 family;
	__u16 other; /* not a part of the tuple */
};

struct entry {
	struct addr client;
	struct addr service;
	struct addr endpoint;
	struct tuple_end there; /* other: source port of SNAT; 0: none */
	struct tuple_end back;	/* other: four window scales of 4 bits */
	__u32 backend;
	__u32 service_id;
	__u32 seen;
	__u32 opened;
	__u32 flags; /* both directions' */
	__u32 in_ifindex;
	__u16 next_hop[2]; /* indices of next_hops */
	__u8 state;
	__u8 end_and_helper;
	__u16 snat_addr; /* index of the node's addresses */
	struct side side[2];
} __attribute__((aligned(8)));

struct bucket {
	__u32 version;
	__u32 pad;
	union {
		__u16 tag[WAYS]; /* 0: free */
		__u64 tags[WAYS / 4];
	};
	__u32 age[WAYS]; /* when the unconfirmed flow was last used */
	union {
		__u8 class[WAYS];
		__u64 classes;
	};
	struct entry entry[WAYS];
};

_Static_assert(sizeof(struct entry) == 128, "an entry has two cache lines");
_Static_assert(sizeof(struct bucket) == 64 + WAYS * 128, "a head has one cache line");

/* Shared memory: such an array begins at a page, and so its elements at a cache line. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct bucket);
} buckets SEC(".maps");

/* By endpoint and source port of SNAT: the entry. A full bucket counts like a port in use. */
struct port_bucket {
	__u32 version;
	__u32 pad;
	union {
		__u16 tag[WAYS];
		__u64 tags[WAYS / 4];
	};
	__u32 entry[WAYS]; /* bucket * WAYS + slot */
	__u64 pad2;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct port_bucket);
} ports SEC(".maps");

/* Flows share next hops: a node has as many as pods and neighbors. */
struct next_hop {
	__u32 ifindex;
	__u32 seen;
	__u16 mtu;
	__u8 kind;
	__u8 pad;
	__u8 macs[12]; /* at a multiple of 4: read as words */
	__u32 pad2[2];
};

#define NEXT_HOPS 256

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, NEXT_HOPS);
	__type(key, __u32);
	__type(value, struct next_hop);
} next_hops SEC(".maps");

const volatile __u32 bucket_count = 1;
const volatile __u32 port_bucket_count = 1;
const volatile __u64 key0 = 1;
const volatile __u64 key1 = 2;
const volatile bool multiply = false; /* the hash: keyed_mix instead of SipHash */

static __always_inline __u64 rotate(__u64 x, int n)
{
	return x << n | x >> (64 - n);
}

static __always_inline void sip_round(__u64 v[4])
{
	v[0] += v[1];
	v[1] = rotate(v[1], 13) ^ v[0];
	v[0] = rotate(v[0], 32);
	v[2] += v[3];
	v[3] = rotate(v[3], 16) ^ v[2];
	v[0] += v[3];
	v[3] = rotate(v[3], 21) ^ v[0];
	v[2] += v[1];
	v[1] = rotate(v[1], 17) ^ v[2];
	v[2] = rotate(v[2], 32);
}

static __always_inline void sip_begin(__u64 v[4])
{
	v[0] = key0 ^ 0x736f6d6570736575ULL;
	v[1] = key1 ^ 0x646f72616e646f6dULL;
	v[2] = key0 ^ 0x6c7967656e657261ULL;
	v[3] = key1 ^ 0x7465646279746573ULL;
}

static __always_inline void sip_word(__u64 v[4], __u64 word)
{
	v[3] ^= word;
	sip_round(v);
	v[0] ^= word;
}

static __always_inline __u64 sip_end(__u64 v[4])
{
	v[2] ^= 0xff;
	sip_round(v);
	sip_round(v);
	sip_round(v);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}

/* A round of keyed_mix, as in the finalizer of MurmurHash3. */
static __always_inline __u64 mix_word(__u64 h, __u64 word, __u64 factor)
{
	h = (h ^ word) * factor;
	return h ^ h >> 32;
}

/*
 * The faster hash: the words and the key are mixed between multiplications. It has no proof, as
 * SipHash has.
 */
static __always_inline __u64 keyed_mix(const struct addr *client, __u64 last, __u8 family)
{
	__u64 h = key0;

	if (family != FAMILY_V4) {
		h = mix_word(h, client->w[1] | (__u64)client->w[2] << 32, 0xff51afd7ed558ccdULL);
		h = mix_word(h, client->w[3], 0xff51afd7ed558ccdULL);
	}
	h = mix_word(h, client->w[0] | last, 0xff51afd7ed558ccdULL);
	h = mix_word(h, key1, 0xc4ceb9fe1a85ec53ULL);
	return mix_word(h, key0, 0xff51afd7ed558ccdULL);
}

/*
 * SipHash-1-3 (Aumasson and Bernstein, 2012), which the kernel's hash tables use (hsiphash). IPv4
 * is one word: address, port, protocol and length.
 */
static __always_inline __u64 client_hash(const struct addr *client, __be16 port, __u8 proto,
					 __u8 family)
{
	__u64 v[4], last = (__u64)port << 32 | (__u64)proto << 48;

	if (multiply)
		return keyed_mix(client, last, family);
	sip_begin(v);
	if (family == FAMILY_V4) {
		sip_word(v, client->w[0] | last | 7ULL << 56);
	} else {
		sip_word(v, client->w[0] | (__u64)client->w[1] << 32);
		sip_word(v, client->w[2] | (__u64)client->w[3] << 32);
		sip_word(v, last >> 32 | 19ULL << 56);
	}
	return sip_end(v);
}

/* Returns a number below n. */
static __always_inline __u32 reduce(__u32 hash, __u32 n)
{
	return (__u64)hash * n >> 32;
}

static __always_inline __u16 tag_of(__u64 hash)
{
	__u16 tag = hash ^ hash >> 32;

	return tag ? tag : 1;
}

struct place {
	__u32 index[2]; /* of both buckets */
	struct bucket *bucket[2];
	__u16 tag;
};

/* Finds the buckets of a client. Returns -1 if there are none. */
static __always_inline int place_of(struct place *at, const struct addr *client, __be16 port,
				    __u8 proto, __u8 family)
{
	__u64 hash = client_hash(client, port, proto, family);

	at->tag = tag_of(hash);
	at->index[0] = reduce(hash, bucket_count);
	at->index[1] = reduce(hash >> 32, bucket_count);
	at->bucket[0] = bpf_map_lookup_elem(&buckets, &at->index[0]);
	at->bucket[1] = bpf_map_lookup_elem(&buckets, &at->index[1]);
	return at->bucket[0] && at->bucket[1] ? 0 : -1;
}

/* Returns the top bit of each of four tags that may be equal: the lowest one is. */
static __always_inline __u64 tags_equal(__u64 tags, __u16 tag)
{
	__u64 x = tags ^ tag * 0x0001000100010001ULL;

	return (x - 0x0001000100010001ULL) & ~x & 0x8000800080008000ULL;
}

/* Returns the number of the lowest of these bits without a branch: the top bits of a product. */
static __always_inline __u32 lowest_tag(__u64 bits)
{
	return ((bits & -bits) >> 15) * (1ULL << 46 | 2ULL << 30 | 3ULL << 14) >> 62;
}

/* Returns the slot so that the verifier knows its bounds, which the compiler would not repeat. */
static __always_inline __u32 bounded(__u32 slot)
{
	asm volatile("" : "+r"(slot));
	return slot & (WAYS - 1);
}

/* Returns the number of a free slot, or -1. */
static __always_inline int free_slot(const __u64 *tags)
{
	for (__u32 word = 0; word < WAYS / 4; word++) {
		__u64 bits = tags_equal(tags[word], 0);

		if (bits)
			return word * 4 + lowest_tag(bits);
	}
	return -1;
}

static __always_inline __u64 word_of(const void *p, __u32 n)
{
	return ((const __u64 *)p)[n];
}

/* Returns 0 if the addresses are equal. */
static __always_inline __u64 addr_differ(const struct addr *a, const struct addr *b)
{
	return (word_of(a, 0) ^ word_of(b, 0)) | (word_of(a, 1) ^ word_of(b, 1));
}

static __always_inline void addr_copy(struct addr *to, const struct addr *from)
{
	((__u64 *)to)[0] = word_of(from, 0);
	((__u64 *)to)[1] = word_of(from, 1);
}

/* Returns 0 if the tuple has these ports, protocol and family. */
static __always_inline __u64 end_differs(const struct tuple_end *end, const struct tuple *t)
{
	return (word_of(end, 0) ^ word_of(&t->sport, 0)) << 16;
}

/* Is this the entry of a packet that goes there, or back? */
static __always_inline bool entry_is(const struct entry *e, const struct tuple *t, int way)
{
	if (way == THERE)
		return !(addr_differ(&e->client, &t->saddr) | addr_differ(&e->service, &t->daddr) |
			 end_differs(&e->there, t));
	return !(addr_differ(&e->client, &t->daddr) | addr_differ(&e->endpoint, &t->saddr) |
		 end_differs(&e->back, t) | e->there.other);
}

/* Returns the slot of the packet's flow in the bucket, or -1. */
static __always_inline int bucket_find(const struct bucket *b, __u16 tag, const struct tuple *t,
				       int way)
{
	for (__u32 word = 0; word < WAYS / 4; word++) {
		__u64 bits = tags_equal(READ_ONCE(b->tags[word]), tag);

		for (int i = 0; i < 4 && bits; i++) {
			__u32 slot = word * 4 + lowest_tag(bits);

			if (likely(entry_is(&b->entry[bounded(slot)], t, way)))
				return slot;
			bits &= bits - 1;
		}
	}
	return -1;
}

/* Takes the lock if it is free. */
static __always_inline bool version_try(__u32 *version)
{
	__u32 old = READ_ONCE(*version);

	return !(old & 1) && __sync_val_compare_and_swap(version, old, old + 1) == old;
}

struct wait {
	__u32 *version;
	bool locked;
};

static long wait_lock(__u64 i, struct wait *w)
{
	w->locked = version_try(w->version);
	return w->locked;
}

static long wait_even(__u64 i, struct wait *w)
{
	return !(READ_ONCE(*w->version) & 1);
}

/*
 * Returns 0 if this CPU may write. No program may be interrupted by another one meanwhile. A loop
 * in the program may not be so long: the verifier follows each of its jumps.
 */
static __always_inline int version_lock(__u32 *version, int tries)
{
	struct wait w = {.version = version};

	if (likely(version_try(version)))
		return 0;
	bpf_loop(tries, wait_lock, &w, 0);
	return w.locked ? 0 : -1;
}

/* An exchange is a full barrier on every architecture; a plain store is none on arm64. */
static __always_inline void version_unlock(__u32 *version)
{
	__sync_lock_test_and_set(version, READ_ONCE(*version) + 1);
}

/*
 * What the rewrite of a packet needs. Where SNAT replaces the other address too, it is the node's
 * or the client's.
 */
struct view {
	struct addr addr; /* the endpoint's there, the Service's back */
	struct addr client;
	__be16 port;
	__be16 other_port;
	__u16 next_hop;
	__u8 state;
	__u8 pad;
	__u32 in_ifindex;
	__u32 service_id;
	__u32 flags;
	__u32 pad2;
} __attribute__((aligned(8)));

static __always_inline void view_fill(struct view *v, const struct entry *e, int way)
{
	if (way == THERE) {
		addr_copy(&v->addr, &e->endpoint);
		v->port = e->back.sport;
		v->other_port = e->there.other;
		v->next_hop = e->next_hop[THERE];
	} else {
		addr_copy(&v->addr, &e->service);
		v->port = e->there.dport;
		v->other_port = e->there.sport;
		v->next_hop = e->next_hop[BACK];
	}
	v->state = e->state;
	v->in_ifindex = e->in_ifindex;
	v->service_id = e->service_id;
	v->flags = e->flags;
}

#define NOT_HERE (-1)
#define BUSY (-2)

/*
 * Reads the packet's flow. Returns its slot, NOT_HERE or BUSY. A global function: the verifier
 * checks it once.
 */
__noinline int bucket_read(struct bucket *b, __u16 tag, const struct tuple *t, int way,
			   struct view *v)
{
	struct wait wait = {};

	if (!b || !t || !v)
		return NOT_HERE;
	for (int i = 0; i < READ_TRIES; i++) {
		__u32 version = READ_ONCE(b->version);
		int slot;

		barrier();
		slot = bucket_find(b, tag, t, way);
		if (slot >= 0)
			view_fill(v, &b->entry[bounded(slot)], way);
		barrier();
		if (likely(!(version & 1) && READ_ONCE(b->version) == version))
			return slot;
		wait.version = &b->version;
		bpf_loop(LOCK_TRIES, wait_even, &wait, 0);
	}
	return BUSY;
}

/* Is this the entry of a reply to the node's address? */
static __always_inline bool port_entry_is(const struct entry *e, const struct tuple *t)
{
	return !(addr_differ(&e->endpoint, &t->saddr) | (e->there.other ^ t->dport) |
		 (e->back.sport ^ t->sport) | (e->back.proto ^ t->proto) |
		 (e->back.family ^ t->family));
}

/*
 * The hash is of the endpoint's address and the node's port, as that of a client. Flows to several
 * ports of an endpoint may share a port and then a bucket.
 */
static __always_inline struct port_bucket *port_bucket_of(const struct tuple *t, __u16 *tag)
{
	__u64 hash = client_hash(&t->saddr, t->dport, t->proto, t->family);
	__u32 index = reduce(hash, port_bucket_count);

	*tag = tag_of(hash);
	return bpf_map_lookup_elem(&ports, &index);
}

/* Reads the flow of a reply to the node's address, by the second index. */
static __always_inline struct entry *port_read(const struct tuple *t, struct view *v)
{
	struct port_bucket *p;
	__u16 tag;

	p = port_bucket_of(t, &tag);
	if (!p)
		return NULL;
	for (__u32 word = 0; word < WAYS / 4; word++) {
		__u64 bits = tags_equal(READ_ONCE(p->tags[word]), tag);

		for (int i = 0; i < 4 && bits; i++) {
			__u32 at = p->entry[bounded(word * 4 + lowest_tag(bits))];
			__u32 index = at / WAYS;
			struct bucket *b = bpf_map_lookup_elem(&buckets, &index);
			struct entry *e;
			__u32 version;

			if (!b)
				return NULL;
			e = &b->entry[bounded(at)];
			version = READ_ONCE(b->version);
			barrier();
			if (port_entry_is(e, t)) {
				view_fill(v, e, BACK);
				addr_copy(&v->client, &e->client);
				barrier();
				if (!(version & 1) && READ_ONCE(b->version) == version)
					return e;
			}
			bits &= bits - 1;
		}
	}
	return NULL;
}

/* Returns the slot of the second index with this entry, or, to add it, another with its port. */
static __always_inline int port_find(const struct port_bucket *p, __u16 tag, const struct tuple *t,
				     __u32 at, bool add)
{
	for (__u32 word = 0; word < WAYS / 4; word++) {
		__u64 bits = tags_equal(READ_ONCE(p->tags[word]), tag);

		for (int i = 0; i < 4 && bits; i++) {
			__u32 slot = bounded(word * 4 + lowest_tag(bits));
			__u32 found = p->entry[slot], index = found / WAYS;
			struct bucket *b;

			bits &= bits - 1;
			if (found == at)
				return slot;
			if (!add)
				continue;
			b = bpf_map_lookup_elem(&buckets, &index);
			if (b && port_entry_is(&b->entry[bounded(found)], t))
				return slot;
		}
	}
	return -1;
}

/* Adds an entry to the second index, or deletes it. Returns -1 if the port is in use. */
__noinline int port_change(const struct entry *e, __u32 at, bool add)
{
	struct port_bucket *p;
	int slot, free, result = -1;
	struct tuple t = {};
	__u16 tag;

	if (!e)
		return -1;
	addr_copy(&t.saddr, &e->endpoint);
	t.sport = e->back.sport;
	t.dport = e->there.other;
	t.proto = e->there.proto;
	t.family = e->there.family;
	p = port_bucket_of(&t, &tag);
	if (!p || version_lock(&p->version, LOCK_TRIES))
		return -1;
	slot = port_find(p, tag, &t, at, add);
	free = free_slot(p->tags);
	if (!add && slot >= 0) {
		p->tag[bounded(slot)] = 0;
		result = 0;
	} else if (add && slot < 0 && free >= 0) {
		p->entry[bounded(free)] = at;
		barrier();
		p->tag[bounded(free)] = tag;
		result = 0;
	}
	version_unlock(&p->version);
	return result;
}

/* Returns how many slots of the bucket are in use. */
static __always_inline __u32 bucket_used(const struct bucket *b)
{
	__u64 classes = READ_ONCE(b->classes);

	return ((classes | classes >> 1) & 0x0101010101010101ULL) * 0x0101010101010101ULL >> 56;
}

/* Returns the slot of the unconfirmed flow that was not used for the longest time, or -1. */
static __always_inline int bucket_oldest(const struct bucket *b, __u32 *age)
{
	int oldest = -1;

	for (int i = 0; i < WAYS; i++) {
		if (b->class[i] != CLASS_UNCONFIRMED)
			continue;
		if (oldest < 0 || (__s32)(b->age[i] - *age) < 0) {
			oldest = i;
			*age = b->age[i];
		}
	}
	return oldest;
}

static __always_inline void entry_fill(struct entry *e, const struct facts *a, const struct run *r)
{
	__builtin_memset(e, 0, sizeof(*e));
	e->client = a->client;
	e->service = a->service;
	e->endpoint = a->endpoint;
	e->there.sport = a->client_port;
	e->there.dport = a->service_port;
	e->there.proto = IPPROTO_TCP;
	e->there.family = family_of(r);
	e->there.other = a->snat_port;
	e->back = e->there;
	e->back.sport = a->endpoint_port;
	e->back.dport = a->client_port;
	e->back.other = 0;
	e->backend = a->backend;
	e->service_id = a->service.w[0];
	e->seen = r->time;
	e->opened = r->time;
	e->flags = FLOW_TO_POD | FLOW_TRACKED;
	e->next_hop[THERE] = a->backend % NEXT_HOPS;
	e->next_hop[BACK] = a->client.w[0] % NEXT_HOPS;
	e->state = FLOW_NEW;
	e->side[THERE].end = 1;
	e->side[THERE].isn = 1;
	e->side[THERE].window = 65535;
}

/* Has the client a flow to this Service already, or with this tuple of replies? */
__noinline int bucket_has(const struct bucket *b, __u16 tag, const struct facts *a, __u8 family)
{
	if (!b || !a)
		return false;
	for (__u32 word = 0; word < WAYS / 4; word++) {
		__u64 bits = tags_equal(READ_ONCE(b->tags[word]), tag);

		for (int i = 0; i < 4 && bits; i++) {
			__u32 slot = word * 4 + lowest_tag(bits);
			const struct entry *e = &b->entry[bounded(slot)];

			bits &= bits - 1;
			if (!addr_equal(&e->client, &a->client) ||
			    e->there.sport != a->client_port || e->there.family != family ||
			    e->there.proto != IPPROTO_TCP)
				continue;
			if (addr_equal(&e->service, &a->service) &&
			    e->there.dport == a->service_port)
				return true;
			if (!e->there.other && !a->snat_port &&
			    addr_equal(&e->endpoint, &a->endpoint) &&
			    e->back.sport == a->endpoint_port)
				return true;
		}
	}
	return false;
}

/* Chooses one of the buckets: the one with more room, or with the older unconfirmed flow. */
__noinline int bucket_choose(const struct bucket *one, const struct bucket *two)
{
	__u32 used_one, used_two, age_one = 0, age_two = 0;
	int slot_one, slot_two;

	if (!one || !two)
		return 0;
	used_one = bucket_used(one);
	used_two = bucket_used(two);
	if (used_one < WAYS || used_two < WAYS)
		return used_two < used_one;
	slot_one = bucket_oldest(one, &age_one);
	slot_two = bucket_oldest(two, &age_two);
	return slot_one < 0 || (slot_two >= 0 && (__s32)(age_two - age_one) < 0);
}

/* Stores the flow in a bucket that is locked. */
__noinline int bucket_store(struct run *r, struct bucket *b, __u32 index, __u16 tag,
			    const struct facts *a)
{
	struct entry *e;
	__u32 age = 0;
	int slot;

	if (!r || !b || !a)
		return false;
	slot = free_slot(b->tags);
	if (slot < 0) {
		slot = bucket_oldest(b, &age);
		if (slot < 0) {
			r->refused++;
			return false;
		}
		e = &b->entry[bounded(slot)];
		if (e->there.other)
			port_change(e, index * WAYS + slot, false);
		r->replaced++;
	}
	slot = bounded(slot);
	e = &b->entry[slot];
	entry_fill(e, a, r);
	if (a->snat_port && port_change(e, index * WAYS + slot, true)) {
		b->tag[slot] = 0;
		b->class[slot] = CLASS_FREE;
		r->refused++;
		return false;
	}
	b->tag[slot] = tag;
	b->class[slot] = CLASS_UNCONFIRMED;
	b->age[slot] = r->time + (__u32)r->next;
	return true;
}

/*
 * Stores the flow of a first packet. The first bucket's lock is the one of the client's port, also
 * if the entry is in the second bucket: of two CPUs with the same packet one stores it.
 */
static __always_inline bool flow_store(struct run *r, const struct place *at, const struct facts *a)
{
	struct bucket *one = at->bucket[0], *two = at->bucket[1], *into = one;
	__u32 index = at->index[0];
	bool stored = false, second;
	__u8 family = family_of(r);

	if (version_lock(&one->version, LOCK_TRIES)) {
		r->busy++;
		return false;
	}
	if (bucket_has(one, at->tag, a, family) || bucket_has(two, at->tag, a, family)) {
		r->missed++;
		goto unlock;
	}
	/* Two CPUs may wait for each other. Then the first bucket is good enough. */
	second = one != two && bucket_choose(one, two) &&
		 !version_lock(&two->version, LOCK_TRIES_SECOND);
	if (second) {
		into = two;
		index = at->index[1];
	}
	stored = bucket_store(r, into, index, at->tag, a);
	if (second)
		version_unlock(&two->version);
unlock:
	version_unlock(&one->version);
	return stored;
}

/*
 * Finds the flow of a client's packet in either bucket. Returns the bucket's number, or -1. In
 * nearly all cases the first tag that is equal is the flow's, and no CPU writes: then there is
 * neither a call nor a loop.
 */
static __always_inline int flow_read(const struct place *at, const struct tuple *t, int way,
				     struct view *v, int *slot)
{
#pragma unroll
	for (int i = 0; i < 2; i++) {
		struct bucket *b = at->bucket[i];
		__u32 version = READ_ONCE(b->version), found = 0;
		__u64 bits;
		int result;

		barrier();
		bits = tags_equal(READ_ONCE(b->tags[0]), at->tag);
		if (!bits) {
			bits = tags_equal(READ_ONCE(b->tags[1]), at->tag);
			found = 4;
		}
		if (!bits && likely(READ_ONCE(b->version) == version && !(version & 1)))
			continue;
		found = bounded(found + lowest_tag(bits));
		if (likely(entry_is(&b->entry[found], t, way))) {
			view_fill(v, &b->entry[found], way);
			barrier();
			if (likely(READ_ONCE(b->version) == version && !(version & 1))) {
				*slot = found;
				return i;
			}
		}
		result = bucket_read(b, at->tag, t, way, v);
		if (result >= 0) {
			*slot = result;
			return i;
		}
	}
	return -1;
}

SEC("tc")
int first(struct __sk_buff *skb)
{
	struct run *r = run_of_cpu();
	struct view v;
	struct place at;
	struct facts a;
	struct tuple t;
	int slot;

	if (!r)
		return TC_ACT_SHOT;
	facts_fill(&a, next_flow(r), r->flags);
	tuple_there(&t, &a, family_of(r));
	if (place_of(&at, &t.saddr, t.sport, t.proto, t.family))
		return TC_ACT_SHOT;
	if (flow_read(&at, &t, THERE, &v, &slot) >= 0) {
		r->missed++;
		return TC_ACT_SHOT;
	}
	if (!flow_store(r, &at, &a))
		return TC_ACT_SHOT;
	r->sum += a.endpoint.w[0];
	r->done++;
	return TC_ACT_OK;
}

static __always_inline bool view_is(const struct view *v, const struct facts *a, int way)
{
	if (v->service_id != a->service.w[0])
		return false;
	if (way == BACK)
		return addr_equal(&v->addr, &a->service) && v->port == a->service_port &&
		       v->other_port == a->client_port;
	return addr_equal(&v->addr, &a->endpoint) && v->port == a->endpoint_port &&
	       v->other_port == a->snat_port;
}

/* Applies a packet to its flow. */
static __always_inline int packet(struct run *r, struct entry *e, const struct view *v,
				  const struct facts *a, int way)
{
	__u32 index = v->next_hop;
	struct next_hop *hop = bpf_map_lookup_elem(&next_hops, &index);
	struct side *side = &e->side[way];

	if (!hop)
		return TC_ACT_SHOT;
	if (r->flags & RUN_CHECK) {
		if (!view_is(v, a, way))
			r->torn++;
		r->done++;
		return TC_ACT_OK;
	}
	if (v->in_ifindex || v->state != FLOW_ESTABLISHED || !(v->flags & FLOW_TRACKED)) {
		r->refused++;
		return TC_ACT_SHOT;
	}
	side->end += 100;
	if (side->ack - 1 < side->window)
		side->ack++;
	if (r->flags & RUN_TICK)
		e->seen = r->time + (__u32)r->next;
	/* What the rewrite reads. */
	r->sum += addr_sum(&v->addr) + v->port + v->other_port + hop->ifindex + hop->seen +
		  hop->mtu + *(__u32 *)hop->macs + v->service_id;
	r->done++;
	return TC_ACT_OK;
}

SEC("tc")
int known(struct __sk_buff *skb)
{
	struct run *r = run_of_cpu();
	struct view v;
	struct place at;
	struct facts a;
	struct tuple t;
	int bucket, slot;

	if (!r)
		return TC_ACT_SHOT;
	facts_fill(&a, next_flow(r), r->flags);
	tuple_there(&t, &a, family_of(r));
	if (place_of(&at, &t.saddr, t.sport, t.proto, t.family))
		return TC_ACT_SHOT;
	bucket = flow_read(&at, &t, THERE, &v, &slot);
	if (bucket < 0) {
		r->missed++;
		return TC_ACT_SHOT;
	}
	return packet(r, &at.bucket[bucket & 1]->entry[bounded(slot)], &v, &a, THERE);
}

SEC("tc")
int reply(struct __sk_buff *skb)
{
	struct run *r = run_of_cpu();
	struct view v;
	struct entry *e;
	struct place at;
	struct facts a;
	struct tuple t;
	int bucket, slot;

	if (!r)
		return TC_ACT_SHOT;
	facts_fill(&a, next_flow(r), r->flags);
	tuple_back(&t, &a, family_of(r));
	/* The product knows the node's addresses. Here the port says it. */
	if (a.snat_port) {
		e = port_read(&t, &v);
		if (!e) {
			r->missed++;
			return TC_ACT_SHOT;
		}
		return packet(r, e, &v, &a, BACK);
	}
	if (place_of(&at, &t.daddr, t.dport, t.proto, t.family))
		return TC_ACT_SHOT;
	bucket = flow_read(&at, &t, BACK, &v, &slot);
	if (bucket < 0) {
		r->missed++;
		return TC_ACT_SHOT;
	}
	return packet(r, &at.bucket[bucket & 1]->entry[bounded(slot)], &v, &a, BACK);
}

/* Confirms or deletes a flow, under the lock of its bucket. */
static __always_inline int change(bool forget)
{
	struct run *r = run_of_cpu();
	struct place at;
	struct facts a;
	struct tuple t;

	if (!r)
		return TC_ACT_SHOT;
	facts_fill(&a, next_flow(r), r->flags);
	tuple_there(&t, &a, family_of(r));
	if (place_of(&at, &t.saddr, t.sport, t.proto, t.family))
		return TC_ACT_SHOT;
	for (int i = 0; i < 2; i++) {
		struct bucket *b = at.bucket[i];
		struct entry *e;
		int slot;

		if (version_lock(&b->version, LOCK_TRIES)) {
			r->busy++;
			return TC_ACT_SHOT;
		}
		slot = bucket_find(b, at.tag, &t, THERE);
		if (slot >= 0) {
			slot = bounded(slot);
			e = &b->entry[slot];
			if (forget) {
				if (e->there.other)
					port_change(e, at.index[i] * WAYS + slot, false);
				b->tag[slot] = 0;
				b->class[slot] = CLASS_FREE;
			} else {
				e->state = FLOW_ESTABLISHED;
				e->flags |= FLOW_CONFIRMED;
				b->class[slot] = CLASS_CONFIRMED;
			}
			r->done++;
		}
		version_unlock(&b->version);
		if (slot >= 0)
			return TC_ACT_OK;
	}
	r->missed++;
	return TC_ACT_SHOT;
}

SEC("tc")
int confirm(struct __sk_buff *skb)
{
	return change(false);
}

SEC("tc")
int forget(struct __sk_buff *skb)
{
	return change(true);
}
