package intent

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
)

// manyPortsOf returns n named ports of a Service and of a slice.
func manyPortsOf(n int) (svc []model.ServicePort, slice []model.EndpointPort) {
	for i := range n {
		name := fmt.Sprint("p", i)
		svc = append(svc, model.ServicePort{Name: name, Protocol: model.TCP, Port: uint16(1 + i)})
		slice = append(slice, model.EndpointPort{Name: name, Protocol: model.TCP, Port: uint16(20000 + i)})
	}
	return svc, slice
}

func manyEndpoints(n int) (out []model.Endpoint) {
	for i := range n {
		out = append(out, at(fmt.Sprintf("10.1.%d.%d", i/250, 1+i%250), there))
	}
	return out
}

func TestAServiceOfManyPortsFindsEachOfASlice(t *testing.T) {
	svcPorts, slicePorts := manyPortsOf(manyPorts + 8)
	s := withPorts(sliceOf("s", at("10.1.0.1", there)), slicePorts...)
	s.Ports = append(s.Ports, model.EndpointPort{Name: "p3", Protocol: model.UDP, Port: 9},
		model.EndpointPort{Name: "p4", Protocol: model.TCP})
	tr := newTracker(web(ports(svcPorts...)), s)
	got := tr.State().Ports
	if len(got) != len(svcPorts) {
		t.Fatalf("%d ports, want %d", len(got), len(svcPorts))
	}
	for _, sp := range got {
		if len(sp.Endpoints) != 1 || sp.Endpoints[0].Addr.Port() != 20000+sp.ID.Number-1 {
			t.Errorf("%v leads to %v", sp.ID, sp.Endpoints)
		}
	}
}

// TestTheEndpointsOfOneServiceAreBounded: two objects that an API server takes must not
// make the hundreds of millions of endpoints that they could.
func TestTheEndpointsOfOneServiceAreBounded(t *testing.T) {
	const each = 1000
	svcPorts, slicePorts := manyPortsOf(maxEndpoints/each + 100)
	tr := newTracker(web(ports(svcPorts...)), withPorts(sliceOf("s", manyEndpoints(each)...), slicePorts...),
		web(called("other"), clusterIPs("10.96.0.2")), ofService(sliceOf("o", at("10.1.0.1", there)), "other"))
	sum, other := 0, 0
	for _, sp := range tr.State().Ports {
		if sp.ID.Service == name("other") {
			other += len(sp.Endpoints)
		} else {
			sum += len(sp.Endpoints)
		}
	}
	if sum != maxEndpoints/each*each || other != 1 {
		t.Errorf("%d endpoints of one Service, %d of the other", sum, other)
	}
	want := fmt.Sprintf("Service ns/web: spec.ports: only the first %d are served", maxEndpoints/each)
	if ps := tr.Problems(); len(ps) != 1 || !strings.HasPrefix(ps[0].String(), want) {
		t.Errorf("problems %v, want %s", ps, want)
	}
}

// TestEndpointsOfARedirectAreBounded: the Service that another one redirects to counts too.
func TestEndpointsOfARedirectAreBounded(t *testing.T) {
	const each = 1000
	svcPorts, slicePorts := manyPortsOf(maxEndpoints/each + 100)
	near := manyEndpoints(each)
	for i := range near {
		near[i].Node = here
	}
	tr := newTracker(web(ports(svcPorts...), func(s *model.Service) { s.Annotations = map[string]string{LocalRedirectAnnotation: "cache"} }),
		web(called("cache"), clusterIPs("10.96.0.2")), ofService(withPorts(sliceOf("c", near...), slicePorts...), "cache"))
	sum := 0
	for _, sp := range tr.State().Ports {
		sum += len(sp.Endpoints)
	}
	if sum != maxEndpoints/each*each {
		t.Errorf("%d endpoints, want %d", sum, maxEndpoints/each*each)
	}
}

// TestEachEndpointIsWeighedOnce: a Service may have thousands of ports, and 64 patterns of pods.
func TestEachEndpointIsWeighedOnce(t *testing.T) {
	svc := web(func(s *model.Service) {
		s.Annotations = map[string]string{BalanceAnnotation: "weighted", WeightsAnnotation: "a*=5"}
	})
	svcPorts, slicePorts := manyPortsOf(2)
	svc.Ports = svcPorts
	a, b := at("10.1.0.1", there, pod("a")), at("10.1.0.2", there, pod("b"))
	tr := newTracker(svc, withPorts(sliceOf("s", a, b), slicePorts...))
	e := tr.services[svc.Name]
	from := newServiceSlices(tr.slicesOf(e), len(e.plan.ports))
	for i, want := range []uint16{5, 5} {
		p := &e.plan.ports[i]
		sp, _ := tr.decidePort(e, p, p.requests, from, nil, nil)
		if sp == nil || !slices.Equal(sp.Weights, []uint16{want, 1}) {
			t.Errorf("port %d: %+v", i, sp)
		}
		e.plan.weights.rules[0].weight = 7 // what the next port would find by comparing again
	}
}

