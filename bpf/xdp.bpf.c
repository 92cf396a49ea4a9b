/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The program of external devices for --xdp. It runs before the kernel allocates an skb, and does
 * what needs no decision that the tc programs (tc.bpf.c) have not made in the same second:
 *
 *   frame for this node -> parse -> flow table -> known, endpoint or client elsewhere: rewritten
 *                                |             as by the tc programs, and sent
 *                                +-> a SYN that its Service drops: dropped
 *                                +-> a SYN of a flood: syn_filter.h
 *                                +-> all else: the tc programs
 *
 * The tc programs get the first packet of each second of a flow: they keep its state, its next hop
 * and its neighbor. So this program needs no lookup of routes, and cannot be wrong for longer.
 *
 *   lib/xdp/    frame.h        takes a frame through the steps; parse_frame.h parses it
 *               syn_filter.h   clients prove their address during a flood of SYNs
 */
#include "lib/xdp/frame.h"

SEC("xdp")
int xdp_from_network(struct xdp_md *ctx)
{
	return xdp_handle(ctx);
}

char __license[] SEC("license") = "Dual BSD/GPL";
