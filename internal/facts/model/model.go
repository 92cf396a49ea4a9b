// Package model holds Services, EndpointSlices, Nodes, Pods and policies: facts, already
// parsed and checked, without any decision about them. Sources fill it; intent reads it.
//
// The package uses only the standard library, so that every other package may import it.
// Values are immutable after a source has delivered them.
package model

import (
	"cmp"
	"net/netip"
	"strings"
	"time"
)

// Name is a namespaced object name.
type Name struct {
	Namespace string
	Name      string
}

// String returns "namespace/name".
func (n Name) String() string { return n.Namespace + "/" + n.Name }

// Compare orders names by namespace, then by name.
func (n Name) Compare(o Name) int {
	return cmp.Or(cmp.Compare(n.Namespace, o.Namespace), cmp.Compare(n.Name, o.Name))
}

// Protocol is an IANA protocol number, as it stands in an IP header.
type Protocol uint8

// The protocols that a Kubernetes Service may name.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// The protocols of echo requests and replies, which no Service has.
const (
	ICMP   Protocol = 1
	ICMPv6 Protocol = 58
)

// String returns the name that Kubernetes uses, "TCP", "UDP" or "SCTP", or "ICMP" for both families.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "TCP"
	case UDP:
		return "UDP"
	case SCTP:
		return "SCTP"
	case ICMP, ICMPv6:
		return "ICMP"
	}
	return "unknown"
}

// Family is an address family of a Service or a slice.
type Family uint8

// The two address families.
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// String returns "IPv4" or "IPv6".
func (f Family) String() string {
	if f == IPv6 {
		return "IPv6"
	}
	return "IPv4"
}

// FamilyOf returns the family of an address; a v4-mapped address is IPv4.
func FamilyOf(a netip.Addr) Family {
	if a.Unmap().Is4() {
		return IPv4
	}
	return IPv6
}

// ServiceType is spec.type of a Service. The model contains no ExternalName and no
// headless Services: they need no proxy.
type ServiceType string

// The Service types that a proxy serves.
const (
	ClusterIP    ServiceType = "ClusterIP"
	NodePort     ServiceType = "NodePort"
	LoadBalancer ServiceType = "LoadBalancer"
	HostPorts    ServiceType = "HostPorts" // of a Pod: see HostPortsOf
)

// AnnotationPrefix begins the annotations of objects that are read.
const AnnotationPrefix = "spillway.dev/"

// Service is one Kubernetes Service that needs a proxy.
type Service struct {
	Name
	UID     string
	Created time.Time // creationTimestamp, zero if unset: the older of two Services with one address wins
	Type    ServiceType
	// ProxyName is the label service.kubernetes.io/service-proxy-name, "" if unset.
	ProxyName       string
	ClusterIPs      []netip.Addr
	ExternalIPs     []netip.Addr
	LoadBalancerIPs []netip.Addr // status.loadBalancer.ingress with an ip and ipMode VIP (or none given)
	// SourceRanges is spec.loadBalancerSourceRanges (or the older annotation);
	// nil allows every client.
	SourceRanges []netip.Prefix
	// Affinity is the timeout of sessionAffinity ClientIP; 0 is no affinity.
	Affinity            time.Duration
	ExternalLocal       bool              // externalTrafficPolicy: Local
	InternalLocal       bool              // internalTrafficPolicy: Local
	HealthCheckNodePort uint16            // 0: none
	Annotations         map[string]string // those with AnnotationPrefix alone
	Ports               []ServicePort
}

// ServicePort is one entry of spec.ports.
type ServicePort struct {
	Name        string // "" is allowed for a Service of one port
	Protocol    Protocol
	Port        uint16
	NodePort    uint16 // 0: none
	AppProtocol string
}

// EndpointSlice is a discovery.k8s.io/v1 EndpointSlice. A slice without a
// kubernetes.io/service-name label never reaches the model.
type EndpointSlice struct {
	Name
	Service   Name // the Service it belongs to
	Family    Family
	Ports     []EndpointPort
	Endpoints []Endpoint
	// Weight is the weight of its endpoints, where the Service is weighted; nil: unset.
	Weight *uint8
	// Triggered is endpoints.kubernetes.io/last-change-trigger-time; zero if unset.
	Triggered time.Time
}

// MaxWeight is the largest weight of an endpoint.
const MaxWeight = 100

// EndpointPort is one entry of a slice's ports.
type EndpointPort struct {
	Name     string
	Protocol Protocol
	Port     uint16
}

