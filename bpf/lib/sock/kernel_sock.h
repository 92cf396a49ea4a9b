/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The parts of the kernel's structures of sockets and iterators that the programs read. */
#ifndef SPILLWAY_SOCK_KERNEL_SOCK_H
#define SPILLWAY_SOCK_KERNEL_SOCK_H

#include "../base.h"

struct ns_common {
	unsigned int inum;
} __attribute__((preserve_access_index));

struct net {
	__u64 net_cookie;
	struct ns_common ns;
} __attribute__((preserve_access_index));

typedef struct {
	struct net *net;
} __attribute__((preserve_access_index)) possible_net_t;

struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned char skc_state;
	int skc_bound_dev_if;
	possible_net_t skc_net;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
} __attribute__((preserve_access_index));

struct sock {
	struct sock_common __sk_common;
} __attribute__((preserve_access_index));

struct bpf_iter_meta {
	struct seq_file *seq;
} __attribute__((preserve_access_index));

struct bpf_iter__bpf_sk_storage_map {
	struct bpf_iter_meta *meta;
	void *map; /* a struct bpf_map: see flow_keys_type */
	struct sock *sk;
	void *value;
} __attribute__((preserve_access_index));

#endif
