package donottrack

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"spillway.dev/spillway/internal/facts/model"
)

// recomputeAddress computes the state of an address of this node.
func (t *Tracker) recomputeAddress(a netip.Addr) {
	before := t.wantedOf[a]
	wanted := t.selecting(a)
	// Add new policies first, then remove old ones, so that a rule in both keeps its
	// peers.
	for _, p := range wanted {
		for _, r := range p.rules {
			t.addWanted(r)
		}
	}
	t.setWanted(a, wanted)
	rules, refused := t.hold(a, slices.Clone(wanted))
	t.retarget(a, rules)
	for _, p := range before {
		for _, r := range p.rules {
			if r.wanted--; r.wanted == 0 {
				r.peers = nil
			}
		}
	}
	if len(refused) > 0 {
		t.refusedOf[a] = refused
	} else {
		delete(t.refusedOf, a)
	}
}

func (t *Tracker) setWanted(a netip.Addr, wanted []*policy) {
	if len(wanted) > 0 {
		t.wantedOf[a] = wanted
	} else {
		delete(t.wantedOf, a)
	}
}

// selecting returns the policies that select an address of this node.
func (t *Tracker) selecting(a netip.Addr) (out []*policy) {
	own := t.isOwn(a)
	for _, p := range t.policies {
		switch s := p.spec; {
		case s.Nodes != nil:
			if n := t.facts.ThisNode(); own && n != nil && s.Nodes.Matches(n.Labels) {
				out = append(out, p)
			}
		case !own && slices.ContainsFunc(t.facts.PodsAt(a), func(n model.Name) bool {
			return t.facts.OnThisNode(n) && t.selectsPod(s.Pods, t.facts.Pod(n))
		}):
			out = append(out, p)
		}
	}
	return out
}

// addWanted counts the addresses that a rule applies to. The first one computes its peers.
func (t *Tracker) addWanted(r *rule) {
	if r.wanted++; r.wanted > 1 {
		return
	}
	r.peers = map[netip.Addr]int{}
	if r.outgoing() {
		t.markRuleDirty(r) // Services may have changed while it had no peers
	}
	if len(r.pods) == 0 {
		return
	}
	for _, pod := range t.facts.Pods() {
		t.addPeers(r, pod, t.facts.Namespace(pod.Namespace), 1)
	}
}

// addPeers adds 1 or -1 to the addresses of a pod among a rule's peers, if the labels of the
// pod and of its namespace match.
func (t *Tracker) addPeers(r *rule, pod *model.Pod, namespace *model.Namespace, by int) {
	if !r.selectsPeer(pod.Labels, namespaceLabels(pod.Namespace, namespace)) {
		return
	}
	for _, a := range pod.IPs {
		a = a.Unmap()
		installed := t.installed[r.Name] == r
		if r.peers[a] += by; r.peers[a] <= 0 {
			delete(r.peers, a)
			if installed {
				t.members.remove(Member{r.Name, a})
			}
		} else if installed {
			t.members.set(Member{r.Name, a}, true)
		}
		if r.Side == Egress && len(t.nat.at[a])+len(t.pendingRemoval.at[a]) > 0 {
			t.markRuleDirty(r)
		}
	}
}

// retarget replaces the targets of an address by those of these rules.
func (t *Tracker) retarget(a netip.Addr, rules []heldRule) {
	old := t.targetsOf[a]
	var now []Target
	denyRule := false
	for _, s := range segments(rules) {
		v, target := s.verdict(), Target{s.side, a, s.proto, s.first, s.last}
		now = append(now, target)
		anyPeer := slices.ContainsFunc(s.rules, func(r *rule) bool { return r.AnyPeer })
		denyRule = denyRule || v.Deny && !anyPeer
		t.setAllowsAny(target, anyPeer && !v.Track && s.side == Ingress)
		t.use(v, s.rules)
		if was := t.targets.now[target]; was != "" {
			t.release(was)
		}
		t.targets.set(target, v.Name)
	}
	for _, target := range old {
		if !slices.Contains(now, target) {
			t.release(t.targets.now[target])
			t.targets.remove(target)
			t.setAllowsAny(target, false)
		}
	}
	if len(now) > 0 {
		t.targetsOf[a] = now
	} else if delete(t.targetsOf, a); len(t.wantedOf[a]) > 0 {
		t.targetsOf[a] = nil // no target holds now; see countNAT
	}
	if _, was := t.hasDenyRule[a]; was != denyRule {
		t.traversalChanged = true
		if denyRule {
			t.hasDenyRule[a] = struct{}{}
		} else {
			delete(t.hasDenyRule, a)
		}
	}
}

// setAllowsAny records whether any client may reach a target untracked.
func (t *Tracker) setAllowsAny(target Target, is bool) {
	if _, was := t.allowsAny[target]; was == is {
		return
	}
	t.traversalChanged = true
	if is {
		t.allowsAny[target] = struct{}{}
	} else {
		delete(t.allowsAny, target)
	}
}

// use and release count the targets that lead to a verdict and its rules.
func (t *Tracker) use(v *Verdict, rules []*rule) {
	t.used[v.Name]++
	t.verdicts.set(v.Name, v)
	for _, r := range rules {
		t.used["rule "+r.Name]++
		t.install(r)
	}
}

// install replaces the rule of the same name.
func (t *Tracker) install(r *rule) {
	before := t.installed[r.Name]
	if before == r {
		return
	}
	t.installed[r.Name] = r
	t.rules.set(r.Name, &r.Rule)
	if before != nil {
		for a := range before.peers {
			if r.peers[a] == 0 {
				t.members.remove(Member{r.Name, a})
			}
		}
	}
	for a := range r.peers {
		t.members.set(Member{r.Name, a}, true)
	}
}

func (t *Tracker) release(name string) {
	v := t.verdicts.now[name]
	for _, r := range v.Rules {
		if t.used["rule "+r]--; t.used["rule "+r] == 0 {
			delete(t.used, "rule "+r)
			t.rules.remove(r)
			for a := range t.installed[r].peers {
				t.members.remove(Member{r, a})
			}
			delete(t.installed, r)
		}
	}
	if t.used[name]--; t.used[name] == 0 {
		delete(t.used, name)
		t.verdicts.remove(name)
	}
}

// collectRefusals merges refusals that several addresses have in common. The result is
// never nil.
func (t *Tracker) collectRefusals() []Refusal {
	all := []Refusal{}
	for _, rs := range t.refusedOf {
		all = append(all, rs...)
	}
	slices.SortFunc(all, func(a, b Refusal) int {
		return cmp.Or(cmp.Compare(a.Policy, b.Policy), cmp.Compare(a.Field, b.Field), cmp.Compare(a.Reason, b.Reason),
			cmp.Compare(a.Message, b.Message))
	})
	out, more := all[:0], 0
	for i, r := range all {
		if n := len(out); n > 0 && out[n-1].Policy == r.Policy && out[n-1].Field == r.Field && out[n-1].Reason == r.Reason {
			more++
		} else {
			if p := t.policies[r.Policy]; p != nil {
				r.Version = p.spec.Version
			}
			out = append(out, r)
		}
		last := i+1 == len(all) || all[i+1].Policy != r.Policy || all[i+1].Field != r.Field || all[i+1].Reason != r.Reason
		if last && more > 0 {
			out[len(out)-1].Message += fmt.Sprintf(" (and %d more addresses)", more)
			more = 0
		}
	}
	return slices.Clone(out)
}
