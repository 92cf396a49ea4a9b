package server

import (
	"context"
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/observe/flowlog"
	"spillway.dev/spillway/internal/reconcile"
)

// tablePlane is a dataplane with a flow table of this use.
type tablePlane struct {
	fakePlane
	used, size uint64
}

func (p *tablePlane) Tables() []dataplane.Table {
	return []dataplane.Table{{Name: "flows", Used: p.used, Size: p.size}, {Name: "services", Used: 10, Size: 10}}
}

// trafficFlow is the n-th flow to the endpoint 10.1.1.1:8080 of default/web, opened some time ago.
func trafficFlow(n int, state string, ago time.Duration) dataplane.Flow {
	return dataplane.Flow{
		Protocol: model.TCP, State: state, Opened: time.Now().Add(-ago),
		Client:  netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), uint16(4000+n)),
		Service: netip.MustParseAddrPort("10.96.0.1:80"), Endpoint: netip.MustParseAddrPort("10.1.1.1:8080"),
	}
}

// findingsOf returns the findings of an agent whose node has nothing but these flows and events.
func findingsOf(t *testing.T, plane dataplane.Backend, events ...dataplane.FlowEvent) (*harness, []*nodev1alpha1.Finding) {
	t.Helper()
	log := flowlog.New(flowlog.Config{Node: "n1"})
	log.Add(events)
	h := start(t, func(c *Config) {
		c.State, c.Backends = &fakeState{services: []reconcile.Service{serviceOf("default", "web", 1)}}, []dataplane.Backend{plane}
		c.Events = FlowEvents{Mode: "refused", Log: log, Reporter: fakeReporter{}}
		c.examine = func(context.Context) (*doctor.Node, error) { return &doctor.Node{}, nil }
	}).wait(t)
	resp, err := h.client.Findings(t.Context(), &nodev1alpha1.FindingsRequest{})
	if err != nil || len(resp.Problems) > 0 {
		t.Fatalf("findings %v, %v", resp, err)
	}
	return h, resp.Findings
}

// began is the age of connections, which grows while the test runs.
var began = regexp.MustCompile(`the oldest of them began about \d+ s ago, the newest \d+ s ago`)

func TestASilentEndpointIsFound(t *testing.T) {
	const waits = 5 * time.Second
	three := func(change func(*dataplane.Flow)) (list []dataplane.Flow) {
		for n := range 3 {
			f := trafficFlow(n, "new", waits)
			if change != nil {
				change(&f)
			}
			list = append(list, f)
		}
		return list
	}
	for _, row := range []struct {
		what  string
		flows []dataplane.Flow
		found bool
	}{
		{"three connections wait", three(nil), true},
		{"no connection", nil, false},
		{"a client gives up once", []dataplane.Flow{trafficFlow(0, "new", waits)}, false},
		{"two clients give up", three(nil)[:2], false},
		{"they have just begun", three(func(f *dataplane.Flow) { f.Opened = time.Now().Add(time.Hour) }), false},
		{"long ago", three(func(f *dataplane.Flow) { f.Opened = time.Now().Add(-40 * time.Second) }), false},
		{"the opening is unknown", three(func(f *dataplane.Flow) { f.Opened = time.Time{} }), false},
		{"UDP without answers", three(func(f *dataplane.Flow) { f.Protocol = model.UDP }), false},
		{"a later connection is answered", append(three(nil), trafficFlow(9, "syn-recv", waits-time.Second)), false},
		{"a later connection was refused", append(three(nil), trafficFlow(9, "closed", waits-time.Second)), false},
		{"an answered connection comes first in the table",
			append([]dataplane.Flow{trafficFlow(9, "established", waits-time.Second)}, three(nil)...), false},
		{"the endpoint died: earlier connections were answered", append(three(nil), trafficFlow(9, "established", waits+time.Second)), true},
		{"a connection was answered long ago", append(three(nil), trafficFlow(9, "established", time.Hour)), true},
		{"another endpoint answers", append(three(nil), func() dataplane.Flow {
			f := trafficFlow(9, "established", waits)
			f.Endpoint = netip.MustParseAddrPort("10.1.1.3:8080")
			return f
		}()), true},
		{"normal load", []dataplane.Flow{trafficFlow(1, "established", waits), trafficFlow(2, "closed", waits), trafficFlow(3, "closing", waits),
			trafficFlow(4, "new", 0)}, false},
		{"the endpoint was removed", three(func(f *dataplane.Flow) { f.Endpoint = netip.MustParseAddrPort("10.1.1.9:8080") }), false},
	} {
		t.Run(row.what, func(t *testing.T) {
			_, found := findingsOf(t, &fakePlane{flows: row.flows})
			switch {
			case !row.found && len(found) > 0:
				t.Errorf("found %v", found)
			case row.found && (len(found) != 1 || found[0].Id != "endpoint-unanswered"):
				t.Errorf("found %v", found)
			case row.found:
				text := fmt.Sprint(found[0])
				if !began.MatchString(text) {
					t.Errorf("no age in %s", text)
				}
				for _, want := range []string{"default/web:http", "pod default/pod-10.1.1.1 (10.1.1.1:8080)", "3 connections of TCP", "192.0.2.1 (3)",
					"on node n2", "spillway drops --address 10.1.1.1 --port 8080 --for 10s # on node n2", "in the last 30 s",
					"runbooks/endpoint-unanswered/"} {
					if !strings.Contains(text, want) {
						t.Errorf("%q is not in %s", want, text)
					}
				}
			}
		})
	}
}

