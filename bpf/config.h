/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Load-time constants. The verifier sees their values, so code for what a
 * kernel lacks is never checked, let alone run.
 */
#ifndef SPILLWAY_CONFIG_H
#define SPILLWAY_CONFIG_H

/* Cookie of the agent's network namespace (SO_NETNS_COOKIE, 5.14). */
volatile const __u64 host_netns_cookie = 0;

/* bpf_set_retval for sock_addr programs (5.18): connect() fails with a fitting errno. */
volatile const __u8 has_set_retval = 0;

/* BPF_F_IPV6 of bpf_l4_csum_replace (6.16): right sums for CHECKSUM_COMPLETE. */
volatile const __u8 has_csum_ipv6 = 0;

/* bpf_skb_ct_lookup (5.18), of the kernel or of its nf_conntrack module. */
volatile const __u8 has_ct_lookup = 0;

/* Seed of all hashes of packets. The agent draws it once for a node: no packet can aim. */
volatile const __u32 hash_seed = 0;

/* Length of the ring of unconfirmed flows. */
volatile const __u32 unconfirmed_max = 1024;

/* Confirmed flows that one client may have. */
volatile const __u32 source_max = 1024;

#endif
