package intent

import (
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// largeServices returns Services of one namespace, each with that many ports, and endpoints of
// each.
func largeServices(n, ports, endpoints int, options ...func(*model.Service)) model.Delta {
	var objects []any
	svcPorts, slicePorts := manyPortsOf(ports)
	eps := manyEndpoints(endpoints)
	for i := range n {
		called := called(fmt.Sprintf("s%02d", i))
		svc := web(append(options, called, born(int64(i)), clusterIPs(fmt.Sprintf("10.96.1.%d", i)))...)
		svc.Ports = svcPorts
		objects = append(objects, svc, ofService(withPorts(sliceOf(svc.Name.Name, eps...), slicePorts...), svc.Name.Name))
	}
	return delta(objects...)
}

// liveHeap returns the bytes of the heap that are in use.
func liveHeap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// heapOf returns the bytes that a Tracker holds while it decides Services of which one fits, and
// after that.
func heapOf(t *testing.T, d model.Delta, endpoints int) (peak, after int64) {
	t.Helper()
	watch, before := false, int64(0)
	cfg := Config{NodeName: here, Capacity: Capacity{Endpoints: 2*endpoints + endpoints/10}}
	cfg.FallsBack = func(p *ServicePort) bool { // asked for each port while its Service is in memory
		if watch && p.ID.Number == 1 {
			peak = max(peak, liveHeap()-before)
		}
		return false
	}
	tr := New(cfg)
	tr.SetTime(time.Unix(1000, 0))
	tr.Changes()
	tr.facts.Apply(d)
	before, watch = liveHeap(), true
	tr.Changes()
	for _, e := range tr.services { // and alone
		tr.markDirty(e)
		tr.Changes()
	}
	after = liveHeap() - before
	if got := tr.Count(); got != 1 {
		t.Errorf("%d Services are served, want 1", got)
	}
	if len(tr.services[name("s00")].ports) == 0 {
		t.Error("the oldest Service is not served")
	}
	runtime.KeepAlive(d)
	return peak, after
}

// TestServicesThatDoNotFitTakeNoMemory: a namespace may ask for any number of Services that are
// refused. While they are decided, one that may fit and one more are in memory.
func TestServicesThatDoNotFitTakeNoMemory(t *testing.T) {
	const ports, endpoints = 50, 1000
	for what, options := range map[string][]func(*model.Service){
		"plain": nil, "slow start": {slowly("30s")},
		"weighted": {func(s *model.Service) {
			s.Annotations = map[string]string{BalanceAnnotation: "weighted", WeightsAnnotation: "10.1.0.1=3"}
		}},
	} {
		onePeak, oneAfter := heapOf(t, largeServices(1, ports, endpoints, options...), ports*endpoints)
		peak, after := heapOf(t, largeServices(20, ports, endpoints, options...), ports*endpoints)
		if peak > onePeak*5/2 || after > oneAfter*3/2 {
			t.Errorf("%s: 20 Services hold %d bytes, and %d after that; one holds %d and %d", what, peak, after, onePeak, oneAfter)
		}
	}
}

// TestServicesThatFitTogetherAreServed, also where they need more than half of the capacity.
func TestServicesThatFitTogetherAreServed(t *testing.T) {
	namespaces := []string{"a", "b", "c"}
	state := func(c Capacity) string {
		tr := New(Config{NodeName: here, Capacity: c})
		apply := func(now int64, endpoints int) {
			var objects []any
			for i, namespace := range namespaces {
				svc := web(slowly("90s"), clusterIPs(fmt.Sprintf("10.96.1.%d", i)))
				s := sliceOf("s", manyEndpoints(endpoints)...)
				svc.Name.Namespace, s.Name.Namespace, s.Service.Namespace = namespace, namespace, namespace
				objects = append(objects, svc, s)
			}
			tr.SetTime(time.Unix(now, 0))
			tr.Apply(delta(objects...))
		}
		apply(1000, 9)
		apply(2000, 10) // the share of the new endpoint grows
		if next, _ := tr.NextStep(); !next.Equal(time.Unix(2010, 0)) || len(tr.starting) != len(namespaces) {
			t.Errorf("%d Services have a step, the next at %v", len(tr.starting), next)
		}
		for _, p := range tr.State().Ports {
			if want := []uint16{10, 10, 10, 10, 10, 10, 10, 10, 10, 1}; !slices.Equal(p.Weights, want) {
				t.Errorf("weights of %v: %v, want %v", p.ID, p.Weights, want)
			}
		}
		return tr.summary()
	}
	if got, want := state(Capacity{Endpoints: 40}), state(Capacity{}); got != want {
		t.Errorf("%s\nwithout a limit:\n%s", got, want)
	}
}
