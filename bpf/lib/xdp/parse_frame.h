/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Parses a frame for XDP: an Ethernet frame for this node with TCP or UDP, without VLAN tag, IP
 * options, extension headers and fragments. Other frames are for the tc programs.
 */
#ifndef SPILLWAY_XDP_PARSE_FRAME_H
#define SPILLWAY_XDP_PARSE_FRAME_H

#include "../parse/packet.h"

#define IPV4_FRAGMENT 0x3fff /* more fragments, and the offset */

static __always_inline int xdp_parse_l4(struct packet *p, const void *l4, const void *end)
{
	bool tcp = p->tuple.proto == IPPROTO_TCP;
	__u32 ip_len = p->l4_off - p->l3_off;

	if (!tcp && p->tuple.proto != IPPROTO_UDP)
		return PARSE_OTHER;
	if (p->l3_len < ip_len + (tcp ? sizeof(struct tcphdr) : sizeof(struct udphdr)) ||
	    p->l3_len > ip_len + (end - l4))
		return PARSE_MALFORMED;
	if (tcp)
		return l4 + sizeof(struct tcphdr) > end ? PARSE_MALFORMED : parse_tcp(p, l4);
	return l4 + sizeof(struct udphdr) > end ? PARSE_MALFORMED : parse_udp(p, l4);
}

static __always_inline int xdp_parse_v4(struct packet *p, const void *l3, const void *end)
{
	const struct iphdr *ip = l3;

	if (l3 + sizeof(*ip) > end || ip->version != 4)
		return PARSE_MALFORMED;
	if (ip->ihl != 5 || ip->frag_off & bpf_htons(IPV4_FRAGMENT))
		return PARSE_OTHER;
	p->l4_off = p->l3_off + sizeof(*ip);
	p->l3_len = bpf_ntohs(ip->tot_len);
	p->ttl = ip->ttl;
	p->check = ip->check;
	p->tuple.family = FAMILY_V4;
	p->tuple.proto = ip->protocol;
	p->tuple.saddr.w[0] = ip->saddr;
	p->tuple.daddr.w[0] = ip->daddr;
	return xdp_parse_l4(p, ip + 1, end);
}

static __always_inline int xdp_parse_v6(struct packet *p, const void *l3, const void *end)
{
	const struct ipv6hdr *ip = l3;

	if (l3 + sizeof(*ip) > end || ip->version != 6)
		return PARSE_MALFORMED;
	p->l4_off = p->l3_off + sizeof(*ip);
	p->l3_len = bpf_ntohs(ip->payload_len) + sizeof(*ip);
	p->ttl = ip->hop_limit;
	p->tuple.family = FAMILY_V6;
	p->tuple.proto = ip->nexthdr;
	__builtin_memcpy(&p->tuple.saddr, &ip->saddr, sizeof(struct addr));
	__builtin_memcpy(&p->tuple.daddr, &ip->daddr, sizeof(struct addr));
	return xdp_parse_l4(p, ip + 1, end);
}

/* Fills *p from a frame for this MAC address. */
static __always_inline int xdp_parse(struct xdp_md *ctx, struct packet *p, const __u8 *mac)
{
	const void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	const struct ethhdr *eth = data;

	if (data + sizeof(*eth) > end || __builtin_memcmp(eth->h_dest, mac, ETH_ALEN))
		return PARSE_OTHER;
	__builtin_memset(&p->tuple, 0, sizeof(p->tuple));
	p->flags = 0;
	p->l3_off = sizeof(*eth);
	if (eth->h_proto == bpf_htons(ETH_P_IP))
		return xdp_parse_v4(p, eth + 1, end);
	if (eth->h_proto == bpf_htons(ETH_P_IPV6))
		return xdp_parse_v6(p, eth + 1, end);
	return PARSE_OTHER;
}

#endif
