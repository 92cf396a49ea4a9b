package services

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
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/internal/cli/nodeclient/nodeclienttest"
	"spillway.dev/spillway/internal/page"
)

// web is a Service of two families, one of which differs from the kernel.
func web() *nodev1alpha1.Service {
	return &nodev1alpha1.Service{
		Namespace: "default", Name: "web", Type: "LoadBalancer",
		Problems: []*nodev1alpha1.Problem{{Where: "Service default/web",
			What: "spec.externalIPs[0]: 192.0.2.1:80/TCP is already taken by Service other/web; change one of the two"}},
		Ports: []*nodev1alpha1.ServicePort{
			{Name: "http", Port: 80, Protocol: nodev1alpha1.Protocol_PROTOCOL_TCP, Family: "IPv4", Dataplane: "ebpf", EndpointCount: 2,
				ExternalTrafficPolicy: "Local", InternalTrafficPolicy: "Cluster", Affinity: durationpb.New(3 * time.Hour), Compared: true,
				Frontends: []*nodev1alpha1.Frontend{{Kind: "clusterIP", Address: "10.96.0.1", Port: 80}, {Kind: "nodePort", Port: 30080},
					{Kind: "loadBalancerIP", Address: "203.0.113.7", Port: 80, SourceRanges: []string{"192.0.2.0/24", "198.51.100.0/24"}}},
				Endpoints: []*nodev1alpha1.Endpoint{
					{Address: "10.1.0.1", Port: 8080, Pod: "default/web-5d9c7b8f6d-abcde", Node: "worker-1.example.org", Ready: true,
						Serving: true, InUse: true,
						Flows: &nodev1alpha1.EndpointFlows{Answered: 1204, Waiting: 3}},
					{Address: "10.1.0.2", Port: 8080, Serving: true, Terminating: true},
					{Address: "10.1.0.3", Port: 8080, Terminating: true}, {Address: "10.1.0.4", Port: 8080}},
				Differences: []string{"endpoint 10.1.0.1:8080: eBPF map backends has 10.9.9.9:1, not 10.1.0.1:8080"},
				Counters:    &nodev1alpha1.Counters{Connections: 12345, Active: 17, BytesToEndpoint: 1 << 40}},
			{Name: "http", Port: 80, Protocol: nodev1alpha1.Protocol_PROTOCOL_TCP, Family: "IPv6", Dataplane: "nftables",
				Frontends: []*nodev1alpha1.Frontend{{Kind: "clusterIP", Address: "fd00:10:96::1234:5678", Port: 80}}},
			{Name: "sctp", Port: 81, Protocol: nodev1alpha1.Protocol_PROTOCOL_SCTP},
		},
	}
}

func healthy() *nodev1alpha1.Service {
	s := web()
	s.Name, s.Problems, s.Ports = "kube-dns", nil, s.Ports[:1]
	s.Ports[0].Differences, s.Ports[0].Helper, s.Health = nil, "tftp", "ok"
	return s
}

// sick has an endpoint that refuses connections to one of two ports, and clients that may be
// refused on purpose.
func sick() *nodev1alpha1.Service {
	s := healthy()
	s.Name, s.Health = "cart", "endpoint-refuses"
	s.Ports = append(s.Ports, &nodev1alpha1.ServicePort{Name: "metrics", Port: 9090, Dataplane: "ebpf"})
	for i := range 5 {
		s.Findings = append(s.Findings, &nodev1alpha1.Finding{Id: "endpoint-refuses", Severity: "critical",
			Title:  fmt.Sprintf("connections to Service default/cart:http fail: endpoint pod default/cart-%d (10.1.0.%d:8080) refuses them", i, i),
			Object: &nodev1alpha1.FindingObject{Kind: "Service", Namespace: "default", Name: "cart", Port: "http"},
			Since:  timestamppb.New(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))})
	}
	s.Findings = append(s.Findings, &nodev1alpha1.Finding{Id: "source-range-refuses", Severity: "info",
		Title: "Service default/cart:metrics refuses 3 clients by loadBalancerSourceRanges"})
	return s
}

