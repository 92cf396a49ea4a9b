package server

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/reconcile"
)

// A finding begins once. It goes on while evaluations find it, however far apart they are, and
// after an absence that is short.
func TestAFindingKeepsItsBeginning(t *testing.T) {
	began := 0
	f := NewFindings(func(doctor.Finding) { began++ })
	start := time.Now()
	silent := doctor.Finding{ID: "endpoint-unanswered", Severity: doctor.Critical, Object: doctor.Object{Kind: "Service", Name: "web"}}
	other := silent
	other.Object.Name = "api"
	for _, step := range []struct {
		at     time.Duration
		title  string
		listed bool
		began  int
		since  time.Duration
	}{
		{0, "first", true, 1, 0},
		{10 * time.Minute, "second", true, 1, 0}, // the evaluation between would have found it too
		{10*time.Minute + resumedWithin, "", false, 1, 0},
		{10*time.Minute + resumedWithin, "third", true, 1, 0},
		{11*time.Minute + resumedWithin, "", false, 1, 0},
		{11*time.Minute + resumedWithin + 1, "", false, 1, 0},
		{20 * time.Minute, "fourth", true, 2, 20 * time.Minute},
	} {
		var list []doctor.Finding
		if step.listed {
			silent.Title = step.title
			list = append(list, silent)
		}
		f.update(list, nil, start.Add(step.at))
		got, _ := f.now()
		if began != step.began || len(got) != len(list) || step.listed &&
			(!got[0].Since.Equal(start.Add(step.since)) || got[0].Title != step.title) {
			t.Errorf("after %v: it began %d times, now %+v", step.at, began, got)
		}
	}
	f.update([]doctor.Finding{other, silent}, nil, start.Add(21*time.Minute))
	if began != 3 {
		t.Errorf("a finding about another Service: %d beginnings", began)
	}
	gauge := func(id, severity string) float64 { return testutil.ToFloat64(f.gauge.WithLabelValues(id, severity)) }
	if n := gauge("endpoint-unanswered", "critical"); n != 2 {
		t.Errorf("the gauge is %v", n)
	}
	f.update([]doctor.Finding{{ID: "rules-many", Severity: doctor.Info}}, nil, start.Add(22*time.Minute))
	if ended, now := gauge("endpoint-unanswered", "critical"), gauge("rules-many", "info"); ended != 0 || now != 1 {
		t.Errorf("the gauges are %v and %v", ended, now)
	}
}

// Every answer has the same finding, with one identity.
func TestAnswersHaveTheSameFindings(t *testing.T) {
	var flows []dataplane.Flow
	for n := range 3 {
		flows = append(flows, trafficFlow(n, "new", 5*time.Second))
	}
	var began []doctor.Finding
	web, other := serviceOf("default", "web", 1), serviceOf("default", "zeta", 2)
	h := start(t, func(c *Config) {
		c.State, c.Backends = &fakeState{services: []reconcile.Service{web, other}}, []dataplane.Backend{&fakePlane{flows: flows}}
		c.examine = func(context.Context) (*doctor.Node, error) { return &doctor.Node{}, nil }
		c.Findings = NewFindings(func(f doctor.Finding) { began = append(began, f) })
	}).wait(t)
	status, err := h.client.Status(t.Context(), &nodev1alpha1.StatusRequest{})
	if err != nil {
		t.Fatal(err)
	}
	list, err := h.client.ListServices(t.Context(), &nodev1alpha1.ListServicesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	one, err := h.client.GetService(t.Context(), &nodev1alpha1.GetServiceRequest{Namespace: "default", Name: "web"})
	if err != nil {
		t.Fatal(err)
	}
	all, err := h.client.Findings(t.Context(), &nodev1alpha1.FindingsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	identity := func(f *nodev1alpha1.Finding) string {
		return f.Id + " " + f.Severity + " " + f.Title + " " + f.Object.String() + " " + f.Since.String() + " " + f.Documentation
	}
	var got []string
	for _, answer := range [][]*nodev1alpha1.Finding{status.Findings, list.Services[0].Findings, one.Service.Findings, all.Findings} {
		if len(answer) != 1 || answer[0].Id != "endpoint-unanswered" || answer[0].Since == nil {
			t.Fatalf("findings %v", answer)
		}
		got = append(got, identity(answer[0]))
	}
	if len(slices.Compact(slices.Clone(got))) != 1 {
		t.Errorf("several identities: %q", got)
	}
	if o := all.Findings[0].Object; o.Kind != "Service" || o.Namespace != "default" || o.Name != "web" || o.Port != "http" ||
		o.Endpoint != "10.1.1.1:8080" {
		t.Errorf("the object is %v", o)
	}
	if status.Findings[0].Evidence != nil || all.Findings[0].Evidence == nil || len(began) != 1 {
		t.Errorf("evidence of status %v, of findings %v; it began %d times", status.Findings[0].Evidence, all.Findings[0].Evidence, len(began))
	}
	if list.Services[0].Health != "endpoint-unanswered" || one.Service.Health != "endpoint-unanswered" || list.Services[1].Health != "ok" ||
		len(list.Services[1].Findings) > 0 {
		t.Errorf("health of %v, %v", list.Services, one.Service)
	}
	if status.NetworkNamespace == 0 || status.NetworkNamespace != all.NetworkNamespace {
		t.Errorf("network namespaces %d and %d", status.NetworkNamespace, all.NetworkNamespace)
	}
}

// Findings are there without a request: metrics and Events need them.
func TestTheAgentEvaluatesByItself(t *testing.T) {
	began, examined := make(chan doctor.Finding, 1), make(chan bool, 100)
	var flows []dataplane.Flow
	for n := range 3 {
		flows = append(flows, trafficFlow(n, "new", 5*time.Second))
	}
	start(t, func(c *Config) {
		c.State = &fakeState{services: []reconcile.Service{serviceOf("default", "web", 1)}}
		c.Backends = []dataplane.Backend{&fakePlane{flows: flows}}
		c.watchPause = time.Millisecond
		c.examine = func(context.Context) (*doctor.Node, error) { examined <- true; return &doctor.Node{}, nil }
		c.Findings = NewFindings(func(f doctor.Finding) { began <- f })
	})
	if f := <-began; f.ID != "endpoint-unanswered" {
		t.Errorf("it found %+v", f)
	}
	<-examined
}

func TestHealthOfAService(t *testing.T) {
	problem := []*nodev1alpha1.Problem{{What: "x"}}
	refused := doctor.Finding{ID: "source-range-refuses", Severity: doctor.Info}
	silent := doctor.Finding{ID: "endpoint-unanswered", Severity: doctor.Critical}
	for want, row := range map[string]struct {
		problems []*nodev1alpha1.Problem
		findings []doctor.Finding
	}{
		"ok":                  {nil, []doctor.Finding{refused}},
		"problem":             {problem, []doctor.Finding{refused}},
		"endpoint-unanswered": {problem, []doctor.Finding{silent, refused}},
	} {
		s := &nodev1alpha1.Service{Problems: row.problems}
		if addFindings(s, row.findings); s.Health != want || len(s.Findings) != len(row.findings) {
			t.Errorf("%s: %v", want, s)
		}
	}
}
