/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The filters, the rate and the buffer of drops.bpf.c. */
#ifndef SPILLWAY_DROPS_FILTER_H
#define SPILLWAY_DROPS_FILTER_H

#include <stdbool.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_endian.h>

/* Load-time constants, see drops.Config. */
volatile const struct filter_prefix addresses[FILTER_PREFIXES];
volatile const __u32 addresses_count = 0;
volatile const struct filter_prefix pod_addresses[FILTER_PREFIXES];
volatile const __u32 pod_addresses_count = 0;
volatile const __be16 ports[FILTER_PORTS];
volatile const __u32 ports_count = 0;
volatile const __u8 only_protocol = 0;
volatile const __u8 only_netns = 0; /* places with PLACE_NETNS */
volatile const __u8 only_pods = 0;  /* places with PLACE_POD, or pod_addresses */
volatile const __u8 only_reasons = 0;
volatile const __u8 no_groups = 0; /* no drops to multicast addresses */
volatile const __u32 rate = 0;	   /* maximum of reported drops per second, 0: no limit */
volatile const __u32 netfilter_reason = 0;
volatile const __u32 listen_reason = 0;

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);   /* cookie of a network namespace */
	__type(value, __u32); /* enum place_flags */
} places SEC(".maps");

/* Reported reasons with only_reasons, excluded reasons without. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, __u8);
} reasons SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, DROPS_COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

/* Drops that match the filters, reported or not, by reason. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_HASH);
	__uint(max_entries, 1024);
	__type(key, __u32); /* reason */
	__type(value, __u64);
} by_reason SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} told SEC(".maps");

struct window {
	__u64 began;
	__u64 count;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2); /* drops, SYNs */
	__type(key, __u32);
	__type(value, struct window);
} windows SEC(".maps");

static __always_inline void count(__u32 which)
{
	__u64 *n = bpf_map_lookup_elem(&counters, &which);

	if (n)
		(*n)++;
}

static __always_inline void count_reason(__u32 reason)
{
	__u64 one = 1, *n = bpf_map_lookup_elem(&by_reason, &reason);

	if (n)
		(*n)++;
	else
		bpf_map_update_elem(&by_reason, &reason, &one, BPF_NOEXIST);
}

static __always_inline bool reason_wanted(__u32 reason)
{
	return !bpf_map_lookup_elem(&reasons, &reason) == !only_reasons;
}

/* parse_ports reads the header after the IP header, at this address. */
static __always_inline void parse_ports(struct drop *d, const void *at)
{
	__u8 bytes[14] = {};

	switch (d->proto) {
	case IPPROTO_TCP:
		bpf_probe_read_kernel(bytes, sizeof(bytes), at);
		d->tcp_flags = bytes[13];
		break;
	case IPPROTO_UDP:
	case IPPROTO_SCTP:
	case IPPROTO_UDPLITE:
	case IPPROTO_DCCP:
		bpf_probe_read_kernel(bytes, 4, at);
		break;
	case IPPROTO_ICMP:
	case IPPROTO_ICMPV6:
		bpf_probe_read_kernel(bytes, 2, at);
		break;
	default:
		return;
	}
	__builtin_memcpy(&d->sport, bytes, 2);
	if (d->proto != IPPROTO_ICMP && d->proto != IPPROTO_ICMPV6)
		__builtin_memcpy(&d->dport, bytes + 2, 2);
}

/*
 * parse_packet fills in the outermost IP header and the ports. It returns false for packets
 * that are not IP. Extension headers of IPv6 hide the ports.
 */
