/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Parses the headers of a packet into struct packet. Changes nothing in the packet. */
#ifndef SPILLWAY_PARSE_PACKET_H
#define SPILLWAY_PARSE_PACKET_H

#include "../base.h"

/*
 * Makes the compiler describe this type of a field of struct __sk_buff. LLVM 19 declares what only
 * fields point to in the order of its own addresses, which depend on the length of the directory's
 * name: with more than one such type, the object is not the same everywhere.
 */
const struct bpf_flow_keys *volatile const flow_keys_type = 0;

/* The TCP flags have the positions of the TCP header (RFC 9293, 3.1). */
enum packet_flags {
	PACKET_FIN = 1 << 0,
	PACKET_SYN = 1 << 1,
	PACKET_RST = 1 << 2,
	PACKET_ACK = 1 << 4,
	PACKET_NO_L4 = 1 << 8, /* later fragment: the tuple alone has the ports */
	PACKET_FIRST_FRAGMENT = 1 << 9,
	PACKET_ICMP_ERROR = 1 << 10,
	PACKET_OPTIONS = 1 << 11,    /* IPv4 options or IPv6 extension headers */
	PACKET_DF = 1 << 12,	     /* must not be fragmented; always set for IPv6 */
	PACKET_DSR_OPTION = 1 << 13, /* the option of dsr/option.h comes first */
	PACKET_DSR =
		1 << 14, /* the option was read: dsr.connection in scratch memory is its content */
	/*
	 * The destination is the endpoint already, while the tuple has the Service's:
	 * dsr/receive.h.
	 */
	PACKET_TRANSLATED = 1 << 15,
	PACKET_REPEATED = 1 << 16,  /* a SYN whose endpoint did not answer, with DSR */
	PACKET_ROUTED = 1 << 17,    /* its next hop is in scratch memory */
	PACKET_STATELESS = 1 << 18, /* to the table's endpoint, without a flow: dsr/receive.h */
	PACKET_ECHO = 1 << 19,	    /* of ICMP, not a later fragment: echo_ports */
};

#define PACKET_TCP_FLAGS (PACKET_FIN | PACKET_SYN | PACKET_RST | PACKET_ACK)
#define TCP_FLAGS_OFF 13

struct packet {
	struct tuple tuple;
	__u32 l3_off; /* bytes from the start of the frame; 0: no link-layer header */
	__u32 l4_off;
	__u32 l3_len; /* bytes of the datagram, its IP header included */
	__u32 fragment_id;
	__u32 flags;
	__u8 ttl;
	__u8 pad;
	__u16 check; /* IPv4 header checksum */
	__u32 time;  /* seconds since boot */
	/* TCP only, and valid only without PACKET_NO_L4: */
	__u32 seq;
	__u32 seq_end; /* sequence number after the segment; SYN and FIN count 1 each */
	__u32 ack;
	__u16 window; /* not scaled */
	__u16 header; /* bytes of the TCP header */
};

/* The option of dsr/option.h: types and lengths, and the length of the IPv6 header around
 * it. */
#define DSR_OPTION_V4 0x9e
#define DSR_OPTION_V4_LEN 16
#define DSR_OPTION_V6 0x1e
#define DSR_OPTION_V6_LEN 26
#define DSR_HEADER_V6_WORDS 3 /* of 8 bytes after the first */

enum parse_result {
	PARSE_OK,
	PARSE_OTHER, /* well-formed, but not TCP, UDP, ICMP echo or an ICMP error */
	PARSE_MALFORMED,
};

#define IPV6_MAX_HEADERS 6 /* maximum of extension headers; RFC 8200 names six */

static __always_inline int load(struct __sk_buff *skb, __u32 off, void *to, __u32 len)
{
	return bpf_skb_load_bytes(skb, off, to, len);
}

/* Headers beyond this offset are not parsed: the verifier requires a bound. */
#define HEADERS_MAX 0x4000

/*
 * Returns a pointer to len bytes at off, or NULL if the packet is too short. The bytes are
 * nearly always in the linear part; otherwise other pointers into the packet become
 * invalid.
 */
