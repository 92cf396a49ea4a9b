package server

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/reconcile"
)

// dsrPlane is a dataplane whose endpoints answer directly. Its counters are 0 at the first
// reading.
type dsrPlane struct {
	fakePlane
	replies               dataplane.DSRReplies
	encapsulations        []dataplane.DSREncapsulation
	announced, unanswered uint64
	readings              int
}

func (p *dsrPlane) DSRReplies() (dataplane.DSRReplies, error)       { return p.replies, nil }
func (p *dsrPlane) DSREncapsulations() []dataplane.DSREncapsulation { return p.encapsulations }
func (p *dsrPlane) DSRCounts() (announced, unanswered uint64) {
	if p.readings++; p.readings == 1 {
		return 0, 0
	}
	return p.announced, p.unanswered
}

func TestMissingDSRRepliesAreFound(t *testing.T) {
	now := time.Now()
	at := netip.MustParseAddrPort("10.1.1.1:8080")
	broken := dataplane.DSRPath{Endpoint: at, Failures: 7, Failed: now.Add(-12 * time.Second), Broken: true}
	before, old, works := broken, broken, broken
	before.Answered = now.Add(-200 * time.Second)
	old.Failed = now.Add(-time.Hour)
	works.Broken, works.Failures, works.Answered = false, 0, now.Add(-time.Minute)
	silent := []dataplane.Flow{trafficFlow(0, "new", 5*time.Second), trafficFlow(1, "new", 5*time.Second),
		trafficFlow(2, "new", 5*time.Second)}
	for _, row := range []struct {
		what  string
		plane dsrPlane
		want  []string // texts of the finding; nil: there is none
	}{
		{"a broken path", dsrPlane{replies: dataplane.DSRReplies{Paths: []dataplane.DSRPath{broken}}}, []string{
			"dsr-replies-missing", "warning", "pod default/pod-10.1.1.1 (10.1.1.1:8080) on node n2 does not answer the clients of Service " +
				"default/web:http directly",
			"repeated 7 SYNs in a row, the last 12 s ago; no direct reply has arrived yet", "0 other endpoints answered", "Look at the network",
			"spillway drops --address 10.1.1.1 --port 8080 --for 10s # on node n2"}},
		{"one that worked", dsrPlane{replies: dataplane.DSRReplies{Paths: []dataplane.DSRPath{before}}},
			[]string{"the last direct reply arrived 200 s ago"}},
		{"others work", dsrPlane{replies: dataplane.DSRReplies{Paths: []dataplane.DSRPath{works, broken, works}}},
			[]string{"2 other endpoints answered", "Other endpoints answer directly. Look at the endpoint's node"}},
		{"long ago", dsrPlane{replies: dataplane.DSRReplies{Paths: []dataplane.DSRPath{old}}}, nil},
		{"all work", dsrPlane{replies: dataplane.DSRReplies{Paths: []dataplane.DSRPath{works}}, announced: 1000, unanswered: 4}, nil},
		{"many break", dsrPlane{replies: dataplane.DSRReplies{Paths: manyPaths(broken, 30)}},
			[]string{"30 endpoints do not answer them directly, such as", "and 25 more endpoints"}},
		{"some clients get no reply", dsrPlane{replies: dataplane.DSRReplies{Paths: []dataplane.DSRPath{works}}, announced: 80, unanswered: 5},
			[]string{"5 of the last 80 got no direct reply", "1 other endpoint answered"}},
		{"few clients get no reply", dsrPlane{replies: dataplane.DSRReplies{Paths: []dataplane.DSRPath{works}}, announced: 1000, unanswered: 40},
			nil},
		{"nothing happens", dsrPlane{}, nil},
		{"no network was probed yet", dsrPlane{encapsulations: encapsulationsOf(dataplane.EncapsulationUnknown, 0, 1)}, nil},
		{"options arrive", dsrPlane{encapsulations: encapsulationsOf(dataplane.EncapsulationOption, 0, 3)}, nil},
		{"only datagrams arrive", dsrPlane{encapsulations: encapsulationsOf(dataplane.EncapsulationGUE, 1430, 7)},
			[]string{"dsr-encapsulated", "info", "the network drops IP options to 7 endpoints of 7", "10.2.2.4",
				"and 2 more endpoints", "1430 bytes"}},
		{"nothing arrives", dsrPlane{encapsulations: encapsulationsOf(dataplane.EncapsulationNone, 0, 1)},
			[]string{"dsr-impossible", "warning", "1 endpoint of 1 cannot answer clients directly", "10.2.2.0"}},
	} {
		t.Run(row.what, func(t *testing.T) {
			found := dsrFindings(t, &row.plane)
			if len(found) != min(len(row.want), 1) {
				t.Fatalf("found %v", found)
			}
			for _, want := range row.want {
				if text := fmt.Sprint(found[0]); !strings.Contains(text, want) {
					t.Errorf("%q is not in %s", want, text)
				}
			}
		})
	}
	t.Run("the endpoint is dead", func(t *testing.T) {
		plane := &dsrPlane{fakePlane: fakePlane{flows: silent}, replies: dataplane.DSRReplies{Paths: []dataplane.DSRPath{broken}},
			announced: 10, unanswered: 10}
		if found := dsrFindings(t, plane); len(found) != 1 || found[0].Id != "endpoint-unanswered" {
			t.Errorf("found %v", found)
		}
	})
}

