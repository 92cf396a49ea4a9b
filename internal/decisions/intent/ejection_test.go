package intent

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

func ejecting(value string) func(*model.Service) {
	return func(s *model.Service) { s.Annotations = map[string]string{OutlierEjectionAnnotation: value} }
}

// watching returns a Tracker of a Service with outlier ejection and these endpoints.
func watching(addrs ...string) *Tracker {
	tr := New(Config{NodeName: here, OutlierEjection: true})
	var eps []model.Endpoint
	for _, a := range addrs {
		eps = append(eps, at(a, there))
	}
	tr.Apply(delta(web(ejecting("true")), sliceOf("s", eps...)))
	return tr
}

// failing sets the failing endpoints of the first port, and returns the shares of all.
func failing(tr *Tracker, addrs ...string) []int {
	p := tr.State().Ports[0]
	list := map[PortID][]Failing{}
	for _, a := range addrs {
		list[p.ID] = append(list[p.ID], Failing{netip.AddrPortFrom(netip.MustParseAddr(a), p.Endpoints[0].Addr.Port()), "it refuses"})
	}
	tr.SetFailing(list)
	tr.Changes()
	return tr.State().Ports[0].Shares(ToCluster)
}

func TestFailingEndpointsGetNoShare(t *testing.T) {
	tr := watching("10.1.0.1", "10.1.0.2", "10.1.0.3", "10.1.0.4")
	if !tr.Watching() {
		t.Error("not watching")
	}
	for _, test := range []struct {
		failing []string
		want    []int
		problem string
	}{
		{nil, []int{1, 1, 1, 1}, ""},
		{[]string{"10.1.0.2"}, []int{1, 0, 1, 1}, "endpoint 10.1.0.2:8080 gets no new connections for a while: it refuses"},
		{[]string{"10.1.0.4", "10.1.0.2", "10.1.0.1"}, []int{1, 0, 1, 0}, "endpoint 10.1.0.1:8080 still gets new connections"},
		{[]string{"10.9.9.9"}, []int{1, 1, 1, 1}, ""},
		{nil, []int{1, 1, 1, 1}, ""},
	} {
		if got := failing(tr, test.failing...); !slices.Equal(got, test.want) {
			t.Errorf("%v: shares %v, want %v", test.failing, got, test.want)
		}
		problems := tr.Problems()
		found := slices.ContainsFunc(problems, func(p model.Problem) bool { return strings.HasPrefix(p.What, test.problem) })
		if test.problem == "" && len(problems) > 0 || test.problem != "" && !found {
			t.Errorf("%v: problems %v, want %q", test.failing, problems, test.problem)
		}
	}
}

func TestALastEndpointIsNotEjected(t *testing.T) {
	if got := failing(watching("10.1.0.1"), "10.1.0.1"); !slices.Equal(got, []int{1}) {
		t.Errorf("shares %v, want 1", got)
	}
}

func TestOutlierEjectionOff(t *testing.T) {
	for _, test := range []struct {
		value   string
		cfg     bool
		watch   bool
		problem string
	}{
		{"true", true, true, ""},
		{"false", true, false, ""},
		{"false", false, false, ""},
		{"yes please", true, false, "is neither true nor false"},
		{"true", false, false, "has no effect on this node"},
	} {
		tr := New(Config{NodeName: here, OutlierEjection: test.cfg})
		tr.Apply(delta(web(ejecting(test.value)), sliceOf("s", at("10.1.0.1", here))))
		problems := tr.Problems()
		if test.problem == "" && len(problems) > 0 || test.problem != "" &&
			(len(problems) != 1 || !strings.Contains(problems[0].What, test.problem)) {
			t.Errorf("%q: problems %v, want %q", test.value, problems, test.problem)
		}
		if got := tr.State().Ports[0].Endpoints[0].Watched; got != test.watch || tr.Watching() != test.watch {
			t.Errorf("%q: watched %v, want %v", test.value, got, test.watch)
		}
	}
	tr := watching("10.1.0.1", "10.1.0.2")
	failing(tr, "10.1.0.1")
	tr.Apply(delta(web()))
	if p := tr.State().Ports[0]; p.Endpoints[0].Ejected || p.Endpoints[0].Watched || tr.Watching() {
		t.Errorf("without the annotation: endpoints %+v", p.Endpoints)
	}
}
