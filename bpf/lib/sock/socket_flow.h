/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Events and handshakes of the flows that a connect hook has translated. The tc programs do not
 * know these flows, so the kernel's socket reports them. Its state is stored on the socket itself.
 *
 *            TCP                                  UDP
 *   connect  socket_flow_plan                     socket_flow_plan: opened
 *   SYN      BPF_SOCK_OPS_TCP_CONNECT_CB: opened
 *   SYN-ACK  BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB: answered
 *   end      BPF_SOCK_OPS_STATE_CB: closed        sock_release: closed
 *
 * The agent always loads the program of TCP. It loads that of UDP where there may be events of
 * flows, and for the load of endpoints. A flow without events is silent. If its handshake alone is
 * counted, its state and its calls end with the handshake.
 */
#ifndef SPILLWAY_SOCK_SOCKET_FLOW_H
#define SPILLWAY_SOCK_SOCKET_FLOW_H

#include "../events/events.h"
#include "../flow/endpoint_select.h"
#include "../events/outcome.h"
#include "failed_handshake.h"
#include "kernel_sock.h"

/* Counts an open flow in the load of its endpoint. */
static __always_inline void socket_count(const struct socket_flow *f)
{
	if (balance_by_load && f->counted)
		load_add_socket(f->backend, 1);
}

static __always_inline void socket_uncount(const struct socket_flow *f)
{
	if (balance_by_load && f->counted)
		load_add_socket(f->backend, -1);
}

/* Returns an empty event with the ends of a socket's flow, or NULL. */
static __always_inline struct event *socket_event(const struct socket_flow *f, enum event_kind kind)
{
	struct event *e;

	if (f->silent)
		return NULL;
	e = event_reserve(kind);
	if (!e)
		return NULL;
	e->client = f->client;
	e->service_addr = f->service_addr;
	e->endpoint = f->endpoint;
	e->client_port = f->client_port;
	e->service_port = f->service_port;
	e->endpoint_port = f->endpoint_port;
	e->proto = f->proto;
	e->family = f->family;
	e->service = f->service;
	e->backend = f->backend;
	e->handshake = f->handshake;
	e->by_socket = 1;
	return e;
}

/* Returns an empty event of the end of a socket's flow, or NULL. The flow is over. */
static __always_inline struct event *socket_closed(struct socket_flow *f, enum event_end end)
{
	struct event *e;
	__u64 ms;

	f->state = SOCKET_FLOW_NONE;
	if (!flow_events_wanted())
		return NULL;
	e = socket_event(f, EVENT_CLOSED);
	if (!e)
		return NULL;
	e->end = end;
	ms = (e->time - f->opened) / 1000000;
	e->lasted = ms < 0xffffffff ? ms : 0xffffffff;
	return e;
}

/*
 * Decides whether the flow of a connect() is reported or its handshake counted. A UDP flow is
 * open from now on. TCP sends its SYN later, when the socket has an address.
 */
static __noinline int socket_flow_plan(struct bpf_sock_addr *ctx, const struct addr *service,
				       __be16 service_port, const struct backend_choice *choice)
{
	const struct backend *b = choice->backend;
	bool reported, tcp = ctx->protocol == IPPROTO_TCP, wanted;
	struct socket_flow *f;
	struct event *e;

	if (!ctx->sk)
		return 0;
	reported = flow_events_wanted() && event_take(b->service, false);
	wanted = reported || tcp || choice->counted;
	f = bpf_sk_storage_get(&socket_flows, ctx->sk, NULL,
			       wanted ? BPF_SK_STORAGE_GET_F_CREATE : 0);
	if (!f)
		return 0;
	if (f->state == SOCKET_FLOW_OPEN) {
		socket_uncount(f);
		e = socket_closed(f, EVENT_END_SOCKET);
		if (e)
			event_submit(e);
	}
	f->state = SOCKET_FLOW_NONE;
	if (!wanted)
		return 0;
	__builtin_memset(f, 0, sizeof(*f));
	f->service_addr = *service;
	f->service_port = service_port;
	f->endpoint = b->addr;
	f->endpoint_port = b->port;
	f->proto = ctx->protocol;
	f->family = b->family;
	f->service = b->service;
	f->backend = choice->id;
	f->silent = !reported;
	f->watched = tcp && b->flags & BACKEND_WATCHED;
	f->counted = choice->counted;
	f->state = SOCKET_FLOW_PLANNED;
	if (f->proto != IPPROTO_UDP)
		return 0;
	f->state = SOCKET_FLOW_OPEN;
	f->opened = bpf_ktime_get_ns();
	socket_count(f);
	e = socket_event(f, EVENT_OPENED);
	if (e)
		event_submit(e);
	return 0;
}

