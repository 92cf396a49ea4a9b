package intent

import "spillway.dev/spillway/internal/facts/model"

// policySet holds the NetworkPolicies of one namespace that police anything.
type policySet map[model.Name]*model.NetworkPolicy

// hasRules reports whether a policy is about any traffic at all. The direction
// does not matter further: a bypass of netfilter would hide both from whoever
// enforces the policy.
func hasRules(p *model.NetworkPolicy) bool {
	return p != nil && (p.Ingress || p.Egress)
}

// selects reports whether any policy of the set selects a pod so labelled.
func (s policySet) selects(labels map[string]string) bool {
	for _, p := range s {
		if p.Selector.Matches(labels) {
			return true
		}
	}
	return false
}

// selectsUnknown answers for a pod whose labels are not known. An empty
// selector selects it, any other may: safety first, it counts as selected.
func (s policySet) selectsUnknown() bool { return len(s) > 0 }
