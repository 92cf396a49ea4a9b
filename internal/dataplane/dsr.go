package dataplane

import (
	"net/netip"
	"time"
)

// DSRReporter is a Backend with endpoints that answer clients of other nodes directly (direct
// server return). Any goroutine may call its methods.
type DSRReporter interface {
	// DSRCounts returns the connections that this node has forwarded with the client's
	// address, and those of them whose client repeated its SYN, since the programs were loaded.
	DSRCounts() (announced, unanswered uint64)
	// DSREncapsulations returns the addresses of all endpoints on other nodes, sorted; none if there
	// are no probes.
	DSREncapsulations() []DSREncapsulation
	// DSRReplies describes the endpoints. Its cost follows the number of Service ports.
	DSRReplies() (DSRReplies, error)
}

// DSRReplies are the endpoints with DSR, as a node knows them.
type DSRReplies struct {
	// Paths are the endpoints on other nodes that this node has forwarded connections to with
	// the client's address.
	Paths []DSRPath
	// ThroughStack are the Pods of this node that other nodes forward such connections to, and
	// whose packets traverse the node's stack.
	ThroughStack []netip.AddrPort
}

// How packets tell the node of an endpoint which Service they are for, by what probes of the network
// between the nodes say.
const (
	EncapsulationUnknown = "unknown" // no probe is over yet
	EncapsulationOption  = "option"  // an IP option of the first packet
	EncapsulationGUE     = "gue"     // each packet travels within a datagram
	EncapsulationNone    = "none"    // neither arrives: new connections get this node's address
)

// Encapsulations are all of them.
var Encapsulations = []string{EncapsulationUnknown, EncapsulationOption, EncapsulationGUE, EncapsulationNone}

// DSREncapsulation is the way to an endpoint on another node.
type DSREncapsulation struct {
	Endpoint      netip.Addr
	Encapsulation string
	MTU           int // EncapsulationGUE: the longest packet that arrives, with all headers, in bytes; otherwise 0
}

// DSRPath is what a node knows about the replies of an endpoint on another node.
type DSRPath struct {
	Endpoint netip.AddrPort
	Failures uint32    // repeated SYNs since the last reply
	Failed   time.Time // the last repeated SYN; zero: none
	Answered time.Time // the last reply that a client has acknowledged; zero: none
	// Broken says that several clients in a row got no reply. Then clients' packets get the
	// node's address, unless Trusted: after a while the node tries again.
	Broken, Trusted bool
}
