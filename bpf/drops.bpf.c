/* SPDX-License-Identifier: (GPL-2.0 OR BSD-2-Clause) */
/*
 * Follows packets to the point where the kernel frees them without delivery.
 *
 *   nf_hook_slow ──> conntrack, NAT, nft, iptables     active function: map now
 *        |                    |
 *        |              NF_DROP | freed inside
 *        v                    v
 *   sk_skb_reason_drop ──> tracepoint kfree_skb ──> filters ──> rate ──> ring buffer
 *
 *   tcp_conn_request, accept queue full              ──> the same; the kernel frees the
 *                                                        SYN as if it were delivered
 *
 * The kernel's reason for all of netfilter is NETFILTER_DROP. The table or chain is the
 * last of their functions that ran for the packet on this CPU.
 */
#include "lib/drops/kernel.h"
#include "drops.h"
#include "lib/drops/filter.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* The function that handles a packet. Netfilter's functions for one packet run in sequence. */
struct running {
	__u64 skb;
	__u64 state; /* struct nf_hook_state */
	__u64 rules; /* struct nft_chain, or struct xt_table */
	__u32 path;  /* enum drop_path */
	__u32 verdict;
};

#define TCP_SYN 0x02
#define TCP_ACK 0x10
#define NF_DROP 0
#define NO_VERDICT 0xff
#define VERDICT_MASK 0xff

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct running);
} now SEC(".maps");

/* Time of conntrack's last failed allocation, in ns. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} refused SEC(".maps");

/* Packets that conntrack found INVALID: address and time. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, __u64);
	__type(value, __u64);
} invalid SEC(".maps");

#define MSEC 1000000ULL

static __always_inline struct running *running(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&now, &zero);
}

static __always_inline void enter(struct sk_buff *skb, const void *state, const void *rules,
				  __u32 path)
{
	struct running *r = running();

	if (!r)
		return;
	r->skb = (__u64)skb;
	if (state)
		r->state = (__u64)state;
	r->rules = (__u64)rules;
	r->path = path;
	r->verdict = NO_VERDICT;
}

/*
 * leave keeps the innermost function with the verdict drop: NAT runs the chains of its
 * table.
 */
static __always_inline void leave(struct sk_buff *skb, const void *state, const void *rules,
				  __u32 path, __u32 verdict)
{
	struct running *r = running();

	if (!r || (verdict & VERDICT_MASK) != NF_DROP)
		return;
	if (r->skb == (__u64)skb && r->path && r->verdict == NF_DROP)
		return;
	enter(skb, r->skb == (__u64)skb ? NULL : state, rules, path);
	r->verdict = NF_DROP;
}

SEC("fentry/nf_hook_slow")
int BPF_PROG(hook_enter, struct sk_buff *skb, struct nf_hook_state *state)
{
	enter(skb, state, NULL, PATH_NONE);
	return 0;
}

SEC("fentry/nft_do_chain")
int BPF_PROG(nft_enter, struct nft_pktinfo *pkt, void *chain)
{
	enter(BPF_CORE_READ(pkt, skb), BPF_CORE_READ(pkt, state), chain, PATH_NFT);
	return 0;
}

SEC("fexit/nft_do_chain")
int BPF_PROG(nft_leave, struct nft_pktinfo *pkt, void *chain, unsigned int verdict)
{
	struct running *r = running();

	/* A chain that frees the packet itself is already recorded, and pkt may be invalid. */
	if (r && (verdict & VERDICT_MASK) == NF_DROP)
		leave((struct sk_buff *)BPF_CORE_READ(pkt, skb), BPF_CORE_READ(pkt, state), chain,
		      PATH_NFT, verdict);
	else if (r && r->path == PATH_NFT)
		r->path = PATH_NONE;
	return 0;
}

