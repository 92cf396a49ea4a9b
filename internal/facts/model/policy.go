package model

import (
	"net/netip"
	"time"
)

// Namespace is what Spillway needs of a Namespace: what selectors ask of it.
type Namespace struct {
	Name   string
	Labels map[string]string
}

// DoNotTrackPolicy is a policy.spillway.dev/v1alpha1 DoNotTrackPolicy: which
// traffic of which pods or nodes conntrack is kept away from.
type DoNotTrackPolicy struct {
	Name    string
	Created time.Time // creationTimestamp, zero if unset: of two policies that contradict, the older holds
	// Pods or Nodes selects whose traffic it is; the other is nil.
	Pods  *PodSelection
	Nodes *Selector
	// Track has what matches tracked as usual; DenyOthers denies what goes to
	// the same ports and does not match.
	Track, DenyOthers bool
	Ingress, Egress   []PolicyRule
}

// PodSelection selects pods by their own labels and by those of their
// namespaces. A nil selector is one that was not given, and selects all.
type PodSelection struct {
	Namespaces *Selector
	Pods       *Selector
}

// PolicyRule is one entry of a policy's ingress or egress.
type PolicyRule struct {
	Ports []PortRange
	// Peers are the allowed peers; nil allows every peer. An empty list, as of a rule
	// whose pods do not exist, does not occur here: the source refuses it.
	Peers []PolicyPeer
}

// PortRange is a protocol and the ports of the side that was asked, both
// included.
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

// PolicyRefusal is what a DoNotTrackPolicy asks for and does not hold on this node.
type PolicyRefusal struct {
	Policy  string
	Field   string // of the policy, "" for all of it
	Reason  string // one word, as a condition has it
	Message string
}

// Problem is the refusal as a person reads it.
func (r PolicyRefusal) Problem() Problem {
	return ClusterProblem(KindDoNotTrackPolicy, r.Policy, r.Field, r.Message)
}
