/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Turns a packet into the answer to it, and sends it back through its ingress interface:
 * RST, port unreachable, fragmentation needed, time exceeded.
 *
 * A packet from a pod has CHECKSUM_PARTIAL: its transport checksum is still missing. A
 * device or the stack later sums from the old transport header and writes at the old
 * offset. Programs cannot read or clear that state. But the kernel clears it when a program
 * removes that header from the front of the packet (skb_postpull_rcsum). So every packet
 * that becomes an answer loses its front, and its checksums are complete.
 *
 * An answer quotes the packet as it arrived (RFC 1812, 4.3.2.3). The quote may contain a
 * checksum of the pseudo header alone, as with the kernel's own icmp_send.
 */
#ifndef SPILLWAY_ANSWER_ANSWER_H
#define SPILLWAY_ANSWER_ANSWER_H

#include "../hook.h"
#include "../parse/packet.h"
#include "../nat/rewrite.h"

/* Bytes to remove: more than precede any transport header with a partial checksum. */
#define ANSWER_CUT 256

#define ICMP_ECHOED 8	   /* bytes of the transport header that an error quotes */
#define ICMP_EXTENSIONS 64 /* maximum of quoted IPv6 extension headers, in bytes */

struct tcp_answer {
	union {
		struct iphdr v4;
		struct ipv6hdr v6;
	} ip;
	struct tcphdr tcp;
	struct tcphdr in; /* the packet to answer */
};

struct icmp_answer {
	union {
		struct {
			struct iphdr ip;
			struct icmphdr icmp;
			__u8 quoted[sizeof(struct iphdr) + ICMP_ECHOED];
		} v4;
		struct {
			struct ipv6hdr ip;
			struct icmp6hdr icmp;
			__u8 quoted[sizeof(struct ipv6hdr) + ICMP_EXTENSIONS + ICMP_ECHOED];
		} v6;
	};
};

/* Returns the folded sum of a pseudo header, not inverted (RFC 9293, RFC 8200). */
static __always_inline __u16 pseudo_sum(const struct tuple *t, __u32 len)
{
	__be32 words[2] = { bpf_htonl(len), bpf_htonl(t->proto) };
	__s64 sum;

	sum = bpf_csum_diff(NULL, 0, (__be32 *)&t->saddr, sizeof(t->saddr), 0);
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&t->daddr, sizeof(t->daddr), sum);
	sum = bpf_csum_diff(NULL, 0, words, sizeof(words), sum);
	return csum_fold16((__u32)sum);
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
	ip->check = ipv4_sum(ip, sizeof(*ip));
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

/*
 * Gives the packet len bytes after its Ethernet header. The caller writes all of them, and
 * no device changes their checksums. Returns 0, or -1 if the kernel refuses.
 */
static __always_inline int answer_resize(struct __sk_buff *skb, const struct packet *p, __u32 len)
{
	/* In this order: the tail is never shorter than the kernel's start of the checksum. */
	if (bpf_skb_change_tail(skb, p->l3_off + ANSWER_CUT + len, 0) ||
	    bpf_skb_adjust_room(skb, -ANSWER_CUT, BPF_ADJ_ROOM_MAC, 0))
		return -1;
	return 0;
}

static __always_inline int macs_swap(struct __sk_buff *skb)
{
	__u8 mac[ETH_ALEN * 2], swapped[ETH_ALEN * 2];

	if (load(skb, 0, mac, sizeof(mac)))
		return -1;
	__builtin_memcpy(swapped, mac + ETH_ALEN, ETH_ALEN);
	__builtin_memcpy(swapped + ETH_ALEN, mac, ETH_ALEN);
	return bpf_skb_store_bytes(skb, 0, swapped, sizeof(swapped), 0);
}

/* Sends the packet back to the sender. */
static __always_inline int answer_send(struct __sk_buff *skb, const struct packet *p)
{
	if (p->l3_off && macs_swap(skb))
		return TC_ACT_SHOT;
	skb->tc_index = TC_INDEX_DONE;
	return bpf_redirect(skb->ifindex, 0);
}

/* Fills the RST of a closed port (RFC 9293, 3.10.7.1). */
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

/* Returns the checksum of the TCP header of an answer without data. */
static __always_inline __sum16 tcp_sum(struct tcphdr *tcp, const struct packet *p)
{
	/* The sum of both addresses does not depend on their order. */
	return ~csum_fold16((__u32)bpf_csum_diff(NULL, 0, (__be32 *)tcp, sizeof(*tcp),
						 pseudo_sum(&p->tuple, sizeof(*tcp))));
}

/* Replaces a packet without IP options by the answer in a->tcp. Returns 0, or -1. */
static __always_inline int answer_tcp(struct __sk_buff *skb, const struct packet *p,
				      struct tcp_answer *a)
{
	__u32 ip_len;

