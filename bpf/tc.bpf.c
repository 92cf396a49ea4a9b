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
 * business: most are not. What may be ours goes to the program handle, by a tail call.
 *
 * Each packet is parsed once, looked up once and acted on once:
 *
 *    parse       parse/packet.h                   headers -> struct packet
 *                parse/fragment.h                 later fragments: the ports of the first,
 *                                                 which is stored when it is forwarded
 *    look up     lookup/port_filter.h             is it ours? Most packets leave here
 *                flow/table.h                     a known flow; flow/tcp.h: the TCP state
 *                serve/first_packet.h: decide()   no flow: Service -> endpoint, enum decision
 *    act         nat/forward.h                    rewrite (nat/rewrite.h) and send
 *                flow/plan.h, flow/create.h       new flow: source address and port, entries
 *                answer/answer.h                  RST and ICMP errors
 *
 *    base.h      ABI, maps, clock, hashes              hook.h: the steps of a packet
 *    scratch.h   memory beside the stack
 *    lookup/     reads alone: Services, IPsec, pods, sources, next hop, conntrack, sockets,
 *                do-not-track policies
 *    flow/       the flow table; entry.h: the two entries of a flow; endpoint_select.h: its
 *                endpoint; unconfirmed.h: floods; client_share.h: flows of a client;
 *                socket_service.h: sockets whose endpoint is no longer their Service's;
 *                accounting.h: bytes
 *    serve/      packets of no flow
 *                first_packet.h  the first to a Service
 *                without_flow.h  TCP packets to a Service that start no flow
 *                leaving_flow.h  the first of a pod's connection to the outside
 *                from_stack.h    packets of the node's own stack
 *                bypass.h        packets to and from endpoints that bypass netfilter
 *    nat/        tftp.h        answers from a port of the server's choice
 *                icmp_error.h  ICMP errors about translated packets
 *    egress/     leave.h: which pods' connections leave to the outside
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
#include "lib/egress/leave.h"
#include "lib/lookup/port_filter.h"
#include "lib/serve/first_packet.h"
#include "lib/serve/from_stack.h"
#include "lib/nat/icmp_error.h"
#include "lib/answer/syn_challenge.h"

/*
 * Deletes the flow of the packet, which is over. Another CPU may have replaced it: slot is the old
 * one's.
 */
__noinline int flow_forget(const struct packet *p, __u32 slot)
{
	struct flow_pair *pair = get_flow_pair();
	struct flow *f;

	if (!pair || !p)
		return 0;
	pair->other_key = p->tuple;
	f = bpf_map_lookup_elem(&flows, &pair->other_key);
	if (!f || f->slot != slot)
		return 0;
	if (f->flags & FLOW_REPORTED)
		report_stale(f);
	flow_delete(&pair->other_key, slot, &pair->reverse_key);
	return 0;
}

/*
 * Has the endpoint answered none of the client's SYNs so far? After a SYN that went with the node's
 * address, later ones do too, until a connection was established: who forges the end of a handshake
 * must not lead the client back to a path that may not work.
 */
static __always_inline bool flow_unanswered(const struct flow *f)
{
	if (dsr_remote(f))
		return f->state == FLOW_NEW;
	return (f->flags & (FLOW_SNAT | FLOW_REPLY | FLOW_CONFIRMED)) == FLOW_SNAT;
}

/* Handles a packet of a known flow. */
static __always_inline int handle_flow(struct __sk_buff *skb, struct scratch *m, struct flow *f,
				       enum hook hook)
{
	if (unlikely(!flow_applies(f, hook)))
		return pass(PASS_OTHER);
	if (traffic_counted(f) && !dsr_remote(f))
		report_packet(skb, f);
	if (unlikely(flow_is_request(f)))
		tftp_request_repeated(f, &m->packet.tuple, &m->pair.reply_key);
	/* flow_forward reads only the fields before tcp. */
	__builtin_memcpy(&m->pair.flow, f, offsetof(struct flow, tcp));
	return flow_forward(skb, m, hook, f);
}

/* Handles a packet of no flow. */
static __always_inline int handle_first(struct __sk_buff *skb, const struct packet *p,
					struct settings *s, enum hook hook)
{
	int ret;

	if (dsr && unlikely(p->flags & PACKET_TRANSLATED))
		return serve_dsr(skb, s);
	if (hook == FROM_NETWORK && unlikely(syn_is_left(p))) {
		ret = serve_challenge(skb);
		if (ret != GO_ON)
			return ret;
	}
	if (p->tuple.proto == IPPROTO_UDP && feature_seen(FEATURE_HELPER)) {
		ret = serve_tftp_answer(skb, s, hook);
		if (ret != GO_ON)
			return ret;
	}
	if (hook == FROM_STACK)
		return serve_from_stack(skb, s);
	ret = serve(skb, s, hook);
	/* Not calls of serve: the frames of all active calls share the stack. */
	if (ret == LEAVE)
		return serve_leaving(skb, s);
	return ret == WITHOUT_FLOW ? serve_without_flow(skb, hook) : ret;
}

