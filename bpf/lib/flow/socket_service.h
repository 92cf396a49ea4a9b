/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Pods' sockets whose endpoint is no longer their Service's. */
#ifndef SPILLWAY_FLOW_SOCKET_SERVICE_H
#define SPILLWAY_FLOW_SOCKET_SERVICE_H

#include "../lookup/connected_socket.h"

/* What a socket asked for. */
struct asked {
	struct frontend *fe; /* its Service's, if that no longer has the endpoint of the socket */
	bool gone;	     /* UDP: no Service has the address */
};

/*
 * Finds the Service that a pod's TCP socket asked for, if the packet goes to the endpoint that the
 * connect hook chose. For a SYN to an endpoint that no Service has any more: the socket keeps its
 * address, but the handshake can be with another endpoint. Returns 1, and the Service's address in
 * asked. A global function: the verifier checks it once.
 */
__noinline int find_connection_service(struct __sk_buff *skb)
{
	struct scratch *m = get_scratch();
	struct bpf_sock *sk = skb->sk;
	struct connection *c;

	if (!m || !sk)
		return 0;
	sk = bpf_sk_fullsock(sk);
	if (!sk)
		return 0;
	c = bpf_sk_storage_get(&connections, sk, NULL, 0);
	if (!c || !addr_equal(&c->endpoint, &m->packet.tuple.daddr) ||
	    c->endpoint_port != m->packet.tuple.dport)
		return 0;
	m->asked.addr = c->service;
	m->asked.port = c->service_port;
	return 1;
}

/*
 * Finds the Service of a pod's socket if the socket's endpoint is no longer the Service's. A
 * connected socket keeps the endpoint's address, but a SYN or a datagram can go to another
 * endpoint.
 */
static __noinline void find_socket_service(struct __sk_buff *skb, const struct packet *p,
					   struct asked *asked)
{
	__u32 changes = service_changes_now(); /* before the lookups */
	struct scratch *m = get_scratch();
	const struct tuple *t = &p->tuple;
	struct socket_peer *peer;
	struct backend *b;

	if (t->proto == IPPROTO_TCP) {
		if (packet_syn(p) && m && find_connection_service(skb))
			asked->fe = socket_frontend(&m->asked.addr, m->asked.port, t);
		return;
	}
	if (t->proto != IPPROTO_UDP)
		return;
	peer = socket_asked(skb, t);
	if (!peer || (peer->checked && peer->checked == (__u16)changes))
		return;
	asked->fe = socket_frontend(&peer->addr, peer->port, t);
	if (!asked->fe) {
		asked->gone = true;
		return;
	}
	b = bpf_map_lookup_elem(&backends, &peer->backend);
	if (!b || b->service != asked->fe->service)
		return;
	peer->checked = changes;
	asked->fe = NULL;
}

#endif
