/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* SipHash-2-4 (Aumasson and Bernstein, 2012): what only who has the key can compute. */
#ifndef SPILLWAY_SIPHASH_H
#define SPILLWAY_SIPHASH_H

#include "base.h"

static __always_inline __u64 rotl64(__u64 x, int n)
{
	return x << n | x >> (64 - n);
}

static __always_inline void sip_round(__u64 v[4])
{
	v[0] += v[1];
	v[1] = rotl64(v[1], 13) ^ v[0];
	v[0] = rotl64(v[0], 32);
	v[2] += v[3];
	v[3] = rotl64(v[3], 16) ^ v[2];
	v[0] += v[3];
	v[3] = rotl64(v[3], 21) ^ v[0];
	v[2] += v[1];
	v[1] = rotl64(v[1], 17) ^ v[2];
	v[2] = rotl64(v[2], 32);
}

static __always_inline void sip_word(__u64 v[4], __u64 word)
{
	v[3] ^= word;
	sip_round(v);
	sip_round(v);
	v[0] ^= word;
}

/* Returns the hash of n words of 8 bytes each. */
static __always_inline __u64 siphash(const void *data, __u32 n, __u64 k0, __u64 k1)
{
	__u64 v[4] = {
		k0 ^ 0x736f6d6570736575ULL,
		k1 ^ 0x646f72616e646f6dULL,
		k0 ^ 0x6c7967656e657261ULL,
		k1 ^ 0x7465646279746573ULL,
	};
	__u64 word;

	for (__u32 i = 0; i < n; i++) {
		__builtin_memcpy(&word, data + i * sizeof(word), sizeof(word));
		sip_word(v, word);
	}
	sip_word(v, (__u64)n * sizeof(word) << 56);
	v[2] ^= 0xff;
	for (int i = 0; i < 4; i++)
		sip_round(v);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}

#endif
