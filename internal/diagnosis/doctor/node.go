package doctor

import (
	"net/netip"
	"time"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/ruleset"
)

// Node is the state of a machine that Load has read.
type Node struct {
	Kernel     kernel.Version
	Namespaces []Namespace // the caller's own first
	Log        map[conntrack.LogKind]conntrack.LogCount
	Up         time.Duration // since the machine started
	Sampled    time.Duration // between two readings of the counters; 0: read once
	Problems   []Problem
	NFS        []NFSMount // whose server is a Service, if there are socket hooks
	// Traffic is what the agent knows. Load leaves it nil: without an agent it is unknown.
	Traffic *Traffic
}

// Own is the caller's own network namespace, nil if it was not read.
func (n *Node) Own() *Namespace {
	if len(n.Namespaces) > 0 && n.Namespaces[0].Report.Namespace.Own {
		return &n.Namespaces[0]
	}
	return nil
}

// inUse counts the namespaces in which conntrack does anything.
func (n *Node) inUse() int {
	used := 0
	for i := range n.Namespaces {
		if n.Namespaces[i].InUse() {
			used++
		}
	}
	return used
}

// Problem is something that could not be read, in one line, with its namespaces.
type Problem struct {
	What       string   `json:"what"`
	Namespaces []string `json:"namespaces,omitempty"`
}

// Namespace is the state of one network namespace. A part that could not be read is
// zero, and a Problem of the Node.
type Namespace struct {
	conntrack.Report
	Grown        conntrack.Counters // during Node.Sampled
	Rules        *ruleset.Ruleset   // never nil
	AllRulesRead bool               // false if some rules could not be read
	States       map[string]State   // entries by the name of their timeout (conntrack.Limits)
	Endpoints    map[netip.AddrPort]*Endpoint
	SourcePorts  []*SourcePorts // those with the fewest free ports first
	Links        []Link
	IPVS         bool // IPVS has services here, which no rule shows

	MarkRules []MarkRule // routing rules for packets with a mark

	IPsec []kernel.XfrmPolicy
	EBPF  bool // programs of Spillway's eBPF dataplane are attached; read only where there is IPsec

	// Hooked reports that Spillway's socket hooks translate connections of processes here; read
	// only where a rule redirects connections of local processes.
	Hooked bool

	BeLiberal  bool            // nf_conntrack_tcp_be_liberal
	AutoHelper bool            // nf_conntrack_helper, until Linux 5.19
	Bridged    map[string]bool // bridge-nf-call-iptables by "ip", "ip6"; nil without br_netfilter

	ChecksumErrors map[string]uint64 // packets discarded on receipt, by "tcp", "udp"
}

// State counts the entries of one timeout.
type State struct {
	Entries int
	Silent  int // entries without a packet for longer than flows of the kind pause
}

// Endpoint is an address that UDP entries are translated to.
type Endpoint struct {
	Entries     int
	Example     conntrack.Entry
	Unreachable string // why: "no route", "no neighbor answers for it"; "" if no reason is known
	RemovedFrom string // the Service port of the example's client, which does not have it; "": none is known
	Local       bool   // an address of the namespace itself
}

// MarkRule is a routing rule for packets with a mark.
type MarkRule struct {
	Text     string       // as "ip rule" prints it
	Src, Dst netip.Prefix // invalid: all
	Input    string       // device by which packets enter; "": all
	V6       bool
}

// Link is a device.
type Link struct {
	Name, Kind string
	Ports      int  // devices that are in this bridge
	TxChecksum bool // of VXLAN devices only: leaves checksums to the device below
	// StrictSource says that a tunnel drops IPv4 packets from addresses whose route leads by
	// another device (rp_filter 1), and that the default route does.
	StrictSource bool
	// Programs are the names of tcx programs by "ingress", "egress", in their order;
	// nil if there is at most one at each.
	Programs map[string][]string
}
