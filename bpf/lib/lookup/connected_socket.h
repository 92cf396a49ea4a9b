/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Connected UDP sockets that a socket hook has translated. The hook runs once, so the socket keeps
 * its endpoint's address. The tc programs find the Service by the socket.
 */
#ifndef SPILLWAY_LOOKUP_CONNECTED_SOCKET_H
#define SPILLWAY_LOOKUP_CONNECTED_SOCKET_H

#include "service.h"

static __always_inline void socket_key(struct socket_key *key, __u64 cookie, __u8 proto,
				       const struct addr *addr, __be16 port, __u8 dir)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->cookie = cookie;
	key->addr = *addr;
	key->port = port;
	key->proto = proto;
	key->dir = dir;
}

/*
 * Returns the Service that the packet's socket asked for, or NULL if it asked for none. A socket
 * that is not connected is none of these: its hook runs for each datagram, and the process may send
 * others to the endpoint's own address.
 */
static __always_inline struct socket_peer *socket_asked(struct __sk_buff *skb,
							const struct tuple *t)
{
	/*
	 * The packet keeps its socket on the path out of a pod (4.19), and through the node's
	 * stack.
	 */
	struct bpf_sock *sk = skb->sk;
	struct socket_key key;
	__u64 cookie;

	if (!sk)
		return NULL;
	sk = bpf_sk_fullsock(sk);
	if (!sk || sk->state != BPF_TCP_ESTABLISHED)
		return NULL;
	cookie = bpf_get_socket_cookie(skb);
	if (!cookie)
		return NULL;
	socket_key(&key, cookie, t->proto, &t->daddr, t->dport, SOCKET_REVERSE);
	return bpf_map_lookup_elem(&sockets, &key);
}

/* Returns the frontend that a socket asked for, or NULL if no Service has its address. */
static __always_inline struct frontend *socket_frontend(const struct addr *addr, __be16 port,
							const struct tuple *t)
{
	struct frontend *fe = frontend_lookup(addr, port, t->proto, t->family).fe;

	if (!fe && addr_loopback(addr, t->family)) /* --localhost-nodeports */
		fe = frontend_nodeport(port, t->proto, t->family);
	return is_service(fe) ? fe : NULL;
}

#endif
