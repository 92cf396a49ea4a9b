package kube

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"spillway.dev/spillway/api/policy/v1alpha1"
	"spillway.dev/spillway/internal/facts/model"
)

// TestTheReporterOwnsAFalseCondition has node a meet false conditions from other nodes and
// from itself, in a cluster of a and b.
func TestTheReporterOwnsAFalseCondition(t *testing.T) {
	s := newSource(t, Config{})
	for _, k := range s.kinds {
		if nodes, ok := k.(*nodeStore); ok {
			for _, name := range []string{"a", "b"} {
				nodes.known[model.Name{Name: name}] = &model.Node{}
			}
		}
	}
	p := NewPolicyStatus(s, nil)
	refused := []model.PolicyRefusal{{Policy: "cache", Reason: "Contradiction", Message: "of a"}}
	for name, c := range map[string]struct {
		reason, reporter string
		age              time.Duration
		refused          []model.PolicyRefusal
		want, wantBy     string // "": not written
	}{
		"its own, resolved":                {"Contradiction", "a", 0, nil, "True", ""},
		"its own, other reason":            {"ServiceNeedsNAT", "a", 0, refused, "False", "a"},
		"of a present node":                {"Contradiction", "b", time.Hour, nil, "", ""},
		"of a present node, also refused":  {"Contradiction", "b", time.Hour, refused, "", ""},
		"of a removed node":                {"Contradiction", "c", 0, nil, "True", ""},
		"of a removed node, also refused":  {"Contradiction", "c", 0, refused, "False", "a"},
		"not accepted, now valid":          {"NotAccepted", "", 0, nil, "True", ""},
		"without a reporter, new":          {"Contradiction", "", time.Minute, nil, "", ""},
		"without a reporter, old":          {"Contradiction", "", time.Hour, nil, "True", ""},
		"without a reporter, also refused": {"Contradiction", "", time.Hour, refused, "", ""},
	} {
		s.own.status["cache"] = policyObject{status: v1alpha1.DoNotTrackPolicyStatus{ReportingNodeName: c.reporter,
			Conditions: []metav1.Condition{
				accepted(0, nil),
				{Type: v1alpha1.Applied, Status: metav1.ConditionFalse, Reason: c.reason, Message: "x",
					LastTransitionTime: metav1.NewTime(time.Now().Add(-c.age))},
			}}}
		p.Update(c.refused, nil)
		got, by := "", ""
		if w, ok := p.wanted()["cache"]; ok {
			got, by = string(w.status.Conditions[1].Status), w.status.ReportingNodeName
		}
		if got != c.want || by != c.wantBy {
			t.Errorf("%s: Applied %q by %q, want %q by %q", name, got, by, c.want, c.wantBy)
		}
	}
}
