/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* TCP packets to a Service that belong to no flow and start none. */
#ifndef SPILLWAY_SERVE_WITHOUT_FLOW_H
#define SPILLWAY_SERVE_WITHOUT_FLOW_H

#include "../nat/forward.h"

/*
 * Handles a packet to a Service that has no forward entry and is no SYN. The kernel may
 * have evicted the forward entry of an idle flow. If only the endpoint's address differs
 * between the two entries, the reply entry is found here and the forward entry restored.
 * Otherwise the client gets the answer of a host without the connection (RFC 9293,
 * 3.10.7.1).
 */
__noinline int serve_without_flow(struct __sk_buff *skb, enum hook hook)
{
	struct scratch *m = get_scratch();
	struct settings *s = get_settings();
	struct backend *b;
	struct flow *reply;
	struct tuple *key;

	if (!m || !s)
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
		/* Not stored if another CPU has stored one since: this packet has its endpoint. */
		(void)flow_refresh_reverse(reply, key, m->packet.time);
		flow_make_reverse(&m->pair.flow, reply, key);
		return flow_forward(skb, m, hook, NULL);
	}
	if (m->packet.flags & PACKET_RST)
		return drop_reported(s, b->service, DROP_NO_FLOW, REPORT_PACKET);
	report_refusal(s, b->service, REJECTED_NO_FLOW, REPORT_PACKET);
	return answer_rst(skb, &m->packet, &m->rst, REJECTED_NO_FLOW);
}

#endif
