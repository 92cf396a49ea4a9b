// Package intent turns the facts of model into decisions: what this node's
// kernel must do for every Service port. All Service semantics live here and
// nowhere else; the functions are pure and know nothing of eBPF, nftables or
// iptables.
//
//	store (of facts) ──object changed──> Tracker ──Changes()──> {Upserts, Deletes, Node, Problems}
//	policy.Traversal ──SetTraversal()──────┘
package intent

import (
	"net/netip"
	"time"

	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/facts/model"
)

// PortID identifies one Service port in one address family. A dual-stack Service of one
// port has two.
type PortID struct {
	Service  model.Name
	Port     string // the port's name, "" for an unnamed one
	Number   uint16 // spec.ports[].port; tells apart unnamed or equally named ports
	Protocol model.Protocol
	Family   model.Family
}

// Route is the destination of a packet that enters through a frontend.
type Route uint8

// The routes of a frontend. Intent has already applied kube-proxy's fallback rules: a
// Route of ToCluster or ToLocal has at least one endpoint.
const (
	Reject    Route = iota // TCP RST or ICMP port unreachable: no endpoints anywhere
	Drop                   // no reply: Local policy without an endpoint on this node
	ToCluster              // any of the endpoints with ClusterPolicy set
	ToLocal                // any of the endpoints with LocalPolicy set
)

// FrontendKind is the kind of a frontend's address.
type FrontendKind uint8

// The kinds of frontend.
const (
	ClusterIP FrontendKind = iota
	NodePort               // every address in Node.NodePortAddrs
	ExternalIP
	LoadBalancerIP
)

// Frontend is one address and port that clients connect to.
type Frontend struct {
	Kind FrontendKind
	Addr netip.Addr // invalid for NodePort
	Port uint16
	// ExternalRoute is the route of packets from other machines, including pods of other
	// nodes. InternalRoute is the route of packets from this node's own processes and
	// pods. They differ with externalTrafficPolicy Local, where internal traffic uses all
	// endpoints, as in kube-proxy.
	ExternalRoute, InternalRoute Route
	// SourceRanges allows only clients from these prefixes; the dataplane drops packets of
	// other clients. Nil allows all clients; an empty, non-nil list allows none. The list has
	// the load balancer addresses that the node has itself, if it has the node: see withOwn.
	SourceRanges []netip.Prefix
}

// Endpoint is one address that serves a Service port, and what intent decided about it.
type Endpoint struct {
	Addr          netip.AddrPort
	ClusterPolicy bool // used by ToCluster
	LocalPolicy   bool // used by ToLocal
	// OnThisNode says that the endpoint is on this node: a slice says so, or the address
	// is the node's own or that of a Pod of this node. Any author of a slice can name any
	// node, so the address counts whatever the slice says. LocalPolicy does not follow
	// from OnThisNode: kube-proxy uses nodeName alone.
	OnThisNode bool
	// NodeUnknown says that no slice names the endpoint's node: it may be this one.
	NodeUnknown           bool
	HostNetwork           bool // OnThisNode, and the address is the node's own (a hostNetwork pod)
	MustTraverseNetfilter bool // a NetworkPolicy (possibly) selects it, or it has a deny rule: its packets go through the stack
	AllowsAny             bool // a do-not-track policy allows any client: its packets may bypass netfilter all the same
	Watched               bool // the dataplane counts which of its TCP handshakes fail
	Ejected               bool // it gets no new connections for a while; see Tracker.SetFailing
}

// ServicePort is everything that a dataplane must know about one Service port. Values are
// immutable and canonical: Frontends and Endpoints are sorted and without duplicates, so
// that equal decisions compare equal.
type ServicePort struct {
	ID        PortID
	Frontends []Frontend
	Endpoints []Endpoint
	// Weights are the shares of new flows that each of Endpoints gets; nil: equal shares.
	// See Shares.
	Weights []uint16
	// Table has the index in Endpoints that each hash of a client leads to, modulo its length,
	// with the route ToCluster; nil without the balance Maglev, or without endpoints.
	Table []uint32
	// ServingUnselected are endpoints that serve but that no route selects: those that
	// terminate while others are ready, or that the topology excludes. They get no new
	// flows but keep existing ones. Sorted; UDP only, because TCP and SCTP flows end by
	// themselves.
	ServingUnselected []Endpoint
	// Lingering are endpoints that serve or terminate but that no route selects: their
	// sockets continue. Sorted; nil without Config.Lingering.
	Lingering []netip.AddrPort
	Affinity  time.Duration // 0: none
	// Balance says how a new flow gets one of the endpoints, among their shares.
	Balance Balance
	// DSR says that an endpoint on another node answers clients outside the cluster itself,
	// with the Service's address. Only with the balance Maglev.
	DSR bool
	// SYNLimit is the number of SYNs that a CPU of the node takes for the port in a second before
	// clients must prove their address; 0: all. See SYNFilterAnnotation.
	SYNLimit uint16
	// Helper is the protocol whose expected connections of this port the dataplane must
	// allow.
	Helper Helper
	// OfFTP says that this Service speaks FTP, on this TCP port or another: its own
	// servers may name this port for data connections.
	OfFTP bool
	// Triggered is the newest last-change-trigger-time behind this state, for network
	// programming latency. Comparisons of states ignore it.
	Triggered time.Time
}

