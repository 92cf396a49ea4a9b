package model

import "slices"

// Matches is the label selector of the Kubernetes API: every part must hold, and
// a selector without parts matches everything.
func (s Selector) Matches(labels map[string]string) bool {
	for key, want := range s.MatchLabels {
		if have, ok := labels[key]; !ok || have != want {
			return false
		}
	}
	for _, r := range s.Expressions {
		if !r.holds(labels) {
			return false
		}
	}
	return true
}

// Everything reports whether the selector has no part, and so matches everything.
func (s Selector) Everything() bool { return len(s.MatchLabels) == 0 && len(s.Expressions) == 0 }

func (r Requirement) holds(labels map[string]string) bool {
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
	// An operator that this version does not know may select the object, and for a
	// NetworkPolicy to take it so is always right. Other sources refuse it.
	return true
}
