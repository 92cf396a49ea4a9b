package reach_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/doctor"
	"spillway.dev/spillway/internal/cli/flows"
	"spillway.dev/spillway/internal/cli/reach"
	"spillway.dev/spillway/internal/cli/services"
	"spillway.dev/spillway/internal/cli/status"
)

// many is an agent that answers all requests of the commands.
type many struct {
	named
	ports uint32 // of the Service
}

func (a many) service() *nodev1alpha1.Service {
	return &nodev1alpha1.Service{Namespace: "shop", Name: "web", Ports: []*nodev1alpha1.ServicePort{
		{Port: 80, Dataplane: "ebpf", EndpointCount: a.ports, Frontends: []*nodev1alpha1.Frontend{{Address: "10.96.0.1", Port: 80}}}}}
}

func (a many) ListServices(context.Context, *nodev1alpha1.ListServicesRequest) (*nodev1alpha1.ListServicesResponse, error) {
	return &nodev1alpha1.ListServicesResponse{Services: []*nodev1alpha1.Service{a.service()}}, nil
}

func (a many) GetService(context.Context, *nodev1alpha1.GetServiceRequest) (*nodev1alpha1.GetServiceResponse, error) {
	s := a.service()
	s.Ports[0].Differences = []string{"the kernel has another endpoint"}
	return &nodev1alpha1.GetServiceResponse{Service: s}, nil
}

func (a many) ListFlows(context.Context, *nodev1alpha1.ListFlowsRequest) (*nodev1alpha1.ListFlowsResponse, error) {
	return &nodev1alpha1.ListFlowsResponse{Flows: []*nodev1alpha1.Flow{{Namespace: "shop", Service: "of-" + a.node, State: "new"}}}, nil
}

func (a many) Findings(context.Context, *nodev1alpha1.FindingsRequest) (*nodev1alpha1.FindingsResponse, error) {
	return &nodev1alpha1.FindingsResponse{Findings: []*nodev1alpha1.Finding{
		{Id: "rules-many", Severity: "warning", Title: "many rules"},
		{Id: "endpoint-unanswered", Severity: "critical", Title: "shop/web of " + a.node},
		{Id: "flow-table-full", Severity: "critical", Title: "full by " + a.node, Object: &nodev1alpha1.FindingObject{Kind: "Node"}},
	}}, nil
}

func (a many) WatchFlows(_ context.Context, req *nodev1alpha1.WatchFlowsRequest,
	to *connect.ServerStream[nodev1alpha1.WatchFlowsResponse]) error {
	if !req.Remembered {
		return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("it would not end"))
	}
	return to.Send(&nodev1alpha1.WatchFlowsResponse{Events: []*nodev1alpha1.FlowEvent{
		{Kind: nodev1alpha1.EventKind_EVENT_KIND_CLOSED, Flow: &nodev1alpha1.Flow{Service: "of-" + a.node}}}})
}

// threeNodes is a cluster of two agents and of a node without one.
func threeNodes(t *testing.T) string {
	t.Helper()
	c := reach.NewFakeCluster(t)
	c.Agent("n1", many{named{node: "n1"}, 2})
	c.Agent("n2", many{named{node: "n2"}, 3})
	c.Bare("n3")
	return c.Kubeconfig()
}

// run runs a command line.
func run(t *testing.T, kubeconfig, line string) (out, errs string, code int) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	p := cli.Program{Name: "spillway", Commands: []*cobra.Command{status.NewCommand(), services.NewCommand(), flows.NewCommand(),
		flows.NewObserveCommand(), doctor.NewCommand()}}
	code = p.Run(append(strings.Fields(line), "--kubeconfig", kubeconfig), &stdout, &stderr)
	return stdout.String(), stderr.String(), code
}

const noAgent = "spillway: node n3: no agent runs on this node\n"

