// Package dataplane defines what a dataplane is. Its sub-packages ebpf,
// nftables and iptables each implement Backend and never import each other.
package dataplane

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"spillway.dev/spillway/internal/decisions/intent"
)

// Backend writes intent into the kernel. Its methods are called by one
// goroutine at a time. A failed call leaves the kernel serving what it served
// before, or a mixture of before and after per Service port, never a broken
// Service port; it can be repeated.
type Backend interface {
	// Name is the --proxy-mode that selects this backend.
	Name() string

	// CanCarry returns nil when the backend can serve the port as asked, else
	// an error that says what it lacks ("SCTP: the eBPF dataplane ...").
	CanCarry(*intent.ServicePort) error

	// Apply brings the kernel from the state that earlier calls left to that
	// state with the changes made. Its cost follows the changes, not the size
	// of the state. Ports that could not be written are in a *PortErrors; all
	// others are served.
	Apply(context.Context, intent.Changes) error

	// Replace makes the kernel hold exactly this state, whatever it held
	// before: what is right is left alone, so that no running flow notices. A
	// state without ports leaves nothing that a packet would meet: a dataplane
	// that only helps out must not cost anything while it is not needed.
	Replace(context.Context, intent.State) error

	// Close releases the backend's own resources. The kernel keeps serving what
	// was applied.
	Close() error

	Watcher
}

// PortErrors is an error that concerns single Service ports; the others were
// applied.
type PortErrors struct {
	Errors map[intent.PortID]error
}

// Error names one failed port and counts the rest.
func (e *PortErrors) Error() string {
	ids := slices.SortedFunc(maps.Keys(e.Errors), intent.PortID.Compare)
	if len(ids) == 0 {
		return "no port failed"
	}
	first := fmt.Sprintf("serve %s: %v", ids[0], e.Errors[ids[0]])
	if len(ids) == 1 {
		return first
	}
	return fmt.Sprintf("%s (and %d more ports)", first, len(ids)-1)
}

// Unwrap gives the single errors to errors.Is and errors.As.
func (e *PortErrors) Unwrap() []error {
	return slices.Collect(maps.Values(e.Errors))
}
