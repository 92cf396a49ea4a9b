package model

import "slices"

// Matches reports whether the labels match, as the Kubernetes API defines it: every part
// must match, and a selector without parts matches everything.
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

// Parts counts the labels and values that Matches may compare.
func (s Selector) Parts() int {
	n := len(s.MatchLabels) + len(s.Expressions)
	for i := range s.Expressions {
		n += len(s.Expressions[i].Values)
	}
	return n
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
	// An unknown operator may select the object. For a NetworkPolicy it is always safe to
	// assume so; sources reject it in other objects.
	return true
}
