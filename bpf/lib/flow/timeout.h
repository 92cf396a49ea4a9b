/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/* The timeouts of flows, by their state. */
#ifndef SPILLWAY_FLOW_TIMEOUT_H
#define SPILLWAY_FLOW_TIMEOUT_H

#include "../base.h"

static __always_inline __u32 flow_timeout(const struct flow *f, __u8 proto,
					  const struct settings *s)
{
	/* Conntrack gives an answered echo no more time either (nf_conntrack_icmp_timeout). */
	if (proto != IPPROTO_TCP)
		return f->state == FLOW_NEW || proto != IPPROTO_UDP ? s->timeout_udp_new
								    : s->timeout_udp;
	switch (f->state) {
	case FLOW_NEW:
	case FLOW_SYN_RECV:
	case FLOW_LAST_ACK:
		return s->timeout_new;
	case FLOW_ESTABLISHED:
		return s->timeout_tcp;
	case FLOW_CLOSING:
		return s->timeout_closing;
	}
	return s->timeout_closed;
}

static __always_inline int flow_dead(const struct flow *f, __u8 proto, const struct settings *s,
				     __u32 time)
{
	/* seen may be ahead of time, if another CPU has just written it. */
	return (__s32)(time - f->seen) > (__s32)flow_timeout(f, proto, s);
}

#endif
