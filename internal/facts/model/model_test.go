package model

import (
	"net/netip"
	"testing"
)

func TestDeltaEmpty(t *testing.T) {
	if !(Delta{}).Empty() {
		t.Error("the zero Delta is not empty")
	}
	for name, d := range map[string]Delta{
		"full":   {Full: true},
		"dark":   {PoliciesUnknown: new(bool)},
		"gone":   {Services: map[Name]*Service{{Name: "a"}: nil}},
		"slice":  {Slices: map[Name]*EndpointSlice{{Name: "a"}: {}}},
		"node":   {Nodes: map[string]*Node{"a": nil}},
		"pod":    {Pods: map[Name]*Pod{{Name: "a"}: nil}},
		"policy": {NetworkPolicies: map[Name]*NetworkPolicy{{Name: "a"}: nil}},
		"space":  {Namespaces: map[string]*Namespace{"a": nil}},
		"track":  {DoNotTrackPolicies: map[string]*DoNotTrackPolicy{"a": nil}},
	} {
		if d.Empty() {
			t.Errorf("%s: is empty", name)
		}
	}
}

func TestFamilyOf(t *testing.T) {
	for addr, want := range map[string]Family{"10.0.0.1": IPv4, "::ffff:10.0.0.1": IPv4, "fd00::1": IPv6} {
		if got := FamilyOf(netip.MustParseAddr(addr)); got != want {
			t.Errorf("FamilyOf(%s) = %s", addr, got)
		}
	}
}

func TestStrings(t *testing.T) {
	p := Problem{Where: "a.yaml, document 1", What: "is empty"}
	if got := p.String(); got != "a.yaml, document 1: is empty" {
		t.Error(got)
	}
	p.Field = "spec"
	if got := p.String(); got != "a.yaml, document 1: spec: is empty" {
		t.Error(got)
	}
	if got := (Name{"a", "b"}).String() + TCP.String() + UDP.String() + SCTP.String() + Protocol(1).String() + IPv4.String() + IPv6.String(); got != "a/bTCPUDPSCTPunknownIPv4IPv6" {
		t.Error(got)
	}
}