// Node is what a dataplane must know about the node itself and the cluster's
// address plan.
type Node struct {
	Name string
	// Addrs are the node's own addresses (all interfaces but loopback), sorted.
	Addrs []netip.Addr
	// NodePortAddrs are those of Addrs on which NodePorts are served, sorted.
	NodePortAddrs []netip.Addr
	// LoopbackNodePorts are the families whose loopback addresses serve NodePorts to the
	// node's own processes, sorted. Packets never get them there (CVE-2020-8558).
	LoopbackNodePorts []model.Family
	// PodCIDRs are the ranges of this node's own pods, sorted; empty where the
	// cluster gives nodes none.
	PodCIDRs []netip.Prefix
	// ClusterCIDRs are the pod address ranges known: --cluster-cidr and all
	// nodes' podCIDRs, sorted.
	ClusterCIDRs []netip.Prefix
	// Peers are the addresses of the cluster's other nodes, sorted.
	Peers []netip.Addr
	// MustTraverseNetfilter are addresses of pods on this node that a NetworkPolicy
	// selects, in either direction, or that have a deny rule, sorted.
	MustTraverseNetfilter []netip.Addr
	// DenyRuleOnlyPods are the addresses in MustTraverseNetfilter that no NetworkPolicy
	// selects, sorted.
	DenyRuleOnlyPods []netip.Addr
	// KnownPods are the addresses of this node's pods that a Pod object names, sorted,
	// without the node's own. While PoliciesExist, any other pod address belongs to a pod
	// with unknown labels: a pod that starts, or a pod whose object was deleted.
	KnownPods []netip.Addr
	// UnhookedPods are the UIDs of this node's pods whose sockets must connect to Service
	// addresses themselves, sorted: see model.Pod.UnhookedUID.
	UnhookedPods []string
	// PoliciesExist says that a NetworkPolicy exists, or may exist, in any namespace. A
	// pod of its namespace may start on this node at any time, and its first packets leave
	// before its Pod object names an address.
	PoliciesExist bool
	// OtherPods are the addresses that Pod objects of other nodes name, sorted. The source
	// decides which Pods of other nodes it delivers, if any.
	OtherPods []netip.Addr
	// OtherPodCIDRs are the ranges of the other nodes' pods, sorted.
	OtherPodCIDRs []netip.Prefix
	// PoliciesUnknown says that a NetworkPolicy may select any pod of this node.
	PoliciesUnknown bool
	// MasqueradeAll requires that every Service packet get the node's address.
	MasqueradeAll bool
	// Egress says which packets of this node's pods to the outside get the node's address.
	Egress egress.Plan
	// Local recognizes packets from this node's pods for a dataplane that cannot recognize
	// them by their device.
	Local LocalTraffic
	// Leaving says that the node is being deleted or no longer exists: load balancers
	// should send it no new connections (KEP-3836).
	Leaving bool
}

// LocalTraffic describes packets from pods of this node, for --detect-local-mode. At most
// one field is set; without any, packets of pods cannot be recognized.
type LocalTraffic struct {
	Sources   []netip.Prefix // source address in these ranges, sorted
	Interface string         // name of the input device
	Prefix    string         // prefix of the input device's name
}

// LocalMode is a value of --detect-local-mode.
type LocalMode string

// The modes, by kube-proxy's names.
const (
	LocalClusterCIDR         LocalMode = "ClusterCIDR"         // source in --cluster-cidr
	LocalNodeCIDR            LocalMode = "NodeCIDR"            // source in the Node's podCIDRs
	LocalBridgeInterface     LocalMode = "BridgeInterface"     // in by LocalInterface
	LocalInterfaceNamePrefix LocalMode = "InterfaceNamePrefix" // in by a device named LocalInterface...
)