/* The calls of the kernel that the flow of a socket needs. None of them is made for each packet. */
#define SOCKET_CALLS (BPF_SOCK_OPS_STATE_CB_FLAG | BPF_SOCK_OPS_RTO_CB_FLAG)

/* Reports the flow of a SYN that the kernel is about to send. */
static __always_inline void socket_flow_syn(struct bpf_sock_ops *ctx, struct socket_flow *f)
{
	bool planned = f->state == SOCKET_FLOW_PLANNED;
	struct addr peer = {};
	struct event *e;

	/* The kernel does not report the end of a silent flow: a new SYN ends it, too. */
	f->state = SOCKET_FLOW_NONE;
	if (!planned)
		return;
	if (f->family == FAMILY_V4) {
		peer.w[0] = ctx->remote_ip4;
		f->client.w[0] = ctx->local_ip4;
	} else {
		peer.w[0] = ctx->remote_ip6[0];
		peer.w[1] = ctx->remote_ip6[1];
		peer.w[2] = ctx->remote_ip6[2];
		peer.w[3] = ctx->remote_ip6[3];
		f->client.w[0] = ctx->local_ip6[0];
		f->client.w[1] = ctx->local_ip6[1];
		f->client.w[2] = ctx->local_ip6[2];
		f->client.w[3] = ctx->local_ip6[3];
	}
	f->client_port = bpf_htons(ctx->local_port);
	/* The translated connect() has failed, and the socket connects to another peer. */
	if (!addr_equal(&peer, &f->endpoint) ||
	    f->endpoint_port != bpf_htons(bpf_ntohl(ctx->remote_port)))
		return;
	/* Other programs of the cgroup may have asked for calls, too. */
	f->calls = SOCKET_CALLS & ~ctx->bpf_sock_ops_cb_flags;
	if (bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags | SOCKET_CALLS))
		return;
	f->state = SOCKET_FLOW_OPEN;
	f->opened = bpf_ktime_get_ns();
	if (f->watched)
		outcome_opened(f->backend);
	socket_count(f);
	e = socket_event(f, EVENT_OPENED);
	if (e)
		event_submit(e);
}

/*
 * A flow that is followed until its handshake ends needs no more calls. This call of the kernel
 * comes before ACTIVE_ESTABLISHED_CB, in which other programs ask for theirs.
 */
static __always_inline void socket_flow_established(struct bpf_sock_ops *ctx,
						    const struct socket_flow *f)
{
	if (f->silent && !f->counted && f->calls)
		bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags & ~f->calls);
}

static __always_inline void socket_flow_answered(struct bpf_sock_ops *ctx, struct bpf_sock *sk,
						 struct socket_flow *f)
{
	struct event *e;

	if (f->state != SOCKET_FLOW_OPEN)
		return;
	f->handshake = bpf_ktime_get_ns() - f->opened;
	outcome_answered(f->backend);
	if (service_metrics)
		service_count_handshake(f->service, f->handshake);
	if (balance_by_load && f->counted)
		load_measure(f->backend, f->handshake);
	if (f->silent && !f->counted) {
		bpf_sk_storage_delete(&socket_flows, sk);
		return;
	}
	if (!flow_events_wanted())
		return;
	e = socket_event(f, EVENT_ANSWERED);
	if (!e)
		return;
	e->srtt = ctx->srtt_us >> 3;
	event_submit(e);
}

/* Returns how a TCP connection has ended that leaves a state for BPF_TCP_CLOSE. */
static __always_inline enum event_end socket_end(const struct socket_flow *f, __u32 state,
						 __u32 segments_in)
{
	if (f->expired)
		return EVENT_END_TIMEOUT;
	switch (state) {
	case BPF_TCP_SYN_SENT:
		/* Without an answer, the process or the kernel has given up. */
		return segments_in ? EVENT_END_RST : EVENT_END_TIMEOUT;
	case BPF_TCP_FIN_WAIT2:
	case BPF_TCP_CLOSING:
	case BPF_TCP_LAST_ACK:
		return EVENT_END_FIN;
	default:
		return EVENT_END_RST;
	}
}

/*
 * How long a SYN must have no answer to count, in units of struct fragment: half a second. Shorter
 * ones are of a process that asks several servers at once, or of TCP_USER_TIMEOUT.
 */
#define SYN_PATIENCE (500000000 >> FRAGMENT_CLOCK_SHIFT)

/* Counts the last SYN of a handshake if it had no answer for long. repeats: another SYN follows. */
static __always_inline void socket_syn_unanswered(struct socket_flow *f, bool repeats)
{
	__u64 time = bpf_ktime_get_ns();
	__u16 units = time >> FRAGMENT_CLOCK_SHIFT | 1; /* 0 is no time */
	bool again = f->sent;
	__u64 waited = again ? (__u16)(units - f->sent)
			     : (time - f->opened) >> FRAGMENT_CLOCK_SHIFT;

	if (waited < SYN_PATIENCE)
		return;
	outcome_failed(f->backend, &f->client, HANDSHAKE_UNANSWERED, again);
	if (repeats)
		f->sent = units;
}