	a->tcp.check = tcp_sum(&a->tcp, p);
	if (p->tuple.family == FAMILY_V4) {
		ip_len = sizeof(a->ip.v4);
		answer_ipv4(&a->ip.v4, p, IPPROTO_TCP, ip_len + sizeof(a->tcp));
	} else {
		ip_len = sizeof(a->ip.v6);
		answer_ipv6(&a->ip.v6, p, IPPROTO_TCP, sizeof(a->tcp));
	}
	if (answer_resize(skb, p, ip_len + sizeof(a->tcp)) ||
	    bpf_skb_store_bytes(skb, p->l3_off, &a->ip, ip_len, BPF_F_RECOMPUTE_CSUM) ||
	    bpf_skb_store_bytes(skb, p->l4_off, &a->tcp, sizeof(a->tcp), BPF_F_RECOMPUTE_CSUM)) {
		count(DROP_REWRITE);
		return -1;
	}
	return 0;
}

static __always_inline int answer_rst(struct __sk_buff *skb, const struct packet *p,
				      struct tcp_answer *a, enum verdict verdict)
{
	/* An RST must not be answered. IP options would have to be copied to the answer. */
	if (p->flags & (PACKET_RST | PACKET_NO_L4 | PACKET_OPTIONS) ||
	    load(skb, p->l4_off, &a->in, sizeof(a->in))) {
		count(DROP_REJECTED_SILENT);
		return TC_ACT_SHOT;
	}
	answer_rst_header(&a->tcp, &a->in, p);
	if (answer_tcp(skb, p, a))
		return TC_ACT_SHOT;
	count(verdict);
	return answer_send(skb, p);
}

/* An ICMP error. type and code are those of the packet's family. */
struct icmp_error {
	__u8 type;
	__u8 code;
	__u32 rest; /* the second word of the header: the MTU for "too big" */
	enum verdict verdict;
};

/* Builds an error of RFC 792. */
static __always_inline int answer_icmp4(struct __sk_buff *skb, const struct packet *p,
					struct icmp_answer *a, struct icmp_error e)
{
	__builtin_memset(&a->v4.icmp, 0, sizeof(a->v4.icmp));
	if (load(skb, p->l3_off, a->v4.quoted, sizeof(a->v4.quoted)))
		return -1;
	a->v4.icmp.type = e.type;
	a->v4.icmp.code = e.code;
	a->v4.icmp.rest = bpf_htonl(e.rest);
	a->v4.icmp.checksum = ~csum_fold16((__u32)bpf_csum_diff(
		NULL, 0, (__be32 *)&a->v4.icmp, sizeof(a->v4) - sizeof(a->v4.ip), 0));
	answer_ipv4(&a->v4.ip, p, IPPROTO_ICMP, sizeof(a->v4));
	if (answer_resize(skb, p, sizeof(a->v4)))
		return -1;
	return bpf_skb_store_bytes(skb, p->l3_off, &a->v4, sizeof(a->v4), BPF_F_RECOMPUTE_CSUM);
}

/* Builds an error of RFC 4443. It quotes extension headers too, also a fragment header. */
static __always_inline int answer_icmp6(struct __sk_buff *skb, const struct packet *p,
					struct icmp_answer *a, struct icmp_error e)
{
	__u32 quote = p->l4_off - p->l3_off + ICMP_ECHOED, len;
	struct tuple t = p->tuple;

	/* Keeps the compiler from using a copy that the verifier has not checked. */
	barrier_var(quote);
	if (quote > sizeof(a->v6.quoted) || quote < sizeof(struct ipv6hdr))
		return -1;
	__builtin_memset(&a->v6.icmp, 0, sizeof(a->v6.icmp));
	if (load(skb, p->l3_off, a->v6.quoted, quote))
		return -1;
	len = sizeof(a->v6.icmp) + quote;
	t.proto = IPPROTO_ICMPV6;
	a->v6.icmp.icmp6_type = e.type;
	a->v6.icmp.icmp6_code = e.code;
	a->v6.icmp.icmp6_mtu = bpf_htonl(e.rest);
	a->v6.icmp.icmp6_cksum = ~csum_fold16(
		(__u32)bpf_csum_diff(NULL, 0, (__be32 *)&a->v6.icmp, len, pseudo_sum(&t, len)));
	answer_ipv6(&a->v6.ip, p, IPPROTO_ICMPV6, len);
	len += sizeof(a->v6.ip);
	if (answer_resize(skb, p, len))
		return -1;
	return bpf_skb_store_bytes(skb, p->l3_off, &a->v6, len, BPF_F_RECOMPUTE_CSUM);
}

