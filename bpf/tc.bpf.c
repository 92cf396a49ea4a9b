/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * The tc programs of a node (tcx, or a clsact filter before 6.6): one for each direction of
 * the external devices and of the pod-side devices.
 *
 *        network                                         pod
 *           |  from_network                               ^
 *           +------------> flow table ------------------->|   redirect_peer
 *           |<------------ flow table --------------------+   redirect_neigh
 *           |                               from_pod      |
 *
 * An endpoint may be on another node: then the flow table sends the packet back to the network.
 * to_network is at the egress of both kinds of devices. It acts on packets of the node's own stack.
 *
 * The programs of the hooks parse a packet and leave it to the stack if it is no Service's
 * business: most are not. What may be ours goes to the program handle, by a tail call (tc.h).
 *
 * Each packet is parsed once, looked up once and acted on once:
 *
 *    parse       parse/packet.h                   headers -> struct packet
 *                parse/fragment.h                 later fragments: the ports of the first,
 *                                                 which is stored when it is forwarded
 *    look up     lookup/port_filter.h             is it ours? Most packets leave here
 *                flow/table.h                     a known flow; flow/tcp.h: the TCP state
 *                serve.h: decide()                no flow: Service -> endpoint, enum decision
 *    act         nat/forward.h                    rewrite and send: nat/rewrite.h, nat/redirect.h
 *                flow/plan.h, flow/create.h       new flow: source address and port, entries
 *                answer/answer.h                  RST and ICMP errors
 *
 *    tc.h        takes a packet through the three steps
 *    base.h      ABI, maps, clock, hashes              hook.h: the steps of a packet
 *    scratch.h   memory beside the stack
 *    lookup/     reads alone: Services, endpoints, pods, next hop, conntrack, IPsec, sockets,
 *                do-not-track policies
 *    flow/       the flow table; entry.h: the two entries of a flow; choose.h: the endpoint;
 *                unconfirmed.h: floods; client_share.h: flows of a client; socket_service.h:
 *                sockets whose endpoint is no longer their Service's; without_flow.h: TCP packets
 *                to a Service without a flow; accounting.h: bytes
 *    nat/        tftp.h        answers from a port of the server's choice
 *                icmp_error.h  ICMP errors about translated packets
 *                from_stack.h  packets of the node's own stack
 *                bypass.h      packets to and from endpoints that bypass netfilter
 *    egress/     pods' connections to the outside: leave.h (which), leaving_flow.h
 *    answer/     syn_challenge.h  answers of the SYN filter that XDP could not send
 *    dsr/        direct server return: an endpoint's node answers clients of another node
 *                send.h        the node that receives a packet; flow.h: its flows and their state
 *                receive.h     the endpoint's node
 *                option.h      the option with the Service's address; option_write.h
 *                gue.h         datagrams where a network drops options
 *                path.h        which endpoints answer, and what reaches them
 *    events/     flow events and counters by Service, and what is known of endpoints;
 *                report.h: events of packets
 *
 * Two kinds of packets are rewritten at egress: replies of flows that traverse the stack, and the
 * node's own packets whose source port belongs to a flow. All others: at ingress.
 *
 * sock.bpf.c has the socket hooks (lib/sock/), xdp.bpf.c the program of --xdp (lib/xdp/),
 * drops.bpf.c the programs of `spillway drops` (lib/drops/).
 */
#include "lib/tc.h"

/* The programs of devices without a link-layer header (tun, WireGuard, IPIP). */
#define NO_HEADER 0

SEC("tc")
int from_network(struct __sk_buff *skb)
{
	/* A promiscuous port sees frames for other hosts. No Service has a group address. */
	if (skb->pkt_type != PACKET_HOST)
		return NEXT;
	return enter(skb, FROM_NETWORK, ETH_HLEN);
}

SEC("tc")
int from_network_l3(struct __sk_buff *skb)
{
	return enter(skb, FROM_NETWORK, NO_HEADER);
}

SEC("tc")
int from_pod(struct __sk_buff *skb)
{
	/* On a port of a bridge, a frame for the bridge has PACKET_OTHERHOST. */
	if (skb->pkt_type == PACKET_BROADCAST || skb->pkt_type == PACKET_MULTICAST)
		return NEXT;
	return enter(skb, FROM_POD, ETH_HLEN);
}

static __always_inline int enter_from_stack(struct __sk_buff *skb, __u32 l3_off)
{
	__u32 *features;

	if (skb->tc_index == TC_INDEX_DONE) {
		skb->tc_index = 0;
		return NEXT;
	}
	features = features_get();
	if (!features || !(*features & (FEATURE_STACK_FLOW | FEATURE_NODE_HELPER | FEATURE_SNAT |
					FEATURE_NODE_SOCKET)))
		return pass(PASS_OTHER);
	return enter(skb, FROM_STACK, l3_off);
}

/* Also for egress of pod-side devices. */
SEC("tc")
int to_network(struct __sk_buff *skb)
{
	return enter_from_stack(skb, ETH_HLEN);
}

SEC("tc")
int to_network_l3(struct __sk_buff *skb)
{
	return enter_from_stack(skb, NO_HEADER);
}

/* Behind the others, which have parsed the packet. */
SEC("tc")
int handle(struct __sk_buff *skb)
{
	return handle_parsed(skb);
}

/* BTF, and so Go, would lack enumerations that no map or function uses as a type. */
const enum frontend_flags *unused_frontend_flags __attribute__((unused));
const enum backend_flags *unused_backend_flags __attribute__((unused));
const enum flow_flags *unused_flow_flags __attribute__((unused));
const enum flow_state *unused_flow_state __attribute__((unused));
const enum flow_end *unused_flow_end __attribute__((unused));
const enum request_progress *unused_request_progress __attribute__((unused));
const enum pod_flags *unused_pod_flags __attribute__((unused));
const enum node_addr_flags *unused_node_addr_flags __attribute__((unused));
const enum settings_flags *unused_settings_flags __attribute__((unused));
const enum service_flags *unused_service_flags __attribute__((unused));
const enum flow_helper *unused_flow_helper __attribute__((unused));
const enum untracked_peers *unused_untracked_peers __attribute__((unused));
const enum feature *unused_feature __attribute__((unused));
const enum route *unused_route __attribute__((unused));
const enum verdict *unused_verdict __attribute__((unused));
const struct event *unused_event __attribute__((unused));
const enum event_kind *unused_event_kind __attribute__((unused));
const enum event_end *unused_event_end __attribute__((unused));
const enum event_count *unused_event_count __attribute__((unused));
const enum xdp_device_flags *unused_xdp_device_flags __attribute__((unused));
const enum dsr_path_limit *unused_dsr_path_limit __attribute__((unused));
const enum dsr_encapsulation_kind *unused_dsr_encapsulation_kind __attribute__((unused));

char __license[] SEC("license") = "Dual BSD/GPL";
