package intent

import "spillway.dev/spillway/internal/facts/model"

// policySet holds the NetworkPolicies of one namespace that restrict any traffic.
type policySet map[model.Name]*model.NetworkPolicy

// hasRules reports whether a policy restricts any traffic. The direction makes no
// difference: a bypass of netfilter would hide both from the program that enforces the
// policy.
func hasRules(p *model.NetworkPolicy) bool {
	return p != nil && (p.Ingress || p.Egress)
}

// selects reports whether any policy of the set selects a pod with these labels.
func (s policySet) selects(labels map[string]string) bool {
	for _, p := range s {
		if p.Selector.Matches(labels) {
			return true
		}
	}
	return false
}

// selectsUnknown reports whether a policy may select a pod whose labels are not known. Any
// selector may, so any policy counts.
func (s policySet) selectsUnknown() bool { return len(s) > 0 }