func encapsulationsOf(encapsulation string, mtu, n int) (out []dataplane.DSREncapsulation) {
	for i := range n {
		at := netip.AddrFrom4([4]byte{10, 2, 2, byte(i)})
		out = append(out, dataplane.DSREncapsulation{Endpoint: at, Encapsulation: encapsulation, MTU: mtu})
	}
	return out
}

func TestEncapsulationsAreShown(t *testing.T) {
	encapsulations := slices.Concat(
		encapsulationsOf(dataplane.EncapsulationGUE, 1430, 2), encapsulationsOf(dataplane.EncapsulationOption, 0, 1),
		encapsulationsOf(dataplane.EncapsulationGUE, 1400, 1))
	var got []string
	for _, e := range dsrEndpoints(encapsulations) {
		got = append(got, fmt.Sprint(e.Encapsulation, " ", e.Count, " ", e.Mtu))
	}
	if want := []string{"option 1 0", "gue 3 1400"}; !slices.Equal(got, want) {
		t.Errorf("endpoints by encapsulation %q, want %q", got, want)
	}
	endpoints := func() []*nodev1alpha1.Endpoint {
		return []*nodev1alpha1.Endpoint{{Address: "10.2.2.1"}, {Address: "10.1.1.1"}}
	}
	s := &nodev1alpha1.Service{Ports: []*nodev1alpha1.ServicePort{{Forwarding: intent.Hybrid, Endpoints: endpoints()},
		{Endpoints: endpoints()}}}
	addEncapsulations(s, encapsulations)
	if e := s.Ports[0].Endpoints; e[0].Encapsulation != "gue" || e[0].EncapsulationMtu != 1430 || e[1].Encapsulation != "" ||
		s.Ports[1].Endpoints[0].Encapsulation != "" {
		t.Errorf("endpoints %v", s.Ports)
	}
}

func manyPaths(like dataplane.DSRPath, n int) (list []dataplane.DSRPath) {
	for i := range n {
		like.Endpoint = netip.AddrPortFrom(like.Endpoint.Addr(), uint16(8000+i))
		list = append(list, like)
	}
	return list
}

// dsrFindings returns the findings of an agent with this dataplane.
func dsrFindings(t *testing.T, plane dataplane.Backend) []*nodev1alpha1.Finding {
	t.Helper()
	h := start(t, func(c *Config) {
		c.State, c.Backends = &fakeState{services: []reconcile.Service{serviceOf("default", "web", 1)}}, []dataplane.Backend{plane}
		c.examine = func(context.Context) (*doctor.Node, error) { return &doctor.Node{}, nil }
	}).wait(t)
	h.dsrGrowth() // the first reading, if no other was
	resp, err := h.client.Findings(t.Context(), &nodev1alpha1.FindingsRequest{})
	if err != nil || len(resp.Problems) > 0 {
		t.Fatalf("findings %v, %v", resp, err)
	}
	return resp.Findings
}

// TestFlowsWithoutRepliesSayNothing: no reply passes the node that received a DSR connection.
func TestFlowsWithoutRepliesSayNothing(t *testing.T) {
	three := func(direct, oneWay bool) (list []dataplane.Flow) {
		for n := range 3 {
			f := trafficFlow(n, "new", 5*time.Second)
			f.DSR, f.OneWay = direct, oneWay
			list = append(list, f)
		}
		return list
	}
	answered := trafficFlow(9, "established", 0)
	answered.DSR, answered.OneWay = true, true // a forged client may say so
	for _, row := range []struct {
		what  string
		flows []dataplane.Flow
		found bool
	}{
		{"the node that received them", three(true, true), false},
		{"the endpoint's node", three(true, false), true},
		{"a client says that the endpoint answered", append(three(false, false), answered), true},
	} {
		found := dsrFindings(t, &fakePlane{flows: row.flows})
		if len(found) != 0 != row.found || row.found && found[0].Id != "endpoint-unanswered" {
			t.Errorf("%s: found %v", row.what, found)
		}
	}
}

func TestPodsWhoseDirectPacketsTraverseTheStackAreNamed(t *testing.T) {
	at := netip.MustParseAddrPort("10.1.1.1:8080")
	plane := &dsrPlane{replies: dataplane.DSRReplies{ThroughStack: []netip.AddrPort{at}}}
	h := start(t, func(c *Config) {
		c.State, c.Backends = &fakeState{services: []reconcile.Service{serviceOf("default", "web", 1)}}, []dataplane.Backend{plane}
	}).wait(t)
	traffic, err := h.traffic(t.Context())
	want := doctor.DSREndpoint{Endpoint: at, Pod: "default/pod-10.1.1.1", Node: "n2", Service: "default/web:http"}
	if err != nil || !slices.Equal(traffic.DSR.ThroughStack, []doctor.DSREndpoint{want}) {
		t.Errorf("%+v, %v", traffic.DSR, err)
	}
}
