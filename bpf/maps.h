/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The maps. Each is pinned by name in the instance's own directory. The agent sets
 * max_entries of the maps that grow with the cluster or the traffic.
 */
#ifndef SPILLWAY_MAPS_H
#define SPILLWAY_MAPS_H

#define HASH(name, keytype, valtype, max)             \
	struct {                                      \
		__uint(type, BPF_MAP_TYPE_HASH);      \
		__uint(map_flags, BPF_F_NO_PREALLOC); \
		__uint(max_entries, max);             \
		__type(key, keytype);                 \
		__type(value, valtype);               \
		__uint(pinning, LIBBPF_PIN_BY_NAME);  \
	} name SEC(".maps")

#define LRU(name, keytype, valtype, max)             \
	struct {                                     \
		__uint(type, BPF_MAP_TYPE_LRU_HASH); \
		__uint(max_entries, max);            \
		__type(key, keytype);                \
		__type(value, valtype);              \
		__uint(pinning, LIBBPF_PIN_BY_NAME); \
	} name SEC(".maps")

/* Memory for an entry is allocated when the entry is made. */
#define PERCPU_HASH(name, keytype, valtype, max)        \
	struct {                                        \
		__uint(type, BPF_MAP_TYPE_PERCPU_HASH); \
		__uint(map_flags, BPF_F_NO_PREALLOC);   \
		__uint(max_entries, max);               \
		__type(key, keytype);                   \
		__type(value, valtype);                 \
		__uint(pinning, LIBBPF_PIN_BY_NAME);    \
	} name SEC(".maps")

#define ARRAY(name, maptype, valtype, max)           \
	struct {                                     \
		__uint(type, maptype);               \
		__uint(max_entries, max);            \
		__type(key, __u32);                  \
		__type(value, valtype);              \
		__uint(pinning, LIBBPF_PIN_BY_NAME); \
	} name SEC(".maps")

/* Finds the longest prefix: see struct range_key. */
#define TRIE(name, valtype, max)                      \
	struct {                                      \
		__uint(type, BPF_MAP_TYPE_LPM_TRIE);  \
		__uint(map_flags, BPF_F_NO_PREALLOC); \
		__uint(max_entries, max);             \
		__type(key, struct range_key);        \
		__type(value, valtype);               \
		__uint(pinning, LIBBPF_PIN_BY_NAME);  \
	} name SEC(".maps")

/* Maps that the agent writes. */
HASH(frontends, struct frontend_key, struct frontend, 1 << 20);
HASH(services, __u32, struct service, 1 << 18);
HASH(slots, struct slot_key, __u32, 1 << 21);
HASH(backends, __u32, struct backend, 1 << 20);
ARRAY(service_changes, BPF_MAP_TYPE_ARRAY, __u32, 1);
HASH(pods, struct addr_key, struct pod, 1 << 14);
HASH(node_addrs, struct addr_key, __u32, 1 << 12);
HASH(uplinks, __u32, struct uplink, 1 << 10);
HASH(l3_devices, __u32, __u8, 1 << 10);
HASH(dsr_encapsulations, struct addr_key, struct dsr_encapsulation, 1 << 14);
HASH(untracked_ports, struct frontend_key, struct untracked_port, 1 << 14);
HASH(untracked_pods, struct untracked_pod_key, __u8, 1 << 16);
HASH(unhooked_cgroups, __u64, __u8, 1 << 12); /* by the id of a pod's cgroup */
ARRAY(node_settings, BPF_MAP_TYPE_ARRAY, struct settings, 1);
ARRAY(snat_ports, BPF_MAP_TYPE_ARRAY, __u16, 1 << 16);
ARRAY(xdp_devices, BPF_MAP_TYPE_ARRAY, struct xdp_device, XDP_DEVICES); /* by ifindex */

/* The agent writes its words through shared memory. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1 << 18);
	__type(key, __u32);
	__type(value, __u64);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} port_filter SEC(".maps");

TRIE(source_ranges, __u8, 1 << 18);
/* The agent writes it before Services: they take no room of it. */
TRIE(cluster_ranges, __u8, 1 << 17);
TRIE(untracked_blocks, __u8, 1 << 16);
TRIE(route_mtus, __u32, 1 << 14);

/* Maps that the programs write. */
LRU(flows, struct tuple, struct flow, 1 << 19);
ARRAY(unconfirmed, BPF_MAP_TYPE_ARRAY, struct tuple, 1 << 16);
ARRAY(unconfirmed_next, BPF_MAP_TYPE_ARRAY, __u32, 1);
ARRAY(one_way_next, BPF_MAP_TYPE_ARRAY, __u32, 1);
ARRAY(sources, BPF_MAP_TYPE_ARRAY, __u32, SOURCES);
LRU(icmp_rates, struct addr_key, struct icmp_rate, 1 << 12);
LRU(affinities, struct affinity_key, struct affinity, 1 << 16);
LRU(fragments, struct fragment_key, struct fragment, 1 << 13);
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct connection);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} connections SEC(".maps"); /* the kernel deletes the entry with the socket */
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct socket_backend);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} socket_backends SEC(".maps");
LRU(sockets, struct socket_key, struct socket_peer, 1 << 17);
/* The agent writes the ports of flows that other maps had. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, (1 << 16) / EGRESS_PORTS_OF_VALUE);
	__type(key, __u32);
	__type(value, struct egress_ports);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} egress_ports SEC(".maps");
ARRAY(egress_addresses, BPF_MAP_TYPE_ARRAY, struct addr, 2 * EGRESS_POD_GROUPS);
ARRAY(features_seen, BPF_MAP_TYPE_ARRAY, __u32, 1); /* enum feature */
ARRAY(verdicts, BPF_MAP_TYPE_PERCPU_ARRAY, __u64, VERDICTS);

/* Maps of flow events and of counters by Service: lib/events/events.h. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 16);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} events SEC(".maps");
ARRAY(event_counts, BPF_MAP_TYPE_PERCPU_ARRAY, __u64, EVENT_COUNTS);
HASH(reported_services, __u32, __u8, 1 << 12);
LRU(event_rates, struct event_rate_key, struct event_rate, 1 << 13);
ARRAY(handshakes, BPF_MAP_TYPE_ARRAY, struct handshake, 1 << 16);
LRU(outcomes, __u32, struct outcome, 1 << 13);
LRU(dsr_paths, __u32, struct dsr_path, 1 << 14);
ARRAY(syn_proofs, BPF_MAP_TYPE_ARRAY, __u32, SYN_PROOFS);
ARRAY(syn_rates, BPF_MAP_TYPE_PERCPU_ARRAY, struct syn_rate, SYN_RATES);
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct load);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} loads SEC(".maps");
LRU(flow_bytes, struct tuple, struct traffic, 1 << 17);
struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct socket_flow);
	__uint(pinning, LIBBPF_PIN_BY_NAME);
} socket_flows SEC(".maps"); /* the kernel deletes the entry with the socket */
PERCPU_HASH(service_counters, __u32, struct service_counts, 1 << 13);
PERCPU_HASH(service_refusals, struct refusal_key, __u64, 1 << 14);

#endif
