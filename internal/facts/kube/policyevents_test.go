package kube

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"spillway.dev/spillway/internal/facts/model"
)

// TestRefusalsAreToldWhenTheyAreNews checks the messages for Events: a resync adds none,
// however old the first message is.
func TestRefusalsAreToldWhenTheyAreNews(t *testing.T) {
	s := newSource(t, Config{})
	e := NewEvents(s.cfg.Client, "a", s.UID, slog.New(slog.DiscardHandler))
	p := NewPolicyStatus(s, e)
	s.own.status["cache"] = policyObject{uid: "1"}
	heard := func() string {
		p.reportRefusals()
		var out []string
		for m, any := e.queue.pop(); any; m, any = e.queue.pop() {
			out = append(out, fmt.Sprint(m.what, " ", m.note, " ", m.standing))
		}
		return strings.Join(out, ", ")
	}
	refused := func(policy, message string, reasons ...string) (out []model.PolicyRefusal) {
		for _, r := range reasons {
			out = append(out, model.PolicyRefusal{Policy: policy, Reason: r, Message: message})
		}
		return out
	}
	for i, c := range []struct {
		refused []model.PolicyRefusal
		uid     types.UID
		want    string
	}{
		{refused("cache", "x", "A"), "1", "A node a: x true"},
		{refused("cache", "x", "A"), "1", ""},
		{refused("cache", "another address", "A", "A"), "1", ""},
		{refused("cache", "x", "A", "B", "A", "B"), "1", "B node a: x (and 1 more like it on this node) false"},
		{refused("cache", "x", "B"), "1", ""},
		{refused("cache", "x", "B", "A"), "1", "A node a: x false"},
		{refused("cache", "x", "A"), "2", "A node a: x false"}, // a new object
		{refused("unknown", "x", "A"), "2", ""},                // deleted meanwhile
	} {
		s.own.status["cache"] = policyObject{uid: c.uid}
		p.Update(c.refused, nil)
		if got := heard(); got != c.want {
			t.Errorf("%d: told %q, want %q", i, got, c.want)
		}
	}
}

// TestTheNameOfAnEventIsOne uses policies with names of up to the maximum length.
func TestTheNameOfAnEventIsOne(t *testing.T) {
	for _, name := range []string{"a", strings.Repeat("a", 253), strings.Repeat("a", 199) + "-b", strings.Repeat("a.b-c", 50)} {
		m := aboutPolicy(name, "1", "Contradiction", "x", "n")
		if faults := validation.IsDNS1123Subdomain(m.name); len(faults) > 0 {
			t.Errorf("%s: %v", m.name, faults)
		}
		if other := aboutPolicy(name, "1", "ServiceNeedsNAT", "x", "n"); other.name == m.name {
			t.Errorf("two reasons have one name: %s", m.name)
		}
	}
}
