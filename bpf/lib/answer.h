/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Turns a packet into the answer to it, sent back by the interface it came by:
 * RST, port unreachable, fragmentation needed, time exceeded.
 *
 * A packet from a pod has CHECKSUM_PARTIAL: its transport checksum is not there
 * yet, and the kernel will sum from the old transport header and write at the
 * old place. Programs cannot see or clear that, but can tell it: the checksum
 * field then holds the sum of the pseudo header. (One complete packet in 65,536
 * looks alike; its answer is lost, as any packet may be.)
 */
#ifndef SPILLWAY_ANSWER_H
#define SPILLWAY_ANSWER_H

#include "csum.h"
#include "parse.h"

/* What tells our egress programs that a packet has been dealt with. */
#define DONE_TC_INDEX 0x5357

#define ICMP_ECHOED 8 /* bytes of the transport header that an error quotes */

struct tcp_answer {
	union {
		struct iphdr v4;
		struct ipv6hdr v6;
	} ip;
	struct tcphdr tcp;
	struct tcphdr in; /* what is answered */
};

struct icmp_answer {
	union {
		struct {
			struct iphdr ip;
			struct icmphdr icmp;
			struct iphdr quoted;
			__u8 l4[ICMP_ECHOED];
		} v4;
		struct {
			struct ipv6hdr ip;
			struct icmp6hdr icmp;
			struct ipv6hdr quoted;
			__u8 l4[ICMP_ECHOED];
		} v6;
	};
};

/* Folded sum of a pseudo header, not inverted (RFC 9293, RFC 8200). */
static __always_inline __u16 pseudo_sum(const struct tuple *t, __u32 len)
{
	__be32 words[2] = {bpf_htonl(len), bpf_htonl(t->proto)};
	__s64 sum;

	sum = bpf_csum_diff(NULL, 0, (__be32 *)&t->saddr, sizeof(t->saddr), 0);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&t->daddr, sizeof(t->daddr), sum);
	sum = bpf_csum_diff(NULL, 0, words, sizeof(words), sum);
	return fold((__u32)sum);
}

static __always_inline int csum_is_partial(struct __sk_buff *skb, const struct packet *p)
{
	__u32 off = p->tuple.proto == IPPROTO_TCP ? 16 : 6;
	__u16 check;

	if (load(skb, p->l4_off + off, &check, sizeof(check)))
		return 0;
	return check == pseudo_sum(&p->tuple, p->l3_off + p->l3_len - p->l4_off);
}

static __always_inline void answer_ipv4(struct iphdr *ip, const struct packet *p, __u8 proto,
					__u16 len)
{
	__builtin_memset(ip, 0, sizeof(*ip));
	ip->version = 4;
	ip->ihl = 5;
	ip->tot_len = bpf_htons(len);
	ip->frag_off = bpf_htons(0x4000);
	ip->ttl = 64;
	ip->protocol = proto;
	ip->saddr = p->tuple.daddr.w[0];
	ip->daddr = p->tuple.saddr.w[0];
	ip->check = ~fold((__u32)bpf_csum_diff(NULL, 0, (__be32 *)ip, sizeof(*ip), 0));
}

static __always_inline void answer_ipv6(struct ipv6hdr *ip, const struct packet *p, __u8 proto,
					__u16 payload)
{
	__builtin_memset(ip, 0, sizeof(*ip));
	ip->version = 6;
	ip->payload_len = bpf_htons(payload);
	ip->nexthdr = proto;
	ip->hop_limit = 64;
	__builtin_memcpy(&ip->saddr, &p->tuple.daddr, sizeof(ip->saddr));
	__builtin_memcpy(&ip->daddr, &p->tuple.saddr, sizeof(ip->daddr));
}

/* Swaps the MAC addresses and sends the frame back. */
static __always_inline int answer_send(struct __sk_buff *skb)
{
	__u8 mac[ETH_ALEN * 2], swapped[ETH_ALEN * 2];

	if (load(skb, 0, mac, sizeof(mac)))
		return TC_ACT_SHOT;
	__builtin_memcpy(swapped, mac + ETH_ALEN, ETH_ALEN);
	__builtin_memcpy(swapped + ETH_ALEN, mac, ETH_ALEN);
	if (bpf_skb_store_bytes(skb, 0, swapped, sizeof(swapped), 0))
		return TC_ACT_SHOT;
	skb->tc_index = DONE_TC_INDEX;
	return bpf_redirect(skb->ifindex, 0);
}