/* May an ICMP error answer the packet (RFC 1122, 3.2.2), and is it possible? */
static __always_inline int answer_allowed(const struct packet *p)
{
	if (p->flags & (PACKET_NO_L4 | PACKET_ICMP_ERROR))
		return 0;
	/* The answer would have to follow an IPv4 source route back (RFC 1812, 4.3.2.6). */
	if (p->tuple.family == FAMILY_V4)
		return !(p->flags & PACKET_OPTIONS);
	return p->l4_off - p->l3_off <= sizeof(struct ipv6hdr) + ICMP_EXTENSIONS;
}

/* Bursts of ICMP errors to one address (XRLIM_BURST_FACTOR), and to all together. */
#define ICMP_BURST 6
#define ICMP_BURST_ALL 50

/*
 * Takes one error from a key's bucket. Returns 0 if there is none. The bucket gains one per
 * interval, in nanoseconds.
 */
static __always_inline int rate_take(const struct addr_key *key, __u64 interval, __u32 burst)
{
	struct icmp_rate *rate, first = { .time = bpf_ktime_get_coarse_ns() };

	if (!interval)
		return 1;
	rate = bpf_map_lookup_elem(&icmp_rates, key);
	if (!rate) {
		first.credit = (burst - 1) * interval;
		bpf_map_update_elem(&icmp_rates, key, &first, BPF_ANY);
		return 1;
	}
	rate->credit += first.time - rate->time;
	rate->time = first.time;
	if (rate->credit > burst * interval)
		rate->credit = burst * interval;
	if (rate->credit < interval)
		return 0;
	rate->credit -= interval;
	return 1;
}

/*
 * Takes one ICMP error to this address from the node's buckets. Returns 0 if there is none. The
 * limits are the node's own
 * sysctls, applied as in inet_peer_xrlim_allow and icmp_global_allow (net/ipv4/inetpeer.c,
 * icmp.c). As in the kernel, "packet too big" is not limited.
 */
static __always_inline int answer_rate_take(const struct packet *p, const struct settings *s)
{
	struct addr_key key = { .addr = p->tuple.saddr, .family = p->tuple.family }, all = {};

	return rate_take(&key,
			 p->tuple.family == FAMILY_V4 ? s->icmp_interval_v4 : s->icmp_interval_v6,
			 ICMP_BURST) &&
	       rate_take(&all, s->icmp_interval_all, ICMP_BURST_ALL);
}

/* Answers with an ICMP error. */
static __always_inline int answer_icmp(struct __sk_buff *skb, const struct packet *p,
				       struct icmp_answer *a, struct icmp_error e)
{
	int ret;

	if (!answer_allowed(p)) {
		count(DROP_REJECTED_SILENT);
		return TC_ACT_SHOT;
	}
	if (p->tuple.family == FAMILY_V4)
		ret = answer_icmp4(skb, p, a, e);
	else
		ret = answer_icmp6(skb, p, a, e);
	if (ret) {
		count(DROP_REWRITE);
		return TC_ACT_SHOT;
	}
	count(e.verdict);
	return answer_send(skb, p);
}

static __always_inline int answer_over_rate(void)
{
	count(DROP_ICMP_RATE);
	return TC_ACT_SHOT;
}

static __always_inline int answer_unreachable(struct __sk_buff *skb, const struct packet *p,
					      struct icmp_answer *a, const struct settings *s)
{
	if (!answer_rate_take(p, s))
		return answer_over_rate();
	if (p->tuple.family == FAMILY_V4)
		return answer_icmp(skb, p, a,
				   (struct icmp_error){ ICMP_DEST_UNREACH, ICMP_PORT_UNREACH, 0,
							REJECTED_ICMP });
	return answer_icmp(
		skb, p, a,
		(struct icmp_error){ ICMPV6_DEST_UNREACH, ICMPV6_PORT_UNREACH, 0, REJECTED_ICMP });
}

static __always_inline int answer_too_big(struct __sk_buff *skb, const struct packet *p,
					  struct icmp_answer *a, __u32 mtu)
{
	if (p->tuple.family == FAMILY_V4)
		return answer_icmp(skb, p, a,
				   (struct icmp_error){ ICMP_DEST_UNREACH, ICMP_FRAG_NEEDED, mtu,
							ANSWERED_TOO_BIG });
	return answer_icmp(skb, p, a,
			   (struct icmp_error){ ICMPV6_PKT_TOOBIG, 0, mtu, ANSWERED_TOO_BIG });
}

static __always_inline int answer_ttl(struct __sk_buff *skb, const struct packet *p,
				      struct icmp_answer *a, const struct settings *s)
{
	if (!answer_rate_take(p, s))
		return answer_over_rate();
	if (p->tuple.family == FAMILY_V4)
		return answer_icmp(
			skb, p, a,
			(struct icmp_error){ ICMP_TIME_EXCEEDED, ICMP_EXC_TTL, 0, ANSWERED_TTL });
	return answer_icmp(
		skb, p, a,
		(struct icmp_error){ ICMPV6_TIME_EXCEED, ICMPV6_EXC_HOPLIMIT, 0, ANSWERED_TTL });
}

#endif
