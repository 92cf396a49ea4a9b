package dataplane

import (
	"context"

	"spillway.dev/spillway/internal/policy"
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

	// Holds reports whether the kernel has policies, of whichever agent.
	Holds(context.Context) (bool, error)

	// Close lets go of resources; what was applied stays.
	Close() error

	Watcher
}
