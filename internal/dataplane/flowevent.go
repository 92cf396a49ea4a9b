package dataplane

import (
	"context"
	"net/netip"
	"time"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/decisions/outlier"
	"spillway.dev/spillway/internal/facts/model"
)

// FlowReporter is a Backend that reports what happens to flows and packets of Services.
type FlowReporter interface {
	// ReportFlows calls report with the events in the order in which they happened, until
	// ctx ends. It returns an error if the kernel's events cannot be read.
	ReportFlows(ctx context.Context, report func([]FlowEvent)) error

	// CatchUp waits until ReportFlows has reported what happened before the call: half a second, as a
	// rule. It also returns when ctx ends.
	CatchUp(ctx context.Context)

	// FlowEventCounts returns the numbers of events since the programs were loaded first.
	FlowEventCounts() FlowEventCounts
}

// FlowSwitch is a FlowReporter that reports flows on demand.
type FlowSwitch interface {
	// SwitchFlows has the kernel report the flows of these Service ports, until the next call. An
	// error leaves it open which flows are reported: call it again.
	SwitchFlows(FlowSelection) error
}

// FlowSelection selects Service ports, also those that come later. The zero value selects none.
type FlowSelection struct {
	All  bool
	Some func(intent.PortID) bool // without All; it must be quick
}

// FlowEventCounts has numbers of events.
type FlowEventCounts struct {
	// Received is by kind, without the kinds that have none.
	Received map[FlowEventKind]uint64
	Lost     uint64 // the kernel had no room for them
	LeftOut  uint64 // flows and refusals beyond the sample or the rate
}

// FlowEventKind is what happened.
type FlowEventKind uint8

// The kinds of events, with the numbers of api/proto/spillway/node/v1alpha1/node.proto.
const (
	FlowOpened   FlowEventKind = 1
	FlowAnswered FlowEventKind = 2
	FlowClosed   FlowEventKind = 3
	FlowRefused  FlowEventKind = 4
	FlowDropped  FlowEventKind = 5
)

// FlowEventKinds are all kinds.
var FlowEventKinds = []FlowEventKind{FlowOpened, FlowAnswered, FlowClosed, FlowRefused, FlowDropped}

// String returns the kind in lower case.
func (k FlowEventKind) String() string {
	switch k {
	case FlowOpened:
		return "opened"
	case FlowAnswered:
		return "answered"
	case FlowClosed:
		return "closed"
	case FlowRefused:
		return "refused"
	case FlowDropped:
		return "dropped"
	}
	return "unknown"
}

// Reasons why a flow was closed. The reason of a refusal or a drop is a verdict.
const (
	EndFIN          = "FIN"
	EndRST          = "RST"
	EndTimeout      = "timeout"
	EndEvicted      = "evicted"       // a newer flow took its place in the table
	EndEndpointGone = "endpoint gone" // UDP: the next packet did not go to this endpoint
	EndSocketClosed = "socket closed" // UDP: the process closed its socket, or connected it anew
)

// FlowEvent is an event of a flow, or of a packet that was refused or dropped.
type FlowEvent struct {
	Kind   FlowEventKind
	Time   time.Time
	Reason string // of FlowClosed, FlowRefused and FlowDropped
	Flow   EventFlow
}

// EventFlow is the flow of an event, as far as it is known then.
type EventFlow struct {
	Port           intent.PortID // zero: unknown
	Protocol       model.Protocol
	Client         netip.AddrPort // invalid: unknown
	ServiceAddress netip.AddrPort
	Endpoint       netip.AddrPort // invalid: none was chosen
	BySocket       bool           // the socket hooks chose the endpoint
	Cgroup         uint64         // id of that of the process, of a refused call with BySocket; 0: unknown
	Opened         time.Time      // zero: unknown
	LastSeen       time.Time
	Handshake      time.Duration // from the first packet to the answer; 0: unknown
	SmoothedRTT    time.Duration // 0: unknown
	// Numbers of packets and bytes, with IP headers; 0: not counted. With BySocket, bytes are
	// TCP's data, and a FIN counts as one byte.
	PacketsToEndpoint, PacketsToClient uint64
	BytesToEndpoint, BytesToClient     uint64
}

