package apiload

import (
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/lab/experiment"
)

func TestReport(t *testing.T) {
	r := Report{
		Machine: experiment.Machine{Kernel: "6.18.0", Arch: "x86_64", CPU: "Test", Cores: 2, Date: time.Date(2026, 1, 2, 0, 0, 0, 0, time.UTC)},
		Agents:  200, AtOnce: 20, Services: 2000, Endpoints: 10, Nodes: 5000, Pods: 10,
		Idle: Row{Name: "no clients", Changes: Phase{CPU: 1}},
		Rows: []Row{{
			Name: "ebpf", Watches: map[string]int{"services": 200, "nodes": 200}, Peak: 1000,
			Start: Phase{Wire: 12345678, CPU: 30, Requests: []Traffic{
				{Request{"list", "nodes", "", 200, "protobuf", true}, 11, 33e6},
				{Request{"stream", "pods", "spec.nodeName=NODE", 200, "protobuf", false}, 1, 25000},
			}},
			Changes: Phase{Wire: 700000, CPU: 4},
		}},
	}
	clitest.Pages(t, "report", &r)
}

func TestRequestsAreToldApart(t *testing.T) {
	for url, want := range map[string]Request{
		"/api/v1/nodes?limit=500": {Verb: "list", Resource: "nodes"},
		"/api/v1/nodes/a":         {Verb: "get", Resource: "nodes"},
		"/api/v1/namespaces":      {Verb: "list", Resource: "namespaces"},
		"/api/v1/namespaces/shop/pods?watch=true&fieldSelector=spec.nodeName%3Da": {Verb: "watch", Resource: "pods",
			Selector: "spec.nodeName=NODE"},
		"/apis/discovery.k8s.io/v1/endpointslices?watch=1&sendInitialEvents=true": {Verb: "stream", Resource: "endpointslices"},
		"/version": {Verb: "get", Resource: "version"},
	} {
		got := newCounter("a").describe(httptest.NewRequest(http.MethodGet, url, nil), &http.Response{})
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: %s", url, d)
		}
	}
}