// HealthCheck is the response to health checks of one Service.
type HealthCheck struct {
	Service   model.Name
	Port      uint16
	Endpoints int // ready endpoints on this node: 0 answers 503, else 200
}

// Changes is the difference between two states of intent.
type Changes struct {
	Upserts []*ServicePort // new or changed, whole, sorted by ID
	Deletes []PortID       // sorted
	Node    *Node          // non-nil when it changed
	// HealthChecks holds every changed healthCheckNodePort; Port 0 means that the Service
	// no longer has one.
	HealthChecks []HealthCheck
	// Moves are the addresses that one Service port has lost to another.
	Moves []Move
	// Problems are all current Problems of objects (address conflicts and the like),
	// sorted. Nil means unchanged.
	Problems []model.Problem
}

// Move is an address that passes from one Service port to another. It is served all the
// time if the kernel has it of To before From loses it.
type Move struct{ From, To PortID }

// State is a whole state of intent.
type State struct {
	Ports []*ServicePort // sorted by ID
	Node  Node
}

// Config configures a Tracker; see Validate.
type Config struct {
	NodeName string
	// ProxyName selects Services by service.kubernetes.io/service-proxy-name: "" serves
	// Services without the label, another value only Services with it.
	ProxyName string
	// NodePortAddresses limits NodePorts to the node's addresses in these prefixes; nil
	// allows all of them.
	NodePortAddresses []netip.Prefix
	// LocalhostNodePorts serves NodePorts on loopback too, if NodePortAddresses and
	// NodePortPrimary allow its addresses 127.0.0.1 and ::1.
	LocalhostNodePorts bool
	// NodePortPrimary limits NodePorts to the first address of each family that
	// the Node object names.
	NodePortPrimary bool
	// ClusterCIDRs is --cluster-cidr.
	ClusterCIDRs  []netip.Prefix
	MasqueradeAll bool
	// RefuseExternalIPs serves no externalIPs, and reports each Service that has them: any
	// author of a Service can name any address (CVE-2020-8554).
	RefuseExternalIPs bool
	// APIServer is the API server's address that the agent uses; invalid if it is a name or
	// unknown. No externalIP takes it: the agent would send its own connections to the
	// endpoints of that Service, and never hear that the Service is deleted.
	APIServer netip.AddrPort
	// Servers are the addresses that the agents of all nodes listen on. No Service takes them
	// at a node's address: without its health checks, an agent is restarted again and again.
	Servers []netip.AddrPort
	// IgnoreNetworkPolicies lets packets bypass netfilter although a NetworkPolicy selects
	// the pod. Pods with a deny rule of a do-not-track policy still traverse netfilter:
	// see SetTraversal.
	IgnoreNetworkPolicies bool
	// Lingering fills ServicePort.Lingering.
	Lingering bool
	// OutlierEjection says that the dataplane counts handshakes: see
	// OutlierEjectionAnnotation.
	OutlierEjection bool
	// BalanceByLoad says that the dataplane knows the load of endpoints: see
	// BalanceAnnotation.
	BalanceByLoad bool
	// HostPorts serves the host ports of this node's Pods.
	HostPorts bool
	// MaglevSize is the length of ServicePort.Table, one of MaglevSizes; 0: the dataplane
	// cannot use it.
	MaglevSize int
	// Forwarding is one of Forwardings, for Services without ForwardingAnnotation; "" is SNAT.
	// CanForwardByDSR says that the dataplane can do without SNAT.
	Forwarding      string
	CanForwardByDSR bool
	// FilterSYNs says that the dataplane can make clients prove their address: see
	// SYNFilterAnnotation.
	FilterSYNs bool
	// DetectLocal is --detect-local-mode; "" is LocalClusterCIDR.
	DetectLocal LocalMode
	// LocalInterface is the device name or prefix for DetectLocal.
	LocalInterface string
	// LocalBySource says that the dataplane recognizes this node's pods by DetectLocal
	// alone. A Node without podCIDRs is then a Problem where they are needed.
	LocalBySource bool
	// Capacity is what the dataplane has room for, of which a namespace gets a share.
	Capacity Capacity
	// FallsBack says which ports another dataplane carries; nil: none.
	FallsBack func(*ServicePort) bool
	// ExpectNode says that the source knows this node's Node object if there is one.
	// Without the object the node counts as deleted.
	ExpectNode bool
}