func TestARefusingEndpointIsFound(t *testing.T) {
	refused := func(n int, ago time.Duration) dataplane.Flow {
		f := trafficFlow(n, "closed", ago)
		f.Refused = true
		return f
	}
	three := []dataplane.Flow{refused(0, 3*time.Second), refused(1, 2*time.Second), refused(2, time.Second)}
	for _, row := range []struct {
		what  string
		flows []dataplane.Flow
		found string // id; "": none
	}{
		{"three are refused", three, "endpoint-refuses"},
		{"two are", three[:2], ""},
		{"earlier ones were accepted", append(three[:3:3], trafficFlow(9, "established", 4*time.Second)), "endpoint-refuses"},
		{"a later one is accepted", append(three[:3:3], trafficFlow(9, "syn-recv", 0)), ""},
		{"a later one waits", append(three[:3:3], trafficFlow(9, "new", 0)), "endpoint-refuses"},
		{"refused ones and then silence", append(three[:3:3], trafficFlow(6, "new", 1900*time.Millisecond),
			trafficFlow(7, "new", 1800*time.Millisecond), trafficFlow(8, "new", 1700*time.Millisecond)), "endpoint-refuses"},
	} {
		t.Run(row.what, func(t *testing.T) {
			_, found := findingsOf(t, &fakePlane{flows: row.flows})
			if len(found) != min(len(row.found), 1) || row.found != "" && found[0].Id != row.found {
				t.Fatalf("found %v, want %q", found, row.found)
			}
			if row.found == "" {
				return
			}
			text := fmt.Sprint(found[0])
			for _, want := range []string{"default/web:http", "pod default/pod-10.1.1.1 (10.1.1.1:8080) refuses",
				"3 connections of TCP in the last 10 s", "192.0.2.1 (3)", "the newest of them began about", "runbooks/endpoint-refuses/"} {
				if !strings.Contains(text, want) {
					t.Errorf("%q is not in %s", want, text)
				}
			}
		})
	}
}

// socketsPlane is a dataplane whose sockets have failed.
type socketsPlane struct {
	fakePlane
	failed []dataplane.FailedSockets
}

func (p *socketsPlane) FailedSockets() ([]dataplane.FailedSockets, error) { return p.failed, nil }

// failedSockets are connections of a pod to the endpoint 10.1.1.1:8080 of default/web.
func failedSockets(change func(*dataplane.FailedSockets)) dataplane.FailedSockets {
	f := dataplane.FailedSockets{Port: serviceOf("default", "web", 1).Ports[0].ID, Endpoint: netip.MustParseAddrPort("10.1.1.1:8080"),
		Client: netip.MustParseAddr("10.1.1.7")}
	change(&f)
	return f
}

// failuresOf returns failures that began some time ago.
func failuresOf(connections, segments uint32, first, last time.Duration) dataplane.Failures {
	now := time.Now()
	return dataplane.Failures{Connections: connections, Segments: segments, First: now.Add(-first), Last: now.Add(-last)}
}