// Endpoint is one entry of a slice's endpoints. Missing conditions have the API's
// defaults: ready is true, serving is ready, terminating is false.
//
// A large cluster has a million of them: each has one address, and repeated text is
// shared.
type Endpoint struct {
	Addr        netip.Addr // the first that can be used: addresses are interchangeable
	Ready       bool
	Serving     bool
	Terminating bool
	Node        string // nodeName, "" if unknown
	Hints       *Hints // nil: none
	Pod         Name   // targetRef when it is a Pod; zero otherwise
}

// Hints are the nodes and zones that should use an endpoint.
type Hints struct {
	Zones, Nodes []string // hints.forZones, hints.forNodes
}

// Node is a cluster node.
type Node struct {
	Name      string
	Addresses []netip.Addr // status.addresses of types InternalIP and ExternalIP, in that order
	PodCIDRs  []netip.Prefix
	Labels    map[string]string // topology.kubernetes.io/zone is read from here
	// Annotations are those with AnnotationPrefix alone, of this node's Node.
	Annotations map[string]string
	// Leaving reports that the node is being removed: its object is being deleted, or
	// cluster-autoscaler has tainted it (KEP-3836).
	Leaving bool
}

// Pod holds the fields of a Pod that decide which policies select it.
type Pod struct {
	Name
	Labels map[string]string
	Node   string
	IPs    []netip.Addr
	// HostPorts are the container ports to which the CNI maps a port of the node.
	HostPorts []HostPort
	UID       string // of a Pod with HostPorts, else ""
	// UnhookedUID is the UID by which the kubelet names the Pod's cgroup, if the Pod has no
	// socket hooks by its annotation; else "".
	UnhookedUID string
}

// HostPort is a container's port and the node's port that maps to it.
type HostPort struct {
	Protocol   Protocol
	Port, Host uint16
	IP         netip.Addr // of the node, at which alone the port is served; invalid: at all
}

// podPrefix begins the name of a Pod's host ports among Services. No Service has such a name.
const podPrefix = "pod/"

// HostPortsOf returns the name under which the host ports of a Pod are served: "pod/NAME", in
// the Pod's namespace.
func HostPortsOf(pod Name) Name { return Name{pod.Namespace, podPrefix + pod.Name} }

// PodOf returns the Pod whose host ports have a name, and whether it is such a name.
func PodOf(service Name) (pod Name, is bool) {
	name, is := strings.CutPrefix(service.Name, podPrefix)
	return Name{service.Namespace, name}, is
}

// OwnerText names what has an address, for people: a Service, or a Pod's host port.
func OwnerText(service Name) string {
	if pod, is := PodOf(service); is {
		return "the hostPort of Pod " + pod.String()
	}
	return "Service " + service.String()
}

// NetworkPolicy holds the fields of a networking.k8s.io/v1 NetworkPolicy that decide
// which pods it selects. The CNI enforces it.
type NetworkPolicy struct {
	Name
	Selector Selector
	Ingress  bool // policyTypes has Ingress
	Egress   bool // policyTypes has Egress
}

// Selector is a label selector; the zero value selects everything.
type Selector struct {
	MatchLabels map[string]string
	Expressions []Requirement
}

// Requirement is one matchExpressions entry. Operator is In, NotIn, Exists or
// DoesNotExist.
type Requirement struct {
	Key      string
	Operator string
	Values   []string
}

// Delta is a set of objects that became visible together. In each map a nil value means
// that the object was deleted.
type Delta struct {
	Services        map[Name]*Service
	Slices          map[Name]*EndpointSlice
	Nodes           map[string]*Node
	Pods            map[Name]*Pod
	NetworkPolicies map[Name]*NetworkPolicy
	// Namespaces and DoNotTrackPolicies have no namespace.
	Namespaces         map[string]*Namespace
	DoNotTrackPolicies map[string]*DoNotTrackPolicy
	// NetworkPoliciesUnknown reports that the source cannot know all NetworkPolicies and Pods of
	// this node, so that any pod may be selected. nil means unchanged, and in a Full
	// Delta that they are known.
	NetworkPoliciesUnknown *bool
	// Unread describes objects that the source could not read although do-not-track
	// policies may depend on them. nil means unchanged, and in a Full Delta none.
	Unread *Unread
	// Full reports that the Delta is complete: objects that it does not name do not
	// exist. A source sends a Full Delta first, and again after it lost track.
	Full bool
}
