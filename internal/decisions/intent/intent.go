// Package intent turns the facts of model into decisions: what this node's
// kernel must do for every Service port. All Service semantics live here and
// nowhere else; the functions are pure and know nothing of eBPF, nftables or
// iptables.
//
//	model.Delta ──> Tracker.Apply ──> Changes{Upserts, Deletes, Node, Problems}
package intent

import (
	"net/netip"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// PortID names one Service port in one address family. A dual-stack Service of
// one port has two.
type PortID struct {
	Service  model.Name
	Port     string // the port's name, "" for an unnamed one
	Number   uint16 // spec.ports[].port; tells apart unnamed or equally named ports
	Protocol model.Protocol
	Family   model.Family
}

// Route says where a packet that entered through a frontend goes.
type Route uint8

// The routes a frontend can take. Intent has already applied kube-proxy's
// fallback rules: a Route of ToCluster or ToLocal has at least one endpoint.
const (
	Reject    Route = iota // TCP RST or ICMP port unreachable: no endpoints anywhere
	Drop                   // silence: local policy without an endpoint here
	ToCluster              // any of the endpoints with Cluster set
	ToLocal                // any of the endpoints with Local set
)

// FrontendKind says what sort of address a frontend is.
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
	// ExternalRoute is the route of packets that reach the node from another machine
	// (pods of other nodes included); Inside that of this node's own processes
	// and pods. They differ with externalTrafficPolicy Local, where traffic
	// from inside uses all endpoints (kube-proxy's short cut).
	ExternalRoute, InternalRoute Route
	// SourceRanges lets in only clients from these prefixes; nil lets all in.
	// Others are dropped. An empty, non-nil list lets nobody in.
	SourceRanges []netip.Prefix
}

// Endpoint is one address that serves a Service port, and what intent decided
// about it.
type Endpoint struct {
	Addr          netip.AddrPort
	ClusterPolicy bool // used by ToCluster
	LocalPolicy   bool // used by ToLocal
	// OnThisNode says that the endpoint is on this node: a slice says so, or the address
	// is the node's own or that of a Pod of this node. Anybody who may write a
	// slice can name any node, so the address counts whatever the slice says.
	// Local does not follow from it: kube-proxy goes by nodeName alone.
	OnThisNode bool
	// NodeUnknown says that no slice tells which node it is on: it may be this one.
	NodeUnknown           bool
	HostNetwork           bool // Here, and the address is the node's own (a hostNetwork pod)
	MustTraverseNetfilter bool // a NetworkPolicy selects it (or may), or it is guarded: its packets go through the stack
	AllowsAny             bool // a do-not-track policy opens it to anybody: they need not, in spite of that
}

