/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The kernel structures that tracing programs read. Only the names of members matter: the
 * loader relocates each access to the running kernel's layout (CO-RE).
 */
#ifndef SPILLWAY_DROPS_KERNEL_H
#define SPILLWAY_DROPS_KERNEL_H

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct ns_common {
	unsigned int inum;
};

struct net {
	struct ns_common ns;
	__u64 net_cookie; /* 5.14 */
};

typedef struct {
	struct net *net;
} possible_net_t;

struct net_device {
	char name[16];
	int ifindex;
	possible_net_t nd_net;
};

struct sock_common {
	possible_net_t skc_net;
};

struct sock {
	struct sock_common __sk_common;
	__u32 sk_ack_backlog;
	__u32 sk_max_ack_backlog;
};

struct dst_entry {
	struct net_device *dev;
};

struct sk_buff {
	struct net_device *dev;
	struct sock *sk;
	unsigned long _skb_refdst;
	unsigned long _nfct;
	unsigned int len;
	int skb_iif;
	__be16 protocol;
	__u16 network_header;
	unsigned char *head;
};

struct nf_hook_state {
	__u8 hook;
	__u8 pf;
	struct net_device *in;
	struct net_device *out;
	struct net *net;
};

struct nft_pktinfo {
	struct sk_buff *skb;
	const struct nf_hook_state *state;
};

struct nft_table {
	char *name;
};

struct nft_chain {
	struct nft_table *table;
	char *name;
};

struct xt_table {
	const char name[32];
};

#pragma clang attribute pop

#endif
