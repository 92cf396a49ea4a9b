/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * ICMP errors about translated packets: the programs translate the outer and the quoted
 * headers back (RFC 5508, 4.2). The quoted packet is one that this node sent. Its mirror
 * image is the key of the flow entry that leads to its sender:
 *
 *   error to client'  { quoted: client' -> endpoint }   reply entry
 *   error to service  { quoted: service -> client }     forward entry
 */
#ifndef SPILLWAY_NAT_ICMP_ERROR_H
#define SPILLWAY_NAT_ICMP_ERROR_H

#include "forward.h"
#include "../lookup/pod.h"

#define ICMP_HEADER 8

/* Fills the ports of a quoted echo's flow. Returns -1 if the quoted packet is not an echo. */
static __always_inline int icmp_quoted_echo(struct icmp_scratch *m)
{
	struct tuple *key = &m->key;
	__be16 asked;

	if (key->proto != (key->family == FAMILY_V4 ? IPPROTO_ICMP : IPPROTO_ICMPV6) ||
	    echo_ports(key, (const struct icmphdr *)m->old.l4) || key->sport == key->dport)
		return -1;
	asked = key->sport;
	key->sport = key->dport;
	key->dport = asked;
	return 0;
}

/* Loads the quoted packet and fills the key of its flow. Returns -1 if no flow can have it. */
static __always_inline int icmp_quoted(struct __sk_buff *skb, const struct packet *p,
				       struct icmp_scratch *m)
{
	__u32 off = p->l4_off + ICMP_HEADER, ip_len;
	struct tuple *key = &m->key;

	__builtin_memset(m, 0, sizeof(*m));
	key->family = p->tuple.family;
	if (key->family == FAMILY_V4) {
		struct iphdr *ip = (struct iphdr *)m->old.ip;

		ip_len = sizeof(*ip);
		if (load(skb, off, ip, sizeof(*ip)) || ip->version != 4 || ip->ihl != 5 ||
		    ip->frag_off & bpf_htons(0x1fff))
			return -1;
		key->proto = ip->protocol;
		key->saddr.w[0] = ip->daddr;
		key->daddr.w[0] = ip->saddr;
	} else {
		struct ipv6hdr *ip = (struct ipv6hdr *)m->old.ip;

		ip_len = sizeof(*ip);
		if (load(skb, off, ip, sizeof(*ip)) || ip->version != 6)
			return -1;
		key->proto = ip->nexthdr;
		__builtin_memcpy(&key->saddr, &ip->daddr, sizeof(key->saddr));
		__builtin_memcpy(&key->daddr, &ip->saddr, sizeof(key->daddr));
	}
	/* Bytes after the datagram are padding of Ethernet. */
	if (off + ip_len + QUOTED_L4 > p->l3_off + p->l3_len ||
	    load(skb, off + ip_len, m->old.l4, sizeof(m->old.l4)))
		return -1;
	if (key->proto == IPPROTO_TCP || key->proto == IPPROTO_UDP) {
		key->sport = *(__be16 *)&m->old.l4[2];
		key->dport = *(__be16 *)&m->old.l4[0];
	} else if (icmp_quoted_echo(m)) {
		return -1;
	}
	/* An error goes to the sender of the quoted packet. */
	return addr_equal(&p->tuple.daddr, &key->daddr) ? 0 : -1;
}

/*
 * Writes the quoted packet as its sender sent it into m->new. Returns the change of the
 * quoted transport checksum.
 */
static __always_inline __u32 icmp_requote(struct icmp_scratch *m, const struct flow *f)
{
	union ports from = { .p = { m->key.dport, m->key.sport } };
	union ports to = { .p = { f->dport, f->sport } };
	__u16 *check = (__u16 *)&m->new.l4[UDP_CHECK_OFF];
	__u32 addrs, ports;

	m->new = m->old;
	addrs = addrs_change(&m->key.daddr, &m->key.saddr, &f->daddr, &f->saddr);
	ports = csum_fold32((__u64)addrs + csum_change(&from.word, &to.word, 1));
	if (m->key.family == FAMILY_V4) {
		struct iphdr *ip = (struct iphdr *)m->new.ip;

		ip->saddr = f->daddr.w[0];
		ip->daddr = f->saddr.w[0];
		ip->check = check_apply(ip->check, addrs);
	} else {
		struct ipv6hdr *ip = (struct ipv6hdr *)m->new.ip;

		__builtin_memcpy(&ip->saddr, &f->daddr, sizeof(ip->saddr));
		__builtin_memcpy(&ip->daddr, &f->saddr, sizeof(ip->daddr));
	}
	if (is_icmp(m->key.proto)) {
		*(__be16 *)&m->new.l4[ECHO_ID_OFF] = echo_id(f->dport, f->sport);
		check = (__u16 *)&m->new.l4[ICMP_CHECK_OFF];
		/* ICMP of IPv4 has no pseudo header. */
		if (m->key.family == FAMILY_V4)
			ports = csum_change(&from.word, &to.word, 1);
		*check = check_apply(*check, ports);
		return ports;
	}
	__builtin_memcpy(m->new.l4, &to, sizeof(to));
	/* The quoted 8 bytes include the checksum of UDP, but not that of TCP. */
	if (m->key.proto == IPPROTO_UDP && *check)
		*check = check_apply(*check, ports) ?: 0xffff;
	return ports;
}

/*
 * Fixes the quoted TCP checksum at off, if the quote includes it. Returns 0, or -1 if the
 * packet is not writable.
 */