/* RFC 9293, 3.10.7.1: the RST that a closed port answers with. */
static __always_inline void answer_rst_header(struct tcphdr *out, const struct tcphdr *in,
					      const struct packet *p)
{
	__u32 data = p->l3_off + p->l3_len - p->l4_off - in->doff * 4;

	__builtin_memset(out, 0, sizeof(*out));
	out->source = in->dest;
	out->dest = in->source;
	out->doff = 5;
	out->rst = 1;
	if (in->ack) {
		out->seq = in->ack_seq;
		return;
	}
	out->ack = 1;
	out->ack_seq = bpf_htonl(bpf_ntohl(in->seq) + data + in->syn + in->fin);
}

static __always_inline int answer_rst(struct __sk_buff *skb, const struct packet *p,
				      struct tcp_answer *a)
{
	int partial = csum_is_partial(skb, p);
	__u32 ip_len;
	__u16 sum;

	/* An answer to an RST would be answered; options would have to be echoed. */
	if (p->flags & (PACKET_RST | PACKET_NO_L4 | PACKET_OPTIONS) ||
	    load(skb, p->l4_off, &a->in, sizeof(a->in))) {
		count(DROP_REJECTED_SILENT);
		return TC_ACT_SHOT;
	}
	answer_rst_header(&a->tcp, &a->in, p);
	/* The sum of both addresses does not mind their order. */
	sum = pseudo_sum(&p->tuple, sizeof(a->tcp));
	if (!partial)
		sum = ~fold((__u32)bpf_csum_diff(NULL, 0, (__be32 *)&a->tcp, sizeof(a->tcp), sum));
	a->tcp.check = sum;
	if (p->tuple.family == FAMILY_V4) {
		ip_len = sizeof(a->ip.v4);
		answer_ipv4(&a->ip.v4, p, IPPROTO_TCP, ip_len + sizeof(a->tcp));
	} else {
		ip_len = sizeof(a->ip.v6);
		answer_ipv6(&a->ip.v6, p, IPPROTO_TCP, sizeof(a->tcp));
	}
	if (bpf_skb_change_tail(skb, p->l4_off + sizeof(a->tcp), 0) ||
	    bpf_skb_store_bytes(skb, p->l3_off, &a->ip, ip_len, BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, p->l4_off, &a->tcp, sizeof(a->tcp), BPF_F_RECOMPUTE_CSUM)) {
		count(DROP_REWRITE);
		return TC_ACT_SHOT;
	}
	count(REJECTED_RST);
	return answer_send(skb);
}

/* RFC 792. rest is the header's second word: the MTU for "too big". */
static __always_inline int answer_icmp4(struct __sk_buff *skb, const struct packet *p,
					struct icmp_answer *a, __u8 type, __u8 code, __u32 rest)
{
	__builtin_memset(&a->v4.icmp, 0, sizeof(a->v4.icmp));
	if (load(skb, p->l3_off, &a->v4.quoted, sizeof(a->v4.quoted) + ICMP_ECHOED))
		return -1;
	a->v4.icmp.type = type;
	a->v4.icmp.code = code;
	a->v4.icmp.rest = bpf_htonl(rest);
	a->v4.icmp.checksum = ~fold((__u32)bpf_csum_diff(NULL, 0, (__be32 *)&a->v4.icmp,
						  sizeof(a->v4) - sizeof(a->v4.ip), 0));
	answer_ipv4(&a->v4.ip, p, IPPROTO_ICMP, sizeof(a->v4));
	if (bpf_skb_change_tail(skb, p->l3_off + sizeof(a->v4), 0))
		return -1;
	return bpf_skb_store_bytes(skb, p->l3_off, &a->v4, sizeof(a->v4), BPF_F_RECOMPUTE_CSUM);
}