func TestFailedSocketsAreFound(t *testing.T) {
	refused := func(connections uint32, first, last time.Duration) func(*dataplane.FailedSockets) {
		return func(f *dataplane.FailedSockets) { f.Refused = failuresOf(connections, connections, first, last) }
	}
	unanswered := func(connections, segments uint32, first, last time.Duration) func(*dataplane.FailedSockets) {
		return func(f *dataplane.FailedSockets) { f.Unanswered = failuresOf(connections, segments, first, last) }
	}
	both := func(changes ...func(*dataplane.FailedSockets)) func(*dataplane.FailedSockets) {
		return func(f *dataplane.FailedSockets) {
			for _, change := range changes {
				change(f)
			}
		}
	}
	acceptedAgo := func(ago time.Duration) func(*dataplane.FailedSockets) {
		return func(f *dataplane.FailedSockets) { f.Accepted = time.Now().Add(-ago) }
	}
	const sec = time.Second
	refusedFlow := trafficFlow(1, "closed", 3*sec)
	refusedFlow.Refused = true
	for _, row := range []struct {
		what   string
		failed []dataplane.FailedSockets
		flows  []dataplane.Flow
		found  string // id; "": none
		text   string
	}{
		{"three are refused", []dataplane.FailedSockets{failedSockets(refused(3, 2*sec, sec))}, nil, "endpoint-refuses",
			"3 connections of TCP in the last 10 s were answered with an RST, from sockets of this node and its pods (3, the last one of pod " +
				"default/pod-10.1.1.7 (10.1.1.7))"},
		{"two are refused", []dataplane.FailedSockets{failedSockets(refused(2, 2*sec, sec))}, nil, "", ""},
		{"two are refused, and a flow", []dataplane.FailedSockets{failedSockets(refused(2, 2*sec, sec))}, []dataplane.Flow{refusedFlow},
			"endpoint-refuses", "192.0.2.1 (1) and sockets of this node and its pods (2, the last one of"},
		{"the Service has two ports with the endpoint", []dataplane.FailedSockets{failedSockets(refused(1, 2*sec, sec)),
			failedSockets(refused(2, 4*sec, 2*sec))}, nil, "endpoint-refuses", "3 connections"},
		{"long ago", []dataplane.FailedSockets{failedSockets(refused(9, time.Minute, 11*sec))}, nil, "", ""},
		{"for long", []dataplane.FailedSockets{failedSockets(refused(9, time.Minute, sec))}, nil, "endpoint-refuses",
			"9 connections of TCP in the last 60 s"},
		{"another port accepts", []dataplane.FailedSockets{failedSockets(refused(9, 3*sec, 2*sec)), failedSockets(acceptedAgo(sec))}, nil,
			"", ""},
		{"a flow is accepted", []dataplane.FailedSockets{failedSockets(refused(9, 3*sec, 2*sec))},
			[]dataplane.Flow{trafficFlow(1, "established", sec)}, "", ""},
		{"a flow was accepted before", []dataplane.FailedSockets{failedSockets(refused(9, 3*sec, 2*sec))},
			[]dataplane.Flow{trafficFlow(1, "established", 5*sec)}, "endpoint-refuses", ""},
		{"one connection repeats its SYN", []dataplane.FailedSockets{failedSockets(unanswered(1, 3, 3*sec, sec))}, nil, "endpoint-unanswered",
			"1 connection of TCP in the last 30 s without an answer, from sockets of this node"},
		{"two SYNs", []dataplane.FailedSockets{failedSockets(unanswered(2, 2, 3*sec, sec))}, nil, "", ""},
		{"silence and then refusals", []dataplane.FailedSockets{failedSockets(both(unanswered(3, 3, 9*sec, 8*sec), refused(3, 3*sec, sec)))}, nil,
			"endpoint-refuses", ""},
		{"waiting flows, and then a refused socket", []dataplane.FailedSockets{failedSockets(refused(1, sec, sec))},
			[]dataplane.Flow{trafficFlow(1, "new", 5*sec), trafficFlow(2, "new", 5*sec), trafficFlow(3, "new", 5*sec)}, "", ""},
		{"the endpoint was removed", []dataplane.FailedSockets{failedSockets(both(refused(3, 2*sec, sec), func(f *dataplane.FailedSockets) {
			f.Endpoint = netip.MustParseAddrPort("10.1.1.9:8080")
		}))}, nil, "", ""},
	} {
		t.Run(row.what, func(t *testing.T) {
			_, found := findingsOf(t, &socketsPlane{fakePlane{flows: row.flows}, row.failed})
			if len(found) != min(len(row.found), 1) || row.found != "" && found[0].Id != row.found {
				t.Fatalf("found %v, want %q", found, row.found)
			}
			if row.found == "" {
				return
			}
			for _, want := range []string{row.text, "default/web:http", "pod default/pod-10.1.1.1 (10.1.1.1:8080)"} {
				if text := strings.Join(append(found[0].Evidence, found[0].Title), "\n"); !strings.Contains(text, want) {
					t.Errorf("%q is not in %s", want, text)
				}
			}
		})
	}
}