#define XTABLES(family)                                                       \
	SEC("fentry/" #family "_do_table")                                    \
	int BPF_PROG(family##_enter, void *table, struct sk_buff *skb,        \
		     const struct nf_hook_state *state)                       \
	{                                                                     \
		enter(skb, state, table, PATH_XTABLES);                       \
		return 0;                                                     \
	}                                                                     \
	SEC("fexit/" #family "_do_table")                                     \
	int BPF_PROG(family##_leave, void *table, struct sk_buff *skb,        \
		     const struct nf_hook_state *state, unsigned int verdict) \
	{                                                                     \
		struct running *r = running();                                \
                                                                              \
		if ((verdict & VERDICT_MASK) == NF_DROP)                      \
			leave(skb, state, table, PATH_XTABLES, verdict);      \
		else if (r && r->path == PATH_XTABLES)                        \
			r->path = PATH_NONE;                                  \
		return 0;                                                     \
	}

XTABLES(ipt)
XTABLES(ip6t)

SEC("fexit/nf_nat_inet_fn")
int BPF_PROG(nat_leave, void *priv, struct sk_buff *skb, const struct nf_hook_state *state,
	     unsigned int verdict)
{
	leave(skb, state, NULL, PATH_NAT, verdict);
	return 0;
}

SEC("fexit/__nf_conntrack_alloc")
int BPF_PROG(alloc_leave, void *net, void *zone, void *orig, void *repl, __u32 gfp, __u32 hash,
	     void *entry)
{
	__u32 zero = 0;
	__u64 *when = bpf_map_lookup_elem(&refused, &zero);

	if (when && (unsigned long)entry >= (unsigned long)-4095L)
		*when = bpf_ktime_get_ns();
	return 0;
}

SEC("fexit/nf_conntrack_in")
int BPF_PROG(conntrack_leave, struct sk_buff *skb, const struct nf_hook_state *state,
	     unsigned int verdict)
{
	__u64 key = (__u64)skb, time;
	__u32 zero = 0, path = PATH_CONNTRACK;
	__u64 *when;

	if ((verdict & VERDICT_MASK) != NF_DROP) {
		/* Untracked packets have a state. Only INVALID ones have none. */
		if (!BPF_CORE_READ(skb, _nfct)) {
			time = bpf_ktime_get_ns();
			bpf_map_update_elem(&invalid, &key, &time, BPF_ANY);
		}
		return 0;
	}
	when = bpf_map_lookup_elem(&refused, &zero);
	if (when && *when && bpf_ktime_get_ns() - *when < MSEC)
		path = PATH_CONNTRACK_FULL;
	leave(skb, state, NULL, path, verdict);
	return 0;
}

SEC("fexit/__nf_conntrack_confirm")
int BPF_PROG(confirm_leave, struct sk_buff *skb, int verdict)
{
	leave(skb, NULL, NULL, PATH_CONNTRACK_INSERT, verdict);
	return 0;
}

/* was_invalid: skb has no state, and had none when conntrack saw it just now. */
static __always_inline bool was_invalid(struct sk_buff *skb)
{
	__u64 key = (__u64)skb;
	__u64 *when = bpf_map_lookup_elem(&invalid, &key);
	bool yes = when && bpf_ktime_get_ns() - *when < 100 * MSEC && !BPF_CORE_READ(skb, _nfct);

	if (when)
		bpf_map_delete_elem(&invalid, &key);
	return yes;
}

/*
 * Modules define these structures, and an access does not load if the module is absent.
 * Separate functions keep the compiler from moving an access before the existence check.
 */
static __noinline int copy_chain(struct drop *d, __u64 rules)
{
	const struct nft_chain *chain = (const void *)rules;

	bpf_probe_read_kernel_str(d->chain, sizeof(d->chain), BPF_CORE_READ(chain, name));
	bpf_probe_read_kernel_str(d->table, sizeof(d->table), BPF_CORE_READ(chain, table, name));
	return 0;
}

static __noinline int copy_table(struct drop *d, __u64 rules)
{
	const struct xt_table *table = (const void *)rules;

	bpf_probe_read_kernel_str(d->table, sizeof(d->table), table->name);
	return 0;
}

static __always_inline void set_netns(struct drop *d, const struct net *net)
{
	d->netns = BPF_CORE_READ(net, ns.inum);
	d->cookie = BPF_CORE_READ(net, net_cookie);
}

static __always_inline void copy_names(struct drop *d, const struct running *r)
{
	const struct nf_hook_state *state = (const void *)r->state;
	struct net_device *in = BPF_CORE_READ(state, in), *out = BPF_CORE_READ(state, out);

	d->path = r->path;
	d->hook = BPF_CORE_READ(state, hook);
	d->hook_family = BPF_CORE_READ(state, pf);
	set_netns(d, BPF_CORE_READ(state, net));
	if (in)
		bpf_probe_read_kernel_str(d->in, sizeof(d->in), in->name);
	if (out)
		bpf_probe_read_kernel_str(d->out, sizeof(d->out), out->name);
	if (r->path == PATH_NFT && bpf_core_type_exists(struct nft_chain) &&
	    bpf_core_type_exists(struct nft_table))
		copy_chain(d, r->rules);
	else if (r->path == PATH_XTABLES && bpf_core_type_exists(struct xt_table))
		copy_table(d, r->rules);
}

/*
 * find_place fills in the location of skb. A listening socket clears the device, and UDP's
 * queue overwrites it. The route still has one.
 */
static __always_inline void find_place(struct drop *d, struct sk_buff *skb)
{
	struct dst_entry *dst = (void *)(BPF_CORE_READ(skb, _skb_refdst) & ~1UL);
	struct net_device *dev = BPF_CORE_READ(skb, dev);
	struct sock *sk = BPF_CORE_READ(skb, sk);

	d->iif = BPF_CORE_READ(skb, skb_iif);
	set_netns(d, BPF_CORE_READ(dev, nd_net.net));
	if (d->netns) {
		bpf_probe_read_kernel_str(d->in, sizeof(d->in), dev->name);
		return;
	}
	if (sk)
		set_netns(d, BPF_CORE_READ(sk, __sk_common.skc_net.net));
	if (!d->netns && dst)
		set_netns(d, BPF_CORE_READ(dst, dev, nd_net.net));
}

static __always_inline void report(void *ctx, struct sk_buff *skb, __u64 location, __u32 reason,
				   __u32 path)
{
	struct running *r = running();
	struct drop drop = {}, *d = &drop;

	if (!parse_packet(d, skb))
		return;
	count(DROPS_SEEN);
	d->time = bpf_ktime_get_ns();
	d->location = location;
	d->reason = reason;
	d->path = path;
	find_place(d, skb);
	/* If no function runs, netfilter accepted the packet and is not the cause. */
	if (!path && netfilter_reason && reason == netfilter_reason && r && r->skb == (__u64)skb)
		copy_names(d, r);
	if (!wanted(d))
		return;
	count(DROPS_MATCHED);
	count_reason(reason);
	if (count_limited(d))
		return;
	if (was_invalid(skb))
		d->flags |= DROP_INVALID;
	if (!BPF_CORE_READ(skb, _nfct))
		d->flags |= DROP_NO_ENTRY;
	d->length = BPF_CORE_READ(skb, len);
	bpf_get_stack(ctx, d->stack, sizeof(d->stack), 0);
	deliver(d);
}

SEC("tp_btf/kfree_skb")
int BPF_PROG(kfree_skb, struct sk_buff *skb, void *location, int reason)
{
	if (reason_wanted(reason))
		report(ctx, skb, (__u64)location, reason, PATH_NONE);
	return 0;
}

/*
 * tcp_conn_request counts a SYN that meets a full accept queue (ListenDrops), and frees it
 * as consumed. No tracepoint reports it.
 */
SEC("fentry/tcp_conn_request")
int BPF_PROG(listen_enter, void *ops, void *af_ops, struct sock *sk, struct sk_buff *skb)
{
	if (BPF_CORE_READ(sk, sk_ack_backlog) > BPF_CORE_READ(sk, sk_max_ack_backlog) &&
	    reason_wanted(listen_reason))
		report(ctx, skb, 0, listen_reason, PATH_LISTEN);
	return 0;
}

/*
 * Without fentry: a SYN that a listener has finished with. The reader checks whether the
 * listener's queue is full.
 */
SEC("tp_btf/consume_skb")
int BPF_PROG(consume_skb, struct sk_buff *skb)
{
	struct drop drop = {}, *d = &drop;

	/* A listener clears the device and the socket of a packet. */
	if (BPF_CORE_READ(skb, dev) || BPF_CORE_READ(skb, sk) || !parse_packet(d, skb) ||
	    d->proto != IPPROTO_TCP || (d->tcp_flags & (TCP_SYN | TCP_ACK)) != TCP_SYN)
		return 0;
	d->time = bpf_ktime_get_ns();
	d->reason = listen_reason;
	d->path = PATH_SYN;
	find_place(d, skb);
	if (!d->iif || !wanted(d) || !syn_rate_take(d->time))
		return 0;
	d->length = BPF_CORE_READ(skb, len);
	bpf_ringbuf_output(&told, d, sizeof(*d), 0);
	return 0;
}

/* BTF, and so Go, would lack types that no map contains. */
const enum drop_path *unused_drop_path __attribute__((unused));
const enum drop_flags *unused_drop_flags __attribute__((unused));
const enum drop_counter *unused_drop_counter __attribute__((unused));
const enum place_flags *unused_place_flags __attribute__((unused));
const struct drop *unused_drop __attribute__((unused));
