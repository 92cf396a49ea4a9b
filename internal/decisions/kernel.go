package decisions

// Kernel is what the kernel holds, as far as decisions depend on it: their second input, beside
// the facts. internal/reconcile knows it from its writes.
type Kernel struct {
	// Services says whether the kernel holds the Services of Tracker.State.
	Services ServicesHeld
	// DenyRulesUnknown says that the kernel may hold deny rules of policies that an earlier
	// agent wrote and this one could not read. Any pod may then have one.
	DenyRulesUnknown bool
}

// ServicesHeld says whether the kernel holds the desired Services. Netfilter may translate
// for others until then, and policies wait for that.
type ServicesHeld uint8

// The values of ServicesHeld.
const (
	ServicesPending ServicesHeld = iota // not all are written yet
	ServicesForeign                     // no agent has written any: another program may serve them
	ServicesFailing                     // a write fails, so this may last
	ServicesWritten                     // all are written
)

// SetKernel sets what the kernel holds, and returns what that changes.
func (t *Tracker) SetKernel(k Kernel) Changes {
	changed := k.DenyRulesUnknown != t.traversal.Unknown
	if changed {
		t.traversal.Unknown = k.DenyRulesUnknown
		t.services.SetTraversal(t.traversal)
	}
	switch k.Services {
	case ServicesForeign:
		t.policies.StartTakeover()
	case ServicesFailing:
		return t.changes(t.policies.ReportRefusals())
	case ServicesWritten:
		return t.changes(t.policies.ServicesWritten())
	}
	if !changed {
		return Changes{}
	}
	return t.servicesChanged()
}
