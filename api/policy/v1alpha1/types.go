// Package v1alpha1 holds the Go types of the API group policy.spillway.dev. The
// schema that an API server checks is deploy/helm/spillway/crds; a test there
// compares the two.
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// SchemeGroupVersion is the group and version of this package.
var SchemeGroupVersion = schema.GroupVersion{Group: "policy.spillway.dev", Version: "v1alpha1"}

// DoNotTrackPolicies is the resource of DoNotTrackPolicy.
var DoNotTrackPolicies = SchemeGroupVersion.WithResource("donottrackpolicies")

// DoNotTrackPolicy makes traffic of the selected pods or nodes bypass conntrack. It is
// cluster-scoped.
type DoNotTrackPolicy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec   DoNotTrackPolicySpec   `json:"spec"`
	Status DoNotTrackPolicyStatus `json:"status"`
}

// DoNotTrackPolicyList is a list of DoNotTrackPolicies.
type DoNotTrackPolicyList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata"`

	Items []DoNotTrackPolicy `json:"items"`
}

// DoNotTrackPolicySpec selects either pods, by podSelector, namespaceSelector or
// both, or nodes, and which of their traffic bypasses conntrack.
type DoNotTrackPolicySpec struct {
	NamespaceSelector *metav1.LabelSelector `json:"namespaceSelector,omitempty"`
	PodSelector       *metav1.LabelSelector `json:"podSelector,omitempty"`
	NodeSelector      *metav1.LabelSelector `json:"nodeSelector,omitempty"`
	// Track keeps matching traffic tracked: the same policy with conntrack.
	Track bool `json:"track,omitempty"`
	// Deny is "others" to deny other traffic to the same ports; nil denies nothing. It is
	// never empty.
	Deny    *string       `json:"deny,omitempty"`
	Ingress []IngressRule `json:"ingress,omitempty"`
	Egress  []EgressRule  `json:"egress,omitempty"`
}

// DenyOthers is the one value of spec.deny.
const DenyOthers = "others"

// IngressRule matches traffic to ports of the selected pods or nodes.
type IngressRule struct {
	Ports []Port `json:"ports"`
	// From are the peers that may connect to the ports; empty: all peers.
	From []Peer `json:"from,omitempty"`
}

// EgressRule matches traffic of the selected pods or nodes to ports of peers.
type EgressRule struct {
	Ports []Port `json:"ports"`
	// To are the peers; empty: all peers.
	To []Peer `json:"to,omitempty"`
}

// Port is a port, or a range of ports including endPort.
type Port struct {
	Protocol string `json:"protocol,omitempty"` // TCP, the default, UDP or SCTP
	Port     int32  `json:"port"`
	EndPort  *int32 `json:"endPort,omitempty"`
}

// Peer is a range of addresses or a selection of pods.
type Peer struct {
	IPBlock           *IPBlock              `json:"ipBlock,omitempty"`
	NamespaceSelector *metav1.LabelSelector `json:"namespaceSelector,omitempty"`
	PodSelector       *metav1.LabelSelector `json:"podSelector,omitempty"`
}

// IPBlock is a range of addresses without the ranges in except.
type IPBlock struct {
	CIDR   string   `json:"cidr"`
	Except []string `json:"except,omitempty"`
}

// DoNotTrackPolicyStatus holds the conditions that the nodes report.
type DoNotTrackPolicyStatus struct {
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// ReportingNodeName is the node that set Applied to false. Other nodes keep that
	// condition while the node exists. It is empty if the condition is true or the same
	// on every node.
	ReportingNodeName string `json:"reportingNodeName,omitempty"`
}

// Types of conditions.
const (
	// Accepted is true if the policy is valid.
	Accepted = "Accepted"
	// Applied is false while a node does not apply the whole policy; its message names
	// the node and the cause.
	Applied = "Applied"
)
