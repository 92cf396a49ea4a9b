/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Connected UDP sockets whose endpoint is no longer their Service's. */
#ifndef SPILLWAY_SPECIAL_ASKED_H
#define SPILLWAY_SPECIAL_ASKED_H

#include "../lookup/socket.h"

/* What a connected UDP socket asked for. */
struct asked {
	struct frontend *fe; /* its Service's, if that no longer has the endpoint of the socket */
	bool gone;	     /* no Service has the address */
};

/*
 * Finds the Service of a connected UDP socket if the socket's endpoint is no longer the Service's. The
 * socket keeps the endpoint's address, but a pod's packets can go to another endpoint.
 */
static __noinline void asked_by_socket(struct __sk_buff *skb, const struct tuple *t,
				       struct asked *asked)
{
	__u32 changes = service_changes_now(); /* before the lookups */
	struct socket_peer *peer = socket_asked(skb, t);
	struct backend *b;

	if (!peer || (peer->checked && peer->checked == (__u16)changes))
		return;
	asked->fe = socket_frontend(peer, t);
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
