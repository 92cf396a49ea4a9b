/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The cgroup socket hooks.
 *
 *   process -- connect(service) --> endpoint      connect4/6: TCP, connected UDP
 *           -- sendto(service)  --> endpoint      sendmsg4/6: unconnected UDP
 *           <- recvfrom() shows service           recvmsg4/6
 *           <- getpeername() shows service        getpeername4/6
 *
 * sock_ops counts handshakes, and reports flows. The last four programs are loaded if they are
 * wanted: sock_release reports the ends of UDP flows. The iterators list sockets whose endpoint was
 * removed, those of the node that are in a handshake with such an endpoint, and those that a load
 * counts.
 */
#include "lib/sock/translate.h"

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	return socket_translate(ctx, FAMILY_V4, SOCKET_CONNECTED);
}

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	return socket_translate(ctx, FAMILY_V6, SOCKET_CONNECTED);
}

SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
	return socket_translate(ctx, FAMILY_V4, SOCKET_PER_DATAGRAM);
}

SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
	return socket_translate(ctx, FAMILY_V6, SOCKET_PER_DATAGRAM);
}

SEC("cgroup/recvmsg4")
int recvmsg4(struct bpf_sock_addr *ctx)
{
	return socket_restore(ctx, FAMILY_V4, SOCKET_PER_DATAGRAM);
}

SEC("cgroup/recvmsg6")
int recvmsg6(struct bpf_sock_addr *ctx)
{
	return socket_restore(ctx, FAMILY_V6, SOCKET_PER_DATAGRAM);
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	return socket_restore(ctx, FAMILY_V4, SOCKET_CONNECTED);
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	return socket_restore(ctx, FAMILY_V6, SOCKET_CONNECTED);
}

/* The kernel ignores what the program returns, since reply is unset: the defaults apply. */
SEC("sockops")
int sock_ops(struct bpf_sock_ops *ctx)
{
	socket_flow_call(ctx);
	return ALLOW;
}

SEC("cgroup/sock_release")
int sock_release(struct bpf_sock *ctx)
{
	socket_flow_released(ctx);
	return ALLOW;
}

SEC("iter/bpf_sk_storage_map")
int lost_sockets(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	lost_report(ctx);
	return 0;
}

SEC("iter/bpf_sk_storage_map")
int lost_handshakes(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	handshake_report(ctx);
	return 0;
}

SEC("iter/bpf_sk_storage_map")
int counted_sockets(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	socket_flow_count(ctx);
	return 0;
}

/* Keeps the type for bpf2go. */
const struct lost_socket *unused_lost_socket __attribute__((unused));

char __license[] SEC("license") = "Dual BSD/GPL";
