/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* Takes a frame through the steps of XDP. See xdp.bpf.c. */
#ifndef SPILLWAY_XDP_FRAME_H
#define SPILLWAY_XDP_FRAME_H

#include "../nat/rewrite.h"
#include "../flow/table.h"
#include "../lookup/port_filter.h"
#include "../lookup/service.h"
#include "../lookup/pod.h"
#include "parse_frame.h"
#include "syn_filter.h"

/* Is the flow's last next hop a neighbor that this packet can be sent to? */
static __always_inline bool xdp_next_hop(const struct flow *f, const struct packet *p)
{
	return !(dsr_remote(f) && dsr_udp_is_new(f, p)) && f->next_hop_seen == p->time &&
	       f->next_hop_kind == NEXT_HOP_LINK && p->ttl > 1 && p->l3_len <= f->next_hop_mtu;
}

/*
 * Sends a packet of a known flow to its next hop, if a tc program has found that in the same second
 * and the packet does not change the flow's state.
 */
static __always_inline int xdp_forward(struct xdp_md *ctx, struct scratch *m, struct flow *f)
{
	const void *data = (void *)(long)ctx->data, *end = (void *)(long)ctx->data_end;
	struct settings *s = get_settings();
	struct packet *p = &m->packet;
	__u32 ifindex = f->next_hop_ifindex;
	struct xdp_device *out;

	if (!s || !flow_applies(f, FROM_NETWORK) || f->flags & FLOW_STACK || !xdp_next_hop(f, p))
		return XDP_PASS;
	out = bpf_map_lookup_elem(&xdp_devices, &ifindex);
	if (!out || (ifindex != ctx->ingress_ifindex && !(out->flags & XDP_DEVICE_REDIRECTS)) ||
	    !flow_advance_busy(f, p, s, 0))
		return XDP_PASS;
	if (traffic_counted(f) && !dsr_remote(f))
		traffic_add(m, f, (struct traffic){ .packets = 1, .bytes = p->l3_len });
	if (nat_store((void *)data, (void *)end, p, f, 1, false) ||
	    data + sizeof(f->next_hop_macs) > end) {
		count(DROP_REWRITE);
		return XDP_DROP;
	}
	__builtin_memcpy((void *)data, f->next_hop_macs, sizeof(f->next_hop_macs));
	count(TRANSLATED_XDP);
	return ifindex == ctx->ingress_ifindex ? XDP_TX : bpf_redirect(ifindex, 0);
}

/*
 * Drops the first packet of a connection that the Service drops, and makes its client prove its
 * address. Later packets may belong to a connection of netfilter, as may datagrams, and a SYN while
 * netfilter translates destinations: the tc programs ask conntrack. Without an agent the maps may
 * be those of another release: then the tc programs decide alone.
 */
static __always_inline int xdp_first(struct xdp_md *ctx, struct scratch *m, struct settings *s)
{
	const struct packet *p = &m->packet;
	const struct tuple *t = &p->tuple;
	enum verdict drop = DROP_SOURCE;
	struct frontend *fe;

	if (p->time - s->agent_seen > SYN_AGENT_SECONDS)
		return XDP_PASS;
	fe = frontend_lookup(&t->daddr, t->dport, t->proto, t->family).fe;
	if (!is_service(fe))
		return XDP_PASS;
	if (source_belongs(t, 0) && service_check(fe, t, fe->external_route, &drop) == GO_ON)
		return syn_filter(ctx, p, fe->service);
	if (s->flags & SETTING_ASK_CONNTRACK)
		return XDP_PASS;
	drop_reported(s, fe->service, drop, REPORT_PACKET);
	return XDP_DROP;
}

static __always_inline int xdp_handle(struct xdp_md *ctx)
{
	__u32 ifindex = ctx->ingress_ifindex;
	struct xdp_device *in = bpf_map_lookup_elem(&xdp_devices, &ifindex);
	struct scratch *m = get_scratch();
	struct settings *s;
	struct packet *p;
	struct flow *f;

	if (!in || !(in->flags & XDP_DEVICE_SERVED) || !m)
		return XDP_PASS;
	p = &m->packet;
	if (xdp_parse(ctx, p, in->mac) != PARSE_OK || !filter_passes(p))
		return XDP_PASS;
	p->time = now();
	f = bpf_map_lookup_elem(&flows, &p->tuple);
	if (f)
		return xdp_forward(ctx, m, f);
	if (packet_syn(p)) {
		s = get_settings();
		return s ? xdp_first(ctx, m, s) : XDP_PASS;
	}
	/* lwIP sends an ACK with its RST. */
	if ((p->flags & (PACKET_RST | PACKET_SYN | PACKET_FIN)) == PACKET_RST && syn_prove(p)) {
		count(SYN_PROVED);
		return XDP_DROP;
	}
	return XDP_PASS;
}

#endif