static __always_inline void *header(struct __sk_buff *skb, __u32 off, __u32 len)
{
	void *h;

	if (off > HEADERS_MAX)
		return NULL;
	h = (void *)(long)skb->data + off;
	if (h + len <= (void *)(long)skb->data_end)
		return h;
	if (bpf_skb_pull_data(skb, off + len))
		return NULL;
	h = (void *)(long)skb->data + off;
	return h + len <= (void *)(long)skb->data_end ? h : NULL;
}

static __always_inline int icmp_is_error(__u8 family, __u8 type)
{
	if (family == FAMILY_V4)
		return type == ICMP_DEST_UNREACH || type == ICMP_TIME_EXCEEDED ||
		       type == ICMP_PARAMETERPROB;
	return type < ICMPV6_INFOMSG_MASK; /* RFC 4443: errors have the high bit clear */
}

/* Fills what a TCP header says. The caller has set the offsets. */
static __always_inline int parse_tcp(struct packet *p, const struct tcphdr *tcp)
{
	__u32 flags;

	if (!tcp || tcp->doff < 5 || p->l4_off + tcp->doff * 4 > p->l3_off + p->l3_len)
		return PARSE_MALFORMED;
	flags = ((const __u8 *)tcp)[TCP_FLAGS_OFF] & PACKET_TCP_FLAGS;
	p->flags |= flags;
	p->header = tcp->doff * 4;
	p->seq = bpf_ntohl(tcp->seq);
	p->seq_end = p->seq + p->l3_off + p->l3_len - p->l4_off - p->header +
		     !!(flags & PACKET_SYN) + (flags & PACKET_FIN);
	p->ack = bpf_ntohl(tcp->ack_seq);
	p->window = bpf_ntohs(tcp->window);
	p->tuple.sport = tcp->source;
	p->tuple.dport = tcp->dest;
	return PARSE_OK;
}

/* Fills what a UDP header says. RFC 768: the length includes the header. */
static __always_inline int parse_udp(struct packet *p, const struct udphdr *udp)
{
	if (!udp || bpf_ntohs(udp->len) < sizeof(*udp))
		return PARSE_MALFORMED;
	p->tuple.sport = udp->source;
	p->tuple.dport = udp->dest;
	return PARSE_OK;
}

/* The port in the tuple of an echo where the other direction has the identifier. */
#define ECHO_NO_PORT 0
#define ECHO_ID_OFF 4

static __always_inline bool is_icmp(__u8 proto)
{
	return proto == IPPROTO_ICMP || proto == IPPROTO_ICMPV6;
}

/*
 * Sets the ports of an ICMP echo: the identifier stands for the port of the host that asks, as in
 * conntrack (net/netfilter/nf_conntrack_proto_icmp.c), and the other port is ECHO_NO_PORT. So the
 * tuple tells requests from replies. No reply of ours has that identifier. Returns -1 if the header
 * is not such an echo.
 */
static __always_inline int echo_ports(struct tuple *t, const struct icmphdr *icmp)
{
	__be16 id = *(const __be16 *)&icmp->rest;
	bool v4 = t->family == FAMILY_V4;

	if (icmp->code)
		return -1;
	if (icmp->type == (v4 ? ICMP_ECHO : ICMPV6_ECHO_REQUEST)) {
		t->sport = id;
		t->dport = ECHO_NO_PORT;
		return 0;
	}
	if (icmp->type != (v4 ? ICMP_ECHOREPLY : ICMPV6_ECHO_REPLY) || id == ECHO_NO_PORT)
		return -1;
	t->sport = ECHO_NO_PORT;
	t->dport = id;
	return 0;
}

static __always_inline bool echo_is_request(const struct tuple *t)
{
	return t->dport == ECHO_NO_PORT;
}

/* Returns the identifier of an echo with these ports. */
static __always_inline __be16 echo_id(__be16 sport, __be16 dport)
{
	return dport == ECHO_NO_PORT ? sport : dport;
}

