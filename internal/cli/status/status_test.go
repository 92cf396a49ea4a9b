package status

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/internal/cli/nodeclient/nodeclienttest"
	"spillway.dev/spillway/internal/page"
)

var now = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

func ago(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(now.Add(-d)) }

// serving is an agent without a problem.
func serving() *nodev1alpha1.StatusResponse {
	return &nodev1alpha1.StatusResponse{
		Node: "worker-1", Version: "0.1.0", Commit: "0123456789abcdef0123456789abcdef01234567-dirty", Kernel: "6.18.5", ProxyMode: "ebpf",
		Time: ago(0), Started: ago(75 * time.Hour),
		Sync:       &nodev1alpha1.Sync{Listed: true, LastSynced: ago(3 * time.Second), Services: 5003, Ports: 5015, Endpoints: 50210},
		Dataplanes: []*nodev1alpha1.Dataplane{{Name: "ebpf", Ports: 5012}, {Name: "nftables", Ports: 3}},
		Tables:     []*nodev1alpha1.Table{{Name: "ebpf flows", Used: 12011, Size: 262144}, {Name: "conntrack", Used: 5}},
		Hooks: []*nodev1alpha1.Hook{{Place: "eth0 ingress", Program: "from_network", Mechanism: "tcx"},
			{Place: "/sys/fs/cgroup/kubepods.slice", Program: "connect4", Mechanism: "cgroup"}},
		Features: []*nodev1alpha1.Feature{{Name: "tcx", Present: true, Detail: "programs of other projects keep their place"}},
		Events:   &nodev1alpha1.Events{Enabled: true, Received: 1234, Lost: 5, SampledOut: 6},
		DsrEndpoints: []*nodev1alpha1.DSREndpoints{
			{Encapsulation: "option", Count: 12}, {Encapsulation: "gue", Count: 3, Mtu: 1430},
			{Encapsulation: "none", Count: 1}, {Encapsulation: "unknown", Count: 2},
		},
		Egress: &nodev1alpha1.Egress{
			Mode: "auto", Sources: []string{"10.244.1.0/24", "fd44:0:0:1::/64"}, Kept: 14, Connections: proto.Uint64(1203),
		},
	}
}

func TestEgressSaysWhatItDoes(t *testing.T) {
	many := []string{"10.0.0.0/24", "10.0.1.0/24", "10.0.2.0/24", "10.0.3.0/24", "10.0.4.0/24"}
	for want, e := range map[string]*nodev1alpha1.Egress{
		"": nil,
		"auto: no rule masquerades pods of this node, so netfilter has them all":                     {Mode: "auto", Kept: 2},
		"on: netfilter has all connections of pods":                                                  {Mode: "on"},
		"on: pods of 10.0.0.0/24, 10.0.1.0/24, 10.0.2.0/24, 10.0.3.0/24 and 1 more, but to 3 ranges": {Mode: "on", Sources: many, Kept: 3},
		"auto: pods of 10.0.0.0/24, but to 3 ranges; 0 connections": {
			Mode: "auto", Sources: many[:1], Kept: 3, Connections: proto.Uint64(0)},
		"on: pods of 10.0.0.0/24, but to 3 ranges; as 192.0.2.1, 192.0.2.2": {
			Mode: "on", Sources: many[:1], Kept: 3, Addresses: []string{"192.0.2.1", "192.0.2.2"}},
	} {
		if got := egress(e); got != want {
			t.Errorf("%v: %q, want %q", e, got, want)
		}
	}
}

// troubled is an agent with problems of each kind, and with hostile texts.
func troubled() *nodev1alpha1.StatusResponse {
	r := serving()
	r.Version = "9.9.9"
	r.Sync.PendingSince = ago(70 * time.Second)
	r.Dataplanes[0].Error = "write map frontends: no memory\n\x1b[31mred"
	r.Hooks[0].Error = "device or resource busy"
	r.Features[0].Present = false
	r.Problems = []*nodev1alpha1.Problem{
		{Where: "Service default/web", What: "spec.externalIPs[0]: 192.0.2.1:80/TCP is already taken by Service other/web; change one of " +
			"the two"},
		{Where: "s.yaml, \x1b]0;document 1", What: "is\u202eempty"},
	}
	r.MoreProblems = 7
	return r
}