static __always_inline bool parse_packet(struct drop *d, struct sk_buff *skb)
{
	const unsigned char *at = BPF_CORE_READ(skb, head) + BPF_CORE_READ(skb, network_header);
	__be16 protocol = BPF_CORE_READ(skb, protocol);

	if (protocol == bpf_htons(ETH_P_IP)) {
		struct iphdr ip;

		if (bpf_probe_read_kernel(&ip, sizeof(ip), at) || ip.version != 4)
			return false;
		d->family = 4;
		d->proto = ip.protocol;
		d->saddr[0] = ip.saddr;
		d->daddr[0] = ip.daddr;
		if (ip.frag_off & bpf_htons(0x1fff))
			d->flags |= DROP_FRAGMENT;
		else
			parse_ports(d, at + ip.ihl * 4);
		return true;
	}
	if (protocol == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr ip6;

		if (bpf_probe_read_kernel(&ip6, sizeof(ip6), at) || ip6.version != 6)
			return false;
		d->family = 6;
		d->proto = ip6.nexthdr;
		__builtin_memcpy(d->saddr, &ip6.saddr, 16);
		__builtin_memcpy(d->daddr, &ip6.daddr, 16);
		parse_ports(d, at + sizeof(ip6));
		return true;
	}
	return false;
}

static __always_inline bool in_prefix(const __be32 *addr, volatile const struct filter_prefix *p)
{
	return !(((addr[0] ^ p->addr[0]) & p->mask[0]) | ((addr[1] ^ p->addr[1]) & p->mask[1]) |
		 ((addr[2] ^ p->addr[2]) & p->mask[2]) | ((addr[3] ^ p->addr[3]) & p->mask[3]));
}

static __always_inline bool in_prefixes(const struct drop *d,
					volatile const struct filter_prefix *list, __u32 n)
{
	__u32 i;

	for (i = 0; i < FILTER_PREFIXES; i++) {
		if (i >= n)
			break;
		if (list[i].family == d->family &&
		    (in_prefix(d->saddr, &list[i]) || in_prefix(d->daddr, &list[i])))
			return true;
	}
	return false;
}

static __always_inline bool has_port(const struct drop *d)
{
	__u32 i;

	if (d->proto == IPPROTO_ICMP || d->proto == IPPROTO_ICMPV6)
		return false;
	for (i = 0; i < FILTER_PORTS; i++) {
		if (i >= ports_count)
			break;
		if (d->sport == ports[i] || d->dport == ports[i])
			return true;
	}
	return false;
}

static __always_inline bool to_group(const struct drop *d)
{
	const __u8 *first = (const __u8 *)d->daddr;

	return d->family == 6 ? *first == 0xff : (*first & 0xf0) == 0xe0;
}

/* wanted reports whether the drop matches every filter that is set. */
static __always_inline bool wanted(const struct drop *d)
{
	__u64 cookie = d->cookie;
	__u32 *place = bpf_map_lookup_elem(&places, &cookie);

	if (no_groups && to_group(d))
		return false;
	if (only_protocol && d->proto != only_protocol)
		return false;
	if (only_netns && !(place && *place & PLACE_NETNS))
		return false;
	if (addresses_count && !in_prefixes(d, addresses, addresses_count))
		return false;
	if (ports_count && !has_port(d))
		return false;
	return !only_pods || (place && *place & PLACE_POD) ||
	       in_prefixes(d, pod_addresses, pod_addresses_count);
}

/*
 * window_take takes one from a rate, or returns false. Two CPUs that start a second at once exceed
 * it a little.
 */
static __always_inline bool window_take(__u32 which, __u32 most, __u64 time)
{
	struct window *w = bpf_map_lookup_elem(&windows, &which);

	if (!w)
		return true;
	if (time - w->began >= 1000000000ULL) {
		w->began = time;
		w->count = 0;
	}
	return __sync_fetch_and_add(&w->count, 1) < most;
}

/* For each SYN the reader searches the listeners. */
static __always_inline bool syn_rate_take(__u64 time)
{
	return window_take(1, 200, time);
}

/* count_limited returns true, and counts the drop, if it is beyond the rate. */
static __always_inline bool count_limited(const struct drop *d)
{
	if (!rate || window_take(0, rate, d->time))
		return false;
	count(DROPS_LIMITED);
	return true;
}

static __always_inline void deliver(struct drop *d)
{
	if (bpf_ringbuf_output(&told, d, sizeof(*d), 0))
		count(DROPS_LOST);
}

#endif
