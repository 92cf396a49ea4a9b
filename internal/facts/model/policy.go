package model

import (
	"net/netip"
	"time"
)

// Namespace holds the labels of a Namespace, for selectors.
type Namespace struct {
	Name   string
	Labels map[string]string
}

// DoNotTrackPolicy is a policy.spillway.dev/v1alpha1 DoNotTrackPolicy. It selects traffic
// of pods or nodes that bypasses conntrack.
type DoNotTrackPolicy struct {
	Name    string
	Version string    // of the text that a person has written; see Problem
	Created time.Time // creationTimestamp, zero if unset: the older of two contradicting policies applies
	// Pods or Nodes selects the pods or nodes of the traffic; the other is nil.
	Pods  *PodSelection
	Nodes *Selector
	// Track keeps matching traffic tracked. DenyOthers denies other traffic to the same
	// ports.
	Track, DenyOthers bool
	Ingress, Egress   []PolicyRule
}

// PodSelection selects pods by their labels and by the labels of their namespaces. A nil
// selector was not given, and selects all.
type PodSelection struct {
	Namespaces *Selector
	Pods       *Selector
}

// PolicyRule is one entry of a policy's ingress or egress.
type PolicyRule struct {
	Ports []PortRange
	// Peers are the allowed peers; nil allows every peer. An empty list, as of a rule
	// whose pods do not exist, does not occur: the source refuses it.
	Peers []PolicyPeer
}

// PortRange is a protocol and a range of ports of the server's side, including both ends.
type PortRange struct {
	Protocol    Protocol
	First, Last uint16
}

// PolicyPeer is a range of addresses, without the ranges in Except, or a
// selection of pods. Pods is nil for a range.
type PolicyPeer struct {
	Block  netip.Prefix
	Except []netip.Prefix
	Pods   *PodSelection
}

// PolicyRefusal is a part of a DoNotTrackPolicy that is not applied on this node.
type PolicyRefusal struct {
	Policy  string
	Field   string // of the policy, "" for all of it
	Reason  string // one word, as in a condition
	Message string
	Version string // of the policy
}

// Problem returns the refusal as a Problem.
func (r PolicyRefusal) Problem() Problem {
	p := ClusterProblem(KindDoNotTrackPolicy, r.Policy, r.Field, r.Message)
	p.Version = r.Version
	return p
}
