package intent

import (
	"slices"

	"spillway.dev/spillway/internal/model"
)

// policySet holds the NetworkPolicies of one namespace that police anything.
type policySet map[model.Name]*model.NetworkPolicy

// polices reports whether a policy is about any traffic at all. The direction
// does not matter further: a bypass of netfilter would hide both from whoever
// enforces the policy.
func polices(p *model.NetworkPolicy) bool {
	return p != nil && (p.Ingress || p.Egress)
}

// selects reports whether any policy of the set selects a pod so labelled.
func (s policySet) selects(labels map[string]string) bool {
	for _, p := range s {
		if selectorMatches(p.Selector, labels) {
			return true
		}
	}
	return false
}

// selectsUnknown answers for a pod whose labels are not known. An empty
// selector selects it, any other may: safety first, it counts as selected.
func (s policySet) selectsUnknown() bool { return len(s) > 0 }

// selectorMatches is the label selector of the Kubernetes API: every part must
// hold, and a selector without parts matches everything.
func selectorMatches(s model.Selector, labels map[string]string) bool {
	for key, want := range s.MatchLabels {
		if have, ok := labels[key]; !ok || have != want {
			return false
		}
	}
	for _, r := range s.Expressions {
		if !requirementHolds(r, labels) {
			return false
		}
	}
	return true
}

func requirementHolds(r model.Requirement, labels map[string]string) bool {
	value, present := labels[r.Key]
	switch r.Operator {
	case "In":
		return present && slices.Contains(r.Values, value)
	case "NotIn":
		return !present || !slices.Contains(r.Values, value)
	case "Exists":
		return present
	case "DoesNotExist":
		return !present
	}
	// An operator that this version does not know may select the pod, and
	// going through the stack is always right.
	return true
}