/* Handles a packet of these programs' business. */
static __always_inline int handle_packet(struct __sk_buff *skb, struct scratch *m,
					 struct settings *s, enum hook hook)
{
	struct packet *p = &m->packet;
	struct flow *f;
	int ret;

	__u32 device = hook == FROM_STACK ? ANY_DEVICE : hook_device(skb, hook);
	enum flow_lookup result = flow_find(skb, p, s, device, &f);

	if (dsr && hook == FROM_NETWORK)
		result = dsr_find(skb, m, s, result, &f);
	if (dsr && hook == FROM_NETWORK && result == LOOKUP_DSR) {
		p->flags |= PACKET_STATELESS;
		ret = serve(skb, s, hook);
		if (ret != WITHOUT_FLOW)
			return ret;
	}
	switch (result) {
	case LOOKUP_DSR:
	case LOOKUP_FOUND:
		return f ? handle_flow(skb, m, f, hook) : NEXT;
	case LOOKUP_SUPERSEDED:
		return drop(DROP_HELPER_CONFLICT);
	case LOOKUP_SOURCE:
		return drop(DROP_SOURCE);
	case LOOKUP_STALE:
		if (!f)
			break;
		if (dsr && packet_syn(p) && flow_unanswered(f))
			p->flags |= PACKET_REPEATED;
		flow_forget(p, f->slot);
		break;
	case LOOKUP_NONE:
		break;
	}
	return handle_first(skb, p, s, hook);
}

/* The program behind those of the hooks. Tail calls find it by its index. */
int handle(struct __sk_buff *skb);

#define TAIL_CALL_HANDLE 0

/* Not pinned by its name: the programs of each agent call their own (attach/tailcalls.go). */
struct {
	__uint(type, BPF_MAP_TYPE_PROG_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, int(void *));
} tail_calls SEC(".maps") = {
	.values = { [TAIL_CALL_HANDLE] = (void *)&handle },
};

/*
 * What an entry program does: parses the packet, and calls the program handle if the packet may be
 * ours. It writes nothing to packets: the kernel would have it make the headers of each cloned
 * packet private first, and drop the packet if that fails (bpf_unclone_prologue). All TCP data from
 * pods is cloned. l3_off is the length of the link-layer header, in bytes.
 */
static __always_inline int enter(struct __sk_buff *skb, enum hook hook, __u32 l3_off)
{
	struct scratch *m = get_scratch();
	struct packet *p;
	int ret;

	if (!m)
		return NEXT;
	/* The VLAN's device has its own hooks, if the node is a member of the VLAN. */
	if (unlikely(skb->vlan_present))
		return pass(PASS_VLAN);

	p = &m->packet;
	__builtin_memset(&p->tuple, 0, sizeof(p->tuple));
	p->flags = 0;
	p->l3_off = l3_off;
	ret = parse(skb, p);
	if (unlikely(ret != PARSE_OK))
		return pass(ret == PARSE_OTHER ? PASS_OTHER : PASS_MALFORMED);
	/* The filter compares ports. */
	if (unlikely(p->flags & PACKET_NO_L4) && fragment_follow(p))
		return pass(PASS_FRAGMENT);
	if (!may_be_ours(p, hook))
		return pass(PASS_OTHER);
	/* Without a flow for egress, only a first packet may need another source port. */
	if (hook == FROM_STACK && !(p->flags & PACKET_ICMP_ERROR) && !packet_begins(p) &&
	    !feature_seen(FEATURE_STACK_FLOW | FEATURE_NODE_HELPER))
		return pass(PASS_OTHER);
	m->hook = hook;
	bpf_tail_call_static(skb, &tail_calls, TAIL_CALL_HANDLE);
	return drop(DROP_MISSED_TAIL_CALL);
}

/* Handles a packet that an entry program has parsed. */
static __always_inline int handle_parsed(struct __sk_buff *skb)
{
	struct scratch *m = get_scratch();
	struct settings *s = get_settings();
	int ret;

	if (!m || !s)
		return NEXT;
	if (unlikely(m->packet.flags & PACKET_ICMP_ERROR))
		return relay_error(skb, m->hook);
	if (dsr && m->hook == FROM_NETWORK) {
		ret = dsr_unwrap(skb, m);
		if (ret != GO_ON)
			return ret;
	}
	m->packet.time = now();
	ret = handle_packet(skb, m, s, m->hook);
	if (unlikely(ret == DROP))
		return drop_reported(s, 0, m->drop, REPORT_FLOW);
	return ret;
}

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
