/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * What the programs that follow drops share with the program that prints them;
 * the Go types are generated from it. Nothing of it outlives the command.
 *
 * Addresses and ports are in network order, everything else in the host's.
 */
#ifndef SPILLWAY_DROPS_H
#define SPILLWAY_DROPS_H

/* Who dropped, where the kernel's reason does not tell. */
enum drop_path {
	PATH_NONE = 0,
	PATH_NFT = 1,
	PATH_XTABLES = 2,
	PATH_NAT = 3,
	PATH_CONNTRACK = 4,
	PATH_CONNTRACK_FULL = 5,
	PATH_CONNTRACK_INSERT = 6,
	PATH_LISTEN = 7,
	PATH_SYN = 8, /* a SYN is done with; whether it was answered is not known */
};

enum drop_flags {
	DROP_INVALID = 1 << 0, /* conntrack called it INVALID */
	DROP_FRAGMENT = 1 << 1, /* not the first: it has no ports */
	DROP_NO_ENTRY = 1 << 2, /* conntrack has no entry for it */
};

enum drop_counter {
	DROPS_SEEN = 0,    /* IP packets dropped, of the reasons asked for */
	DROPS_MATCHED = 1, /* of those, what the filters let through */
	DROPS_LIMITED = 2, /* of those, beyond the rate */
	DROPS_LOST = 3,    /* of those, for want of room in the buffer */
	DROPS_COUNTERS = 4,
};

#define DROP_STACK 12

struct drop {
	__u64 time;     /* CLOCK_MONOTONIC, ns */
	__u64 location; /* an address in the kernel's code */
	__u64 cookie;   /* of the network namespace: never used again, as an inode is */
	__u32 netns;    /* inode */
	__u32 reason;   /* enum skb_drop_reason */
	__u32 length;
	__u32 iif; /* index of the interface it came in by, 0: made here */
	__be32 saddr[4];
	__be32 daddr[4];
	__be16 sport; /* of ICMP: type and code */
	__be16 dport;
	__u8 family; /* 4 or 6 */
	__u8 proto;
	__u8 tcp_flags;
	__u8 flags;
	__u8 path;
	__u8 hook;
	__u8 hook_family; /* NFPROTO_* */
	__u8 pad[5];
	char in[16];
	char out[16];
	char table[32];
	char chain[48];
	__u64 stack[DROP_STACK]; /* who called whom, the innermost first */
};

/* filter_prefix: an address with the bits that count; an IPv4 one is in addr[0]. */
struct filter_prefix {
	__be32 addr[4];
	__be32 mask[4];
	__u32 family;
};

#define FILTER_PREFIXES 16
#define FILTER_PORTS 16

/* place_flags say which filters a network namespace passes. */
enum place_flags {
	PLACE_NETNS = 1 << 0,
	PLACE_POD = 1 << 1,
};

#endif
