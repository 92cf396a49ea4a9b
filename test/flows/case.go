package flows

import "time"

// Case is one statement about Service traffic: objects, and flows that must
// come out as said while the objects are loaded. Every case has addresses and
// ports of its own, so that all cases are loaded at once.
type Case struct {
	Name    string // reads as a sentence
	Objects []Object
	Flows   []Flow
	// Then changes objects and asks again, step by step.
	Then []Step
	// Everywhere runs the case again on the VXLAN cluster.
	Everywhere bool
	// Rules are nftables rules for the forward chain of a node, by node, that
	// are there while the case runs. ${a0} stands for an IPv4 address.
	Rules map[string][]string
	// Modes are the dataplanes that the case is about; nil is all of them.
	Modes []string
	// FilesOnly says why an API server does not take the objects; "" if it does.
	FilesOnly string
}

// Step is a later state of a case: its Objects replace all earlier ones; nil
// leaves them as they are.
type Step struct {
	Name    string
	Objects []Object
	Wait    time.Duration // a pause before the flows, for a timeout to expire
	Flows   []Flow
}

// Flow is one question and what must come of it. It is asked once for each
// Combo that the Service has, unless Only says otherwise.
type Flow struct {
	From string // a short name, see the package comment
	To   Target
	Only []Combo
	Want Want

	Unconnected bool // UDP: sendto without connect
	SameSocket  bool // UDP: all tries through one socket
	Mapped      bool // IPv4 through an AF_INET6 socket
	// Keep names a socket that stays open: flows of a case with the same Keep
	// and From share it, also over steps.
	Keep      string
	LocalPort int // the client's port; 0 leaves it to the kernel
	Tries     int // 0: once, or as often as Want needs
	// NoVM leaves out the second run from a pod whose sockets no hook sees.
	NoVM bool
}

// Combo is a protocol and an address family.
type Combo string

// The combinations that a flow is asked for.
const (
	TCP4 Combo = "tcp4"
	TCP6 Combo = "tcp6"
	UDP4 Combo = "udp4"
	UDP6 Combo = "udp6"
)

// AllCombos is what a flow is asked for unless it says otherwise.
var AllCombos = []Combo{TCP4, TCP6, UDP4, UDP6}

// The combinations by family and by protocol.
var (
	V4  = []Combo{TCP4, UDP4}
	V6  = []Combo{TCP6, UDP6}
	TCP = []Combo{TCP4, TCP6}
	UDP = []Combo{UDP4, UDP6}
)

// IPv6 tells whether the combination is of the newer family.
func (c Combo) IPv6() bool { return c == TCP6 || c == UDP6 }

// Protocol is "tcp" or "udp".
func (c Combo) Protocol() string { return string(c)[:3] }

// Kind is what must come of a flow.
type Kind int

// The kinds of outcome.
const (
	Answered  Kind = iota
	Rejected       // at once: RST, ICMP port unreachable
	Dropped        // silence
	NotServed      // anything but an answer: no proxy feels responsible
)

// Source says whose address the answering server sees.
type Source int

// The sources that a flow can ask for.
const (
	// AnySource is the client's address or that of a node: masquerading is up
	// to the dataplane.
	AnySource Source = iota
	// Kept is the client's own address.
	Kept
	// NodeSource is the address of a node.
	NodeSource
	// KeptHere is the one wanted difference between dataplanes: eBPF keeps the
	// client's address when the server is on the node that the packet reached,
	// and uses that node's address otherwise. Those of netfilter (nftables,
	// iptables) use a node's, unless the server is on the node's own network.
	KeptHere
)

