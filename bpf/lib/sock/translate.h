/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Translation at the socket: when a process connects or sends, the hooks replace the
 * Service's address by an endpoint's, and no packet is ever rewritten. recvmsg and
 * getpeername still show the Service to the process.
 *
 * A program runs for the cgroup of a process, in any network namespace. Decisions that need
 * packets (source ranges, silent drops) are left to the tc programs, if the process is in a
 * pod. So are the sockets of pods that the agent excludes: --socket-hooks, and an annotation.
 */
#ifndef SPILLWAY_SOCK_TRANSLATE_H
#define SPILLWAY_SOCK_TRANSLATE_H

#include "../events/events.h"
#include "../flow/endpoint_select.h"
#include "../lookup/connected_socket.h"
#include "../lookup/service.h"
#include "socket_flow.h"
#include "lost_sockets.h"

#define ALLOW 1
#define REFUSE 0

#define ETIMEDOUT 110
#define ECONNREFUSED 111

struct endpoint_addr {
	struct addr addr;
	__be16 port;
	__u8 family; /* of the address, not of the socket */
	__u8 mapped; /* ::ffff:a.b.c.d */
};

/* Loads the address of the program's context. An IPv4-mapped address counts as IPv4. */
static __always_inline void peer_load(struct bpf_sock_addr *ctx, __u8 family,
				      struct endpoint_addr *e)
{
	__builtin_memset(e, 0, sizeof(*e));
	e->family = family;
	e->port = ctx->user_port;
	if (family == FAMILY_V4) {
		e->addr.w[0] = ctx->user_ip4;
		return;
	}
	e->addr.w[0] = ctx->user_ip6[0];
	e->addr.w[1] = ctx->user_ip6[1];
	e->addr.w[2] = ctx->user_ip6[2];
	e->addr.w[3] = ctx->user_ip6[3];
	if (!e->addr.w[0] && !e->addr.w[1] && e->addr.w[2] == bpf_htonl(0xffff)) {
		e->family = FAMILY_V4;
		e->mapped = 1;
		e->addr.w[0] = e->addr.w[3];
		e->addr.w[2] = 0;
		e->addr.w[3] = 0;
	}
}

static __always_inline void peer_store(struct bpf_sock_addr *ctx, __u8 family, __u8 mapped,
				       const struct addr *addr, __be16 port)
{
	ctx->user_port = port;
	if (family == FAMILY_V4) {
		ctx->user_ip4 = addr->w[0];
	} else if (mapped) {
		ctx->user_ip6[3] = addr->w[0];
	} else {
		ctx->user_ip6[0] = addr->w[0];
		ctx->user_ip6[1] = addr->w[1];
		ctx->user_ip6[2] = addr->w[2];
		ctx->user_ip6[3] = addr->w[3];
	}
}

/*
 * Stores the Service of a TCP connection on the socket itself, because a connection may
 * last for months. If the kernel has no memory, the process sees the endpoint.
 */
static __always_inline void connection_remember(struct bpf_sock_addr *ctx,
						const struct endpoint_addr *service,
						const struct backend *b)
{
	struct connection *c;

	if (!ctx->sk)
		return;
	c = bpf_sk_storage_get(&connections, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!c)
		return;
	c->service = service->addr;
	c->service_port = service->port;
	c->endpoint = b->addr;
	c->endpoint_port = b->port;
}

/* Replaces peer by the Service if peer is the endpoint chosen for it. */
static __always_inline void connection_restore(struct bpf_sock_addr *ctx, __u8 family,
					       const struct endpoint_addr *peer)
{
	struct connection *c;

	if (!ctx->sk)
		return;
	c = bpf_sk_storage_get(&connections, ctx->sk, NULL, 0);
	/* The socket may have connected to another peer since. */
	if (c && addr_equal(&c->endpoint, &peer->addr) && c->endpoint_port == peer->port)
		peer_store(ctx, family, peer->mapped, &c->service, c->service_port);
}

/* Stores the Service that a process must see as its peer. */
static __always_inline void socket_remember(__u64 cookie, __u8 proto,
					    const struct endpoint_addr *service,
					    const struct backend *b, __u32 id)
{
	struct socket_peer peer = {
		.addr = service->addr,
		.port = service->port,
		.backend = id,
	};
	struct socket_key key;

	socket_key(&key, cookie, proto, &b->addr, b->port, SOCKET_REVERSE);
	bpf_map_update_elem(&sockets, &key, &peer, BPF_ANY);
	/* Each datagram of an unconnected socket looks up the same endpoint. */
	socket_key(&key, cookie, proto, &service->addr, service->port, SOCKET_FORWARD);
	peer.addr = b->addr;
	peer.port = b->port;
	bpf_map_update_elem(&sockets, &key, &peer, BPF_ANY);
}