/* RFC 4443. */
static __always_inline int answer_icmp6(struct __sk_buff *skb, const struct packet *p,
					struct icmp_answer *a, __u8 type, __u8 code, __u32 rest,
					int partial)
{
	__u32 len = sizeof(a->v6) - sizeof(a->v6.ip);
	struct tuple t = p->tuple;
	__u16 pseudo;

	__builtin_memset(&a->v6.icmp, 0, sizeof(a->v6.icmp));
	if (load(skb, p->l3_off, &a->v6.quoted, sizeof(a->v6.quoted) + ICMP_ECHOED))
		return -1;
	t.proto = IPPROTO_ICMPV6;
	pseudo = pseudo_sum(&t, len);
	a->v6.icmp.icmp6_type = type;
	a->v6.icmp.icmp6_code = code;
	a->v6.icmp.icmp6_mtu = bpf_htonl(rest);
	if (partial) {
		/*
		 * The kernel will sum the message and put the complement into its
		 * bytes 6 and 7, unused here: they must hold the pseudo header.
		 */
		a->v6.icmp.icmp6_dataun.un_data16[1] = pseudo;
	} else {
		a->v6.icmp.icmp6_cksum = ~fold((__u32)bpf_csum_diff(
			NULL, 0, (__be32 *)&a->v6.icmp, sizeof(a->v6) - sizeof(a->v6.ip), pseudo));
	}
	answer_ipv6(&a->v6.ip, p, IPPROTO_ICMPV6, len);
	if (bpf_skb_change_tail(skb, p->l3_off + sizeof(a->v6), 0))
		return -1;
	return bpf_skb_store_bytes(skb, p->l3_off, &a->v6, sizeof(a->v6), BPF_F_RECOMPUTE_CSUM);
}

/* Answers with an ICMP error; type and code are those of the packet's family. */
static __always_inline int answer_icmp(struct __sk_buff *skb, const struct packet *p,
				       struct icmp_answer *a, __u8 type, __u8 code, __u32 rest,
				       enum verdict verdict)
{
	int partial = csum_is_partial(skb, p);
	int ret;

	/*
	 * RFC 1122, 3.2.2: never about an ICMP error or a later fragment. With
	 * CHECKSUM_PARTIAL only a UDP packet's place of the sum can be spared.
	 */
	if (p->flags & (PACKET_NO_L4 | PACKET_ICMP_ERROR | PACKET_OPTIONS) ||
	    (partial && (rest || p->tuple.proto != IPPROTO_UDP))) {
		count(DROP_REJECTED_SILENT);
		return TC_ACT_SHOT;
	}
	if (p->tuple.family == FAMILY_V4)
		ret = answer_icmp4(skb, p, a, type, code, rest);
	else
		ret = answer_icmp6(skb, p, a, type, code, rest, partial);
	if (ret) {
		count(DROP_REWRITE);
		return TC_ACT_SHOT;
	}
	count(verdict);
	return answer_send(skb);
}

static __always_inline int answer_unreachable(struct __sk_buff *skb, const struct packet *p,
					      struct icmp_answer *a)
{
	if (p->tuple.family == FAMILY_V4)
		return answer_icmp(skb, p, a, ICMP_DEST_UNREACH, ICMP_PORT_UNREACH, 0,
				   REJECTED_ICMP);
	return answer_icmp(skb, p, a, ICMPV6_DEST_UNREACH, ICMPV6_PORT_UNREACH, 0, REJECTED_ICMP);
}

static __always_inline int answer_too_big(struct __sk_buff *skb, const struct packet *p,
					  struct icmp_answer *a, __u32 mtu)
{
	if (p->tuple.family == FAMILY_V4)
		return answer_icmp(skb, p, a, ICMP_DEST_UNREACH, ICMP_FRAG_NEEDED, mtu,
				   ANSWERED_TOO_BIG);
	return answer_icmp(skb, p, a, ICMPV6_PKT_TOOBIG, 0, mtu, ANSWERED_TOO_BIG);
}

static __always_inline int answer_ttl(struct __sk_buff *skb, const struct packet *p,
				      struct icmp_answer *a)
{
	if (p->tuple.family == FAMILY_V4)
		return answer_icmp(skb, p, a, ICMP_TIME_EXCEEDED, ICMP_EXC_TTL, 0, ANSWERED_TTL);
	return answer_icmp(skb, p, a, ICMPV6_TIME_EXCEED, ICMPV6_EXC_HOPLIMIT, 0, ANSWERED_TTL);
}

#endif
