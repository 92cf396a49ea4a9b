/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* One's complement sums (RFC 1071) and their incremental update (RFC 1624). */
#ifndef SPILLWAY_NAT_CSUM_H
#define SPILLWAY_NAT_CSUM_H

#include "../base.h"

static __always_inline __u32 csum_fold32(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

/* Folds a sum to 16 bits, not inverted. */
static __always_inline __u16 csum_fold16(__u64 sum)
{
	__u32 s = csum_fold32(sum);

	s = (s & 0xffff) + (s >> 16);
	return (s & 0xffff) + (s >> 16);
}

/* Returns the checksum of an IPv4 header whose own field is 0. The memory has no other bytes. */
static __always_inline __u16 ipv4_sum(const void *header, __u32 len)
{
	return ~csum_fold16((__u32)bpf_csum_diff(NULL, 0, (__be32 *)header, len, 0));
}

/*
 * Returns the checksum difference between from[] and to[]. n is a constant, so this is a
 * few additions, while bpf_csum_diff is a call.
 */
static __always_inline __u32 csum_change(const __be32 *from, const __be32 *to, int n)
{
	__u64 sum = 0;

	for (int i = 0; i < n; i++)
		sum += (__u64)(__u32)~from[i] + to[i];
	return csum_fold32(sum);
}

/* Applies a change to a checksum (RFC 1624, eqn. 3). */
static __always_inline __u16 check_apply(__u16 check, __u32 change)
{
	return ~csum_fold16((__u64)(__u16)~check + change);
}

#endif
