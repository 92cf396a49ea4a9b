/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The option by which the node that receives a client's SYN tells the endpoint's node which
 * address of a Service the client asked for. It comes first: in IPv4 as the first option, in
 * IPv6 as a Destination Options header of its own. The numbers are for experiments (RFC 4727).
 *
 * Where a network drops options, all packets travel within datagrams, from the node's address to
 * the endpoint's, by GUE (draft-ietf-intarea-gue, variant 0). The option is its private data.
 *
 * The tag proves that a node of this cluster has chosen the endpoint for this client: it is
 * SipHash-2-4 (Aumasson and Bernstein, 2012) by the key of --dsr-key-file. Without it, any host
 * could have an endpoint answer with the address of its choice.
 */
#ifndef SPILLWAY_DSR_OPTION_H
#define SPILLWAY_DSR_OPTION_H

#include "../parse/packet.h"
#include "../siphash.h"

/* What an option says about a connection, as SipHash reads it. */
struct dsr_connection {
	struct addr client;
	struct addr endpoint;
	struct addr service;
	__be16 client_port;
	__be16 endpoint_port;
	__be16 service_port;
	__u8 proto;
	__u8 family;
};

#define DSR_CONNECTION_WORDS (sizeof(struct dsr_connection) / sizeof(__u64))

struct dsr_option_v4 {
	__u8 type;
	__u8 len;
	__be16 port;
	__be32 addr;
	__u8 tag[8];
} __attribute__((packed));

struct dsr_option_v6 {
	__u8 type;
	__u8 len;
	__be16 port;
	struct in6_addr addr;
	__u8 tag[8];
} __attribute__((packed));

/* The IP header with the option, as it is read and written. */
struct dsr_ipv4 {
	struct iphdr ip;
	struct dsr_option_v4 option;
} __attribute__((packed));

struct dsr_ipv6 {
	struct ipv6hdr ip;
	__u8 next;
	__u8 words; /* of 8 bytes after the first */
	struct dsr_option_v6 option;
	__u8 pad[2]; /* PadN */
} __attribute__((packed));

/* The header of GUE, without the private data. The version and the type "data" are 0. */
struct gue {
	__u8 words; /* of 4 bytes after this header */
	__u8 proto; /* of the packet inside */
	__be16 flags;
};

/* The headers before a packet that travels within a datagram. */
struct dsr_gue_v4 {
	struct iphdr ip;
	struct udphdr udp;
	struct gue gue;
	struct dsr_option_v4 option;
};

struct dsr_gue_v6 {
	struct ipv6hdr ip;
	struct udphdr udp;
	struct gue gue;
	struct dsr_option_v6 option;
};

union dsr_header {
	struct dsr_ipv4 v4;
	struct dsr_ipv6 v6;
	struct dsr_gue_v4 gue_v4;
	struct dsr_gue_v6 gue_v6;
};

#define DSR_ROOM_V4 (sizeof(struct dsr_ipv4) - sizeof(struct iphdr))
#define DSR_ROOM_V6 (sizeof(struct dsr_ipv6) - sizeof(struct ipv6hdr))

_Static_assert(DSR_ROOM_V4 == DSR_OPTION_V4_LEN, "the option fills the IPv4 options");
_Static_assert(DSR_ROOM_V6 == (DSR_HEADER_V6_WORDS + 1) * 8, "the option fills the IPv6 header");
_Static_assert(sizeof(struct dsr_gue_v4) == 48 && sizeof(struct dsr_gue_v6) == 80, "no padding");
_Static_assert(sizeof(struct dsr_option_v4) % 4 == 0 && sizeof(struct dsr_option_v6) % 4 == 0,
	       "GUE counts words");

#define IPV6_MIN_MTU 1280

static __always_inline __u32 dsr_room(__u8 family)
{
	return family == FAMILY_V4 ? DSR_ROOM_V4 : DSR_ROOM_V6;
}