/*
 * Has this socket sent to the endpoint for another Service? Replies could not be told
 * apart. The tc programs then translate for this Service, and their replies have its
 * address.
 */
static __always_inline int socket_ambiguous(__u64 cookie, __u8 proto,
					    const struct endpoint_addr *service,
					    const struct backend *b)
{
	struct socket_peer *peer;
	struct socket_key key;

	socket_key(&key, cookie, proto, &b->addr, b->port, SOCKET_REVERSE);
	peer = bpf_map_lookup_elem(&sockets, &key);
	return peer && !(addr_equal(&peer->addr, &service->addr) && peer->port == service->port);
}

/* Forgets the Service of a socket that connects to this address itself. */
static __always_inline void socket_forget(__u64 cookie, __u8 proto, const struct endpoint_addr *dst)
{
	struct socket_key key;

	socket_key(&key, cookie, proto, &dst->addr, dst->port, SOCKET_REVERSE);
	if (bpf_map_lookup_elem(&sockets, &key))
		bpf_map_delete_elem(&sockets, &key);
}

/*
 * Returns the endpoint of this socket's last datagram to the Service, while it serves: policies and
 * hints concern new flows.
 */
static __always_inline struct backend *socket_recall(__u64 cookie, __u8 proto,
						     const struct endpoint_addr *service,
						     const struct frontend *fe)
{
	struct socket_peer *last;
	struct socket_key key;
	struct backend *b;

	socket_key(&key, cookie, proto, &service->addr, service->port, SOCKET_FORWARD);
	last = bpf_map_lookup_elem(&sockets, &key);
	if (!last)
		return NULL;
	b = bpf_map_lookup_elem(&backends, &last->backend);
	if (!b || b->service != fe->service)
		return NULL;
	/* If several Services share an endpoint, replies come from the last one asked. */
	if (socket_ambiguous(cookie, proto, service, b))
		socket_remember(cookie, proto, service, b, last->backend);
	return b;
}

/*
 * Stores that any port of the endpoint may answer the socket: a TFTP server answers from a
 * port of its own choice (nat/tftp.h). The process sees the answer from the same port
 * of the Service. What it sends to that port goes to the endpoint's port.
 */
static __always_inline void socket_expect(__u64 cookie, const struct endpoint_addr *service,
					  const struct backend *b, __u32 id, bool in_pod)
{
	struct socket_peer peer = {
		.addr = service->addr,
		.backend = id,
	};
	struct socket_key key;

	socket_key(&key, cookie, IPPROTO_UDP, &b->addr, 0, SOCKET_REVERSE);
	bpf_map_update_elem(&sockets, &key, &peer, BPF_ANY);
	feature_mark(FEATURE_HELPER);
	if (!in_pod)
		feature_mark(FEATURE_NODE_HELPER);
	count(HELPER_ASKED);
}

/*
 * Stores where such an answer came from, and fills peer with the Service and port that it has for
 * the process. Returns -1 if this is none.
 */
static __always_inline int socket_take_answer(__u64 cookie, const struct endpoint_addr *src,
					      struct socket_peer *peer)
{
	struct socket_peer *asked, from = {
		.addr = src->addr,
		.port = src->port,
	};
	struct socket_key key;

	socket_key(&key, cookie, IPPROTO_UDP, &src->addr, 0, SOCKET_REVERSE);
	asked = bpf_map_lookup_elem(&sockets, &key);
	/* The process asked an endpoint's own address. */
	if (!asked || frontend_exact(&src->addr, src->port, IPPROTO_UDP, src->family))
		return -1;
	if (!asked->port) {
		asked->port = src->port; /* marks the request as answered */
		count(HELPER_ANSWERED);
	}
	__builtin_memset(peer, 0, sizeof(*peer));
	peer->addr = asked->addr;
	peer->port = src->port;
	key.port = src->port;
	bpf_map_update_elem(&sockets, &key, peer, BPF_ANY);
	socket_key(&key, cookie, IPPROTO_UDP, &peer->addr, src->port, SOCKET_FORWARD);
	bpf_map_update_elem(&sockets, &key, &from, BPF_ANY);
	return 0;
}