// hostile has names that no API server allows.
func hostile() *nodev1alpha1.Service {
	s := web()
	s.Name, s.Type, s.Ports[0].Dataplane = "w\x1b[2Jeb", "x\ny", "e\rb"
	s.Ports[0].Counters.Refused = 1 // its note has the name
	s.Ports[0].Endpoints[0].Pod, s.Ports[0].Frontends[0].Address = "a\u202eb", "1\x1b]0;x\a"
	s.Ports[0].Differences[0], s.Problems[0].Where = "d\x1b[31m", "w\nw"
	s.Findings = []*nodev1alpha1.Finding{{Id: "f\x1b[31m", Severity: "critical", Title: "t\u202e\r"}}
	return s
}

func TestPages(t *testing.T) {
	list := func(s ...*nodev1alpha1.Service) listResult {
		return listResult{&nodev1alpha1.ListServicesResponse{Services: s}, ""}
	}
	clitest.Pages(t, "list", list(web(), healthy()))
	clitest.Pages(t, "list-healthy", list(healthy()))
	clitest.Pages(t, "empty", list())
	clitest.Pages(t, "list-findings", list(sick(), healthy()))
	clitest.Pages(t, "empty-namespace", listResult{&nodev1alpha1.ListServicesResponse{}, "kube-\x1b[31msystem"})
	one := func(s *nodev1alpha1.Service) oneResult {
		return oneResult{&nodev1alpha1.GetServiceResponse{Service: s}}
	}
	clitest.Pages(t, "web", one(web()))
	clitest.Pages(t, "healthy", one(healthy()))
	clitest.Pages(t, "sick", one(sick()))
	refusing := healthy()
	refusing.Ports[0].Counters.Refused = 123
	clitest.Pages(t, "refusing", one(refusing))
	canary := healthy()
	canary.Ports[0].Endpoints[0].Shares, canary.Ports[0].Endpoints[3].Shares, canary.Ports[0].Endpoints[3].InUse = 19, 1, true
	clitest.Pages(t, "weighted", one(canary))
	direct := healthy()
	direct.Ports[0].Balance, direct.Ports[0].Forwarding = "maglev", "hybrid"
	direct.Ports[0].SynLimit = 1000
	first, second := direct.Ports[0].Endpoints[0], direct.Ports[0].Endpoints[1]
	first.Encapsulation, second.Encapsulation, second.EncapsulationMtu = "option", "gue", 1430
	for range 5 {
		direct.Ports[0].Endpoints = append(direct.Ports[0].Endpoints,
			&nodev1alpha1.Endpoint{Address: "10.1.0.9", Port: 8080, Ready: true, InUse: true, Encapsulation: "none"})
	}
	clitest.Pages(t, "direct", one(direct))
	clitest.Pages(t, "older", one(&nodev1alpha1.Service{Namespace: "default", Name: "web", Ports: []*nodev1alpha1.ServicePort{{Port: 80}}}))
	clitest.Pages(t, "newer", oneResult{nodeclienttest.Newer(&nodev1alpha1.GetServiceResponse{Service: healthy()})})
	lost := healthy()
	lost.Ports[0].Dataplane, lost.Ports[0].Compared = "", false
	clitest.Pages(t, "not-served", one(lost))
}

func TestNothingFromTheAgentReachesTheTerminal(t *testing.T) {
	for _, r := range []cli.Result{listResult{&nodev1alpha1.ListServicesResponse{Services: []*nodev1alpha1.Service{hostile()}}, ""},
		oneResult{&nodev1alpha1.GetServiceResponse{Service: hostile()}}} {
		var out bytes.Buffer
		if err := r.Write(&page.Page{Writer: &out, Wide: true}); err != nil {
			t.Fatal(err)
		}
		if strings.ContainsAny(out.String(), "\x1b\u202e\r\a") {
			t.Errorf("printed: %q", out.String())
		}
	}
}

// agent has 25 Services, in pages of ten.
type agent struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
	repeats bool // the same page forever
}

