package policy

import (
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/model"
)

// The outcomes of a Decision.
const (
	Untracked = "allowed, not tracked"
	Tracked   = "allowed, tracked"
	Denied    = "denied"
	AsUsual   = "tracked as usual" // no policy has a say
)

// Decision is what one side's policies say of a flow.
type Decision struct {
	Side    Side       `json:"-"`
	Addr    netip.Addr `json:"address"` // here, whose policies they are
	Outcome string     `json:"outcome"`
	Policy  string     `json:"policy,omitempty"`
	Field   string     `json:"field,omitempty"` // of the policy
	Why     string     `json:"why"`
}

// Explain says what this node's policies make of a flow: those of the address that
// is asked, and those of the address that asks. One that is not here has none.
func (t *Tracker) Explain(from, to netip.Addr, proto model.Protocol, port uint16) []Decision {
	var out []Decision
	for _, side := range []Side{Ingress, Egress} {
		here, peer := to, from
		if side == Egress {
			here, peer = from, to
		}
		if t.wantedOf[here] != nil {
			out = append(out, t.decide(side, here, peer, proto, port))
		}
	}
	return out
}

// Sources says what becomes of a flow if who asks has one of the ports that ingress
// rules of its own are about as the source: it is taken for an answer. Only ports that
// Linux gives to connections by itself count.
func (t *Tracker) Sources(from, to netip.Addr, proto model.Protocol) (notes []string) {
	for _, target := range t.targetsOf[from] {
		first, last := max(target.First, firstEphemeral), min(target.Last, lastEphemeral)
		if target.Side != Ingress || target.Protocol != proto || first > last {
			continue
		}
		if d := t.decide(Ingress, from, to, proto, first); d.Outcome == Denied || d.Outcome == Untracked {
			notes = append(notes, fmt.Sprintf("from port %s of %s it is %s, as an answer: DoNotTrackPolicy %s, %s",
				portsText(model.PortRange{First: first, Last: last}), from, d.Outcome, d.Policy, d.Field))
		}
	}
	return notes
}

func (t *Tracker) decide(side Side, here, peer netip.Addr, proto model.Protocol, port uint16) Decision {
	d := Decision{Side: side, Addr: here, Outcome: AsUsual}
	verdict := ""
	for _, target := range t.targetsOf[here] {
		if target.Side == side && target.Protocol == proto && target.First <= port && port <= target.Last {
			verdict = t.targets.now[target]
		}
	}
	if verdict == "" {
		d.Why = fmt.Sprintf("no policy that is applied to %s is about %s of %s port %d", here, side, proto, port)
		for _, r := range t.refusedOf[here] {
			d.Policy, d.Field, d.Why = r.Policy, r.Field, r.Message
		}
		return d
	}
	v := t.verdicts.now[verdict]
	for _, name := range v.Rules {
		r := t.holding[name]
		d.Policy, d.Field = r.Policy, fmt.Sprintf("spec.%s[%d]", r.Side, r.Index)
		if why, matches := r.why(peer); matches {
			d.Outcome, d.Why = Untracked, why
			if v.Track {
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
	}
	return d
}

// why says how an address is among the peers of a rule.
func (r *rule) why(a netip.Addr) (string, bool) {
	switch {
	case r.Anybody:
		return "the rule is about anybody", true
	case r.peers[a] > 0:
		return fmt.Sprintf("%s is a pod that the rule selects", a), true
	case r.inBlocks(a):
		i := slices.IndexFunc(r.Blocks, func(b Range) bool { return b.First.Compare(a) <= 0 && a.Compare(b.Last) <= 0 })
		return fmt.Sprintf("%s is in a range of the rule, %s to %s", a, r.Blocks[i].First, r.Blocks[i].Last), true
	}
	return "", false
}

// Outcome is what becomes of a flow by all that was decided on its way: denied by
// any is denied, and what one leaves untracked is untracked there.
func Outcome(decisions []Decision) string {
	out := AsUsual
	for _, d := range decisions {
		switch {
		case d.Outcome == Denied:
			return Denied
		case d.Outcome == Untracked || d.Outcome == Tracked && out == AsUsual:
			out = d.Outcome
		}
	}
	return out
}
