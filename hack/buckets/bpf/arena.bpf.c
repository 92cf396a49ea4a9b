// SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause)
/* The step `array` of locks.bpf.c with an arena (Linux 6.9), whose pages user space has touched. */
#include "common.h"

#define BUCKETS 20480
#define BUCKET_SIZE 1088

struct {
	__uint(type, 33); /* BPF_MAP_TYPE_ARENA, which the headers of Debian 12 lack */
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, BUCKETS * BUCKET_SIZE / 4096);
} arena SEC(".maps");

#define __arena __attribute__((address_space(1)))

SEC("tc")
int arena_read(struct __sk_buff *skb)
{
	struct run *r = run_of_cpu();
	__u64 __arena *b;
	__u32 flow, slot;
	void *map;

	if (!r)
		return TC_ACT_SHOT;
	flow = next_flow(r);
	slot = flow / BUCKETS % 8;
	asm volatile("%0 = %1 ll" : "=r"(map) : "i"(&arena)); /* the program needs to name it */
	b = (__u64 __arena *)(__u64)(flow % BUCKETS * BUCKET_SIZE);
	r->sum += b[0] + b[8 + slot * 16] + b[16 + slot * 16];
	r->done++;
	return TC_ACT_OK;
}
