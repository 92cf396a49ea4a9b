/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Load-time constants. The verifier knows their values, so it never checks, and the kernel
 * never runs, code for features that the kernel lacks.
 */
#ifndef SPILLWAY_CONFIG_H
#define SPILLWAY_CONFIG_H

/* Cookie of the agent's network namespace (SO_NETNS_COOKIE, 5.14). */
volatile const __u64 host_netns_cookie = 0;

/* Is bpf_set_retval (5.18) available to sock_addr programs, to set the errno of connect()? */
volatile const __u8 has_set_retval = 0;

/*
 * Is BPF_F_IPV6 of bpf_l4_csum_replace (6.16) available? It keeps CHECKSUM_COMPLETE
 * correct.
 */
volatile const __u8 has_csum_ipv6 = 0;

/* Is bpf_skb_ct_lookup (5.18) available, in the kernel or its nf_conntrack module? */
volatile const __u8 has_ct_lookup = 0;

/*
 * Seed of all hashes of packets. The agent draws it once per node, so no client can predict
 * a hash.
 */
volatile const __u32 hash_seed = 0;

/*
 * Seed of maglev_hash. It is the same on all nodes, and so a client may know it: see
 * --maglev-seed.
 */
volatile const __u32 maglev_seed = 0;

/*
 * Are there keys for the options of DSR (dsr/option.h)? The present key, and the one before
 * it, or 0: none. Their bytes are in SipHash's order.
 */
volatile const __u8 dsr = 0;
volatile const __u64 dsr_key0 = 0;
volatile const __u64 dsr_key1 = 0;
volatile const __u64 dsr_previous_key0 = 0;
volatile const __u64 dsr_previous_key1 = 0;

/* The UDP port of packets within datagrams, and of probes; 0: there are none. */
volatile const __be16 dsr_port = 0;

/* The key of the cookies of xdp/syn_filter.h, which the agent draws at each start. */
volatile const __u64 syn_key0 = 0;
volatile const __u64 syn_key1 = 0;

/* Number of words of port_filter, minus one. The number is a power of two. */
volatile const __u32 port_filter_mask = 0;

/* Length of the ring of unconfirmed flows. */
volatile const __u32 unconfirmed_max = 1024;

/* Length of the ring of flows with DSR, which follows the other one: dsr/flow.h. */
volatile const __u32 dsr_flows_max = 1;

/* Maximum number of confirmed flows of one client. */
volatile const __u32 client_flows_max = 1024;

/* Are packets and bytes of reported flows counted? A packet of another flow costs nothing. */
volatile const __u8 count_bytes = 0;

/*
 * Are the handshakes of TCP sockets followed, and the flows of UDP sockets reported? If not,
 * connect() costs nothing more.
 */
volatile const __u8 follow_tcp_sockets = 0;
volatile const __u8 report_udp_sockets = 0;

/* Is the endpoint of each connected socket stored, so that the agent can end the socket? */
volatile const __u8 end_sockets = 0;

/*
 * Are connections, refusals and handshakes counted by Service, and packets and bytes too? The
 * first cost no packet of a known flow.
 */
volatile const __u8 service_metrics = 0;
volatile const __u8 service_packets = 0;

/*
 * Do Services choose by the load of endpoints? The size of the map loads, a power of two, minus
 * one. The ends of UDP sockets are seen if sock_release is loaded.
 */
volatile const __u8 balance_by_load = 0;
volatile const __u32 loads_mask = 0;
volatile const __u8 udp_ends_seen = 0;

/* One of so many flows is reported. */
volatile const __u32 event_sample = 1;

/* Minimum interval between the flows of a Service that are reported, in ns; 0: none. */
volatile const __u32 event_interval = 0;

/* Bytes in the ring events from which on the agent is woken. It reads them in time anyway. */
volatile const __u32 events_wakeup = 4096;

#endif