// Failures of sockets are as recent as the question, while the flow table is read seldom.
func TestFailedSocketsAreFoundAtOnce(t *testing.T) {
	plane := &socketsPlane{}
	h, found := findingsOf(t, plane)
	if len(found) > 0 {
		t.Fatalf("found %v", found)
	}
	h.examined.cost, h.walk.took, h.read.cost = time.Hour, time.Hour, 0
	plane.failed = []dataplane.FailedSockets{failedSockets(func(f *dataplane.FailedSockets) { f.Refused = failuresOf(3, 3, time.Second, 0) })}
	resp, err := h.client.Findings(t.Context(), &nodev1alpha1.FindingsRequest{})
	if err != nil || len(resp.Findings) != 1 {
		t.Errorf("found %v, %v", resp, err)
	}
	h.read.cost = time.Hour
	plane.failed = nil
	if resp, err := h.client.Findings(t.Context(), &nodev1alpha1.FindingsRequest{}); err != nil || len(resp.Findings) != 1 {
		t.Errorf("soon after an expensive question: found %v, %v", resp, err)
	}
}

// TestTheFlowTableIsReadSeldom: a reading of a full table takes long, so the next one waits.
func TestTheFlowTableIsReadSeldom(t *testing.T) {
	plane := &fakePlane{}
	for n := range 3 {
		plane.flows = append(plane.flows, trafficFlow(n, "new", 5*time.Second))
	}
	h, _ := findingsOf(t, plane)
	h.walk.took = time.Hour / readingShare
	for range 3 {
		silent, err := h.failingEndpoints(t.Context())
		if err != nil || len(silent) != 1 {
			t.Fatal(silent, err)
		}
	}
	if plane.read != 3 {
		t.Errorf("%d flows were read, want 3", plane.read)
	}
	h.walk.ended = h.walk.ended.Add(-time.Hour)
	if _, err := h.failingEndpoints(t.Context()); err != nil || plane.read != 6 {
		t.Errorf("%d flows were read after a while, want 6: %v", plane.read, err)
	}
}

func TestRefusedClientsAreFound(t *testing.T) {
	event := func(service, reason string, client string, ago time.Duration) dataplane.FlowEvent {
		return dataplane.FlowEvent{Kind: dataplane.FlowRefused, Time: time.Now().Add(-ago), Reason: reason, Flow: dataplane.EventFlow{
			Port:     intent.PortID{Service: model.Name{Namespace: "default", Name: service}, Port: "http", Number: 80, Protocol: model.TCP},
			Protocol: model.TCP, Client: netip.MustParseAddrPort(client), ServiceAddress: netip.MustParseAddrPort("10.0.0.1:30080"),
		}}
	}
	ports := event("web", "drop_snat_ports", "198.51.100.1:1", time.Second)
	ports.Kind, ports.Flow.Endpoint = dataplane.FlowDropped, netip.MustParseAddrPort("10.1.1.3:8080")
	socket, local := event("web", "socket_timed_out", "0.0.0.0:0", time.Second), event("web", "socket_timed_out", "0.0.0.0:0", time.Second)
	local.Flow.ServiceAddress = netip.MustParseAddrPort("10.96.0.1:80")
	opened := event("web", "drop_source_range", "198.51.100.1:1", time.Second)
	opened.Kind = dataplane.FlowOpened
	for _, row := range []struct {
		what   string
		events []dataplane.FlowEvent
		ids    []string
		texts  []string
	}{
		{"source ranges", []dataplane.FlowEvent{
			event("web", "drop_source_range", "198.51.100.1:1", 2*time.Second), event("web", "drop_source_range", "198.51.100.1:2", time.Second),
			event("web", "drop_source_range", "198.51.100.2:1", 3*time.Second),
			event("deleted", "drop_source_range", "198.51.100.2:1", 3*time.Second),
		}, []string{"source-range-refuses"}, []string{"Service default/web:http refuses 2 clients", "at least 3 packets",
			"from 198.51.100.1 (2), 198.51.100.2 (1)", "asked 10.0.0.1:30080", "allowed: 192.0.2.0/24"}},
		{"SNAT ports", []dataplane.FlowEvent{ports}, []string{"service-snat-ports-exhausted"},
			[]string{"critical", "towards 10.1.1.3:8080", "198.51.100.1 (1)"}},
		{"a socket and source ranges", []dataplane.FlowEvent{socket}, []string{"source-range-refuses"},
			[]string{"from sockets of this node and its pods (1)", "allowed: 192.0.2.0/24"}},
		{"a socket and policy Local", []dataplane.FlowEvent{local}, nil, nil},
		{"before the last minute", []dataplane.FlowEvent{event("web", "drop_source_range", "198.51.100.1:1", time.Hour)}, nil, nil},
		{"no endpoints", []dataplane.FlowEvent{event("web", "rejected_rst", "198.51.100.1:1", time.Second),
			event("web", "drop_policy_local", "198.51.100.1:1", time.Second)}, nil, nil},
		{"no refusal", []dataplane.FlowEvent{opened}, nil, nil},
	} {
		t.Run(row.what, func(t *testing.T) {
			_, found := findingsOf(t, &fakePlane{}, row.events...)
			var ids []string
			for _, f := range found {
				ids = append(ids, f.Id)
			}
			if !slices.Equal(ids, row.ids) {
				t.Errorf("found %q, want %q", ids, row.ids)
			}
			for _, want := range row.texts {
				if text := fmt.Sprint(found); !strings.Contains(text, want) {
					t.Errorf("%q is not in %s", want, text)
				}
			}
		})
	}
}

