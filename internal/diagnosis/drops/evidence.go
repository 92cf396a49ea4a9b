package drops

import (
	"context"
	"net/netip"
	"strings"
	"time"

	"spillway.dev/spillway/internal/node/conntrack"
)

// evidence derives the cause of a drop where the eBPF side cannot attach to netfilter's
// functions. It uses the call stack, conntrack's counters, and the listeners' queues.
type evidence struct {
	// counters holds the last conntrack counters of each namespace; nil where they are
	// not needed.
	counters map[uint64]*counterGrowth
	places   *places
}

// hookOf returns netfilter's hook from the function that called it.
var hookOf = map[string]string{
	"ip_rcv": "PREROUTING", "ip_sublist_rcv": "PREROUTING", "ipv6_rcv": "PREROUTING", "ip6_sublist_rcv": "PREROUTING",
	"ip_local_deliver": "INPUT", "ip6_input": "INPUT",
	"ip_forward": "FORWARD", "ip6_forward": "FORWARD",
	"__ip_local_out": "OUTPUT", "__ip6_local_out": "OUTPUT", "ip6_xmit": "OUTPUT", "ip6_send_skb": "OUTPUT", "raw_sendmsg": "OUTPUT",
	"ip_output": "POSTROUTING", "ip6_output": "POSTROUTING", "ip_mc_output": "POSTROUTING",
	// Called by br_netfilter, which passes bridged packets to IP's hooks.
	"br_nf_pre_routing": "PREROUTING", "br_nf_pre_routing_ipv6": "PREROUTING",
	"br_nf_forward_ip": "FORWARD", "br_nf_forward": "FORWARD", "br_nf_post_routing": "POSTROUTING",
	"br_handle_frame": "bridge PREROUTING", "br_pass_frame_up": "bridge INPUT", "__br_forward": "bridge FORWARD",
	"__netif_receive_skb_core": "netdev ingress", "__dev_queue_xmit": "netdev egress",
}

// netfilter adds the part of netfilter that dropped the packet, if only the hook is
// known.
func (e *evidence) netfilter(d *Drop, raw *dropsDrop) {
	passed, nft, xtables := false, false, false
	for _, f := range d.Stack {
		name, _, _ := strings.Cut(f, "+")
		name, _, _ = strings.Cut(name, ".") // of functions that the compiler split
		nft, xtables = nft || name == "nft_do_chain", xtables || strings.HasSuffix(name, "t_do_table")
		if name == "nf_hook_slow" || name == "nf_hook_slow_list" {
			passed = true
		} else if hook, known := hookOf[name]; known && passed && d.Hook == "" {
			d.Hook = hook
			break
		}
	}
	growth := e.growth(raw.Cookie, d.Time)
	d.Invalid = d.Invalid || raw.Flags&uint8(dropsDropFlagsDROP_NO_ENTRY) != 0 && growth.Invalid > 0
	switch {
	case nft:
		d.By = dropper[dropsDropPathPATH_NFT]
	case xtables:
		d.By = dropper[dropsDropPathPATH_XTABLES]
	case growth.InsertFailed > 0:
		growth.InsertFailed--
		d.By, d.Meaning = dropper[dropsDropPathPATH_CONNTRACK_INSERT], explain(d, dropsDropPathPATH_CONNTRACK_INSERT)
	case growth.Drop > 0:
		growth.Drop--
		d.By, d.Meaning = dropper[dropsDropPathPATH_CONNTRACK_FULL], explain(d, dropsDropPathPATH_CONNTRACK_FULL)
	}
	if d.By == "conntrack" {
		return
	}
	switch d.By {
	case "nft":
		d.Meaning = "a rule of nftables, or of iptables' nft variant, dropped or rejected it"
	case "iptables":
		d.Meaning = "a rule or policy of iptables' legacy variant dropped or rejected it"
	default:
		if d.redirect() {
			d.Meaning = redirected
			break
		}
		d.Meaning = "a netfilter hook dropped it, and conntrack's counters did not grow: a rule or policy of iptables, or NAT for a device " +
			"without an address"
	}
	d.Meaning += ofInvalid(d)
}

// counterGrowth holds the last conntrack counters of a namespace, and their growth.
type counterGrowth struct {
	conntrack.Counters
	growth conntrack.Counters
	at     time.Time
}

// growth returns the growth of a namespace's conntrack counters before a drop. If drops
// came faster than the counters could be read, all drops before a reading share the
// growth. The caller subtracts its share.
func (e *evidence) growth(cookie uint64, drop time.Time) *conntrack.Counters {
	n, known := e.places.known[cookie]
	if e.counters == nil || !known {
		return &conntrack.Counters{}
	}
	last := e.counters[cookie]
	if last != nil && drop.Before(last.at) {
		return &last.growth
	}
	now, err := readCounters(n)
	if err != nil {
		return &conntrack.Counters{}
	}
	t := &counterGrowth{Counters: now, at: time.Now()}
	if last != nil {
		t.growth = conntrack.Counters{
			Drop:         now.Drop - last.Drop,
			InsertFailed: now.InsertFailed - last.InsertFailed,
			Invalid:      now.Invalid - last.Invalid,
		}
	}
	e.counters[cookie] = t
	return &t.growth
}

// begin reads the counters of all namespaces, so that the first drop can be compared.
// Unreadable namespaces have no evidence.
func (e *evidence) begin() {
	e.counters = map[uint64]*counterGrowth{}
	for cookie, n := range e.places.known {
		if c, err := readCounters(n); err == nil {
			e.counters[cookie] = &counterGrowth{Counters: c, at: time.Now()}
		}
	}
}

func readCounters(n place) (c conntrack.Counters, err error) {
	err = n.enter(func() error {
		conn, err := conntrack.Open()
		if err != nil {
			return err
		}
		defer conn.Close()
		c, err = conn.Stats(context.Background())
		return err
	})
	return c, err
}

// overflowed reports whether a listener dropped the SYN: its queue is full, and there is
// no connection.
func (e *evidence) overflowed(cookie uint64, from, to netip.AddrPort) bool {
	n, known := e.places.at(cookie)
	if !known {
		return false
	}
	s, err := findSocket(n, from, to)
	return err == nil && s.listens && s.queue > s.most
}