// Want is what must come of a flow.
type Want struct {
	Kind Kind
	// From are the servers that may answer: "a0", or "a0:8081" for another
	// port than 8080.
	From []string
	// Spread says that each of them answers when asked often enough.
	Spread bool
	// Shares are the shares of the answers that each of From must have; nil: any. The number
	// of tries is fixed, and χ² judges the answers.
	Shares []int
	// Same says that all tries of the flow get the same server.
	Same bool
	// Sticky is Same over all flows of the case with equal From, To and Combo:
	// as long as the server that answered first is allowed, it must answer.
	Sticky bool
	Source Source
	Status int // of an HTTP answer (healthCheckNodePort)
	// Distinct is enough of Spread: that many different servers. Pause is the
	// time between two tries.
	Distinct int
	Pause    time.Duration
}

// Spread expects that each of the servers answers sooner or later, and that no other
// server answers.
func Spread(s Source, servers ...string) Want {
	return Want{From: servers, Spread: true, Source: s}
}

// InShares expects answers of the servers in these shares.
func InShares(s Source, shares []int, servers ...string) Want {
	return Want{From: servers, Shares: shares, Source: s}
}

// OneOf wants an answer of one of the servers; which one does not matter.
func OneOf(s Source, servers ...string) Want { return Want{From: servers, Source: s} }

// Sticky wants that one server keeps answering, see Want.Sticky.
func Sticky(s Source, servers ...string) Want {
	return Want{From: servers, Same: true, Sticky: true, Source: s}
}

// Status wants an HTTP status.
func Status(code int) Want { return Want{Status: code} }

// The outcomes without an answer.
var (
	Reject   = Want{Kind: Rejected}
	Drop     = Want{Kind: Dropped}
	Unserved = Want{Kind: NotServed}
)

// TargetKind is the kind of address a flow goes to.
type TargetKind string

// The kinds of address.
const (
	ToClusterIP    TargetKind = "ClusterIP"
	ToNodePort     TargetKind = "NodePort"
	ToExternalIP   TargetKind = "external IP"
	ToLoadBalancer TargetKind = "load balancer IP"
	ToAddress      TargetKind = "address"
	ToHealthCheck  TargetKind = "health check port"
)

// Target is where a flow goes.
type Target struct {
	Kind    TargetKind
	Service string // "" is the first of the case
	Port    string // the Service port's name; "" is the first of the protocol
	// Node has the NodePort, or is the one through which clients reach the
	// external or load balancer address. For ToAddress: whose address.
	Node string
	// Addr is another address of that node: "bridge" or "loopback".
	Addr   string
	Number int // for ToAddress: the port
}

// String names a target in a test's name.
func (t Target) String() string {
	text := string(t.Kind)
	if t.Addr != "" {
		text = t.Addr + " " + text
	}
	switch t.Kind {
	case ToNodePort, ToHealthCheck, ToAddress:
		text += " of " + t.Node
	case ToExternalIP, ToLoadBalancer:
		text += " through " + t.Node
	}
	if t.Service != "" {
		text += " of Service " + t.Service
	}
	if t.Port != "" {
		text += " port " + t.Port
	}
	return text
}

// ClusterIP is the cluster IP of the case's first Service.
var ClusterIP = Target{Kind: ToClusterIP}

// NodePort is the NodePort of the case's first Service at a node's address.
func NodePort(node string) Target { return Target{Kind: ToNodePort, Node: node} }

// ExternalIP is the external IP that clients reach through a node.
func ExternalIP(node string) Target { return Target{Kind: ToExternalIP, Node: node} }

// LoadBalancer is the load balancer IP that clients reach through a node.
func LoadBalancer(node string) Target { return Target{Kind: ToLoadBalancer, Node: node} }

// HealthCheck is the healthCheckNodePort at a node's address.
func HealthCheck(node string) Target { return Target{Kind: ToHealthCheck, Node: node} }

// Address is a host's own address, without any Service.
func Address(host string, port int) Target {
	return Target{Kind: ToAddress, Node: host, Number: port}
}

// Of returns the target with another Service of the case.
func (t Target) Of(service string) Target { t.Service = service; return t }

// At returns the target with a named port of the Service.
func (t Target) At(port string) Target { t.Port = port; return t }

// On returns the target on another address of the node: "bridge", "loopback".
func (t Target) On(addr string) Target { t.Addr = addr; return t }
