package doctor

import (
	"fmt"
	"net/netip"
	"time"

	"spillway.dev/spillway/internal/page"
)

// Traffic is what an agent knows about recent packets, most of it with the eBPF dataplane.
// Everything in it has happened within a short time before: an old counter is no finding.
type Traffic struct {
	// Unanswered and Refusing are endpoints that answered none of their recent connections,
	// or each with an RST; those with the most connections first.
	Unanswered, Refusing []FailingEndpoint
	// Refusals are refused and dropped packets by Service port and reason, the most first.
	Refusals []Refusal
	// Denials are packets that policies denied, by policy in the order of their names. All
	// dataplanes have them.
	Denials []Denial
	// Taken are ports that a Service has and a process of the node listens on.
	Taken  []TakenPort
	DSR    DSRReplies
	Flows  Table // the flow table; zero: unknown
	Egress EgressPorts
	Bypass EgressBypass
}

// EgressBypass says which packets of pods to the outside bypass netfilter. Without Sources there are none.
type EgressBypass struct {
	Sources, Keeps []netip.Prefix // ranges of pods, and destinations whose packets do not
	Devices        []string       // to other machines, by which they may leave
}

// EgressPorts is the use of the node's ports by pods' connections to the outside, with eBPF.
type EgressPorts struct {
	Refused uint64        // packets dropped within Window, for want of a port
	Window  time.Duration // zero: none was
	// Ports is how many connections one destination can have, from one address and by one protocol.
	Ports int
	// Busiest are the destinations with the most connections, the most first.
	Busiest []EgressDestination
}

// EgressDestination counts the connections of pods to a destination outside.
type EgressDestination struct {
	Protocol    string // "TCP", "UDP" or "ICMP"
	Source      netip.Addr
	Destination netip.AddrPort
	Connections int
	Pods        []string // "120 of pod shop/cart", those with the most first
}

// to returns the destination as people read it. A ping has no port there.
func (d *EgressDestination) to() string {
	if d.Destination.Port() == 0 {
		return d.Destination.Addr().String()
	}
	return d.Destination.String()
}

// DSRReplies is what an agent knows about endpoints that answer clients of another node
// directly (direct server return).
type DSRReplies struct {
	// Broken are endpoints on other nodes whose last clients got no direct reply, within the
	// last minutes. There are MoreBroken of them. Working counts those whose clients got one.
	Broken              []DSREndpoint
	MoreBroken, Working int
	// Announced are connections that this node forwarded with the client's address within
	// Window, and Unanswered those whose client repeated its SYN.
	Announced, Unanswered uint64
	Window                time.Duration
	// Probed are the endpoints on other nodes that this node has probed. Packets to those of
	// Encapsulated travel within datagrams, of at most MTU bytes to each. Those of Unreached answer no
	// probe.
	Probed                  int
	Encapsulated, Unreached SomeAddresses
	MTU                     int
	// ThroughStack are Pods of this node whose DSR packets traverse the node's stack.
	ThroughStack []DSREndpoint
}

// DSREndpoint is an endpoint that answers clients directly.
type DSREndpoint struct {
	Endpoint  netip.AddrPort
	Pod, Node string        // "": unknown
	Service   string        // namespace/name:port of one that has it; "": unknown
	Failures  int           // repeated SYNs since the last reply
	Failed    time.Duration // since the last of them
	Answered  time.Duration // since the last reply; 0: there was none
}

// name names the endpoint and its node for people.
func (e *DSREndpoint) name() string {
	text := e.Endpoint.String()
	if e.Pod != "" {
		text = "pod " + e.Pod + " (" + text + ")"
	}
	if e.Node != "" {
		text += " on node " + e.Node
	}
	return text
}

// FailingEndpoint is an endpoint that accepts no connection.
type FailingEndpoint struct {
	Service  string // namespace/name:port
	Protocol string // "TCP"
	Endpoint string // address:port
	Pod      string // namespace/name; "": unknown
	Node     string // of the pod; "": unknown
	Flows    int    // recent connections that failed
	Window   time.Duration
	Longest  time.Duration  // since the first of them began
	Latest   time.Duration  // since the last of them began
	Clients  map[string]int // connections by client, without those of Sockets
	// Sockets are those of this node's sockets, which connect to the endpoint directly, and Socket is
	// the client of the last of them: "pod shop/cart (10.1.2.3)"; "": there are none.
	Sockets int
	Socket  string
}

// Refusal counts packets that were refused or dropped for one reason.
type Refusal struct {
	Reason   string         // the verdict: "drop_source_range"
	Service  string         // namespace/name:port
	Address  netip.AddrPort // that the last client asked
	Protocol string
	Endpoint string // of the last packet; "": unknown
	Packets  int    // the agent may know fewer than there were
	Window   time.Duration
	Ago      time.Duration  // since the last packet
	Clients  map[string]int // packets by client
	Client   string         // of the last packet
	Allowed  []string       // source ranges of the Service
	Cause    string         // of ReasonNoEndpoint: "its selector matches no ready Pod"
}

// Denial counts packets that a DoNotTrackPolicy with deny: others dropped.
type Denial struct {
	Policy  string
	Packets uint64
	Window  time.Duration // in which they were counted
}

// TakenPort is a port at the node's addresses.
type TakenPort struct {
	Service  string // "Service ns/name" or "the hostPort of Pod ns/name"
	Protocol string // "TCP"
	Port     uint16
}

// Table is a table of the kernel with a limit, in entries.
type Table struct{ Used, Size int }

// Reasons of Refusals that checks use: verdicts of the eBPF programs.
const (
	ReasonSourceRange = "drop_source_range"
	ReasonSNATPorts   = "drop_snat_ports"
	// ReasonNoEndpoint is that of a TCP packet. An agent writes it for those of datagrams and of
	// sockets, too: ReasonNoEndpointUDP and ReasonSocketRefused.
	ReasonNoEndpoint    = "rejected_rst"
	ReasonNoEndpointUDP = "rejected_icmp"
	ReasonSocketRefused = "socket_refused"
	// ReasonSocketTimedOut is that of a socket of this node which a source range or a Local
	// policy excludes; an agent writes ReasonSourceRange for the former.
	ReasonSocketTimedOut = "socket_timed_out"
)

// refusals returns the refusals for one reason.
func (n *Node) refusals(reason string) (list []Refusal) {
	if n.Traffic == nil {
		return nil
	}
	for _, r := range n.Traffic.Refusals {
		if r.Reason == reason {
			list = append(list, r)
		}
	}
	return list
}

// packets says how many packets of which clients.
func (r *Refusal) packets() string {
	return fmt.Sprintf("at least %s in the last %.0f s, the last of them %.0f s ago, from %s",
		page.Counted(r.Packets, "packet"), r.Window.Seconds(), r.Ago.Seconds(), mostClients(r.Clients))
}