// ServicePort is everything a dataplane must know about one Service port.
// Values are immutable and canonical: Frontends and Endpoints are sorted and
// without duplicates, so that equal decisions compare equal.
type ServicePort struct {
	ID        PortID
	Frontends []Frontend
	Endpoints []Endpoint
	// ServingUnselected are the endpoints that serve, but that no route leads to: those
	// that terminate while others are ready, or that the topology leaves out. No
	// new flow goes there, but one that does already is right. Sorted; UDP only,
	// because TCP and SCTP flows end when they must.
	ServingUnselected []netip.AddrPort
	Affinity          time.Duration // 0: none
	// Helper is what connections of this port need so that those they announce
	// get through too.
	Helper Helper
	// OfFTP says that this Service speaks FTP, on this TCP port or another: the port
	// may be one that its own servers announce.
	OfFTP bool
	// Triggered is the newest last-change-trigger-time behind this state, for
	// network programming latency. It does not count when states are compared.
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
	// PodCIDRs are the ranges of this node's own pods, sorted; empty where the
	// cluster gives nodes none.
	PodCIDRs []netip.Prefix
	// ClusterCIDRs are the pod address ranges known: --cluster-cidr and all
	// nodes' podCIDRs, sorted.
	ClusterCIDRs []netip.Prefix
	// Peers are the addresses of the cluster's other nodes, sorted.
	Peers []netip.Addr
	// MustTraverseNetfilter are addresses of pods on this node that a NetworkPolicy
	// selects, in either direction, or that are guarded, sorted.
	MustTraverseNetfilter []netip.Addr
	// DenyRulePods are those of MustTraverseNetfilter that no NetworkPolicy selects, sorted.
	DenyRulePods []netip.Addr
	// KnownPods are the addresses of this node's pods that a Pod object names,
	// sorted, without the node's own. While PoliciesExist, an address of a pod
	// that is not among them belongs to a pod whose labels are not known: one that
	// starts, or one whose object is gone.
	KnownPods []netip.Addr
	// PoliciesExist says that there is a NetworkPolicy of any namespace, or may be
	// one: a pod of its namespace may start on this node at any time, and its
	// first packets leave it before its Pod object names an address.
	PoliciesExist bool
	// OtherPods are the addresses that a Pod object of another node names, sorted.
	// The source decides which Pods of other nodes it delivers: it may be none.
	OtherPods []netip.Addr
	// OtherPodCIDRs are the ranges of the other nodes' pods, sorted.
	OtherPodCIDRs []netip.Prefix
	// PoliciesUnknown says that any pod of this node may be policed.
	PoliciesUnknown bool
	// MasqueradeAll asks that every Service packet get the node's address.
	MasqueradeAll bool
	// Local is how a packet from one of this node's pods is recognised by who
	// cannot tell by the device it came from.
	Local LocalTraffic
	// Leaving says that the node is to go, or has gone: load balancers should
	// send it no new connections (KEP-3836).
	Leaving bool
}

// LocalTraffic describes packets from pods of this node, as --detect-local-mode
// asks. At most one field is set; none: they cannot be told.
type LocalTraffic struct {
	Sources   []netip.Prefix // from an address in these ranges, sorted
	Interface string         // by the device of this name
	Prefix    string         // by a device whose name begins so
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

// HealthCheck is what the healthCheckNodePort of one Service must answer.
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
	// HealthChecks holds every changed healthCheckNodePort; Port 0 says that
	// the Service has none any more.
	HealthChecks []HealthCheck
	// Problems are those of the objects as they stand now, complete, sorted:
	// address conflicts and the like. Nil means unchanged.
	Problems []model.Problem
}

// State is a whole state of intent.
type State struct {
	Ports []*ServicePort // sorted by ID
	Node  Node
}

// Config is how intent is set up; see Validate.
type Config struct {
	NodeName string
	// ProxyName selects Services by service.kubernetes.io/service-proxy-name:
	// "" serves those without the label, another value only those with it.
	ProxyName string
	// NodePortAddresses limits NodePorts to the node's addresses in these
	// prefixes; nil is all of them (loopback never, see CVE-2020-8558).
	NodePortAddresses []netip.Prefix
	// NodePortPrimary limits NodePorts to the first address of each family that
	// the Node object names.
	NodePortPrimary bool
	// ClusterCIDRs is --cluster-cidr.
	ClusterCIDRs  []netip.Prefix
	MasqueradeAll bool
	// RefuseExternalIPs leaves externalIPs unserved, each Service with a Problem:
	// anybody who may write a Service can name any address (CVE-2020-8554).
	RefuseExternalIPs bool
	// IgnoreNetworkPolicies has packets pass by whoever enforces NetworkPolicies. What
	// Spillway's own policies deny stays guarded: see SetDenyRulePods.
	IgnoreNetworkPolicies bool
	// DetectLocal is --detect-local-mode; "" is LocalClusterCIDR.
	DetectLocal LocalMode
	// LocalInterface is the name or the prefix that DetectLocal asks for.
	LocalInterface string
	// LocalBySource says that the dataplane knows this node's pods by DetectLocal
	// alone, so that a Node without podCIDRs is a Problem where they are needed.
	LocalBySource bool
	// ExpectNode says that the source knows this node's Node object if there is
	// one: without it the node counts as gone.
	ExpectNode bool
}