/* The kernel's timer has expired, and it repeats the last segment unless it gives up. */
static __always_inline void socket_flow_timeout(struct bpf_sock_ops *ctx, struct socket_flow *f)
{
	f->expired = ctx->args[2];
	if (f->state == SOCKET_FLOW_OPEN && ctx->state == BPF_TCP_SYN_SENT)
		socket_syn_unanswered(f, true);
}

static __always_inline void socket_flow_closed(struct bpf_sock_ops *ctx, struct socket_flow *f)
{
	enum event_end end = socket_end(f, ctx->args[0], ctx->segs_in);
	__u64 acked = ctx->bytes_acked;
	struct event *e;

	if (f->state != SOCKET_FLOW_OPEN)
		return;
	if (ctx->args[0] == BPF_TCP_SYN_SENT && end == EVENT_END_RST) {
		if (f->watched)
			outcome_refused(f->backend);
		outcome_failed(f->backend, &f->client, HANDSHAKE_REFUSED, false);
	} else if (ctx->args[0] == BPF_TCP_SYN_SENT) {
		socket_syn_unanswered(f, false);
	}
	socket_uncount(f);
	e = socket_closed(f, end);
	if (!e)
		return;
	e->srtt = ctx->srtt_us >> 3;
	e->packets[TO_ENDPOINT] = ctx->segs_out;
	e->packets[TO_CLIENT] = ctx->segs_in;
	e->bytes[TO_ENDPOINT] = acked ? acked - 1 : 0; /* the kernel counts the SYN */
	e->bytes[TO_CLIENT] = ctx->bytes_received;
	event_submit(e);
}

/* Handles a call of the kernel for a TCP socket. Most are of no connection to a Service. */
static __always_inline void socket_flow_call(struct bpf_sock_ops *ctx)
{
	struct bpf_sock *sk = ctx->sk;
	struct socket_flow *f;

	switch (ctx->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
	case BPF_SOCK_OPS_RTO_CB:
		break;
	case BPF_SOCK_OPS_STATE_CB:
		if (ctx->args[1] == BPF_TCP_CLOSE || ctx->args[1] == BPF_TCP_ESTABLISHED)
			break;
		return;
	default:
		return;
	}
	if (!sk)
		return;
	f = bpf_sk_storage_get(&socket_flows, sk, NULL, 0);
	if (!f)
		return;
	switch (ctx->op) {
	case BPF_SOCK_OPS_TCP_CONNECT_CB:
		socket_flow_syn(ctx, f);
		break;
	case BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB:
		socket_flow_answered(ctx, sk, f);
		break;
	case BPF_SOCK_OPS_RTO_CB:
		socket_flow_timeout(ctx, f);
		break;
	default:
		if (ctx->args[1] == BPF_TCP_ESTABLISHED)
			socket_flow_established(ctx, f);
		else
			socket_flow_closed(ctx, f);
	}
}

/*
 * Reports the end of a UDP socket's flow. Its address was unknown before: the kernel chooses
 * it after the connect hook. The context is the kernel's socket, of which a program of this
 * type may read few fields.
 */
static __always_inline void socket_flow_released(struct bpf_sock *ctx)
{
	const struct sock_common *sk = (const void *)ctx;
	struct socket_flow *f;
	struct event *e;
	__u16 port = 0;

	if (ctx->protocol != IPPROTO_UDP)
		return;
	f = bpf_sk_storage_get(&socket_flows, ctx, NULL, 0);
	if (!f || f->state != SOCKET_FLOW_OPEN)
		return;
	socket_uncount(f);
	if (f->family == FAMILY_V4)
		bpf_core_read(&f->client.w[0], sizeof(__be32), &sk->skc_rcv_saddr);
	else if (bpf_core_field_exists(sk->skc_v6_rcv_saddr))
		bpf_core_read(&f->client, sizeof(struct addr), &sk->skc_v6_rcv_saddr);
	bpf_core_read(&port, sizeof(port), &sk->skc_num);
	f->client_port = bpf_htons(port);
	e = socket_closed(f, EVENT_END_SOCKET);
	if (e)
		event_submit(e);
}

/* Writes the id of the endpoint whose load counts this socket's flow. */
static __always_inline void socket_flow_count(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	struct socket_flow *f = ctx->value;
	__u32 backend;

	if (!ctx->sk || !f || f->state != SOCKET_FLOW_OPEN || !f->counted)
		return;
	backend = f->backend;
	bpf_seq_write(ctx->meta->seq, &backend, sizeof(backend));
}

#endif