// ServiceCounter is a Backend that counts by Service port.
type ServiceCounter interface {
	// ServiceCounters returns the counters of the ports that had a connection or a refusal.
	// It returns nil if they are not counted.
	ServiceCounters() (map[intent.PortID]*ServiceCounters, error)

	// ServiceCountersOf is ServiceCounters for these ports only. Its cost follows their
	// number, and that of refusals.
	ServiceCountersOf(ports []intent.PortID) (map[intent.PortID]*ServiceCounters, error)
}

// HandshakeWatcher is a Backend that counts which TCP handshakes fail.
type HandshakeWatcher interface {
	// Outcomes returns the outcomes of the watched endpoints (intent.Endpoint) that had a
	// connection.
	Outcomes() ([]outlier.Outcome, error)
}

// SocketWatcher is a Backend that counts the failed handshakes of the node's sockets that connect
// to an endpoint directly: those of its Pods and of its own processes.
type SocketWatcher interface {
	// FailedSockets returns the endpoints that accepted no handshake after the failed ones.
	FailedSockets() ([]FailedSockets, error)
}

// FailedSockets are failed TCP handshakes with an endpoint.
type FailedSockets struct {
	Port     intent.PortID
	Endpoint netip.AddrPort
	// Refused handshakes were answered with an RST, each less than 10 s after the one before.
	// Unanswered ones waited for half a second or longer, each within 30 s of the one before.
	Refused, Unanswered Failures
	Accepted            time.Time  // the last connection since the first failure; zero: none
	Client              netip.Addr // of the last failure
}

// Last returns the time of the last failure.
func (f *FailedSockets) Last() time.Time {
	if f.Refused.Last.After(f.Unanswered.Last) {
		return f.Refused.Last
	}
	return f.Unanswered.Last
}

// Failures are failures in a row.
type Failures struct {
	Connections, Segments uint32 // a connection repeats its first segment
	First, Last           time.Time
}

// Add adds the failures of another port.
func (f *Failures) Add(o Failures) {
	if o.Segments == 0 {
		return
	}
	if f.Segments == 0 || o.First.Before(f.First) {
		f.First = o.First
	}
	if o.Last.After(f.Last) {
		f.Last = o.Last
	}
	f.Connections, f.Segments = f.Connections+o.Connections, f.Segments+o.Segments
}

// handshakeBuckets is the number of buckets of ServiceCounters.Handshakes.
const handshakeBuckets = 16

// ServiceCounters count since the port was first used.
type ServiceCounters struct {
	Connections uint64
	Active      uint64 // flows at the last sweep
	// Refused and Dropped are by verdict.
	Refused, Dropped                   map[string]uint64
	BytesToEndpoint, BytesToClient     uint64
	PacketsToEndpoint, PacketsToClient uint64
	// Handshakes has, at i, the handshakes of less than 2^i ms that no earlier bucket has.
	// The last bucket has all longer ones.
	Handshakes   [handshakeBuckets]uint64
	HandshakeSum time.Duration
	// ConnectionsOnly says that packets and bytes are not counted: their numbers are 0.
	ConnectionsOnly bool
}

// Add adds the counters of another port. Refused and Dropped must not be nil.
func (c *ServiceCounters) Add(o *ServiceCounters) {
	c.Connections += o.Connections
	c.Active += o.Active
	for reason, n := range o.Refused {
		c.Refused[reason] += n
	}
	for reason, n := range o.Dropped {
		c.Dropped[reason] += n
	}
	c.BytesToEndpoint += o.BytesToEndpoint
	c.BytesToClient += o.BytesToClient
	c.PacketsToEndpoint += o.PacketsToEndpoint
	c.PacketsToClient += o.PacketsToClient
	for i, n := range o.Handshakes {
		c.Handshakes[i] += n
	}
	c.HandshakeSum += o.HandshakeSum
	c.ConnectionsOnly = c.ConnectionsOnly || o.ConnectionsOnly
}