/* Returns the length of the headers before a packet that travels within a datagram, in bytes. */
static __always_inline __u32 gue_room(__u8 family)
{
	return family == FAMILY_V4 ? sizeof(struct dsr_gue_v4) : sizeof(struct dsr_gue_v6);
}

/* Returns the tag of a connection by the present key, or by the one before it. */
__noinline __u64 dsr_tag(const struct dsr_connection *c, __u32 previous)
{
	__u64 k0 = previous ? dsr_previous_key0 : dsr_key0;
	__u64 k1 = previous ? dsr_previous_key1 : dsr_key1;

	return c ? siphash(c, DSR_CONNECTION_WORDS, k0, k1) : 0;
}

/*
 * Fills a connection from client to service, to an endpoint. That of a probe, which has port 0, is
 * without the client: netfilter may give the agent's datagrams another source.
 */
static __always_inline void dsr_connection_fill(struct dsr_connection *c,
						const struct tuple *to_service,
						const struct addr *endpoint, __be16 endpoint_port)
{
	__builtin_memset(&c->client, 0, sizeof(c->client));
	c->client_port = 0;
	if (to_service->dport) {
		c->client = to_service->saddr;
		c->client_port = to_service->sport;
	}
	c->service = to_service->daddr;
	c->endpoint = *endpoint;
	c->service_port = to_service->dport;
	c->endpoint_port = endpoint_port;
	c->proto = to_service->proto;
	c->family = to_service->family;
}

static __always_inline void dsr_write_v4(struct dsr_option_v4 *o, const struct tuple *to_service,
					 __u64 tag)
{
	o->type = DSR_OPTION_V4;
	o->len = DSR_OPTION_V4_LEN;
	o->port = to_service->dport;
	o->addr = to_service->daddr.w[0];
	__builtin_memcpy(o->tag, &tag, sizeof(tag));
}

static __always_inline void dsr_write_v6(struct dsr_option_v6 *o, const struct tuple *to_service,
					 __u64 tag)
{
	o->type = DSR_OPTION_V6;
	o->len = DSR_OPTION_V6_LEN;
	o->port = to_service->dport;
	__builtin_memcpy(&o->addr, &to_service->daddr, sizeof(o->addr));
	__builtin_memcpy(o->tag, &tag, sizeof(tag));
}

/*
 * Reads the option of a packet: a dsr_option_v4 or dsr_option_v6. Changes the tuple into that of
 * the packet at the node that received it first, and fills the connection. Returns the tag.
 */
static __always_inline __u64 dsr_read(const void *option, struct tuple *t, struct dsr_connection *c)
{
	const struct dsr_option_v4 *v4 = option;
	const struct dsr_option_v6 *v6 = option;
	struct addr endpoint = t->daddr;
	__be16 endpoint_port = t->dport;
	__u64 tag;

	if (t->family == FAMILY_V4) {
		t->daddr.w[0] = v4->addr;
		t->dport = v4->port;
		__builtin_memcpy(&tag, v4->tag, sizeof(tag));
	} else {
		__builtin_memcpy(&t->daddr, &v6->addr, sizeof(t->daddr));
		t->dport = v6->port;
		__builtin_memcpy(&tag, v6->tag, sizeof(tag));
	}
	dsr_connection_fill(c, t, &endpoint, endpoint_port);
	return tag;
}

/* May this be a datagram of GUE with an option? */
static __always_inline bool gue_possible(const struct packet *p)
{
	return dsr_port && p->tuple.dport == dsr_port && p->tuple.proto == IPPROTO_UDP &&
	       !(p->flags & (PACKET_FIRST_FRAGMENT | PACKET_NO_L4 | PACKET_OPTIONS));
}

/* May the packet say which Service it is for, by the option or within a datagram? */
static __always_inline bool may_be_wrapped(const struct packet *p)
{
	return p->flags & PACKET_DSR_OPTION || gue_possible(p);
}

#endif
