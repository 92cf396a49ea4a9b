package model

// Empty reports whether the Delta contains no change. A Full one is never empty: without
// objects it states that there are none.
func (d Delta) Empty() bool {
	return !d.Full && d.NetworkPoliciesUnknown == nil && d.Unread == nil && len(d.Services) == 0 && len(d.Slices) == 0 && len(d.Nodes) == 0 &&
		len(d.Pods) == 0 && len(d.NetworkPolicies) == 0 &&
		len(d.Namespaces) == 0 && len(d.DoNotTrackPolicies) == 0
}
