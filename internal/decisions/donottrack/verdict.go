package donottrack

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/facts/model"
)

// segment is a range of ports and the rules that apply to all of it.
type segment struct {
	side        Side
	proto       model.Protocol
	first, last uint16
	rules       []*rule
	tracked     bool // one of the rules requires tracking
}

// heldRule is a rule as it holds at an address.
type heldRule struct {
	*rule
	tracked bool // the rule is tracked although it untracks: only its deny holds
}

// segments splits the ports of rules into ranges with one list of rules each.
func segments(rules []heldRule) (out []segment) {
	for _, side := range []Side{Ingress, Egress} {
		for _, proto := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
			var cuts []int
			for _, r := range rules {
				for _, p := range r.ports {
					if r.Side == side && p.Protocol == proto {
						cuts = append(cuts, int(p.First), int(p.Last)+1)
					}
				}
			}
			slices.Sort(cuts)
			cuts = slices.Compact(cuts)
			for i := 0; i+1 < len(cuts); i++ {
				s := segment{side: side, proto: proto, first: uint16(cuts[i]), last: uint16(cuts[i+1] - 1)}
				for _, r := range rules {
					if r.Side == side && r.about(proto, s.first) {
						s.rules, s.tracked = append(s.rules, r.rule), s.tracked || r.tracked
					}
				}
				if n := len(out); n > 0 && len(s.rules) > 0 && out[n-1].continues(&s) {
					out[n-1].last = s.last
				} else if len(s.rules) > 0 {
					out = append(out, s)
				}
			}
		}
	}
	return out
}

// continues reports whether the next segment has the same rules.
func (s *segment) continues(next *segment) bool {
	return s.side == next.side && s.proto == next.proto && int(s.last)+1 == int(next.first) && s.tracked == next.tracked &&
		slices.Equal(s.rules, next.rules)
}

// verdict combines the rules of a segment.
func (s *segment) verdict() *Verdict {
	v := &Verdict{Track: s.tracked || s.rules[0].Track, Deny: s.rules[0].Deny}
	for _, r := range s.rules {
		v.Rules = append(v.Rules, r.Name)
	}
	slices.Sort(v.Rules)
	v.Name = bounded(strings.Join(v.Rules, "/"), 190)
	if s.tracked {
		v.Name += "-tracked"
	}
	return v
}

func sameVerdict(a, b *Verdict) bool {
	return a == b || a != nil && b != nil && a.Name == b.Name && a.Track == b.Track && a.Deny == b.Deny && slices.Equal(a.Rules, b.Rules)
}

func sameRule(a, b *Rule) bool {
	return a == b || a != nil && b != nil && a.Name == b.Name && a.Policy == b.Policy && a.Side == b.Side && a.Index == b.Index &&
		a.Track == b.Track && a.Deny == b.Deny && a.AnyPeer == b.AnyPeer && a.Pods == b.Pods && slices.Equal(a.Blocks, b.Blocks)
}

// hold returns which rules hold for an address, and the refusals of all others.
func (t *Tracker) hold(addr netip.Addr, wanted []*policy) (rules []heldRule, refused []Refusal) {
	slices.SortFunc(wanted, (*policy).before)
	var held []*policy
	for _, p := range wanted {
		if r, contradicts := contradiction(addr, p, held); contradicts {
			refused = append(refused, r)
			continue
		}
		held = append(held, p)
		for _, r := range p.rules {
			in := t.natAt(addr, r)
			// Any author of a Service or a slice can be the cause, so what is denied stays denied. A
			// Service may also not be served where it has an address.
			deniesYet := in.what != "" && r.Deny
			if in.what != "" {
				refused = append(refused, in.refusal(addr, r, deniesYet))
			}
			if in.what == "" || deniesYet {
				rules = append(rules, heldRule{r, deniesYet})
			}
		}
	}
	return rules, refused
}

// refusal returns what does not hold at an address, and the remedy.
func (in obstacle) refusal(addr netip.Addr, r *rule, deniesYet bool) Refusal {
	out := Refusal{Policy: r.Policy, Field: fmt.Sprintf("spec.%s[%d]", r.Side, r.Index), Reason: cmp.Or(in.reason, NeedsNAT)}
	what, denied := "is not applied to", ""
	if in.early {
		if deniesYet {
			what = "denies only what eBPF does not translate at"
		}
		out.Reason = NotSeen
		out.Message = fmt.Sprintf("%s %s: %s, which eBPF translates before a policy sees the packet; select the pods behind it", what, addr,
			in.what)
		return out
	}
	if deniesYet {
		what, denied = "is applied with conntrack to", " (others are denied there)"
	}
	out.Message = fmt.Sprintf("%s %s: %s, and netfilter cannot translate packets that are not tracked%s; "+
		"leave the port out, or %s", what, addr, in.what, denied, in.instead)
	return out
}

// contradiction returns the Refusal if a policy that holds contradicts p about the same
// ports.
func contradiction(addr netip.Addr, p *policy, held []*policy) (Refusal, bool) {
	for _, o := range held {
		for _, a := range p.rules {
			for _, b := range o.rules {
				ports, meet := a.sharedPorts(b)
				if !meet || a.Track == b.Track && a.Deny == b.Deny {
					continue
				}
				field := "spec.deny"
				if a.Track != b.Track {
					field = "spec.track"
				}
				return Refusal{
					Policy: p.spec.Name, Field: field, Reason: Contradiction,
					Message: fmt.Sprintf("is not applied to %s: DoNotTrackPolicy %s, which %s, says otherwise of %s port %s (%s); "+
						"make the two alike, or have them select different pods or ports", addr, o.spec.Name, p.whyAfter(o), a.Side,
						portsText(ports), ports.Protocol),
				}, true
			}
		}
	}
	return Refusal{}, false
}

func portsText(p model.PortRange) string {
	if p.First == p.Last {
		return fmt.Sprint(p.First)
	}
	return fmt.Sprintf("%d-%d", p.First, p.Last)
}
