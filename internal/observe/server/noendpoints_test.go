package server

import (
	"context"
	"net/netip"
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

// emptyService is default/web without endpoints that serve.
func emptyService(slices ...*model.EndpointSlice) reconcile.Service {
	s := serviceOf("default", "web", 1)
	p := s.Ports[0]
	p.Endpoints = nil
	for i := range p.Frontends {
		p.Frontends[i].InternalRoute, p.Frontends[i].ExternalRoute = intent.Reject, intent.Reject
	}
	s.Slices = slices
	return s
}

func TestServicesWithoutEndpointsAreFound(t *testing.T) {
	const podCgroup, otherCgroup, goneCgroup = 7, 8, 9
	slice := func(port string, endpoints ...model.Endpoint) *model.EndpointSlice {
		return &model.EndpointSlice{Family: model.IPv4, Ports: []model.EndpointPort{{Name: port, Protocol: model.TCP, Port: 8080}},
			Endpoints: endpoints}
	}
	event := func(reason, client string, cgroup uint64) dataplane.FlowEvent {
		e := dataplane.FlowEvent{Kind: dataplane.FlowRefused, Time: time.Now(), Reason: reason, Flow: dataplane.EventFlow{
			Port:     intent.PortID{Service: model.Name{Namespace: "default", Name: "web"}, Port: "http", Number: 80, Protocol: model.TCP},
			Protocol: model.TCP, ServiceAddress: netip.MustParseAddrPort("10.96.0.1:80"), BySocket: cgroup != 0, Cgroup: cgroup,
		}}
		if client != "" {
			e.Flow.Client = netip.MustParseAddrPort(client)
		}
		return e
	}
	socket := event("socket_refused", "", podCgroup)
	for _, row := range []struct {
		what    string
		service reconcile.Service
		events  []dataplane.FlowEvent
		texts   []string // nil: no finding
	}{
		{"a socket of a pod", emptyService(), []dataplane.FlowEvent{socket, socket}, []string{"critical",
			"clients connect to default/web:http, which has no endpoint: its selector matches no ready Pod", "at least 2 packets",
			"the last client is a process of the pod with the uid 6f1d3c1e-0c0b-4c4e-9a55-2f6f1a1b0001; it asked 10.96.0.1:80 by TCP"}},
		{"another socket", emptyService(), []dataplane.FlowEvent{event("socket_refused", "", otherCgroup)},
			[]string{"a process in the cgroup /system.slice/kubelet.service"}},
		{"a process that has ended", emptyService(), []dataplane.FlowEvent{event("socket_refused", "", goneCgroup)},
			[]string{"which has ended (cgroup 9)"}},
		{"packets", emptyService(), []dataplane.FlowEvent{event("rejected_rst", "198.51.100.1:9", 0)},
			[]string{"the last client is 198.51.100.1"}},
		{"datagrams and packets", emptyService(), []dataplane.FlowEvent{event("rejected_icmp", "198.51.100.1:9", 0),
			event("rejected_rst", "198.51.100.1:9", 0)}, []string{"at least 2 packets"}},
		{"no endpoint is ready", emptyService(slice("http", model.Endpoint{}, model.Endpoint{})), []dataplane.FlowEvent{socket},
			[]string{"none of its endpoints (2) is ready"}},
		{"they have another port", emptyService(slice("other", model.Endpoint{Ready: true})), []dataplane.FlowEvent{socket},
			[]string{"its ready endpoints have no such port"}},
		{"it has an endpoint by now", serviceOf("default", "web", 1), []dataplane.FlowEvent{socket}, nil},
	} {
		t.Run(row.what, func(t *testing.T) {
			log := flowlog.New(flowlog.Config{Node: "n1"})
			log.Add(row.events)
			h := start(t, func(c *Config) {
				c.State, c.Backends = &fakeState{services: []reconcile.Service{row.service}}, []dataplane.Backend{&fakePlane{}}
				c.Events = FlowEvents{Mode: "refused", Log: log, Reporter: fakeReporter{}}
				c.examine = func(context.Context) (*doctor.Node, error) { return &doctor.Node{}, nil }
			}).wait(t)
			h.clients.find = func(id uint64) string {
				return map[uint64]string{podCgroup: "/kubepods.slice/kubepods-pod6f1d3c1e_0c0b_4c4e_9a55_2f6f1a1b0001.slice/" +
					"pod0123456789abcdef0123456789abcdef", otherCgroup: "/system.slice/kubelet.service"}[id]
			}
			resp, err := h.client.Findings(t.Context(), &nodev1alpha1.FindingsRequest{})
			if err != nil || len(resp.Problems) > 0 {
				t.Fatalf("findings %v, %v", resp, err)
			}
			if row.texts == nil {
				if len(resp.Findings) > 0 {
					t.Errorf("found %v", resp.Findings)
				}
				return
			}
			if len(resp.Findings) != 1 || resp.Findings[0].Id != "service-without-endpoints" {
				t.Fatalf("found %v", resp.Findings)
			}
			f := resp.Findings[0]
			for _, want := range row.texts {
				if text := strings.Join(append(f.Evidence, f.Severity, f.Title), "\n"); !strings.Contains(text, want) {
					t.Errorf("%q is not in %s", want, text)
				}
			}
		})
	}
}