// TestSlicesAtAnAddressAreReadOnce: a Service asks at each of its ports, and slices of anyone may
// name its address.
func TestSlicesAtAnAddressAreReadOnce(t *testing.T) {
	_, slicePorts := manyPortsOf(manyPorts)
	tr := newTracker(withPorts(sliceOf("many", at("192.0.2.1", there)), slicePorts...), sliceOf("few", at("192.0.2.1", there)))
	first := tr.slicesAt(addr("192.0.2.1"))
	if len(first) != 2 || first[0].ports != nil || len(first[1].ports) != manyPorts {
		t.Fatalf("slices %+v", first)
	}
	if again := tr.slicesAt(addr("192.0.2.1")); &again[0] != &first[0] {
		t.Error("the slices are read for each port")
	}
	tr.Apply(delta(ofService(sliceOf("new", at("192.0.2.1", there)), "other")))
	if now := tr.slicesAt(addr("192.0.2.1")); len(now) != 3 {
		t.Errorf("after a change: %d slices, want 3", len(now))
	}
}

// TestPortsShareTheirSourceRanges: a copy for each port would be gigabytes.
func TestPortsShareTheirSourceRanges(t *testing.T) {
	svcPorts, _ := manyPortsOf(2)
	tr := newTracker(web(loadBalancer("192.0.2.1"), from("10.0.0.0/8"), ports(svcPorts...)))
	var first *Frontend
	for _, sp := range tr.State().Ports {
		for i := range sp.Frontends {
			f := &sp.Frontends[i]
			switch {
			case f.Kind != LoadBalancerIP:
			case first == nil:
				first = f
			case &f.SourceRanges[0] != &first.SourceRanges[0]:
				t.Error("each port has source ranges of its own")
			}
		}
	}
}

func TestTheProblemsOfOneServiceAreBounded(t *testing.T) {
	svcPorts, _ := manyPortsOf(100)
	tr := newTracker(web(ports(svcPorts...)), web(called("younger"), born(2000), clusterIPs("10.96.0.9"),
		externalIPs("10.96.0.1", "fd00::1"), ports(svcPorts...)))
	ps := tr.Problems()
	if len(ps) != maxProblems+1 || !strings.Contains(fmt.Sprint(ps), "ns/younger: has more problems than these 16") {
		t.Errorf("%d problems: %v", len(ps), ps)
	}
	var many []string
	for i := range 1000 {
		many = append(many, fmt.Sprintf("fd00::%x", i+1))
	}
	if p := planService(web(externalIPs(many...)), &Config{}); len(p.problems) > maxProblems+1 {
		t.Errorf("a plan has %d problems", len(p.problems))
	}
}

// TestSlicesAtAnAddressAreLimited: a tenant names the address of another's Service in any number
// of slices. That of the API servers counts whatever others there are.
func TestSlicesAtAnAddressAreLimited(t *testing.T) {
	api := sliceOf("kubernetes", at("192.0.2.1", there))
	api.Name.Namespace, api.Service = "default", model.Name{Namespace: "default", Name: "kubernetes"}
	d := delta(api, ofService(sliceOf("honest", at("192.0.2.1", there)), "zz"))
	_, slicePorts := manyPortsOf(maxPortsAt / 4)
	for i := range 1000 {
		few := sliceOf(fmt.Sprint("few", i), at("192.0.2.1", there))
		few.Name.Namespace, few.Service = "default", model.Name{Namespace: "default", Name: fmt.Sprint("a", i)}
		d.Slices[few.Name] = few
		many := withPorts(sliceOf(fmt.Sprint("many", i), at("192.0.2.1", there)), slicePorts...)
		many.Name.Namespace, many.Service = "greedy", model.Name{Namespace: "greedy", Name: "none"}
		d.Slices[many.Name] = many
	}
	got := map[string]int{}
	tr := New(Config{NodeName: here})
	tr.Apply(d)
	for _, c := range tr.slicesAt(addr("192.0.2.1")) {
		got[c.Service.Namespace]++
	}
	if want := map[string]int{"default": maxSlicesAt + 1, "greedy": 4, "ns": 1}; !maps.Equal(got, want) {
		t.Errorf("slices that count, by namespace: %v, want %v", got, want)
	}
}

// TestSlicesCannotFillTheListOfPolicedPods by naming addresses that no pod here has.
func TestSlicesCannotFillTheListOfPolicedPods(t *testing.T) {
	eps := manyEndpoints(3 * maxUnverified)
	for i := range eps {
		eps[i].Node = here
	}
	tr := newTracker(sliceOf("s", eps...), podObject("p", here, nil, "10.200.0.1"), networkPolicy("np", nil))
	guarded := addr("10.200.0.2")
	setTraversal(tr, donottrack.Traversal{DenyRulePods: []netip.Addr{guarded}})
	got := tr.State().Node.MustTraverseNetfilter
	if len(got) != maxUnverified+2 || !slices.Contains(got, addr("10.200.0.1")) || !slices.Contains(got, guarded) {
		t.Errorf("%d policed pods, the last %v", len(got), got[len(got)-2:])
	}
}