/* Sends a datagram to the port that such an answer came from. Returns 0 if there was none. */
static __always_inline int socket_follow(struct bpf_sock_addr *ctx, __u8 family,
					 const struct endpoint_addr *dst)
{
	struct socket_peer *peer;
	struct socket_key key;

	socket_key(&key, bpf_get_socket_cookie(ctx), IPPROTO_UDP, &dst->addr, dst->port,
		   SOCKET_FORWARD);
	peer = bpf_map_lookup_elem(&sockets, &key);
	if (!peer || peer->backend)
		return 0;
	peer_store(ctx, family, dst->mapped, &peer->addr, peer->port);
	count(SOCKET_TRANSLATED);
	return 1;
}

/*
 * Reports a refused call. A socket has no address before connect(), so the process's cgroup tells
 * which pod the client is. The helper is available as bpf_get_current_ancestor_cgroup_id is.
 */
static __noinline int refusal_store(const struct endpoint_addr *dst, __u32 service, __u8 proto,
				    enum verdict verdict)
{
	struct settings *s = get_settings();
	struct event *e;

	if (service_metrics)
		service_count_refusal(service, verdict);
	if (!s || !(s->flags & SETTING_EVENTS_REFUSED) || !event_take(service, true))
		return 0;
	e = event_reserve(EVENT_REFUSED);
	if (!e)
		return 0;
	e->service_addr = dst->addr;
	e->service_port = dst->port;
	e->proto = proto;
	e->family = dst->family;
	e->service = service;
	e->verdict = verdict;
	e->by_socket = 1;
	e->cgroup = bpf_get_current_cgroup_id();
	event_submit(e);
	return 0;
}

/* Refuses a call of a process for a Service's address. */
static __always_inline int refuse(const struct endpoint_addr *dst, __u32 service, __u8 proto,
				  int err, enum verdict verdict)
{
	count(verdict);
	refusal_store(dst, service, proto, verdict);
	if (has_set_retval)
		bpf_set_retval(-err);
	return REFUSE;
}

/* The calls of a process that run the hooks. */
enum socket_call {
	SOCKET_CONNECTED,    /* connect(), getpeername() */
	SOCKET_PER_DATAGRAM, /* sendmsg(), recvmsg() */
};

/* The action for an address of a Service. */
enum socket_decision {
	SOCKET_LEAVE, /* leave the address: the tc programs decide about the packet */
	SOCKET_TRANSLATE,
	SOCKET_REFUSE,	 /* ECONNREFUSED */
	SOCKET_TIME_OUT, /* ETIMEDOUT */
};

static __always_inline enum socket_decision socket_decide(const struct frontend *fe, __u8 family,
							  bool in_pod)
{
	struct settings *s = get_settings();

	if (!s)
		return SOCKET_LEAVE;
	if (fe->flags & FRONTEND_RANGES) {
		if (in_pod)
			return SOCKET_LEAVE;
		if (!service_allows(fe->service, family == FAMILY_V4 ? &s->node_v4 : &s->node_v6,
				    family))
			return SOCKET_TIME_OUT;
	}
	if (fe->internal_route == ROUTE_DROP)
		return in_pod ? SOCKET_LEAVE : SOCKET_TIME_OUT;
	if (fe->internal_route == ROUTE_REJECT)
		return in_pod && !has_set_retval ? SOCKET_LEAVE : SOCKET_REFUSE;
	return SOCKET_TRANSLATE;
}

/*
 * Levels of cgroup2 at which the cgroup of a pod is searched. The kubelet's are at 2 to 4, and
 * deeper where the node itself is a container.
 */
#define CGROUP_LEVELS 12

/*
 * Is the current process in a pod that has no socket hooks? The helper is available to these
 * programs since 5.7, as bpf_get_netns_cookie is.
 */
static __noinline int pod_unhooked(void)
{
	struct settings *s = get_settings();
	__u64 id;
	int level;

	if (!s)
		return 0;
	if (s->flags & SETTING_HOOKS_HOST)
		return 1;
	if (!(s->flags & SETTING_HOOKS_EXCEPT))
		return 0;
	for (level = 1; level <= CGROUP_LEVELS; level++) {
		id = bpf_get_current_ancestor_cgroup_id(level);
		if (!id)
			return 0;
		if (bpf_map_lookup_elem(&unhooked_cgroups, &id))
			return 1;
	}
	return 0;
}

