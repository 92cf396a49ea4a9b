// SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause)
/*
 * Alternatives within the layout of buckets.bpf.c: the lock of a bucket, and the kind of map. Each
 * program does one step, for an element of random number.
 */
#include "common.h"

#define BUCKETS 20480
#define BUCKET_SIZE 1088

struct lockable {
	struct bpf_spin_lock spin;
	__u32 version;
	__u64 value[7];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, struct lockable);
} lockables SEC(".maps");

struct bucket_words {
	__u64 word[BUCKET_SIZE / 8];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, BUCKETS);
	__type(key, __u32);
	__type(value, struct bucket_words);
} buckets SEC(".maps");

static __always_inline struct lockable *next_lockable(struct run *r)
{
	__u32 index = next_flow(r) % 1024;

	return bpf_map_lookup_elem(&lockables, &index);
}

SEC("tc")
int no_lock(struct __sk_buff *skb)
{
	struct run *r = run_of_cpu();
	struct lockable *l;

	if (!r)
		return TC_ACT_SHOT;
	l = next_lockable(r);
	if (!l)
		return TC_ACT_SHOT;
	l->value[0]++;
	r->done++;
	return TC_ACT_OK;
}

SEC("tc")
int compare_and_swap(struct __sk_buff *skb)
{
	struct run *r = run_of_cpu();
	struct lockable *l;
	__u32 old;

	if (!r)
		return TC_ACT_SHOT;
	l = next_lockable(r);
	if (!l)
		return TC_ACT_SHOT;
	old = READ_ONCE(l->version);
	if (old & 1 || __sync_val_compare_and_swap(&l->version, old, old + 1) != old)
		return TC_ACT_SHOT;
	l->value[0]++;
	__sync_lock_test_and_set(&l->version, old + 2);
	r->done++;
	return TC_ACT_OK;
}

SEC("tc")
int spin_lock(struct __sk_buff *skb)
{
	struct run *r = run_of_cpu();
	struct lockable *l;

	if (!r)
		return TC_ACT_SHOT;
	l = next_lockable(r);
	if (!l)
		return TC_ACT_SHOT;
	bpf_spin_lock(&l->spin);
	l->value[0]++;
	bpf_spin_unlock(&l->spin);
	r->done++;
	return TC_ACT_OK;
}

/* Reads the head of a bucket and both lines of an entry. */
SEC("tc")
int array(struct __sk_buff *skb)
{
	struct run *r = run_of_cpu();
	struct bucket_words *b;
	__u32 flow, index, slot;

	if (!r)
		return TC_ACT_SHOT;
	flow = next_flow(r);
	index = flow % BUCKETS;
	slot = flow / BUCKETS % 8;
	b = bpf_map_lookup_elem(&buckets, &index);
	if (!b)
		return TC_ACT_SHOT;
	r->sum += b->word[0] + b->word[8 + slot * 16] + b->word[16 + slot * 16];
	r->done++;
	return TC_ACT_OK;
}