func (a agent) ListServices(_ context.Context, req *nodev1alpha1.ListServicesRequest) (*nodev1alpha1.ListServicesResponse, error) {
	from := 0
	fmt.Sscan(req.PageToken, &from)
	resp := &nodev1alpha1.ListServicesResponse{}
	for i := from; i < min(from+10, 25); i++ {
		resp.Services = append(resp.Services, &nodev1alpha1.Service{Namespace: req.Namespace, Name: fmt.Sprint("s", i),
			Ports: []*nodev1alpha1.ServicePort{{Port: 80}}})
	}
	if from+10 < 25 {
		resp.NextPageToken = fmt.Sprint(from + 10)
	}
	if a.repeats {
		resp.NextPageToken = "0"
	}
	return resp, nil
}

func (agent) GetService(_ context.Context, req *nodev1alpha1.GetServiceRequest) (*nodev1alpha1.GetServiceResponse, error) {
	switch req.Name {
	case "none-of-these", "s2x":
		return nil, connect.NewError(connect.CodeNotFound, errors.New("this node serves no such Service"))
	case "empty":
		return &nodev1alpha1.GetServiceResponse{}, nil
	}
	s := healthy()
	s.Namespace, s.Name = req.Namespace, req.Name
	return &nodev1alpha1.GetServiceResponse{Service: s}, nil
}

func command(args ...string) (code int, out, errs string) {
	var stdout, stderr bytes.Buffer
	code = cli.Program{Name: "spillway", Commands: []*cobra.Command{NewCommand()}}.Run(append([]string{"services"}, args...), &stdout, &stderr)
	return code, stdout.String(), stderr.String()
}

func TestCommand(t *testing.T) {
	socket := nodeclienttest.Serve(t, agent{})
	repeats := nodeclienttest.Serve(t, agent{repeats: true})
	older := nodeclienttest.Serve(t, nodev1alpha1connect.UnimplementedNodeServiceHandler{})
	for _, c := range []struct {
		args []string
		code int
		text string
	}{
		{[]string{"--api-socket", socket}, cli.ExitDone, "25 Services\n"},
		{[]string{"--api-socket", socket, "-n", "x"}, cli.ExitDone, "\nx          s24"},
		{[]string{"--api-socket", socket, "web"}, cli.ExitDone, "Service default/web, LoadBalancer"},
		{[]string{"--api-socket", socket, "-n", "x", "web"}, cli.ExitDone, "Service x/web,"},
		{[]string{"--api-socket", socket, "y/web"}, cli.ExitDone, "Service y/web,"},
		{[]string{"--api-socket", socket, "-n", "y", "y/web"}, cli.ExitDone, "Service y/web,"},
		{[]string{"--api-socket", socket, "-n", "x", "y/web"}, cli.ExitUsage, "the namespace is not that of --namespace"},
		{[]string{"--api-socket", socket, "y/"}, cli.ExitUsage, "not a name"},
		{[]string{"--api-socket", socket, "a/b/c"}, cli.ExitUsage, "not a name"},
		{[]string{"--api-socket", socket, "a/pod/"}, cli.ExitUsage, "not a name"},
		{[]string{"--api-socket", socket, "a/pod/b/c"}, cli.ExitUsage, "not a name"},
		{[]string{"--api-socket", socket, "-n", ""}, cli.ExitUsage, "--namespace: a value is empty"},
		{[]string{"--api-socket", socket, "none-of-these"}, cli.ExitFailed,
			"show Service default/none-of-these: the agent at " + socket + ": this node serves no such Service"},
		{[]string{"--api-socket", socket, "s2x"}, cli.ExitFailed, "no Service default/s2x: did you mean /s"},
		{[]string{"--api-socket", socket, "empty"}, cli.ExitFailed, "answers without it"},
		{[]string{"--api-socket", repeats}, cli.ExitFailed, "repeats page"},
		{[]string{"--api-socket", older}, cli.ExitFailed, "list Services: the agent at " + older + " does not offer this"},
		{[]string{"--api-socket", older, "web"}, cli.ExitFailed, "does not offer this"},
		{[]string{"--api-socket", "/none"}, cli.ExitFailed, "no agent serves here"},
	} {
		code, out, errs := command(c.args...)
		if code != c.code || !strings.Contains(out+errs, c.text) || (code == cli.ExitDone) != (errs == "") || code != cli.ExitDone &&
			(out != "" || strings.Count(errs, "\n") != 1) {
			t.Errorf("%q: exit code %d: %q %q", c.args, code, out, errs)
		}
	}
	var list struct {
		Services []struct{ Name, Health string }
	}
	if _, out, _ := command("--api-socket", socket, "-o", "json"); json.Unmarshal([]byte(out), &list) != nil || len(list.Services) != 25 {
		t.Errorf("JSON: %s", out)
	}
	var one struct {
		Service struct{ Ports []struct{ Compared bool } }
	}
	if _, out, _ := command("--api-socket", socket, "-o", "json", "web"); json.Unmarshal([]byte(out), &one) != nil ||
		len(one.Service.Ports) != 1 || !one.Service.Ports[0].Compared {
		t.Errorf("JSON: %s", out)
	}
}

