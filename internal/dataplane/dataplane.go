// Package dataplane defines what a dataplane is. Its sub-packages implement Backend and
// never import each other:
//
//	ebpf       maps that the programs of bpf/ read
//	  objects      loads programs and maps: imported by the other parts, imports none
//	  objectstest  what tests of several parts need: maps without programs
//	  services     writes the maps of Services, and checks them
//	  flows        sweeps, counts and reports flows, and ends sockets
//	  node         writes settings, source ports, pods, addresses and ranges
//	  donottrack   writes the maps of do-not-track policies
//	  inspect      shows what is in the kernel, and writes nothing
//	  upgrade      takes over from other runs, and leaves to them: layouts, migration, drain, cleanup
//	  dsr          probes the ways of DSR replies
//	  attach       attaches the programs, and finds pods behind interfaces
//	  wire         headers of packets that the agent builds
//	  dsrprobe     finds out what the network between the nodes forwards
//	nftables   a table with maps, and the table of do-not-track policies
//	iptables   chains, for iptables-nft and iptables-legacy
package dataplane

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"spillway.dev/spillway/internal/decisions/intent"
)

// Backend writes intent into the kernel. One goroutine at a time calls its methods. After
// a failed call the kernel serves each Service port as before or as requested, never a
// broken one. The caller can repeat the call.
type Backend interface {
	// Name is the --proxy-mode that selects this backend.
	Name() string

	// CanCarry returns nil if the backend can serve the port, else an error that
	// names what it lacks ("the eBPF programs do not serve SCTP ...").
	CanCarry(*intent.ServicePort) error

	// Apply writes changes on top of the state that earlier calls wrote. Its cost
	// follows the changes, not the size of the state. If single ports or the Node fail, Apply
	// returns a *PortErrors and writes everything else, deletions first.
	Apply(context.Context, intent.Changes) error

	// Replace makes the kernel hold exactly this state, whatever it held before. It
	// does not touch correct objects, so that running flows continue. A state without
	// ports leaves nothing that a packet traverses: a second dataplane costs nothing
	// while no port needs it.
	Replace(context.Context, intent.State) error

	// Close releases the backend's own resources. The kernel keeps serving what
	// was applied.
	Close() error

	Watcher
}

// Partial is a Backend to which a large change comes in several calls of Apply, so that it
// does not hold up others. Ports that exchange an address come in the same call.
type Partial interface {
	Backend

	// PartEndpoints is the number of endpoints that one call should write at most.
	PartEndpoints() int
}

// PortErrors is an error of single Service ports, or of the Node; the backend applied all
// others.
type PortErrors struct {
	Errors map[intent.PortID]error
	Node   error // nil: the Node was written
}

// PortErrorsOf returns a *PortErrors, or nil if no port failed.
func PortErrorsOf(failed map[intent.PortID]error) error { return NodeErrorOf(nil, failed) }

// NodeErrorOf returns a *PortErrors, or nil if neither the Node nor a port failed.
func NodeErrorOf(node error, failed map[intent.PortID]error) error {
	if len(failed) == 0 && node == nil {
		return nil
	}
	return &PortErrors{Errors: failed, Node: node}
}

// Error names the Node's error or one failed port, and counts the other ports.
func (e *PortErrors) Error() string {
	if e.Node != nil && len(e.Errors) == 0 {
		return e.Node.Error()
	}
	if e.Node != nil {
		return fmt.Sprintf("%v (and %d ports)", e.Node, len(e.Errors))
	}
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

// Unwrap returns the single errors, for errors.Is and errors.As.
func (e *PortErrors) Unwrap() []error {
	all := slices.Collect(maps.Values(e.Errors))
	if e.Node != nil {
		all = append(all, e.Node)
	}
	return all
}
