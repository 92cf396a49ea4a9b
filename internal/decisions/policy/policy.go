// Package policy decides what do-not-track policies mean on one node: which
// packets of its pods, or of its own, conntrack is kept away from, and which are
// denied. It is pure, and knows nothing of nftables.
//
//	model.Delta ──> Tracker.Apply ──> Changes ──> dataplane.Policies
//
// A policy's entry of ingress or egress is a Rule. An address here, a protocol and
// a range of ports is a Target; it leads to a Verdict, which is what the rules that
// are about it say together. Who may take part is told by each rule's ranges and by
// its Members, the addresses of pods. So one pod more among a rule's peers is one
// Member more, and nothing else.
//
// Rules are about both directions of a flow: a request is known by the port that
// it goes to, the answer by the same port as the one that it comes from. Nobody
// remembers a flow, so whoever holds the address can use the port as a source.
package policy

import (
	"cmp"
	"fmt"
	"net/netip"

	"spillway.dev/spillway/internal/facts/model"
)

// Side says who has the ports of a rule.
type Side uint8

// The two sides.
const (
	Ingress Side = iota // what the policy selects
	Egress              // its peers
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

// Rule is one entry of ingress or egress of a policy that selects something here.
// Its peers are anybody, or those in Blocks and its Members.
type Rule struct {
	Name    string // "in-cache-0": unique, and fit for the name of a set
	Policy  string
	Side    Side
	Index   int // in spec.ingress or spec.egress
	Track   bool
	Deny    bool
	Anybody bool
	Pods    bool    // may have Members
	Blocks  []Range // sorted, disjoint
}

// Verdict is what one or several rules say of a target. Rules that contradict are
// never in one.
type Verdict struct {
	Name  string
	Rules []string // names, sorted
	Track bool     // what matches a rule is tracked as usual
	Deny  bool     // what matches none is denied
}

// Target is what rules are about: ports of an address here (Ingress), or ports of
// whomever an address here asks (Egress). Targets of one side do not overlap.
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

// Pair is an address here and a peer, and the port of a target: what goes between them
// from or to that port.
type Pair struct {
	Here, Peer netip.Addr
	Protocol   model.Protocol
	Port       uint16
}

// State is all that holds on this node. It is the Tracker's own: to be read before
// the next Apply, and never written.
type State struct {
	Rules    map[string]*Rule
	Verdicts map[string]*Verdict
	Targets  map[Target]string // to the Verdict's name
	Members  map[Member]bool
	Tracked  map[Pair]bool // stay tracked, whatever a Verdict says: see Tracker.Keep
}

// Change is what became of one entry of a State. Had and Want differ; zero values
// say that there was or is none.
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
	// MayAffectRunning says that this may be about connections that run, which those of a
	// pod that comes or goes are not.
	MayAffectRunning bool
	// DenyRulePods are the addresses here of which something is denied, sorted, if that
	// changed; nil if not. Their packets must not pass by who denies.
	DenyRulePods []netip.Addr
	// AllowsAny are the targets of Ingress that anybody may reach untracked, sorted, if
	// that changed; nil if not. Nothing in netfilter has to see their packets.
	AllowsAny []Target
	// Refusals are what policies ask for and does not hold here, complete, sorted;
	// nil if that is as it was.
	Refusals []Refusal
}

// Empty reports whether there is nothing to write.
func (c Changes) Empty() bool {
	return len(c.Rules)+len(c.Verdicts)+len(c.Targets)+len(c.Members)+len(c.Tracked) == 0
}

// The reasons of a Refusal.
const (
	Contradiction = "Contradiction"    // another policy, which holds, says otherwise
	NeedsNAT      = "ServiceNeedsNAT"  // netfilter could not translate the packets of a Service
	HostPort      = "HostPortNeedsNAT" // nor those that come by a port of the node
	NotSeen       = "ServiceNotSeen"   // eBPF translates the packets of a Service before
)

// Refusal is what a policy asks for and does not hold on this node.
type Refusal = model.PolicyRefusal

// Config is how policies are read on this node.
type Config struct {
	NodeName string
	// ProxyName is that of intent.Config: Services of another one are another
	// proxy's, which is taken for one that translates in netfilter.
	ProxyName string
	// Netfilter says that Services are translated in netfilter.
	Netfilter bool
	// GivenAway says of each port of a Service whether netfilter translates for it
	// although Netfilter is false; nil: for none.
	GivenAway func(*model.Service) []bool
}

// ruleName makes the name of a rule, which is that of sets and chains too.
func ruleName(policy string, side Side, index int) string {
	prefix := "in"
	if side == Egress {
		prefix = "out"
	}
	return bounded(fmt.Sprintf("%s-%s-%d", prefix, policy, index), 90)
}