/*
 * Is the source a loopback address, by bind() or by a control message of this datagram? The
 * kernel would send no packet with it to an endpoint.
 */
static __always_inline bool source_loopback(struct bpf_sock_addr *ctx, __u8 family,
					    enum socket_call call)
{
	struct addr src = {};

	if (call == SOCKET_CONNECTED && !ctx->sk)
		return false;
	if (family == FAMILY_V4) {
		src.w[0] = call == SOCKET_PER_DATAGRAM ? ctx->msg_src_ip4 : ctx->sk->src_ip4;
		return addr_loopback(&src, FAMILY_V4);
	}
	for (int i = 0; i < 4; i++)
		src.w[i] = call == SOCKET_PER_DATAGRAM ? ctx->msg_src_ip6[i] : ctx->sk->src_ip6[i];
	if (addr_loopback(&src, FAMILY_V6))
		return true;
	src.w[0] = src.w[3];
	return src.w[2] == bpf_htonl(0xffff) && addr_loopback(&src, FAMILY_V4);
}

/*
 * Finds the NodePort at a loopback address, for --localhost-nodeports. Only sockets of the
 * node's network namespace have it. The tc programs find none there: packets of other machines
 * to loopback remain the stack's, which drops them (CVE-2020-8558).
 */
static __always_inline struct frontend *loopback_nodeport(struct bpf_sock_addr *ctx, __u8 family,
							  enum socket_call call, __u8 proto,
							  const struct endpoint_addr *dst)
{
	struct settings *s;

	if (!addr_loopback(&dst->addr, dst->family))
		return NULL;
	s = get_settings();
	if (!s ||
	    !(s->flags & (dst->family == FAMILY_V4 ? SETTING_LOOPBACK_V4 : SETTING_LOOPBACK_V6)))
		return NULL;
	if (bpf_get_netns_cookie(ctx) != host_netns_cookie || source_loopback(ctx, family, call))
		return NULL;
	return frontend_nodeport(dst->port, proto, dst->family);
}

/* A call of a process that names an address of a Service. */
struct socket_request {
	enum socket_call call;
	__u8 proto;
	bool in_pod;
	const struct endpoint_addr *dst;
	const struct frontend *fe;
	__u64 netns;  /* cookie of the socket's network namespace */
	__u64 cookie; /* of the socket; 0: TCP */
};

/* Returns the frontend of the Service that the call names, or NULL. */
static __always_inline struct frontend *socket_service(struct bpf_sock_addr *ctx, __u8 family,
						       const struct socket_request *r)
{
	const struct endpoint_addr *dst = r->dst;
	struct frontend *fe = frontend_lookup(&dst->addr, dst->port, r->proto, dst->family).fe;

	if (!fe)
		fe = loopback_nodeport(ctx, family, r->call, r->proto, dst);
	return is_service(fe) ? fe : NULL;
}

/*
 * Chooses an endpoint for the call. Returns GO_ON, or the hook's result: ALLOW leaves the address,
 * REFUSE fails the call.
 */
static __always_inline int socket_choose(const struct socket_request *r,
					 struct backend_choice *choice)
{
	struct affinity_client client = { &r->dst->addr, r->netns, r->dst->family };
	enum socket_decision decision = socket_decide(r->fe, r->dst->family, r->in_pod);
	__u32 service = r->fe->service;

	if (decision == SOCKET_LEAVE)
		return ALLOW;
	if (decision == SOCKET_TIME_OUT)
		return refuse(r->dst, service, r->proto, ETIMEDOUT, SOCKET_TIMED_OUT);
	if (decision == SOCKET_REFUSE)
		return refuse(r->dst, service, r->proto, ECONNREFUSED, SOCKET_REFUSED);
	*choice = backend_select(service, r->fe->internal_route, bpf_get_prandom_u32(), NULL,
				 client, AFFINITY_AT_ONCE);
	if (!choice->backend)
		return refuse(r->dst, service, r->proto, ECONNREFUSED, SOCKET_REFUSED);
	if (r->in_pod && r->call == SOCKET_PER_DATAGRAM &&
	    socket_ambiguous(r->cookie, r->proto, r->dst, choice->backend))
		return ALLOW;
	return GO_ON;
}

