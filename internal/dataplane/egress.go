package dataplane

import (
	"net/netip"

	"spillway.dev/spillway/internal/facts/model"
)

// EgressReporter is a Backend that keeps pods' connections to the outside in a table of its own.
type EgressReporter interface {
	// EgressUse returns the use of the node's ports, as at the last look at the table; nil if egress is off.
	EgressUse() (*EgressUse, error)
}

// EgressUse is the use of the node's ports by pods' connections to the outside.
type EgressUse struct {
	Connections uint64 // open ones of all protocols, UDP flows and pings included
	Refused     uint64 // packets dropped for want of a port, since the programs were loaded
	// Bypasses says that new connections bypass netfilter: --bypass may leave them to it. Devices are those
	// to other machines, by which they may leave.
	Bypasses bool
	Devices  []string
	// Ports is how many connections of one protocol, from one address of the node, one destination can
	// have.
	Ports int
	// Busiest are the destinations with the most connections, the most first.
	Busiest []EgressDestination
}

// EgressDestination counts the connections to a destination. Each has a port of the source address.
type EgressDestination struct {
	Protocol    model.Protocol
	Source      netip.Addr // the node's
	Destination netip.AddrPort
	Connections int
	Pods        []EgressPod // with the most connections to it, the most first
}

// EgressPod counts the connections of a pod to a destination.
type EgressPod struct {
	Addr        netip.Addr
	Connections int
}
