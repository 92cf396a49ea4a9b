/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* TCP packets to a Service that belong to no flow. */
#ifndef SPILLWAY_SPECIAL_STRAY_H
#define SPILLWAY_SPECIAL_STRAY_H

#include "../act/forward.h"

/*
 * A packet of TCP to a Service that is of no connection and begins none. Its flow may
 * have lost this half while it was idle: where nothing but the endpoint's address
 * differs between the halves, the other one is found. Else it is answered as a host
 * answers that knows nothing of the connection (RFC 9293, 3.10.7.1).
 */
__noinline int serve_stray(struct __sk_buff *skb, enum hook hook)
{
	struct scratch *m = get_scratch();
	struct backend *b;
	struct flow *reply;
	struct tuple *key;

	if (!m)
		return NEXT;
	b = bpf_map_lookup_elem(&backends, &m->pair.flow.backend);
	if (!b)
		return drop(DROP_NO_BACKEND);
	key = &m->pair.reply_key;
	tuple_mirror(key, &m->packet.tuple);
	key->saddr = b->addr;
	key->sport = b->port;
	reply = bpf_map_lookup_elem(&flows, key);
	if (reply && flow_confirmed(reply) && flow_is_reverse(reply, &m->packet.tuple)) {
		flow_refresh_reverse(reply, key, m->packet.time);
		m->pair.flow = *reply;
		flow_make_reverse(&m->pair.reply, reply, key);
		m->pair.flow = m->pair.reply;
		return flow_forward(skb, m, hook, NULL);
	}
	if (m->packet.flags & PACKET_RST)
		return drop(DROP_NO_FLOW);
	return answer_rst(skb, &m->packet, &m->rst, REJECTED_NO_FLOW);
}

#endif
