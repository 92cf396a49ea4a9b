package doctor

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/spf13/pflag"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/cli/nodeclient/nodeclienttest"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/node/conntrack"
)

type fakeAgent struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
	err   error
	netns uint64
}

// Names knows shop/dns at 10.96.0.10, with one endpoint.
func (a *fakeAgent) Names(_ context.Context, req *nodev1alpha1.NamesRequest) (*nodev1alpha1.NamesResponse, error) {
	resp := &nodev1alpha1.NamesResponse{}
	dns := &nodev1alpha1.ServicePortName{Namespace: "shop", Name: "dns", PortName: "udp"}
	for _, asked := range req.Addresses {
		out := &nodev1alpha1.AddressNames{}
		switch asked.Address {
		case "10.96.0.10":
			out.Service = dns
		case "10.1.0.2":
			out.EndpointOf = append(out.EndpointOf, dns)
		}
		resp.Names = append(resp.Names, out)
	}
	return resp, a.err
}

func (a *fakeAgent) Findings(context.Context, *nodev1alpha1.FindingsRequest) (*nodev1alpha1.FindingsResponse, error) {
	return &nodev1alpha1.FindingsResponse{Findings: []*nodev1alpha1.Finding{
		{Id: "tcp-not-liberal", Severity: "info", Title: "that doctor finds itself"},
		{Id: "source-range-refuses", Severity: "info", Title: "refused", Detail: "effect", Fix: "remedy", Evidence: []string{"e"},
			Commands: []string{"c"}, Documentation: "d"},
		{Id: "endpoint-unanswered", Severity: "critical", Title: "silent"},
		{Id: "of-a-newer-agent", Severity: "critical"},
	}, NetworkNamespace: a.netns}, a.err
}

// asked returns what a command line gets from the agent at a socket.
func asked(t *testing.T, socket string, only ...string) fromAgent {
	t.Helper()
	c, f := config{only: only}, pflag.NewFlagSet("doctor", pflag.ContinueOnError)
	c.socket.AddFlag(f)
	if err := f.Set("api-socket", socket); err != nil {
		t.Fatal(err)
	}
	return c.askAgent(t.Context())
}

func TestTheAgentAddsFindingsOfServices(t *testing.T) {
	socket := nodeclienttest.Serve(t, &fakeAgent{})
	got := asked(t, socket)
	node := examining(conntrack.Namespace{Inode: 1, Own: true})
	findings := got.add(node, []doctor.Finding{{ID: "rules-many", Severity: doctor.Warning}})
	if len(findings) != 3 || findings[0].ID != "endpoint-unanswered" || findings[1].ID != "rules-many" ||
		findings[2].ID != "source-range-refuses" {
		t.Fatalf("findings %+v", findings)
	}
	if f := findings[2]; f.Severity != doctor.Info ||
		f.Title+f.Packets+f.Remedy+f.Evidence[0]+f.Commands[0]+f.Documentation != "refusedeffectremedyecd" {
		t.Errorf("finding %+v", f)
	}
	if node.Traffic == nil || len(node.Problems) > 0 {
		t.Errorf("node %+v", node)
	}
	if got := asked(t, socket, "endpoint-unanswered"); len(got.findings) != 1 {
		t.Errorf("one kind was requested: %+v", got)
	}
	if got := asked(t, socket, "rules-many"); got.answered {
		t.Errorf("the agent was asked for what it need not be: %+v", got)
	}
}

// examining returns a node of which only some namespaces are examined.
func examining(list ...conntrack.Namespace) *doctor.Node {
	n := &doctor.Node{}
	for _, ns := range list {
		n.Namespaces = append(n.Namespaces, doctor.Namespace{Report: conntrack.Report{Namespace: ns}})
	}
	return n
}

// The agent's findings are about its own network namespace, which may be a lab's, and not this
// program's. A report that leaves them out says so.
func TestFindingsAreThoseOfTheAgentsNamespace(t *testing.T) {
	here, lab := conntrack.Namespace{Inode: 1, Own: true}, conntrack.Namespace{Inode: 2, Names: []string{"lab"}}
	for name, row := range map[string]struct {
		netns     uint64
		node      *doctor.Node
		namespace string
		leftOut   bool
	}{
		"the own one":             {1, examining(here, lab), "", false},
		"another one":             {2, examining(here, lab), "lab", false},
		"only another one":        {2, examining(lab), "lab", false},
		"not examined":            {1, examining(lab), "", true},
		"of an earlier agent":     {0, examining(here, lab), "", false},
		"of one, not examined":    {0, examining(lab), "", true},
		"here, and it is another": {2, examining(here), "", true},
	} {
		got := asked(t, nodeclienttest.Serve(t, &fakeAgent{netns: row.netns}))
		findings := got.add(row.node, nil)
		said := len(row.node.Problems) == 1 &&
			strings.Contains(row.node.Problems[0].What, "2 findings of the agent, such as source-range-refuses, are left out")
		if row.leftOut != said || row.leftOut != (len(findings) == 0) || row.leftOut != (row.node.Traffic == nil) {
			t.Errorf("%s: findings %+v, problems %+v", name, findings, row.node.Problems)
		}
		if len(findings) > 0 && (len(findings) != 2 || findings[0].Namespace != row.namespace) {
			t.Errorf("%s: findings %+v", name, findings)
		}
		if p := got.notExamined(row.node, []string{"endpoint-unanswered"}); (p != nil) != row.leftOut {
			t.Errorf("%s: not examined: %v", name, p)
		}
	}
}

func TestAnAgentThatDoesNotAnswerIsAProblem(t *testing.T) {
	broken := nodeclienttest.Serve(t, &fakeAgent{err: connect.NewError(connect.CodeInternal, errors.New("broken"))})
	for what, c := range map[string]struct{ socket, want string }{
		"a broken agent":       {broken, "broken"},
		"no agent, but wanted": {t.TempDir() + "/none.sock", "no agent serves here"},
	} {
		got, node := asked(t, c.socket), &doctor.Node{}
		got.add(node, nil)
		if len(node.Problems) != 1 || !strings.Contains(node.Problems[0].What, c.want) || node.Traffic != nil {
			t.Errorf("%s: %+v", what, node)
		}
	}
}

func TestTheAgentKnowsEndpointsOfServices(t *testing.T) {
	addrs := []netip.AddrPort{netip.MustParseAddrPort("10.96.0.10:53"), netip.MustParseAddrPort("10.1.0.2:5353"),
		netip.MustParseAddrPort("10.1.0.3:5353")}
	uses := func(socket string) []doctor.AddressUse {
		c, f := config{}, pflag.NewFlagSet("doctor", pflag.ContinueOnError)
		c.socket.AddFlag(f)
		if err := f.Set("api-socket", socket); err != nil {
			t.Fatal(err)
		}
		uses, err := c.uses(t.Context(), addrs)
		if err != nil {
			t.Fatal(err)
		}
		return uses
	}
	got := uses(nodeclienttest.Serve(t, &fakeAgent{}))
	if len(got) != 3 || got[0].Service != "shop/dns:udp" || !slices.Equal(got[1].EndpointOf, []string{"shop/dns:udp"}) ||
		got[2].Service != "" || got[2].EndpointOf != nil {
		t.Errorf("uses %+v", got)
	}
	if got := uses(t.TempDir() + "/none.sock"); got != nil {
		t.Errorf("uses %+v without an agent", got)
	}
}
