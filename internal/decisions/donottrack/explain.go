package donottrack

import (
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// The outcomes of a Decision.
const (
	Untracked = "allowed, not tracked"
	Tracked   = "allowed, tracked"
	Denied    = "denied"
	AsUsual   = "tracked as usual" // no policy applies
)

// DiffersBySource is the Outcome of a flow whose outcome depends on its source port.
const DiffersBySource = "differs by source port"

// Flow is the subject of Explain: connections, or their first packets.
type Flow struct {
	From, To netip.Addr
	Protocol model.Protocol
	Port     uint16 // of To
	// Source are the possible source ports; the zero value is the range of ports that
	// Linux assigns.
	Source PortSpan
}

// PortSpan is a range of ports, both ends included.
type PortSpan struct{ First, Last uint16 }

// String returns "80" or "80-89".
func (s PortSpan) String() string { return portsText(model.PortRange{First: s.First, Last: s.Last}) }

func (f Flow) source() PortSpan {
	if f.Source == (PortSpan{}) {
		return PortSpan{firstEphemeral, lastEphemeral}
	}
	return f.Source
}

// Decision is what one side's policies decide about a flow.
type Decision struct {
	Side    Side       `json:"-"`
	Addr    netip.Addr `json:"address"` // the local address whose policies apply
	Peer    netip.Addr `json:"peer"`
	Outcome string     `json:"outcome"`
	// SourcePorts are the source ports that this decision requires, "" if it applies to
	// all: a rule's ports may be source ports of a flow, which then looks like a reply.
	SourcePorts string   `json:"sourcePorts,omitempty"`
	Policy      string   `json:"policy,omitempty"`
	Field       string   `json:"field,omitempty"` // of the policy
	Why         string   `json:"why"`
	sources     PortSpan // as in SourcePorts
}

// Explain returns what this node's policies decide about a flow: the policies of the
// destination and those of the source. An address of another node has none.
func (t *Tracker) Explain(f Flow) []Decision {
	var out []Decision
	if t.wantedOf[f.To] != nil {
		d := t.decide(Ingress, f.To, f.From, f.Protocol, f.Port)
		out = append(out, d)
		if d.Outcome == Untracked && !t.hasEgress() {
			return out // the packet traverses no further policy
		}
	}
	if t.wantedOf[f.From] != nil {
		out = append(out, t.decide(Egress, f.From, f.To, f.Protocol, f.Port))
	}
	return append(out, t.decideAsReply(f)...)
}

// hasEgress reports whether an egress rule holds on this node.
func (t *Tracker) hasEgress() bool {
	for target := range t.targets.now {
		if target.Side == Egress {
			return true
		}
	}
	return false
}

// decideAsReply returns what the policies decide about a flow by its source port, as if it were
// a reply.
func (t *Tracker) decideAsReply(f Flow) (out []Decision) {
	span := f.source()
	for _, side := range []Side{Ingress, Egress} {
		local, peer := f.From, f.To
		if side == Egress {
			local, peer = f.To, f.From
		}
		for _, target := range t.targetsOf[local] {
			first, last := max(target.First, span.First), min(target.Last, span.Last)
			if target.Side != side || target.Protocol != f.Protocol || first > last {
				continue
			}
			d := t.decide(side, local, peer, f.Protocol, first)
			d.sources = PortSpan{first, last}
			d.SourcePorts = d.sources.String()
			d.Why = fmt.Sprintf("what comes from port %s cannot be told from an answer, and %s", d.SourcePorts, d.Why)
			out = append(out, d)
		}
	}
	return out
}

func (t *Tracker) decide(side Side, local, peer netip.Addr, proto model.Protocol, port uint16) Decision {
	d := Decision{Side: side, Addr: local, Peer: peer, Outcome: AsUsual}
	verdict := ""
	for _, target := range t.targetsOf[local] {
		if target.Side == side && target.Protocol == proto && target.First <= port && port <= target.Last {
			verdict = t.targets.now[target]
		}
	}
	if verdict == "" {
		d.Why = fmt.Sprintf("no policy that is applied to %s is about %s of %s port %d", local, side, proto, port)
		for _, r := range t.refusedOf[local] {
			d.Policy, d.Field, d.Why = r.Policy, r.Field, r.Message
		}
		return d
	}
	v := t.verdicts.now[verdict]
	for _, name := range v.Rules {
		r := t.installed[name]
		d.Policy, d.Field = r.Policy, fmt.Sprintf("spec.%s[%d]", r.Side, r.Index)
		if why, matches := r.why(peer); matches {
			d.Outcome, d.Why = Untracked, why
			switch {
			case v.Track && !r.Track:
				d.Outcome, d.Why = Tracked, why+", and netfilter translates for a Service at that port"
			case v.Track:
				d.Outcome, d.Why = Tracked, why+", and the policy says track: true"
			}
			return d
		}
	}
	d.Why = fmt.Sprintf("%s is none of the peers, and others are left alone", peer)
	if v.Deny && t.isOwn(peer) {
		d.Why = fmt.Sprintf("%s is none of the peers, and the node of the selected pods itself is never denied", peer)
	} else if v.Deny {
		d.Outcome, d.Why = Denied, fmt.Sprintf("%s is none of the peers, and the policy says deny: others", peer)
		if t.mayBeOwn(peer) {
			d.Why += "; if the node itself has that address, on a bridge or tunnel, it is not denied"
		}
	}
	return d
}

// mayBeOwn reports whether an address that no object names is in the node's pod range.
func (t *Tracker) mayBeOwn(a netip.Addr) bool {
	n := t.facts.ThisNode()
	return n != nil && slices.ContainsFunc(n.PodCIDRs, func(p netip.Prefix) bool { return p.Contains(a) }) &&
		len(t.facts.PodsAt(a)) == 0
}

// why returns how an address is among the peers of a rule.
func (r *rule) why(a netip.Addr) (string, bool) {
	switch {
	case r.AnyPeer:
		return "the rule allows every peer", true
	case r.peers[a] > 0:
		return fmt.Sprintf("%s is a pod that the rule selects", a), true
	case r.inBlocks(a):
		i := slices.IndexFunc(r.Blocks, func(b Range) bool { return b.First.Compare(a) <= 0 && a.Compare(b.Last) <= 0 })
		return fmt.Sprintf("%s is in a range of the rule, %s to %s", a, r.Blocks[i].First, r.Blocks[i].Last), true
	}
	return "", false
}

// Outcome combines all decisions on a flow's path, on one node or several. One denial
// denies the flow; a node that leaves it untracked does so for its part of the path.
func Outcome(f Flow, decisions []Decision) string {
	span := f.source()
	cuts := []int{int(span.First)} // start of another list of decisions
	for _, d := range decisions {
		if d.SourcePorts == "" {
			continue
		}
		for _, c := range []int{int(d.sources.First), int(d.sources.Last) + 1} {
			if c > int(span.First) && c <= int(span.Last) {
				cuts = append(cuts, c)
			}
		}
	}
	out := ""
	for _, from := range cuts {
		now := AsUsual
		for _, d := range decisions {
			if d.SourcePorts == "" || int(d.sources.First) <= from && from <= int(d.sources.Last) {
				now = strongest(now, d.Outcome)
			}
		}
		if out != "" && out != now {
			return DiffersBySource
		}
		out = now
	}
	return out
}

func strongest(a, b string) string {
	for _, strongest := range []string{Denied, Untracked, Tracked} {
		if a == strongest || b == strongest {
			return strongest
		}
	}
	return AsUsual
}

// PoliciesWithoutTargets returns the policies that select no node and no pod with its own address,
// sorted: most likely they contain a mistake.
func PoliciesWithoutTargets(world model.Delta) (out []string) {
	for name, p := range world.DoNotTrackPolicies {
		found := false
		for _, n := range world.Nodes {
			found = found || p.Nodes != nil && p.Nodes.Matches(n.Labels)
		}
		for _, pod := range world.Pods {
			found = found || p.Pods != nil && selects(p.Pods, pod.Labels, namespaceLabels(pod.Namespace, world.Namespaces[pod.Namespace]))
		}
		if !found {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}
