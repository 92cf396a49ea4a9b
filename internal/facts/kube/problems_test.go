package kube

import (
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/await"
)

// TestAMissingNodeIsOneProblem has no Node at all. If other Nodes exist, intent reports
// the missing Node.
func TestAMissingNodeIsOneProblem(t *testing.T) {
	s := newSource(t, Config{})
	nodes := s.kinds[2].(*nodeStore)
	for _, c := range []struct {
		listed bool
		known  string
		want   int
	}{{false, "", 0}, {true, "", 1}, {true, "b", 0}, {true, "a", 0}} {
		nodes.listed = c.listed
		clear(nodes.known)
		if c.known != "" {
			nodes.known[model.Name{Name: c.known}] = &model.Node{Name: c.known}
		}
		if got := s.serverProblems(); len(got) != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
}

// TestManyProblemsAreListedSeldom: each list has all problems, of which a tenant can make any
// number, and a change of one of its objects is another list.
func TestManyProblemsAreListedSeldom(t *testing.T) {
	s := newSource(t, Config{})
	var lists atomic.Int32
	var last atomic.Value
	s.started, s.ctx = true, t.Context()
	s.deliver = func(_ model.Delta, problems []model.Problem) {
		if problems != nil {
			lists.Add(1)
			last.Store(problems)
		}
	}
	put := func(namespace, name, clusterIP string) {
		t.Helper()
		if err := s.services.Update(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: "1"},
			Spec: corev1.ServiceSpec{ClusterIP: clusterIP, Ports: []corev1.ServicePort{{Port: 80}}}}); err != nil {
			t.Fatal(err)
		}
	}
	put("greedy", "first", "bad")
	if lists.Load() != 1 {
		t.Errorf("%d lists after the first problem, want 1", lists.Load())
	}
	faults := make([]any, 2*manyProblems)
	for i := range faults {
		faults[i] = &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "greedy", Name: fmt.Sprint("s", i), UID: "1"},
			Spec: corev1.ServiceSpec{ClusterIP: "bad", Ports: []corev1.ServicePort{{Port: 80}}}}
	}
	if err := s.services.Replace(faults, ""); err != nil {
		t.Fatal(err)
	}
	before, began := lists.Load(), time.Now()
	for i := range 500 {
		put("greedy", "s0", fmt.Sprint("bad", i))
	}
	put("honest", "web", "worse")
	await.NoError(t, func() error {
		problems := last.Load().([]model.Problem)
		if !slices.ContainsFunc(problems, func(p model.Problem) bool { return p.Object.Name.Namespace == "honest" }) {
			return fmt.Errorf("the honest Service has no problem among %d", len(problems))
		}
		return nil
	})
	// As many as listPeriods have passed, and one that was due.
	if made, most := lists.Load()-before, int32(time.Since(began)/listPeriod)+1; made > most {
		t.Errorf("%d lists for 501 changes, want %d at most", made, most)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	listed := s.listed
	s.emit(model.Delta{})
	if s.listed != listed || s.listsLater {
		t.Error("without a new problem, they are listed again")
	}
}