static __always_inline int icmp_requote_tcp(struct __sk_buff *skb, const struct packet *p,
					    __u32 off, __u32 diff)
{
	__u16 old, new;

	if (off + sizeof(old) > p->l3_off + p->l3_len || load(skb, off, &old, sizeof(old)))
		return 0;
	new = check_apply(old, diff);
	if (bpf_skb_store_bytes(skb, off, &new, sizeof(new), 0))
		return -1;
	return bpf_l4_csum_replace(skb, p->l4_off + ICMP_CHECK_OFF, old, new, sizeof(new));
}

/*
 * Rewrites the error as flow entry f of m->key says. Returns 0, or -1 if the packet is not
 * writable.
 */
static __always_inline int icmp_rewrite(struct __sk_buff *skb, const struct packet *p,
					struct icmp_scratch *m, const struct flow *f, __u8 hops)
{
	__u32 off = p->l4_off + ICMP_HEADER, ip_len;
	/* A router on the path keeps its own address. */
	int from_peer = addr_equal(&p->tuple.saddr, &m->key.saddr);
	const struct addr *saddr = from_peer ? &f->saddr : &p->tuple.saddr;
	__u64 flags = l4_flags(p->tuple.family, IPPROTO_ICMP);
	__u32 outer, inner, transport;

	transport = icmp_requote(m, f);
	ip_len = p->tuple.family == FAMILY_V4 ? sizeof(struct iphdr) : sizeof(struct ipv6hdr);
	inner = bpf_csum_diff((__be32 *)&m->old, sizeof(m->old), (__be32 *)&m->new, sizeof(m->new),
			      0);
	outer = addrs_change(&p->tuple.saddr, &p->tuple.daddr, saddr, &f->daddr);
	if (nat_addrs(skb, p, saddr, &f->daddr, outer, hops))
		return -1;
	if (p->tuple.family == FAMILY_V4) {
		if (bpf_skb_store_bytes(skb, off, m->new.ip, sizeof(struct iphdr), 0))
			return -1;
	} else {
		if (bpf_skb_store_bytes(skb, off, m->new.ip, sizeof(struct ipv6hdr), 0) ||
		    bpf_l4_csum_replace(skb, p->l4_off + ICMP_CHECK_OFF, 0, outer,
					flags | BPF_F_PSEUDO_HDR))
			return -1;
	}
	if (bpf_skb_store_bytes(skb, off + ip_len, m->new.l4, sizeof(m->new.l4), 0))
		return -1;
	if (m->key.proto == IPPROTO_TCP &&
	    icmp_requote_tcp(skb, p, off + ip_len + TCP_CHECK_OFF, transport))
		return -1;
	return bpf_l4_csum_replace(skb, p->l4_off + ICMP_CHECK_OFF, 0, inner, flags & ~BPF_F_IPV6);
}

/*
 * Returns the reply entry of a TFTP request, if the error quotes an answer from the port
 * that the client asked.
 */
static __always_inline struct flow *request_of_error(const struct tuple *quoted, struct tuple *key)
{
	struct flow *f;

	*key = *quoted;
	key->sport = 0;
	f = bpf_map_lookup_elem(&flows, key);
	return f && f->helper == HELPER_REQUEST && f->helper_port == quoted->sport ? f : NULL;
}

/*
 * May the sender of an error bypass netfilter with it? The flow's peer does so with all its
 * packets. Another pod may not if a policy selects it: it would reach clients that the policy
 * forbids.
 */
static __always_inline int error_may_bypass(const struct tuple *error, const struct tuple *quoted)
{
	return addr_equal(&error->saddr, &quoted->saddr) ||
	       !pod_traverses_netfilter(&error->saddr, error->family);
}

/*
 * Handles an ICMP error. Errors about packets of no flow are left to the stack, and so are
 * those from a source that does not belong to the device.
 */
__noinline int relay_error(struct __sk_buff *skb, enum hook hook)
{
	struct settings *s = get_settings();
	struct scratch *m = get_scratch();
	struct packet *p;
	struct flow *f;

	if (!m || !s)
		return NEXT;
	p = &m->packet;
	if (icmp_quoted(skb, p, &m->icmp))
		return pass(PASS_OTHER);
	f = bpf_map_lookup_elem(&flows, &m->icmp.key);
	if (!f && m->icmp.key.proto == IPPROTO_UDP)
		f = request_of_error(&m->icmp.key, &m->pair.reply_key);
	if (!f || flow_dead(f, m->icmp.key.proto, s, now()) || !flow_applies(f, hook))
		return pass(PASS_OTHER);
	if (hook != FROM_STACK && !source_belongs(&p->tuple, hook_device(skb, hook)))
		return pass(PASS_SOURCE);
	if (hook != FROM_STACK && !error_may_bypass(&p->tuple, &m->icmp.key))
		return pass(PASS_OTHER);
	m->pair.flow = *f;
	f = &m->pair.flow;
	if (hook == FROM_STACK || f->flags & FLOW_STACK)
		m->next_hop.kind = NEXT_HOP_STACK;
	else
		next_hop_find(skb, p, &p->tuple.saddr, &f->daddr, &m->next_hop);
	/* An error that cannot be forwarded is not answered (RFC 1122). */
	if (next_hop_unusable(&m->next_hop))
		return drop(DROP_NO_ROUTE);
	if (icmp_rewrite(skb, p, &m->icmp, f, m->next_hop.kind == NEXT_HOP_NEIGH))
		return drop(DROP_REWRITE);
	if (m->next_hop.kind == NEXT_HOP_STACK)
		return pass(TRANSLATED_ICMP);
	return redirect_packet(skb, p, &m->next_hop, TRANSLATED_ICMP);
}

#endif
