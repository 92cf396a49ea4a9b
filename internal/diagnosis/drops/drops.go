// Package drops reports packets that the kernel drops: the location, the kernel's reason,
// and its meaning. It needs no agent and changes nothing; its programs end with the
// process.
//
//	kernel: kfree_skb ──> filters ──> rate ──> ring buffer      bpf/drops.bpf.c
//	                                                │
//	Follow ──> Follower.Next ──> Drop  <── names of reasons (BTF), of places
//	                                       (conntrack.Namespaces), of code (kallsyms)
package drops

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"spillway.dev/spillway/internal/node/conntrack"
)

// Config selects drops. A drop must match every field that is set, and any value of a
// field. Addresses and ports match source and destination.
type Config struct {
	Addresses []netip.Prefix
	Ports     []uint16
	// Protocol is an IP protocol's number, 0 for all.
	Protocol uint8
	// Namespaces selects drops in these network namespaces.
	Namespaces []conntrack.Namespace
	// Pods selects drops in the namespaces of these pods, and from or to their addresses.
	Pods []Pod
	// Reasons are the kernel's names, with or without SKB_DROP_REASON_. A name that
	// begins with "!" is excluded. Without names, all but Quiet are included.
	Reasons []string
	// All wants the reasons of Quiet too, and packets to multicast addresses, which
	// most hosts that hear them drop.
	All bool
	// Rate is the maximum of reported drops per second, 0 for no limit. The rest is
	// counted.
	Rate int
}

// Quiet lists the reasons of harmless drops. These are frames for other hosts, TCP
// segments that were processed, and data that a program had not read when it closed its
// socket.
var Quiet = []string{"OTHERHOST", "IPV6_NDISC_NS_OTHERHOST", "TCP_RESET", "TCP_OFOMERGE", "QUEUE_PURGE"}

// Limits of the kernel's side, which looks through lists for each packet.
const (
	maxPrefixes = 16
	maxPorts    = 16
)

// Validate returns an error if the Config is invalid for a Follower.
func (c *Config) Validate() error {
	switch {
	case len(c.Addresses) > maxPrefixes:
		return fmt.Errorf("%d addresses: at most %d are supported", len(c.Addresses), maxPrefixes)
	case len(c.podAddresses()) > maxPrefixes:
		return fmt.Errorf("the pods have %d addresses: at most %d are supported", len(c.podAddresses()), maxPrefixes)
	case len(c.Ports) > maxPorts:
		return fmt.Errorf("%d ports: at most %d are supported", len(c.Ports), maxPorts)
	case slices.Contains(c.Ports, 0):
		return errors.New("port 0: use 1 to 65535")
	case c.Rate < 0:
		return fmt.Errorf("rate %d: must not be negative", c.Rate)
	}
	not := slices.ContainsFunc(c.Reasons, func(r string) bool { return strings.HasPrefix(r, "!") })
	if not && slices.ContainsFunc(c.Reasons, func(r string) bool { return !strings.HasPrefix(r, "!") }) {
		return errors.New("reasons: name the wanted ones, or the unwanted ones with '!', but not both")
	}
	return nil
}

func (c *Config) podAddresses() (list []netip.Prefix) {
	for _, p := range c.Pods {
		for _, a := range p.Addresses {
			list = append(list, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	return list
}

// Drop is one dropped packet.
type Drop struct {
	Time time.Time `json:"time"`
	// Reason is the kernel's, without SKB_DROP_REASON_.
	Reason string `json:"reason"`
	// By is the component that dropped the packet, if the reason does not name it: nft,
	// iptables, nat, conntrack, or tcp for a listener; else "".
	By string `json:"by,omitempty"`
	// Meaning is the reason in plain words.
	Meaning string `json:"meaning"`
	Packet
	Place
}

// Packet holds the outermost headers of a dropped packet.
type Packet struct {
	Protocol string     `json:"protocol"`
	Source   netip.Addr `json:"source"`
	// SourcePort and DestinationPort are 0 for protocols without ports and for
	// fragments but the first.
	SourcePort      uint16     `json:"sourcePort,omitempty"`
	Destination     netip.Addr `json:"destination"`
	DestinationPort uint16     `json:"destinationPort,omitempty"`
	// TCPFlags are as tcpdump writes them: "S", "S.", "P.".
	TCPFlags string `json:"tcpFlags,omitempty"`
	// ICMP is "type/code".
	ICMP     string `json:"icmp,omitempty"`
	Fragment bool   `json:"fragment,omitempty"`
	Length   int    `json:"length"` // bytes, as the kernel counted them there
	// Invalid reports that conntrack had classified the packet as INVALID just before.
	Invalid bool `json:"conntrackInvalid,omitempty"`
}

// Place is the hop at which a packet was dropped.
type Place struct {
	// Namespace is the network namespace by name or by its first process.
	Namespace string `json:"namespace"`
	Inode     uint64 `json:"namespaceInode"`
	// Pod is the host name of that process, if it has one of its own, as pods do.
	Pod string `json:"pod,omitempty"`
	// Interface is the device by which the packet arrived, Out the device by which it
	// would have left.
	Interface string `json:"interface,omitempty"`
	Out       string `json:"outInterface,omitempty"`
	Hook      string `json:"hook,omitempty"`  // of netfilter: PREROUTING, INPUT, ...
	Table     string `json:"table,omitempty"` // of nft or iptables
	Chain     string `json:"chain,omitempty"` // the base chain of nft
	// Location is the kernel's function with the offset.
	Location string `json:"location,omitempty"`
	// Stack is the call stack; the function that dropped the packet comes first.
	Stack []string `json:"stack,omitempty"`

	cookie uint64 // of the namespace
}

// Counts are the drops since the Follower began.
type Counts struct {
	Seen    uint64 `json:"seen"`    // IP packets with a selected reason
	Matched uint64 `json:"matched"` // of Seen: packets that match the filters
	Limited uint64 `json:"limited"` // of Matched: not reported because of Rate
	Lost    uint64 `json:"lost"`    // of Matched: not reported because the buffer was full
}