/* Parses ports and TCP flags, or the ICMP type, from the header at l4_off. */
static __always_inline int parse_l4(struct __sk_buff *skb, struct packet *p)
{
	struct icmphdr *icmp;

	if (p->tuple.proto == IPPROTO_TCP)
		return parse_tcp(p, header(skb, p->l4_off, sizeof(struct tcphdr)));
	if (p->tuple.proto == IPPROTO_UDP)
		return parse_udp(p, header(skb, p->l4_off, sizeof(struct udphdr)));
	icmp = header(skb, p->l4_off, sizeof(*icmp));
	if (!icmp)
		return PARSE_MALFORMED;
	if (icmp_is_error(p->tuple.family, icmp->type)) {
		p->flags |= PACKET_ICMP_ERROR;
		return PARSE_OK;
	}
	if (echo_ports(&p->tuple, icmp))
		return PARSE_OTHER;
	p->flags |= PACKET_ECHO;
	return PARSE_OK;
}

/* Is this the start of an IPv4 header's first option, of this type and length? */
static __always_inline int option_v4(struct __sk_buff *skb, __u32 off, __u8 type, __u8 len)
{
	__u8 option[2];

	return !load(skb, off, option, sizeof(option)) && option[0] == type && option[1] == len;
}

static __always_inline int parse_v4(struct __sk_buff *skb, struct packet *p)
{
	struct iphdr *ip = header(skb, p->l3_off, sizeof(*ip));
	__u32 hdr_len;
	__u16 frag;

	if (!ip)
		return PARSE_MALFORMED;
	hdr_len = ip->ihl * 4;
	p->l3_len = bpf_ntohs(ip->tot_len);
	/* BIG TCP (6.3): a GSO packet beyond 64 KiB has a length of 0. */
	if (!ip->tot_len && skb->gso_size)
		p->l3_len = skb->len - p->l3_off;
	if (ip->version != 4 || hdr_len < sizeof(*ip) || p->l3_len < hdr_len ||
	    p->l3_off + p->l3_len > skb->len)
		return PARSE_MALFORMED;
	if (hdr_len > sizeof(*ip))
		p->flags |= PACKET_OPTIONS;
	p->l4_off = p->l3_off + hdr_len;
	p->ttl = ip->ttl;
	p->check = ip->check;
	p->tuple.family = FAMILY_V4;
	p->tuple.proto = ip->protocol;
	p->tuple.saddr.w[0] = ip->saddr;
	p->tuple.daddr.w[0] = ip->daddr;
	if (ip->protocol != IPPROTO_TCP && ip->protocol != IPPROTO_UDP &&
	    ip->protocol != IPPROTO_ICMP)
		return PARSE_OTHER;
	frag = bpf_ntohs(ip->frag_off);
	p->fragment_id = ip->id;
	if (frag & 0x4000)
		p->flags |= PACKET_DF;
	if (frag & 0x1fff) {
		p->flags |= PACKET_NO_L4;
		return PARSE_OK;
	}
	if (frag & 0x2000)
		p->flags |= PACKET_FIRST_FRAGMENT;
	if (dsr && unlikely(hdr_len == sizeof(*ip) + DSR_OPTION_V4_LEN) &&
	    option_v4(skb, p->l3_off + sizeof(*ip), DSR_OPTION_V4, DSR_OPTION_V4_LEN))
		p->flags |= PACKET_DSR_OPTION;
	/* The datagram is shorter than its header (RFC 1858). */
	if (p->l3_len < hdr_len + (ip->protocol == IPPROTO_TCP ? sizeof(struct tcphdr) : 8))
		return PARSE_MALFORMED;
	return parse_l4(skb, p);
}

struct ipv6_frag {
	__u8 nexthdr;
	__u8 reserved;
	__be16 frag_off;
	__be32 id;
};

