package dataplane

import (
	"context"

	"spillway.dev/spillway/internal/decisions/policy"
)

// Policies writes do-not-track policies into the kernel, beside whichever Backend
// serves Services. Its methods are called by one goroutine at a time; a call that
// fails leaves the kernel as it was, and can be repeated as Replace.
type Policies interface {
	// Apply makes changes. Its cost follows them.
	Apply(context.Context, policy.Changes) error

	// Replace makes the kernel hold exactly this state, whatever it held before.
	// Of a state without targets nothing is left that a packet would meet.
	Replace(context.Context, policy.State) error

	// HasPolicies reports whether the kernel has policies, of whichever agent.
	HasPolicies(context.Context) (bool, error)

	// Close lets go of resources; what was applied stays.
	Close() error

	Watcher
}

// Bypass is a Backend that can pass packets by netfilter which policies allow and leave
// untracked, so that nobody need look at them there. It denies nothing. Its methods are
// called by one goroutine at a time, around each write of Policies; what is allowed
// but not passed goes through the stack.
type Bypass interface {
	// Revoke has nothing pass that State does not allow. It comes before Policies is
	// written, with the same changes; nil: State may be anything.
	Revoke(policy.State, *policy.Changes) error

	// Grant has pass what State allows. It comes when Policies is written.
	Grant(policy.State, *policy.Changes) error

	// Serves reports whether Services were served already when this Backend was opened,
	// by what an earlier one left. If not, netfilter may translate for them.
	Serves() bool
}
