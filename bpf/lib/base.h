/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Included by every program: kernel headers, the ABI, the maps. */
#ifndef SPILLWAY_BASE_H
#define SPILLWAY_BASE_H

#include <stdbool.h>
#include <linux/bpf.h>
#include <linux/icmpv6.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "../abi.h"
#include "../config.h"
#include "../maps.h"

/*
 * The result for a packet that is not ours: the next program of the hook and then the stack
 * handle it. The value is both TCX_NEXT (6.6) and TC_ACT_UNSPEC of a clsact filter.
 */
#define NEXT (-1)

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

#define AF_INET 2
#define AF_INET6 10

/* linux/icmp.h includes the C library, so its few definitions are repeated here (RFC 792). */
#define ICMP_ECHOREPLY 0
#define ICMP_DEST_UNREACH 3
#define ICMP_ECHO 8
#define ICMP_TIME_EXCEEDED 11
#define ICMP_PARAMETERPROB 12
#define ICMP_PORT_UNREACH 3
#define ICMP_FRAG_NEEDED 4
#define ICMP_EXC_TTL 0

struct icmphdr {
	__u8 type;
	__u8 code;
	__sum16 checksum;
	__be32 rest;
};

#define NSEC_PER_SEC 1000000000ULL

/* The headers of older distributions lack it. */
#ifndef BPF_F_IPV6
#define BPF_F_IPV6 (1ULL << 7) /* bpf_l4_csum_replace, 6.16 */
#endif

static __always_inline void count(enum verdict verdict)
{
	__u32 key = verdict;
	__u64 *n = bpf_map_lookup_elem(&verdicts, &key);

	if (n)
		*n += 1;
}

/*
 * Returns seconds since boot, from the coarse clock (one jiffy), which is cheap (5.11).
 * Without a division, each second is half a millisecond too long. The agent computes the
 * same clock in BootSeconds.
 */
static __always_inline __u32 now(void)
{
	return (bpf_ktime_get_coarse_ns() >> 20) * 1099 >> 20;
}

static __always_inline struct settings *get_settings(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&node_settings, &zero);
}

/* Returns the bits of enum feature. */
static __always_inline __u32 *features_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&features_seen, &zero);
}

static __always_inline int feature_seen(enum feature what)
{
	__u32 *features = features_get();

	return features && *features & what;
}

static __always_inline void feature_mark(enum feature what)
{
	__u32 *features = features_get();

	if (features && !(*features & what))
		__sync_fetch_and_or(features, what);
}

static __always_inline int addr_equal(const struct addr *a, const struct addr *b)
{
	return !((a->w[0] ^ b->w[0]) | (a->w[1] ^ b->w[1]) | (a->w[2] ^ b->w[2]) |
		 (a->w[3] ^ b->w[3]));
}

static __always_inline int addr_zero(const struct addr *a)
{
	return !(a->w[0] | a->w[1] | a->w[2] | a->w[3]);
}

/* Is this address in 127.0.0.0/8, or ::1? */
static __always_inline bool addr_loopback(const struct addr *addr, __u8 family)
{
	if (family == FAMILY_V4)
		return (addr->w[0] & bpf_htonl(0xff000000)) == bpf_htonl(0x7f000000);
	return !addr->w[0] && !addr->w[1] && !addr->w[2] && addr->w[3] == bpf_htonl(1);
}

/* Mixes a word into a 32-bit hash (Murmur3's finalizer). */
static __always_inline __u32 mix(__u32 h, __u32 v)
{
	h ^= v;
	h *= 0x85ebca6b;
	h ^= h >> 13;
	h *= 0xc2b2ae35;
	h ^= h >> 16;
	return h;
}

static __always_inline __u32 addr_hash(const struct addr *a)
{
	__u32 h = hash_seed;

	for (int i = 0; i < 4; i++)
		h = mix(h, a->w[i]);
	return h;
}

/* Hashes by the node's secret seed. maglev_hash has a seed that clients may know. */
static __always_inline __u32 tuple_hash(const struct tuple *t)
{
	__u32 h = hash_seed;

	for (int i = 0; i < 4; i++)
		h = mix(h, t->saddr.w[i] + 0x9e3779b9 * t->daddr.w[i]);
	return mix(h, ((__u32)t->sport << 16 | t->dport) + t->proto);
}

/*
 * Hashes the client's address, port and protocol, as all nodes do. The destination is left out:
 * a client's flow has the same endpoint at each address of a Service.
 */
static __always_inline __u32 maglev_hash(const struct tuple *t)
{
	__u32 h = maglev_seed;

	for (int i = 0; i < 4; i++)
		h = mix(h, t->saddr.w[i]);
	return mix(h, (__u32)t->sport << 16 | t->proto);
}

#endif