func TestAFullFlowTableIsFound(t *testing.T) {
	for used, want := range map[uint64]string{0: "", 79: "", 80: "warning", 95: "critical", 100: "critical"} {
		_, found := findingsOf(t, &tablePlane{used: used, size: 100})
		severity := ""
		if len(found) == 1 && found[0].Id == "flow-table-full" {
			severity = found[0].Severity
		}
		if severity != want || want == "" && len(found) > 0 {
			t.Errorf("%d of 100 flows: found %v, want severity %q", used, found, want)
		}
	}
}

// A report has room for 20. A namespace whose endpoints fail on purpose does not hide those of others.
func TestANamespaceHidesNoFindingsOfOthers(t *testing.T) {
	services := []reconcile.Service{serviceOf("default", "web", 1)}
	flows := []dataplane.Flow{trafficFlow(0, "new", 5*time.Second), trafficFlow(1, "new", 5*time.Second), trafficFlow(2, "new", 5*time.Second)}
	var events []dataplane.FlowEvent
	refuse := func(id intent.PortID, times int) {
		for range times {
			events = append(events, dataplane.FlowEvent{Kind: dataplane.FlowRefused, Time: time.Now(), Reason: "drop_source_range",
				Flow: dataplane.EventFlow{
					Port: id, Protocol: model.TCP, Client: netip.MustParseAddrPort("198.51.100.1:1"),
					ServiceAddress: netip.MustParseAddrPort("10.0.0.1:30080"),
				}})
		}
	}
	refuse(services[0].Ports[0].ID, 1)
	for i := range 30 {
		s := serviceOf("greedy", fmt.Sprint("s", i), 2+i)
		p := s.Ports[0]
		refuse(p.ID, 10)
		p.Endpoints = nil
		for n := range 20 {
			at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 7, byte(i), byte(n)}), 8080)
			p.Endpoints = append(p.Endpoints, intent.Endpoint{Addr: at, ClusterPolicy: true})
			for port := range 5 {
				f := trafficFlow(port, "new", 5*time.Second)
				f.Service, f.Endpoint = netip.AddrPortFrom(p.Frontends[0].Addr, 80), at
				flows = append(flows, f)
			}
		}
		services = append(services, s)
	}
	log := flowlog.New(flowlog.Config{Node: "n1"})
	log.Add(events)
	h := start(t, func(c *Config) {
		c.State, c.Backends = &fakeState{services: services}, []dataplane.Backend{&fakePlane{flows: flows}}
		c.Events = FlowEvents{Mode: "refused", Log: log, Reporter: fakeReporter{}}
		c.examine = func(context.Context) (*doctor.Node, error) { return &doctor.Node{}, nil }
	}).wait(t)
	resp, err := h.client.Findings(t.Context(), &nodev1alpha1.FindingsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]int{}
	for _, f := range resp.Findings {
		if found[f.Id]++; strings.Contains(f.Title, "default/web") {
			found[f.Id+" of default/web"]++
		}
	}
	for _, id := range []string{"endpoint-unanswered", "source-range-refuses"} {
		if found[id] != mostTraffic || found[id+" of default/web"] != 1 {
			t.Errorf("%d findings %s, and %d of default/web", found[id], id, found[id+" of default/web"])
		}
	}
}
