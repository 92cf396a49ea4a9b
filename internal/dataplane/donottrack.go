package dataplane

import (
	"context"

	"spillway.dev/spillway/internal/decisions/donottrack"
)

// DoNotTrack writes do-not-track policies into the kernel, beside the Backend that serves
// Services. One goroutine at a time calls its methods. A failed call leaves the kernel
// unchanged; the caller repeats it as Replace.
type DoNotTrack interface {
	// Apply writes changes. Its cost follows the changes.
	Apply(context.Context, donottrack.Changes) error

	// Replace makes the kernel hold exactly this state, whatever it held before. A
	// state without targets leaves nothing that a packet traverses.
	Replace(context.Context, donottrack.State) error

	// Repair does what Replace does, for a state that the last successful call has
	// written. It is cheap while no other program has written to the kernel's tables.
	Repair(context.Context, donottrack.State) error

	// HasPolicies reports whether the kernel has policies of any agent.
	HasPolicies(context.Context) (bool, error)

	// Close releases resources; the kernel keeps what was applied.
	Close() error

	Watcher
}

// DenialCounter is a DoNotTrack that counts the packets that its policies deny. Any goroutine may call
// its method.
type DenialCounter interface {
	// Denials returns the packets that each policy has denied, by its name. The counts of a
	// policy grow until it is deleted, and may start with those of an earlier instance.
	Denials(context.Context) (map[string]uint64, error)
}

// Bypass is a Backend whose packets can bypass netfilter where a policy allows them
// untracked. It denies nothing: a packet that may not bypass netfilter goes through the
// stack. One goroutine at a time calls its methods, around each write of DoNotTrack.
type Bypass interface {
	// Revoke stops the bypass for packets that State does not allow. The caller calls
	// it before it writes the same changes to DoNotTrack. Without changes the earlier
	// state is unknown.
	Revoke(donottrack.State, *donottrack.Changes) error

	// Grant starts the bypass for packets that State allows. The caller calls it after
	// it has written DoNotTrack.
	Grant(donottrack.State, *donottrack.Changes) error

	// Serves reports whether an earlier instance already served Services when this
	// Backend was opened. If not, netfilter may still translate for them.
	Serves() bool
}