/* Stores the flow of a connected socket, if it is reported or counted (socket_flow.h). */
static __always_inline void connected_flow_plan(struct bpf_sock_addr *ctx,
						const struct socket_request *r,
						struct backend_choice *choice)
{
	bool wanted = follow_tcp_sockets;

	if (r->proto == IPPROTO_UDP) {
		if (!udp_ends_seen)
			choice->counted = false;
		wanted = report_udp_sockets || choice->counted;
	}
	if (wanted)
		socket_flow_plan(ctx, &r->dst->addr, r->dst->port, choice);
}

/* Stores the endpoint that the call got, for later calls of the socket and for the agent. */
static __always_inline void socket_store(struct bpf_sock_addr *ctx, const struct socket_request *r,
					 struct backend_choice *choice)
{
	const struct backend *b = choice->backend;

	if (service_metrics)
		service_count_connection(r->fe->service);
	if (r->proto == IPPROTO_TCP)
		connection_remember(ctx, r->dst, b);
	else
		socket_remember(r->cookie, r->proto, r->dst, b, choice->id);
	if (r->call == SOCKET_PER_DATAGRAM) {
		if (r->fe->flags & FRONTEND_TFTP)
			socket_expect(r->cookie, r->dst, b, choice->id, r->in_pod);
		return;
	}
	if (r->proto == IPPROTO_UDP && !r->in_pod)
		feature_mark(FEATURE_NODE_SOCKET);
	if (end_sockets)
		socket_backend_remember(ctx, b, choice->id);
	connected_flow_plan(ctx, r, choice);
}

/* Handles connect() and sendmsg(): replaces the Service's address by an endpoint's. */
static __always_inline int socket_translate(struct bpf_sock_addr *ctx, __u8 family,
					    enum socket_call call)
{
	struct endpoint_addr dst;
	struct socket_request r = { .call = call, .proto = ctx->protocol, .dst = &dst };
	struct backend_choice choice = {};
	int step;

	if (r.proto != IPPROTO_TCP && r.proto != IPPROTO_UDP)
		return ALLOW;
	peer_load(ctx, family, &dst);
	if (call == SOCKET_CONNECTED)
		socket_backend_forget(ctx);
	if (r.proto == IPPROTO_UDP && feature_seen(FEATURE_HELPER) &&
	    socket_follow(ctx, family, &dst))
		return ALLOW;
	r.fe = socket_service(ctx, family, &r);
	if (!r.fe) {
		if (call == SOCKET_CONNECTED && r.proto == IPPROTO_UDP)
			socket_forget(bpf_get_socket_cookie(ctx), r.proto, &dst);
		return ALLOW;
	}
	r.netns = bpf_get_netns_cookie(ctx);
	r.in_pod = r.netns != host_netns_cookie;
	if (r.in_pod && pod_unhooked())
		return ALLOW;
	r.cookie = r.proto == IPPROTO_UDP ? bpf_get_socket_cookie(ctx) : 0;
	if (call == SOCKET_PER_DATAGRAM)
		choice.backend = socket_recall(r.cookie, r.proto, &dst, r.fe);
	if (!choice.backend) {
		step = socket_choose(&r, &choice);
		if (step != GO_ON)
			return step;
		socket_store(ctx, &r, &choice);
	}
	peer_store(ctx, family, dst.mapped, &choice.backend->addr, choice.backend->port);
	count(SOCKET_TRANSLATED);
	return ALLOW;
}

/* Handles recvmsg() and getpeername(): replaces the endpoint's address by the Service's. */
static __always_inline int socket_restore(struct bpf_sock_addr *ctx, __u8 family,
					  enum socket_call call)
{
	struct socket_peer *peer, answered;
	struct endpoint_addr src;
	struct socket_key key;

	peer_load(ctx, family, &src);
	if (ctx->protocol == IPPROTO_TCP) {
		connection_restore(ctx, family, &src);
		return ALLOW;
	}
	socket_key(&key, bpf_get_socket_cookie(ctx), ctx->protocol, &src.addr, src.port,
		   SOCKET_REVERSE);
	peer = bpf_map_lookup_elem(&sockets, &key);
	if (!peer && call == SOCKET_PER_DATAGRAM && feature_seen(FEATURE_HELPER) &&
	    !socket_take_answer(key.cookie, &src, &answered))
		peer = &answered;
	if (peer)
		peer_store(ctx, family, src.mapped, &peer->addr, peer->port);
	return ALLOW;
}

#endif