/* Parses the extension headers. Sets l4_off and proto to the header after them. */
static __always_inline int parse_v6_headers(struct __sk_buff *skb, struct packet *p, __u8 next)
{
	struct ipv6_frag frag;
	__u8 ext[4];

	for (int i = 0; i < IPV6_MAX_HEADERS; i++) {
		if (next == IPPROTO_TCP || next == IPPROTO_UDP || next == IPPROTO_ICMPV6) {
			p->tuple.proto = next;
			return PARSE_OK;
		}
		p->flags |= PACKET_OPTIONS;
		if (next == IPPROTO_FRAGMENT) {
			if (load(skb, p->l4_off, &frag, sizeof(frag)))
				return PARSE_MALFORMED;
			p->fragment_id = frag.id;
			p->l4_off += sizeof(frag);
			next = frag.nexthdr;
			if (bpf_ntohs(frag.frag_off) & 0xfff8) {
				p->flags |= PACKET_NO_L4;
				p->tuple.proto = next;
				return PARSE_OK;
			}
			if (bpf_ntohs(frag.frag_off) & 1)
				p->flags |= PACKET_FIRST_FRAGMENT;
		} else if (next == IPPROTO_HOPOPTS || next == IPPROTO_ROUTING ||
			   next == IPPROTO_DSTOPTS) {
			if (load(skb, p->l4_off, ext, sizeof(ext)))
				return PARSE_MALFORMED;
			/*
			 * With segments left, daddr is neither the receiver nor part of the
			 * checksum.
			 */
			if (next == IPPROTO_ROUTING && ext[3])
				return PARSE_OTHER;
			if (dsr && !i && next == IPPROTO_DSTOPTS && ext[1] == DSR_HEADER_V6_WORDS &&
			    ext[2] == DSR_OPTION_V6 && ext[3] == DSR_OPTION_V6_LEN)
				p->flags |= PACKET_DSR_OPTION;
			p->l4_off += (ext[1] + 1) * 8;
			next = ext[0];
		} else {
			return PARSE_OTHER;
		}
	}
	return PARSE_OTHER;
}

static __always_inline int parse_v6(struct __sk_buff *skb, struct packet *p)
{
	struct ipv6hdr *ip = header(skb, p->l3_off, sizeof(*ip));
	__u32 end, l4_min;
	int ret;

	if (!ip)
		return PARSE_MALFORMED;
	p->l3_len = bpf_ntohs(ip->payload_len) + sizeof(*ip);
	/* BIG TCP (5.19), as for IPv4. */
	if (!ip->payload_len && skb->gso_size)
		p->l3_len = skb->len - p->l3_off;
	end = p->l3_off + p->l3_len;
	if (ip->version != 6 || end > skb->len)
		return PARSE_MALFORMED;
	p->l4_off = p->l3_off + sizeof(*ip);
	p->ttl = ip->hop_limit;
	p->flags |= PACKET_DF;
	p->tuple.family = FAMILY_V6;
	__builtin_memcpy(&p->tuple.saddr, &ip->saddr, sizeof(struct addr));
	__builtin_memcpy(&p->tuple.daddr, &ip->daddr, sizeof(struct addr));
	ret = parse_v6_headers(skb, p, ip->nexthdr);
	if (ret != PARSE_OK || p->flags & PACKET_NO_L4)
		return ret;
	l4_min = p->tuple.proto == IPPROTO_TCP ? sizeof(struct tcphdr) : 8;
	if (p->l4_off + l4_min > end)
		return PARSE_MALFORMED;
	return parse_l4(skb, p);
}

/*
 * Fills *p. The caller sets l3_off, and sets the tuple and the flags to zero. This and the
 * other large steps are global functions: the verifier checks each of them once, instead of
 * once for every path to it.
 */
__noinline int parse(struct __sk_buff *skb, struct packet *p)
{
	if (!p)
		return PARSE_MALFORMED;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return parse_v4(skb, p);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return parse_v6(skb, p);
	return PARSE_OTHER;
}

/* Is this the first packet of a TCP connection? Linux ignores a SYN with an RST or a FIN. */
static __always_inline int packet_syn(const struct packet *p)
{
	return (p->flags & (PACKET_SYN | PACKET_ACK | PACKET_RST | PACKET_FIN)) == PACKET_SYN;
}

/* May this be the first packet of a connection? */
static __always_inline int packet_begins(const struct packet *p)
{
	return p->tuple.proto != IPPROTO_TCP || packet_syn(p);
}

static __always_inline bool is_fragment(const struct packet *p)
{
	return p->flags & (PACKET_FIRST_FRAGMENT | PACKET_NO_L4);
}

#endif
