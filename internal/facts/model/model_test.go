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
		"dark":   {NetworkPoliciesUnknown: new(bool)},
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

func TestAProblemNamesItsObject(t *testing.T) {
	web := Name{"ns", "web"}
	for _, row := range []struct {
		problem Problem
		service bool
		text    string
	}{
		{ServiceProblem(web, "spec.ports", "is wrong"), true, "Service ns/web: spec.ports: is wrong"},
		{ClusterProblem(KindNode, "n1", "", "is gone"), false, "Node n1: is gone"},
		{Problem{Where: "Service ns/web", What: "only reads like one"}, false, "Service ns/web: only reads like one"},
		{PolicyRefusal{Policy: "p", Field: "spec", Message: "no"}.Problem(), false, "DoNotTrackPolicy p: spec: no"},
	} {
		if name, ok := row.problem.Service(); ok != row.service || ok && name != web || row.problem.String() != row.text {
			t.Errorf("%s: %v is a Service: %v", row.problem, name, ok)
		}
	}
}

func TestUnread(t *testing.T) {
	for _, row := range []struct {
		reason            UnreadReason
		any, onlyPolicies bool
	}{
		{UnreadNothing, false, false}, {UnreadFile, true, false}, {UnreadPolicy, true, true}, {UnreadPolicies, true, true},
	} {
		u := Unread{Reason: row.reason, Text: "DoNotTrackPolicy.yaml"}
		if u.Any() != row.any || u.OnlyPolicies() != row.onlyPolicies {
			t.Errorf("reason %d: any %v, only policies %v", row.reason, u.Any(), u.OnlyPolicies())
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
	if got := (Name{"a", "b"}).String() + TCP.String() + UDP.String() + SCTP.String() + ICMPv6.String() + Protocol(2).String() +
		IPv4.String() + IPv6.String(); got != "a/bTCPUDPSCTPICMPunknownIPv4IPv6" {
		t.Error(got)
	}
}