func TestNearestServices(t *testing.T) {
	known := []*nodev1alpha1.Service{
		{Namespace: "default", Name: "carts"}, {Namespace: "shop", Name: "cart"}, {Namespace: "shop", Name: "web"},
	}
	for asked, want := range map[string]string{
		"default/crat": "shop/cart",
		"default/web":  "shop/web",
		"default/cart": "shop/cart",
		"default/car":  "default/carts shop/cart",
		"default/none": "",
	} {
		req, err := requestOf("", asked)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(nearest(req, known), " "); got != want {
			t.Errorf("%s: %q, want %q", asked, got, want)
		}
	}
}

func TestCompletionOfServices(t *testing.T) {
	socket := nodeclienttest.Serve(t, agent{})
	program := func() cli.Program { return cli.Program{Name: "spillway", Commands: []*cobra.Command{NewCommand()}} }
	if got := clitest.Completion(t, program, "services", "--api-socket", socket, ""); len(got) != 25 || got[24] != "/s24" {
		t.Errorf("Services: %q", got)
	}
	if got := clitest.Completion(t, program, "services", "--api-socket", socket, "a/b", ""); len(got) != 0 {
		t.Errorf("after a Service: %q", got)
	}
}

func TestBothFamiliesAreOneLine(t *testing.T) {
	one := func(family, addr string, endpoints uint32) *nodev1alpha1.ServicePort {
		return &nodev1alpha1.ServicePort{Port: 80, Family: family, EndpointCount: endpoints,
			Frontends: []*nodev1alpha1.Frontend{{Address: addr, Port: 80}, {Port: 30080}}}
	}
	got := ofBothFamilies([]*nodev1alpha1.ServicePort{one("IPv4", "10.96.0.1", 2), one("IPv6", "fd00::1", 2)})
	if len(got) != 1 || addresses(got[0]) != "10.96.0.1:80, *:30080, [fd00::1]:80" {
		t.Errorf("%v", got)
	}
	if got := ofBothFamilies([]*nodev1alpha1.ServicePort{one("IPv4", "10.96.0.1", 2), one("IPv6", "fd00::1", 1)}); len(got) != 2 {
		t.Errorf("with endpoints of one family: %v", got)
	}
}

func TestNamesOfServices(t *testing.T) {
	for _, c := range []struct{ namespace, arg, want string }{
		{"", "web", "default/web"},
		{"shop", "web", "shop/web"},
		{"", "shop/web", "shop/web"},
		{"shop", "shop/web", "shop/web"},
		{"", "shop/pod/web-0", "shop/pod/web-0"},
		{"shop", "pod/web-0", "shop/pod/web-0"},
		{"", "pod/web", "pod/web"}, // a namespace may have this name
		{"pod", "pod/web", "pod/web"},
	} {
		req, err := requestOf(c.namespace, c.arg)
		if err != nil || req.Namespace+"/"+req.Name != c.want {
			t.Errorf("-n %q %q: %v, %v, want %s", c.namespace, c.arg, req, err, c.want)
		}
	}
}