// sick is an agent with findings of each severity.
func sick() *nodev1alpha1.StatusResponse {
	r := serving()
	web := &nodev1alpha1.FindingObject{Kind: "Service", Namespace: "shop", Name: "web", Port: "http", Endpoint: "10.244.1.7:8080"}
	for i := range 6 {
		r.Findings = append(r.Findings, &nodev1alpha1.Finding{Id: "endpoint-refuses", Severity: "critical", Object: web,
			Since: ago(90 * time.Second),
			Title: fmt.Sprintf("connections to Service shop/web:http fail: endpoint pod shop/web-%d (10.244.1.7:8080) refuses them", i)})
	}
	r.Findings = append(r.Findings,
		&nodev1alpha1.Finding{Id: "iptables-both-variants", Severity: "warning", Title: "packets traverse two rule sets"},
		&nodev1alpha1.Finding{Id: "tcp-not-liberal", Severity: "info", Title: "late \x1b[31msegments are dropped"})
	return r
}

func TestPages(t *testing.T) {
	intended := serving()
	intended.Findings = sick().Findings[7:]
	waiting := serving()
	waiting.Sync = &nodev1alpha1.Sync{PendingSince: ago(time.Minute)}
	first := serving()
	first.Sync.LastSynced = nil
	for name, resp := range map[string]*nodev1alpha1.StatusResponse{
		"serving": serving(), "troubled": troubled(), "waiting": waiting, "first": first,
		"sick": sick(), "intended": intended, "older": {Node: "worker-1"}, "newer": nodeclienttest.Newer(serving()),
	} {
		clitest.Pages(t, name, result{resp, "0.1.0"})
	}
}

// agent answers with one response; nil: as one without the method.
type agent struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
	resp *nodev1alpha1.StatusResponse
}

func (a agent) Status(context.Context, *nodev1alpha1.StatusRequest) (*nodev1alpha1.StatusResponse, error) {
	if a.resp == nil {
		return nil, connect.NewError(connect.CodeUnimplemented, errors.New("unknown method"))
	}
	return a.resp, nil
}

func command(args ...string) (code int, out, errs string) {
	var stdout, stderr bytes.Buffer
	code = cli.Program{Name: "spillway", Commands: []*cobra.Command{NewCommand()}}.Run(append([]string{"status"}, args...), &stdout, &stderr)
	return code, stdout.String(), stderr.String()
}

func TestCommand(t *testing.T) {
	socket := nodeclienttest.Serve(t, agent{resp: troubled()})
	if code, out, errs := command("--api-socket", socket); code != cli.ExitDone || errs != "" ||
		!strings.Contains(out, "serving: worker-1, with 9 problems and 1 hook not attached") {
		t.Errorf("exit code %d: %s%s", code, out, errs)
	}
	code, out, errs := command("--api-socket", nodeclienttest.Serve(t, agent{resp: sick()}))
	if code != cli.ExitDone || errs != "" || !strings.Contains(out, "serving: worker-1, with 7 findings (6 critical)\n") {
		t.Errorf("findings are no failure: exit code %d: %s%s", code, out, errs)
	}
	code, out, errs = command("--api-socket", socket, "-o", "json")
	var object struct {
		Node  string `json:"node"`
		Sync  struct{ Services int }
		Hooks []struct{ Error string }
	}
	if err := json.Unmarshal([]byte(out), &object); code != cli.ExitDone || errs != "" || err != nil || object.Sync.Services != 5003 ||
		len(object.Hooks) != 2 {
		t.Errorf("exit code %d, %v: %s%s", code, err, out, errs)
	}
	if code, out, errs = command("--api-socket", socket, "-o", "yaml"); code != cli.ExitDone || !strings.Contains(out, "\nproxyMode: ebpf\n") {
		t.Errorf("exit code %d: %s%s", code, out, errs)
	}
	for _, c := range []struct {
		args []string
		code int
		text string
	}{
		{[]string{"--api-socket", nodeclienttest.Serve(t, agent{})}, cli.ExitFailed, "does not offer this"},
		{[]string{"--api-socket", "/does/not/exist"}, cli.ExitFailed, "no agent serves here"},
		{[]string{"--api-socket", ""}, cli.ExitUsage, "--api-socket: a value is empty"},
		{[]string{"-o", "xml"}, cli.ExitUsage, "not a format"},
		{[]string{"node"}, cli.ExitUsage, "node"},
	} {
		if code, out, errs := command(c.args...); code != c.code || out != "" || !strings.Contains(errs, c.text) ||
			strings.Count(errs, "\n") != 1 {
			t.Errorf("%q: exit code %d: %q %q", c.args, code, out, errs)
		}
	}
}

// TestNothingFromTheAgentReachesTheTerminal as a control character.
func TestNothingFromTheAgentReachesTheTerminal(t *testing.T) {
	var out bytes.Buffer
	if err := (result{troubled(), ""}).Write(&page.Page{Writer: &out, Wide: true}); err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(out.String(), "\x1b\u202e\r") {
		t.Errorf("printed: %q", out.String())
	}
}
