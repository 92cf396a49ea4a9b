/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Sockets whose endpoint was removed. A connect hook stores the endpoint's id on the socket,
 * and ids are never reused: a socket of a later endpoint with the same address differs. An
 * iterator reports the sockets of all network namespaces, and the agent ends them
 * (internal/dataplane/ebpf/flows/sockets_end.go).
 */
#ifndef SPILLWAY_SOCK_LOST_SOCKETS_H
#define SPILLWAY_SOCK_LOST_SOCKETS_H

#include "../lookup/service.h"
#include "kernel_sock.h"

/* Clears the record of an earlier connect(). Most sockets have none. */
static __always_inline void socket_backend_forget(struct bpf_sock_addr *ctx)
{
	struct socket_backend *r;

	if (!ctx->sk)
		return;
	r = bpf_sk_storage_get(&socket_backends, ctx->sk, NULL, 0);
	if (r)
		r->backend = 0;
}

/* Stores the endpoint of a translated connect(). Without memory, the socket is never ended. */
static __always_inline void socket_backend_remember(struct bpf_sock_addr *ctx,
						    const struct backend *b, __u32 id)
{
	struct socket_backend *r;

	if (!ctx->sk)
		return;
	r = bpf_sk_storage_get(&socket_backends, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!r)
		return;
	r->addr = b->addr;
	r->port = b->port;
	r->proto = ctx->protocol;
	r->family = b->family;
	r->backend = id;
}

/* Reads the two ends of a connected socket. */
static __always_inline void lost_ends(struct lost_socket *s, struct sock *sk)
{
	if (s->family == FAMILY_V4) {
		s->local.w[0] = BPF_CORE_READ(sk, __sk_common.skc_rcv_saddr);
		s->peer.w[0] = BPF_CORE_READ(sk, __sk_common.skc_daddr);
	} else if (bpf_core_field_exists(sk->__sk_common.skc_v6_daddr)) {
		BPF_CORE_READ_INTO(&s->local, sk, __sk_common.skc_v6_rcv_saddr);
		BPF_CORE_READ_INTO(&s->peer, sk, __sk_common.skc_v6_daddr);
	}
	s->local_port = bpf_htons(BPF_CORE_READ(sk, __sk_common.skc_num));
	s->peer_port = BPF_CORE_READ(sk, __sk_common.skc_dport);
}

/* Completes the record of a socket, and writes it. */
static __always_inline void lost_write(struct bpf_iter__bpf_sk_storage_map *ctx, struct sock *sk,
				       struct lost_socket *s, struct net *net)
{
	s->cookie = bpf_get_socket_cookie(sk);
	s->ifindex = BPF_CORE_READ(sk, __sk_common.skc_bound_dev_if);
	s->netns_cookie = BPF_CORE_READ(net, net_cookie);
	s->netns_inode = BPF_CORE_READ(net, ns.inum);
	bpf_seq_write(ctx->meta->seq, s, sizeof(*s));
}

/* Writes a record if the socket is still connected to an endpoint that was removed. */
static __always_inline void lost_report(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	struct socket_backend *r = ctx->value;
	struct lost_socket s = {};
	struct sock *sk = ctx->sk;
	__u8 state;

	if (!sk || !r)
		return;
	s.backend = r->backend;
	if (!s.backend || bpf_map_lookup_elem(&backends, &s.backend))
		return;
	state = BPF_CORE_READ(sk, __sk_common.skc_state);
	if (state == BPF_TCP_CLOSE || state == BPF_TCP_LISTEN)
		return;
	s.proto = r->proto;
	s.family = r->family;
	lost_ends(&s, sk);
	/* The socket was closed or disconnected, or the translated connect() has failed. */
	if (!s.local_port || !addr_equal(&s.peer, &r->addr) || s.peer_port != r->port)
		return;
	lost_write(ctx, sk, &s, BPF_CORE_READ(sk, __sk_common.skc_net.net));
}

/*
 * Writes a record if a TCP socket of the node waits for the answer of an endpoint that no Service
 * has any more. No program sees its SYNs on the way, so they cannot be led to another endpoint: see
 * find_connection_service in flow/socket_service.h for the sockets of pods.
 */
static __always_inline void handshake_report(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	struct connection *c = ctx->value;
	struct lost_socket s = {};
	struct sock *sk = ctx->sk;
	struct net *net;

	if (!sk || !c || BPF_CORE_READ(sk, __sk_common.skc_state) != BPF_TCP_SYN_SENT)
		return;
	net = BPF_CORE_READ(sk, __sk_common.skc_net.net);
	if (BPF_CORE_READ(net, net_cookie) != host_netns_cookie)
		return;
	s.proto = IPPROTO_TCP;
	s.family = c->endpoint.w[1] | c->endpoint.w[2] | c->endpoint.w[3] ? FAMILY_V6 : FAMILY_V4;
	lost_ends(&s, sk);
	if (!addr_equal(&s.peer, &c->endpoint) || s.peer_port != c->endpoint_port)
		return;
	if (!frontend_exact(&s.peer, s.peer_port, IPPROTO_TCP, s.family))
		lost_write(ctx, sk, &s, net);
}

#endif
