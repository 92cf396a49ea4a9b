package intent

import (
	"slices"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

func slowly(d string) func(*model.Service) {
	return func(s *model.Service) { s.Annotations = map[string]string{SlowStartAnnotation: d} }
}

func TestAShareGrowsAfterAnEndpointBecomesReady(t *testing.T) {
	start := time.Unix(1000, 0)
	tr := newTracker()
	weights := func() []uint16 { return tr.State().Ports[0].Weights }
	want := func(when string, ws ...uint16) {
		t.Helper()
		if got := weights(); !slices.Equal(got, ws) {
			t.Errorf("%s: weights %v, want %v", when, got, ws)
		}
	}
	tr.SetTime(start)
	tr.Apply(delta(web(slowly("90s")), sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", there))))
	want("a new Service", 10, 10)
	if at, any := tr.NextStep(); any {
		t.Errorf("a step at %v, want none", at)
	}
	tr.SetTime(start.Add(time.Minute))
	tr.Apply(delta(sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", there), at("10.1.0.3", there))))
	want("a new endpoint", 10, 10, 1)
	from := start.Add(time.Minute)
	for step := 1; step < slowStartSteps; step++ {
		next, any := tr.NextStep()
		if wish := from.Add(time.Duration(step) * 10 * time.Second); !any || !next.Equal(wish) {
			t.Fatalf("step %d at %v, %v, want %v", step, next, any, wish)
		}
		if tr.SetTime(next.Add(-time.Millisecond)) {
			t.Errorf("step %d came early", step)
		}
		if !tr.SetTime(next) {
			t.Errorf("step %d did not come", step)
		}
		if c := tr.Changes(); len(c.Upserts) != 1 {
			t.Errorf("step %d changed %d ports, want 1", step, len(c.Upserts))
		}
		want("later", 10, 10, uint16(1+step))
	}
	if at, any := tr.NextStep(); any {
		t.Errorf("a step at %v after the last one", at)
	}

	tr.Apply(delta(sliceOf("s", at("10.1.0.1", here, notReady), at("10.1.0.2", there), at("10.1.0.3", there))))
	want("one is not ready", 10, 10)
	tr.Apply(delta(sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", there), at("10.1.0.3", there))))
	want("it is ready again", 1, 10, 10)
	tr.Apply(delta(web()))
	want("without the annotation")
	if at, any := tr.NextStep(); any {
		t.Errorf("a step at %v without the annotation", at)
	}
	tr.Apply(delta(web(slowly("90s"))))
	want("with the annotation again", 10, 10, 10)
}

func TestSlowStartMultipliesWeights(t *testing.T) {
	tr := newTracker()
	svc := web(slowly("10s"))
	svc.Annotations[BalanceAnnotation], svc.Annotations[WeightsAnnotation] = "weighted", "10.1.0.1=3 10.1.0.2=0"
	tr.SetTime(time.Unix(1000, 0))
	tr.Apply(delta(svc, sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", there))))
	tr.SetTime(time.Unix(2000, 0))
	tr.Apply(delta(sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", there), at("10.1.0.3", there))))
	if got := tr.State().Ports[0].Weights; !slices.Equal(got, []uint16{30, 0, 1}) {
		t.Errorf("weights %v, want 30, 0, 1", got)
	}
}

func TestSlowStartTimes(t *testing.T) {
	for _, bad := range []string{"", "30", "-1s", "10ms", "16m", "soon"} {
		tr := newTracker(web(slowly(bad)), sliceOf("s", at("10.1.0.1", here)))
		if p := tr.Problems(); len(p) != 1 || !strings.Contains(p[0].What, "is not a time from 1s to 15m") {
			t.Errorf("%q: problems %v", bad, p)
		}
		if w := tr.State().Ports[0].Weights; w != nil {
			t.Errorf("%q: weights %v", bad, w)
		}
	}
}
