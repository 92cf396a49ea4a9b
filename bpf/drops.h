/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The data that the programs of `spillway drops` share with the command. bpf2go generates
 * the Go types from this file. Nothing of it outlives the command.
 *
 * Addresses and ports are in network order, all other numbers in host order.
 */
#ifndef SPILLWAY_DROPS_H
#define SPILLWAY_DROPS_H

/* The part of the kernel that dropped the packet, where the kernel's reason does not tell. */
enum drop_path {
	PATH_NONE = 0,
	PATH_NFT = 1,
	PATH_XTABLES = 2,
	PATH_NAT = 3,
	PATH_CONNTRACK = 4,
	PATH_CONNTRACK_FULL = 5,
	PATH_CONNTRACK_INSERT = 6,
	PATH_LISTEN = 7,
	PATH_SYN = 8, /* a listener has finished with a SYN, perhaps without an answer */
};

enum drop_flags {
	DROP_INVALID = 1 << 0,	/* conntrack called it INVALID */
	DROP_FRAGMENT = 1 << 1, /* not the first fragment: no ports */
	DROP_NO_ENTRY = 1 << 2, /* conntrack has no entry for it */
};

enum drop_counter {
	DROPS_SEEN = 0,	   /* dropped IP packets with a requested reason */
	DROPS_MATCHED = 1, /* of those: matched by the filters */
	DROPS_LIMITED = 2, /* of those: beyond the rate */
	DROPS_LOST = 3,	   /* of those: no room in the buffer */
	DROPS_COUNTERS = 4,
};

#define DROP_STACK 12

struct drop {
	__u64 time;	/* CLOCK_MONOTONIC, ns */
	__u64 location; /* address in the kernel's code */
	__u64 cookie;	/* of the network namespace; never reused, unlike an inode */
	__u32 netns;	/* inode */
	__u32 reason;	/* enum skb_drop_reason */
	__u32 length;
	__u32 iif; /* index of the ingress interface; 0: sent by this host */
	__be32 saddr[4];
	__be32 daddr[4];
	__be16 sport; /* ICMP: type and code */
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
	__u64 stack[DROP_STACK]; /* call stack, the innermost function first */
};

/* An address with its significant bits. IPv4 is in addr[0]. */
struct filter_prefix {
	__be32 addr[4];
	__be32 mask[4];
	__u32 family;
};

#define FILTER_PREFIXES 16
#define FILTER_PORTS 16

/* The filters that a network namespace matches. */
enum place_flags {
	PLACE_NETNS = 1 << 0,
	PLACE_POD = 1 << 1,
};

#endif
