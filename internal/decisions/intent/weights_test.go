package intent

import (
	"slices"
	"strings"
	"testing"
)

func TestWeightsOfAnnotations(t *testing.T) {
	weighted := func(text string) map[string]string {
		return map[string]string{BalanceAnnotation: "weighted", WeightsAnnotation: text}
	}
	slice := uint8(20)
	for _, c := range []struct {
		name        string
		annotations map[string]string
		slice       *uint8
		want        []uint16
		problem     string // part of the only one; "" for none
	}{
		{"none", nil, nil, nil, ""},
		{"a slice's weight alone has no effect", nil, &slice, nil, ""},
		{"patterns, the first decides", weighted("web-canary-*=5 web-*=90 *=70"), nil, []uint16{90, 5, 1}, ""},
		{"without a common divisor", weighted("web-canary-*=5, web-*=90,\n10.2.0.0/16=5"), nil, []uint16{18, 1, 1}, ""},
		{"addresses", weighted("10.1.0.2=0 10.2.0.0/16=7"), nil, []uint16{1, 0, 7}, ""},
		{"slices", weighted("web-1=1"), &slice, []uint16{1, 20, 20}, ""},
		{"equal weights are none", weighted("*=7 10.2.0.3=7"), &slice, nil, ""},
		{"all zero", weighted("0.0.0.0/0=0"), nil, nil, "gives every IPv4 endpoint of port 80/TCP weight 0"},
		{"too large", weighted("web-1=101 web-*=2"), nil, []uint16{2, 2, 1}, `entry "web-1=101" has no weight from 0 to 100`},
		{"no number", weighted("web-1"), nil, nil, `entry "web-1" has no pattern and weight`},
		{"no pattern", weighted("=3 web-1=2"), nil, []uint16{2, 1, 1}, `entry "=3" has no pattern`},
		{"bad pattern", weighted("[=3"), nil, nil, "has a pattern that does not parse"},
		{"unknown way", map[string]string{BalanceAnnotation: "fastest"}, nil, nil, `"fastest" is not a way to choose endpoints`},
		{"weights without weighted", map[string]string{WeightsAnnotation: "*=3"}, nil, nil, "needs spillway.dev/balance: weighted"},
		{"weights with random", map[string]string{BalanceAnnotation: "random", WeightsAnnotation: "*=3"}, nil, nil, "has no effect with"},
		{"too many", weighted(strings.Repeat("a=1 ", maxWeightRules) + "web-1=2"), nil, nil, "has more than 64 entries"},
	} {
		t.Run(c.name, func(t *testing.T) {
			svc := web(clusterIPs("10.96.0.1"))
			svc.Annotations = c.annotations
			s := sliceOf("s", at("10.1.0.1", here, pod("web-1")), at("10.1.0.2", here, pod("web-canary-1")), at("10.2.0.3", there))
			s.Weight = c.slice
			tr := newTracker(svc, s)
			if got := tr.State().Ports[0].Weights; !slices.Equal(got, c.want) {
				t.Errorf("weights %v, want %v", got, c.want)
			}
			problems := tr.Problems()
			if len(problems) != min(len(c.problem), 1) || c.problem != "" && !strings.Contains(problems[0].What, c.problem) {
				t.Errorf("problems %v, want %q", problems, c.problem)
			}
		})
	}
}

func TestSharesAreBounded(t *testing.T) {
	for _, c := range []struct {
		name      string
		n         int
		first, at uint16 // weights of the first endpoint and of the others
	}{
		{"as asked", 600, 100, 99}, {"divided", 3000, 100, 50}, {"so many that only 0 and 1 remain", maxShares, 0, 100},
	} {
		ws := slices.Repeat([]uint16{c.at}, c.n)
		ws[0] = c.first
		got := canonicalWeights(ws)
		sum := 0
		for _, w := range got {
			sum += int(w)
		}
		if len(got) != c.n || sum > maxShares || sum == 0 {
			t.Errorf("%s: %d weights with sum %d, want %d and at most %d", c.name, len(got), sum, c.n, maxShares)
		}
	}
}

func TestSharesOfARoute(t *testing.T) {
	p := &ServicePort{Weights: []uint16{3, 0, 2},
		Endpoints: []Endpoint{{ClusterPolicy: true}, {ClusterPolicy: true, LocalPolicy: true}, {ClusterPolicy: true}}}
	if got := p.Shares(ToCluster); !slices.Equal(got, []int{3, 0, 2}) {
		t.Errorf("shares of the cluster's route %v, want 3, 0, 2", got)
	}
	if got := p.Shares(ToLocal); !slices.Equal(got, []int{0, 1, 0}) {
		t.Errorf("shares of the local route %v, want its only endpoint, although its weight is 0", got)
	}
	p.Weights = nil
	if got := p.Shares(ToCluster); !slices.Equal(got, []int{1, 1, 1}) {
		t.Errorf("shares without weights %v, want equal ones", got)
	}
}

// Topology hints decide which endpoints a node uses, and weights which shares these get.
func TestWeightsApplyWithinTopologyHints(t *testing.T) {
	svc := web(clusterIPs("10.96.0.1"))
	svc.Annotations = map[string]string{BalanceAnnotation: "weighted", WeightsAnnotation: "10.1.0.1=9 10.1.0.2=3 10.1.0.3=50"}
	s := sliceOf("s", at("10.1.0.1", there, forZones("zone-1")), at("10.1.0.2", here, forZones("zone-1")),
		at("10.1.0.3", there, forZones("zone-2")))
	for zone, want := range map[string][]int{"zone-1": {3, 1}, "zone-2": {1}, "zone-3": {9, 3, 50}} {
		p := newTracker(svc, inZone(zone), s).State().Ports[0]
		if got := p.Shares(ToCluster); !slices.Equal(got, want) {
			t.Errorf("in %s, the endpoints %v have the shares %v, want %v", zone, p.Endpoints, got, want)
		}
	}
}

func TestTheSharesOfOneServiceAreBounded(t *testing.T) {
	svcPorts, slicePorts := manyPortsOf(20)
	svc := web(ports(svcPorts...))
	svc.Annotations = map[string]string{BalanceAnnotation: "weighted", WeightsAnnotation: "10.1.0.1=99 0.0.0.0/0=100"}
	tr := newTracker(svc, withPorts(sliceOf("s", manyEndpoints(600)...), slicePorts...))
	sum := 0
	for _, sp := range tr.State().Ports {
		sum += sp.allShares()
	}
	if sum == 0 || sum > maxEndpoints {
		t.Errorf("%d shares are served, want at most %d", sum, maxEndpoints)
	}
	if p := tr.Problems(); len(p) != 1 || !strings.Contains(p[0].What, "shares by weight") {
		t.Errorf("problems %v, want one about too many shares", p)
	}
}
