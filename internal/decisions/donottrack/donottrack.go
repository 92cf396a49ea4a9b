// Package donottrack decides the effect of do-not-track policies on one node: which packets
// of its pods, or of the node itself, conntrack does not track, and which are denied. It
// is pure, and independent of nftables.
//
//	store (of facts) ──object changed──> Tracker ──Changes()──> dataplane.DoNotTrack
//	                                        └──Traversal──> intent
//
// An entry of ingress or egress of a policy is a Rule. An address of this node, a protocol
// and a range of ports are a Target. A Target leads to a Verdict, which combines all rules
// about the Target. The peers of a rule are its ranges and its Members, the addresses of
// pods. One more pod among the peers of a rule is therefore one more Member.
//
// A rule applies to both directions of a flow: the port is the destination of a request
// and the source of a reply. Rules have no state, so the owner of the address can also use
// the port as a source.
package donottrack

import (
	"cmp"
	"fmt"
	"net/netip"

	"spillway.dev/spillway/internal/facts/model"
)

// Side is the owner of a rule's ports.
type Side uint8

// The two sides.
const (
	Ingress Side = iota // the pods or nodes that the policy selects
	Egress              // their peers
)

// String returns the field of the policy's spec.
func (s Side) String() string {
	if s == Egress {
		return "egress"
	}
	return "ingress"
}

// Range is a range of addresses of one family, both ends included.
type Range struct{ First, Last netip.Addr }

// Rule is one entry of ingress or egress of a policy that selects an address of this node.
// Its peers are any address, or Blocks and its Members.
type Rule struct {
	Name    string // "in-cache-0": unique, and valid as the name of a set
	Policy  string
	Side    Side
	Index   int // in spec.ingress or spec.egress
	Track   bool
	Deny    bool
	AnyPeer bool
	Pods    bool    // may have Members
	Blocks  []Range // sorted, disjoint
}

// Verdict combines the rules about a target. It never combines rules that contradict.
type Verdict struct {
	Name  string
	Rules []string // names, sorted
	Track bool     // traffic that matches a rule is tracked
	Deny  bool     // traffic that matches no rule is denied
}

// Target is the subject of rules: ports of an address of this node (Ingress), or ports of
// the peers that such an address connects to (Egress). Targets of one side do not overlap.
type Target struct {
	Side        Side
	Addr        netip.Addr
	Protocol    model.Protocol
	First, Last uint16
}

// Compare orders targets.
func (t Target) Compare(o Target) int {
	return cmp.Or(cmp.Compare(t.Side, o.Side), t.Addr.Compare(o.Addr), cmp.Compare(t.Protocol, o.Protocol), cmp.Compare(t.First, o.First))
}

// Member is the address of a pod that is among the peers of a rule.
type Member struct {
	Rule string
	Addr netip.Addr
}

// Pair is the traffic between an address of this node and a peer, from or to the port of a
// target.
type Pair struct {
	Local, Peer netip.Addr
	Protocol    model.Protocol
	Port        uint16
}

// State is the whole state of this node. The Tracker owns it: callers read it before the
// next Apply, and never write it.
type State struct {
	Rules    map[string]*Rule
	Verdicts map[string]*Verdict
	Targets  map[Target]string // name of the Verdict
	Members  map[Member]bool
	Tracked  map[Pair]bool // tracked exceptions from all Verdicts: see Tracker.SetTracked
}

// Change is the difference of one entry of a State. Had and Want differ; a zero value
// means that the entry did not or does not exist.
type Change[K comparable, V any] struct {
	Key       K
	Had, Want V
}

// Changes is the difference between two States. A change of a Member or of a
// Target never comes without its Rule or Verdict.
type Changes struct {
	Rules    []Change[string, *Rule]
	Verdicts []Change[string, *Verdict]
	Targets  []Change[Target, string]
	Members  []Change[Member, bool]
	Tracked  []Change[Pair, bool]
	// MayAffectRunning says that the changes may affect running connections. Changes for a
	// pod that starts or ends do not.
	MayAffectRunning bool
	// Traversal is complete; nil if unchanged.
	Traversal *Traversal
	// Refusals are the parts of policies that do not hold on this node, complete, sorted;
	// nil if unchanged.
	Refusals []Refusal
}

// Traversal says which packets to and from this node's pods must traverse netfilter because
// of do-not-track policies, and which need not.
type Traversal struct {
	// DenyRulePods are the addresses with a deny rule, sorted: their packets must traverse
	// netfilter.
	DenyRulePods []netip.Addr
	// AllowsAny are the Ingress targets that any client may reach untracked, sorted. Packets
	// of Services to them may bypass netfilter, even if a NetworkPolicy selects the pod.
	AllowsAny []Target
	// Unknown says that any pod may have a deny rule, because not all policies could be
	// read.
	Unknown bool
}

// Empty reports whether there is nothing to write.
func (c Changes) Empty() bool {
	return len(c.Rules)+len(c.Verdicts)+len(c.Targets)+len(c.Members)+len(c.Tracked) == 0
}

// The reasons of a Refusal.
const (
	Contradiction = "Contradiction"    // contradicts another policy, which holds
	NeedsNAT      = "ServiceNeedsNAT"  // netfilter must translate the packets of a Service, and so track them
	HostPort      = "HostPortNeedsNAT" // the same for packets to a hostPort
	NotSeen       = "ServiceNotSeen"   // eBPF translates the packets of a Service before policies see them
)

// Refusal is a part of a policy that does not hold on this node.
type Refusal = model.PolicyRefusal

// Config configures a Tracker.
type Config struct {
	NodeName string
	// ProxyName is that of intent.Config: another proxy serves Services of another name,
	// and Spillway assumes that it translates in netfilter.
	ProxyName string
	// Netfilter says that the dataplane of Services translates in netfilter.
	Netfilter bool
	// NeedsFallback returns for each port of a Service whether netfilter translates for it
	// although Netfilter is false; nil means for none.
	NeedsFallback func(*model.Service) []bool
}

// ruleName returns the name of a rule, which is also the name of its sets and chains.
func ruleName(policy string, side Side, index int) string {
	prefix := "in"
	if side == Egress {
		prefix = "out"
	}
	return bounded(fmt.Sprintf("%s-%s-%d", prefix, policy, index), 90)
}
