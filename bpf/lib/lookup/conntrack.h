/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * A packet that looks like the first of a Service's flow may belong to a flow of netfilter:
 *
 *   - the reply to a pod's connection, if the CNI masqueraded it to a port that is also a
 *     NodePort;
 *   - a connection that kube-proxy translated before this dataplane took over.
 *
 * Both are left to netfilter. The kernel has the functions since 5.18. Without them, or
 * without conntrack, the lookups find nothing.
 */
#ifndef SPILLWAY_LOOKUP_CONNTRACK_H
#define SPILLWAY_LOOKUP_CONNTRACK_H

#include "../parse/packet.h"

#define IPS_DST_NAT (1 << 5) /* enum ip_conntrack_status */
#define IP_CT_DIR_REPLY 1
#define TCP_CONNTRACK_TIME_WAIT 7 /* enum tcp_conntrack; CLOSE follows */
#define TCP_CONNTRACK_CLOSE 8

struct ip_ct_tcp {
	__u8 state;
} __attribute__((preserve_access_index));

union nf_conntrack_proto {
	struct ip_ct_tcp tcp;
} __attribute__((preserve_access_index));

struct nf_conn {
	unsigned long status;
	union nf_conntrack_proto proto;
} __attribute__((preserve_access_index));

/* net/netfilter/nf_conntrack_bpf.c. The kernel accepts a struct without the later members. */
struct bpf_ct_opts___spillway {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

extern struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *skb, struct bpf_sock_tuple *tuple,
					 __u32 tuple_size, struct bpf_ct_opts___spillway *opts,
					 __u32 opts_size) __ksym __weak;
extern void bpf_ct_release(struct nf_conn *ct) __ksym __weak;

/* Converts a tuple for the socket helpers. Returns its length. */
static __always_inline __u32 sock_tuple(struct bpf_sock_tuple *out, const struct tuple *t)
{
	if (t->family == FAMILY_V4) {
		out->ipv4.saddr = t->saddr.w[0];
		out->ipv4.daddr = t->daddr.w[0];
		out->ipv4.sport = t->sport;
		out->ipv4.dport = t->dport;
		return sizeof(out->ipv4);
	}
	__builtin_memcpy(out->ipv6.saddr, &t->saddr, sizeof(out->ipv6.saddr));
	__builtin_memcpy(out->ipv6.daddr, &t->daddr, sizeof(out->ipv6.daddr));
	out->ipv6.sport = t->sport;
	out->ipv6.dport = t->dport;
	return sizeof(out->ipv6);
}

/* An entry of conntrack. */
struct tracked {
	unsigned long status;
	__u8 tcp_state; /* of TCP only */
};

/*
 * Looks up a tuple in conntrack. Returns the entry's direction and fills *found, or returns
 * -1 if there is no entry.
 */
static __always_inline int conntrack_find(struct __sk_buff *skb, const struct tuple *of,
					  struct tracked *found)
{
	struct bpf_ct_opts___spillway opts = { .netns_id = -1, .l4proto = of->proto };
	struct bpf_sock_tuple t = {};
	struct nf_conn *ct;
	__u32 len;

	len = sock_tuple(&t, of);
	if (len == sizeof(t.ipv4))
		ct = bpf_skb_ct_lookup(skb, &t, sizeof(t.ipv4), &opts, sizeof(opts));
	else
		ct = bpf_skb_ct_lookup(skb, &t, sizeof(t.ipv6), &opts, sizeof(opts));
	if (!ct)
		return -1;
	found->status = ct->status;
	found->tcp_state = ct->proto.tcp.state;
	bpf_ct_release(ct);
	return opts.dir;
}

/* The entries that conntrack_has looks for. */
enum conntrack_scope {
	CONNTRACK_TRANSLATED, /* with destination NAT, or with the packet as a reply */
	CONNTRACK_ANY_ENTRY,
};

/*
 * Does conntrack have an entry of this scope for the packet? Both directions of such a
 * connection must traverse netfilter. If conntrack sees one direction only, its packets are
 * INVALID.
 */
__noinline int conntrack_has(struct __sk_buff *skb, const struct packet *p,
			     enum conntrack_scope scope)
{
	struct tracked found = {};
	int dir;

	if (!p || !has_ct_lookup)
		return 0;
	/* A SYN starts a connection: see conntrack_runs. */
	if (packet_syn(p))
		return 0;
	dir = conntrack_find(skb, &p->tuple, &found);
	return dir >= 0 && (scope == CONNTRACK_ANY_ENTRY || dir == IP_CT_DIR_REPLY ||
			    found.status & IPS_DST_NAT);
}

static __always_inline int tracked_ended(const struct tracked *found)
{
	return found->tcp_state == TCP_CONNTRACK_TIME_WAIT ||
	       found->tcp_state == TCP_CONNTRACK_CLOSE;
}

/*
 * Does netfilter translate a connection with this tuple that has not ended? Then a SYN is
 * repeated or forged. A flow for it would also get the connection's packets, and lead them
 * to another endpoint or port. Netfilter forwards the SYN to the endpoint, which answers it
 * with an ACK (RFC 5961, 4.2). A client without the connection resets it then, and its next
 * SYN finds the entry closed.
 */
__noinline int conntrack_runs(struct __sk_buff *skb, const struct tuple *t)
{
	struct tracked found = {};

	if (!t || !has_ct_lookup)
		return 0;
	return conntrack_find(skb, t, &found) >= 0 && found.status & IPS_DST_NAT &&
	       !tracked_ended(&found);
}

/* Has netfilter a connection with this tuple, in either direction, that has not ended? */
__noinline int conntrack_continues(struct __sk_buff *skb, const struct tuple *t)
{
	struct tracked found = {};

	if (!t || !has_ct_lookup || conntrack_find(skb, t, &found) < 0)
		return 0;
	return t->proto != IPPROTO_TCP || !tracked_ended(&found);
}

/*
 * Is this tuple the reply direction of a conntrack entry? Then netfilter would treat the
 * replies as that connection's. A client may use one port both for an endpoint through a
 * Service and for the endpoint itself. On a path through the stack, nf_nat changes the port
 * of one of them.
 */
__noinline int conntrack_sees_as_reply(struct __sk_buff *skb, const struct tuple *t)
{
	struct tracked found = {};

	if (!t || !has_ct_lookup)
		return 0;
	return conntrack_find(skb, t, &found) == IP_CT_DIR_REPLY;
}

/* Has netfilter accepted a packet with this tuple? It keeps no entry of dropped packets. */
__noinline int conntrack_accepted(struct __sk_buff *skb, const struct tuple *t)
{
	struct tracked found = {};

	if (!t || !has_ct_lookup)
		return 0;
	return conntrack_find(skb, t, &found) >= 0;
}

#endif