// Each command shows what the nodes answer, names the node that does not, and then fails.
func TestCommandsOfAllNodes(t *testing.T) {
	file := threeNodes(t)
	for line, want := range map[string][]string{
		"services":               {"shop       web   80", "2  ebpf  -       -        n1", "3  ebpf  -       -        n2", "1 Service on 2 nodes"},
		"services shop/web":      {"the kernel has another endpoint  n1", "1 Service: on 2 nodes, 1 with problems"},
		"flows":                  {"NODE  PROTO", "n1", "shop/of-n1", "n2", "shop/of-n2", "2 in the table"},
		"flows --since 1m":       {" n1 closed", " n2 closed", "of-n2"},
		"observe --follow=false": {"NODE  PROTO", "shop/of-n1", "shop/of-n2"},
		"doctor": {"warning   rules-many           many rules      all 2",
			"critical  endpoint-unanswered  shop/web of n1  n1",
			"critical  flow-table-full      full by n1      all 2", "4 findings on 2 nodes"},
		"doctor --fail-on info":    {"rules-many"},
		"doctor --finding no-such": nil,
	} {
		if !strings.HasPrefix(line, "observe") {
			line += " --all-nodes"
		}
		out, errs, code := run(t, file, line)
		if want == nil {
			if code != cli.ExitUsage {
				t.Errorf("%s: exit code %d", line, code)
			}
			continue
		}
		for _, text := range want {
			if !strings.Contains(out, text) {
				t.Errorf("%s: no %q in\n%s", line, text, out)
			}
		}
		if code != cli.ExitFailed || !strings.Contains(errs, noAgent) || !strings.Contains(errs, "1 of 3 nodes gave none") {
			t.Errorf("%s: exit code %d, %q", line, code, errs)
		}
	}
}

// Chosen nodes are asked, and no others. One node's answer has the form of this machine's.
func TestCommandsOfChosenNodes(t *testing.T) {
	file := threeNodes(t)
	for line, want := range map[string]string{
		"status --node n1":                 "",
		"status --node n1 --node n2":       "NODE",
		"services --node n2,n1":            "NODES",
		"services --node n1":               "BY",
		"flows --node n1":                  "PROTO",
		"flows --node n1 --node n2":        "NODE",
		"observe --follow=false --node n1": "PROTO",
		"doctor --node n1":                 "3 findings on 1 node",
		"doctor --node n1 --finding rules-many --fail-on critical": "1 finding on 1 node",
	} {
		out, errs, code := run(t, file, line)
		if code != cli.ExitDone || !strings.Contains(out, want) || strings.Contains(out, "n3") || strings.Contains(out, "all 1") {
			t.Errorf("%s: exit code %d, %s\n%s", line, code, errs, out)
		}
	}
	for line, want := range map[string]string{
		"services --node n1 --node n9":        `node n9: the cluster has no node "n9"`,
		"doctor --node n9":                    `node n9: the cluster has no node "n9"`,
		"doctor --node n1 --fail-on critical": "--fail-on critical: 3 findings on 1 node",
	} {
		if _, errs, code := run(t, file, line); code != cli.ExitFailed || !strings.Contains(errs, want) {
			t.Errorf("%s: exit code %d, %s", line, code, errs)
		}
	}
	for _, line := range []string{"doctor --node n1 --fix", "doctor --all-nodes --netns here"} {
		if _, errs, code := run(t, file, line); code != cli.ExitUsage || !strings.Contains(errs, "is for this machine") {
			t.Errorf("%s: exit code %d, %s", line, code, errs)
		}
	}
}

func TestJSONOfAllNodes(t *testing.T) {
	file := threeNodes(t)
	out, _, _ := run(t, file, "services --all-nodes -o json")
	var list struct {
		Complete bool
		Nodes    []struct {
			Node     string
			Services []struct{ Name string }
		}
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list.Nodes) != 2 || list.Nodes[1].Node != "n2" ||
		len(list.Nodes[0].Services) != 1 || !list.Complete {
		t.Errorf("%v: %s", err, out)
	}
	out, _, _ = run(t, file, "doctor --all-nodes -o json")
	var report struct {
		Nodes    []string
		Findings []struct {
			ID    string
			Nodes []string
		}
	}
	if err := json.Unmarshal([]byte(out), &report); err != nil || len(report.Nodes) != 2 || len(report.Findings) != 4 ||
		report.Findings[3].ID != "rules-many" || len(report.Findings[3].Nodes) != 2 {
		t.Errorf("%v: %s", err, out)
	}
}
