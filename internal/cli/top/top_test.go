package top

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/clitest"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/nodeclient/nodeclienttest"
	"spillway.dev/spillway/internal/diagnosis/top"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/page"
)

// once prints the first page of a sample.
func once(t *testing.T, terminal bool, list []conntrack.Report, err error) (text, warned string, failed error) {
	t.Helper()
	var out, warn bytes.Buffer
	p := &page.Page{Writer: &out}
	if terminal {
		p.Width = 80
	}
	tp := topPages{out: p, warn: &warn, once: true, output: cli.Table,
		read: func(context.Context) ([]conntrack.Report, error) { return list, err }}
	failed = tp.page(t.Context())
	return out.String(), warn.String(), failed
}

func TestAPageForAProgramHasWholeNamesAndNoEscapes(t *testing.T) {
	long := "cni-5b2c1d7e-0c3f-4a4e-9d8a-1f2e3d4c5b6a"
	list := []conntrack.Report{{Namespace: conntrack.Namespace{Inode: 1, Names: []string{long}}, Entries: 3},
		{Namespace: conntrack.Namespace{Inode: 2, PID: 7, Command: "a\x1b[2J\nb"}}}
	page, _, _ := once(t, false, list, nil)
	if !strings.Contains(page, long+" ") || strings.Contains(page, "\x1b") || strings.Count(page, "\n") != 4 ||
		!strings.Contains(page, `a\x1b[2J\nb[7]`) {
		t.Errorf("%q", page)
	}
	fields := strings.Fields(strings.Split(page, "\n")[1])
	if fields[3] != "-" { // no earlier sample
		t.Errorf("growth without a second reading: %q", fields)
	}
	page, _, _ = once(t, true, list, nil)
	for line := range strings.Lines(page) {
		if n := utf8.RuneCountInString(line); n > 81 {
			t.Errorf("%d columns: %q", n-1, line)
		}
	}
	// Consecutive pages are no interactive screen either.
	var out bytes.Buffer
	tp := topPages{out: &out, warn: &out, read: func(context.Context) ([]conntrack.Report, error) { return list, nil }}
	for range 2 {
		if err := tp.page(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if strings.Contains(out.String(), "\x1b") || !strings.Contains(out.String(), " +0 ") {
		t.Errorf("%q", out.String())
	}
}

// Unreadable processes are no failure if nothing uses conntrack. If nothing could be
// read, that is a failure.
func TestAPageIsPrintedWhereConntrackIsNotInUse(t *testing.T) {
	page, warned, err := once(t, false, nil, os.ErrPermission)
	if err != nil || !strings.Contains(page, "conntrack is in use in no network namespace") || !strings.Contains(warned, "permission") {
		t.Errorf("%q, %q, %v", page, warned, err)
	}
	for _, failed := range []error{conntrack.ErrUnsupported, errors.Join(conntrack.ErrNothingRead, os.ErrPermission)} {
		if page, _, err := once(t, false, nil, failed); err == nil || page != "" {
			t.Errorf("%v: %q, %v", failed, page, err)
		}
	}
}

func TestTopShowsTheFullestFirstAndSaysOnceWhatItCannotRead(t *testing.T) {
	reports := []conntrack.Report{
		{Namespace: conntrack.Namespace{Inode: 1, Own: true}, Entries: 5, Limits: conntrack.Limits{Max: 1000}},
		{Namespace: conntrack.Namespace{Inode: 2, Names: []string{"pod"}}, Entries: 700, Limits: conntrack.Limits{Max: 1000},
			Counters: conntrack.Counters{Drop: 42}, Expectations: map[string]int{"tftp": 2, "ftp": 1}},
	}
	var out, warn bytes.Buffer
	tp := topPages{out: &out, warn: &warn, once: true, read: func(context.Context) ([]conntrack.Report, error) {
		return reports, errors.New("one namespace is locked")
	}}
	for range 2 {
		if err := tp.page(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	lines := strings.Split(out.String(), "\n")
	if !strings.HasPrefix(lines[1], "pod ") || !strings.Contains(lines[1], "70.0%") || !strings.Contains(lines[1], " 42 ") ||
		!strings.HasSuffix(lines[1], " 3") || !strings.HasPrefix(lines[2], "(here) ") {
		t.Errorf("page:\n%s", &out)
	}
	for _, l := range lines {
		if len(l) > 80 {
			t.Errorf("%d columns: %q", len(l), l)
		}
	}
	if n := strings.Count(warn.String(), "locked"); n != 1 {
		t.Errorf("said %d times", n)
	}
	at := time.Now()
	tp.collector.Compare(reports, at)
	reports[1].Entries, reports[1].Counters.Drop = 800, 52
	rows := tp.collector.Compare(reports, at.Add(2*time.Second))
	if rows[0].Rate != 50 || rows[0].PerSec != 5 {
		t.Errorf("rates %v and %v, want 50 and 5", rows[0].Rate, rows[0].PerSec)
	}
	tp.read = func(context.Context) ([]conntrack.Report, error) { return nil, conntrack.ErrUnsupported }
	if err := tp.page(t.Context()); !errors.Is(err, conntrack.ErrUnsupported) {
		t.Errorf("nothing could be read: %v", err)
	}
}

// The keys are an interface for programs.
func TestTheKeysOfAJSONPage(t *testing.T) {
	var out bytes.Buffer
	tp := topPages{out: &out, output: cli.JSON, read: func(context.Context) ([]conntrack.Report, error) {
		return []conntrack.Report{{Expectations: map[string]int{"tftp": 2}}}, nil
	}}
	if err := tp.page(t.Context()); err != nil {
		t.Fatal(err)
	}
	var page []map[string]any
	if err := json.Unmarshal(out.Bytes(), &page); err != nil || strings.Count(out.String(), "\n") != 1 {
		t.Fatalf("%q: %v", &out, err)
	}
	want := []string{"counters", "dropsPerSecond", "entries", "entriesPerSecond", "expectations", "limits", "name", "namespace"}
	if got := slices.Sorted(maps.Keys(page[0])); !slices.Equal(got, want) {
		t.Errorf("keys %q, want %q", got, want)
	}
}

// fakeAgent has two flows of a Service and one that it does not know.
type fakeAgent struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
	flowsErr error
	namesErr error
	egress   []*nodev1alpha1.Flow
	status   *nodev1alpha1.StatusResponse
}

func (a fakeAgent) Status(context.Context, *nodev1alpha1.StatusRequest) (*nodev1alpha1.StatusResponse, error) {
	return a.status, nil
}

func (a fakeAgent) Names(_ context.Context, req *nodev1alpha1.NamesRequest) (*nodev1alpha1.NamesResponse, error) {
	resp := &nodev1alpha1.NamesResponse{}
	web := &nodev1alpha1.ServicePortName{Namespace: "shop", Name: "web", PortName: "http"}
	for _, a := range req.Addresses {
		out := &nodev1alpha1.AddressNames{}
		switch a.Address {
		case "10.96.0.1":
			out.Service = web
		case "10.1.0.7":
			out.Pod, out.EndpointOf = "shop/web-0", []*nodev1alpha1.ServicePortName{web}
		}
		resp.Names = append(resp.Names, out)
	}
	return resp, a.namesErr
}

// ListFlows returns flows of egress to those who ask for them alone: the others fill the limit.
func (a fakeAgent) ListFlows(_ context.Context, req *nodev1alpha1.ListFlowsRequest) (*nodev1alpha1.ListFlowsResponse, error) {
	if req.Egress {
		return &nodev1alpha1.ListFlowsResponse{Flows: a.egress}, a.flowsErr
	}
	peer := func(addr string, port uint32) *nodev1alpha1.Peer {
		return &nodev1alpha1.Peer{Address: addr, Port: port}
	}
	tcp := nodev1alpha1.Protocol_PROTOCOL_TCP
	return &nodev1alpha1.ListFlowsResponse{Flows: []*nodev1alpha1.Flow{
		{Protocol: tcp, Client: peer("10.1.0.2", 1), ServiceAddress: peer("10.96.0.1", 80), Endpoint: peer("10.1.0.7", 8080)},
		{Protocol: tcp, Client: peer("10.1.0.2", 2), ServiceAddress: peer("10.96.0.1", 80), Endpoint: peer("10.1.0.7", 8080)},
		{Protocol: tcp, Client: peer("10.1.0.3", 2), ServiceAddress: peer("10.96.0.9", 80)},
	}}, a.flowsErr
}

// addressPages prints a page of a view, where conntrack is not in use.
func addressPages(t *testing.T, view top.View, output cli.Output, socket string) (text, warned string) {
	t.Helper()
	var out, warn bytes.Buffer
	c := top.NewCollector()
	c.ReadAll = func(context.Context) ([]conntrack.Report, error) { return nil, conntrack.ErrUnsupported }
	c.Agent = newAgent(nodeclient.Unix(socket))
	tp := topPages{out: &out, warn: &warn, output: output, once: true,
		sample: func(ctx context.Context) (top.Sample, error) { return c.Read(ctx, view, 0) }}
	for range 2 {
		out.Reset()
		if err := tp.page(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	return out.String(), warn.String()
}

func TestPagesOfServicesHaveNamesAndSpillwaysFlows(t *testing.T) {
	socket := nodeclienttest.Serve(t, fakeAgent{})
	for view, want := range map[top.View]string{
		top.Services:  "SERVICE ENTRIES +/s tcp 10.96.0.1:80 shop/web:http 2 +0 tcp 10.96.0.9:80 1 +0 2 services",
		top.Endpoints: "ENDPOINT ENTRIES +/s tcp 10.1.0.7:8080 shop/web-0 of shop/web:http 2 +0 1 endpoints",
	} {
		text, _ := addressPages(t, view, cli.Table, socket)
		if got := strings.Join(strings.Fields(text), " "); got != want {
			t.Errorf("%s: %s\nwant %s", view, got, want)
		}
	}
	text, _ := addressPages(t, top.Services, cli.JSON, socket)
	if want := `{"protocol":"tcp","address":"10.96.0.1","port":80,"service":"shop/web:http","entries":2,"entriesPerSecond":0}`; !strings.
		HasPrefix(text, "["+want+",") {
		t.Errorf("%s\nwant %s", text, want)
	}
}

func TestPagesOfEgressHavePodsAndDestinations(t *testing.T) {
	out := func(pod, client string, port uint32) *nodev1alpha1.Flow {
		return &nodev1alpha1.Flow{Protocol: nodev1alpha1.Protocol_PROTOCOL_TCP, Egress: true,
			Client: &nodev1alpha1.Peer{Address: client, Port: port, Pod: pod}, Endpoint: &nodev1alpha1.Peer{Address: "203.0.113.5", Port: 443}}
	}
	socket := nodeclienttest.Serve(t, fakeAgent{egress: []*nodev1alpha1.Flow{
		out("shop/web-0", "10.1.0.7", 1), out("shop/web-0", "10.1.0.7", 2), out("", "10.1.0.8", 1),
	}})
	text, warned := addressPages(t, top.Egress, cli.Table, socket)
	if got, want := strings.Join(strings.Fields(text), " "), "POD DESTINATION ENTRIES +/s shop/web-0 tcp 203.0.113.5:443 2 +0 "+
		"10.1.0.8 tcp 203.0.113.5:443 1 +0 2 destinations of pods"; got != want || warned != "" {
		t.Errorf("%s\nwant %s; warned %q", got, want, warned)
	}
	text, _ = addressPages(t, top.Egress, cli.JSON, socket)
	to := `{"protocol":"tcp","address":"203.0.113.5","port":443,`
	want := "[" + to + `"client":"10.1.0.7","pod":"shop/web-0","entries":2,"entriesPerSecond":0},` +
		to + `"client":"10.1.0.8","entries":1,"entriesPerSecond":0}]`
	if strings.TrimSpace(text) != want {
		t.Errorf("%s\nwant %s", text, want)
	}
}

// Without connections, a page of egress says why in one line.
func TestPagesOfEgressSayWhyTheyAreEmpty(t *testing.T) {
	serve := func(e *nodev1alpha1.Egress, dataplane string) string {
		return nodeclienttest.Serve(t, fakeAgent{status: &nodev1alpha1.StatusResponse{
			ProxyMode: dataplane, Egress: e, Dataplanes: []*nodev1alpha1.Dataplane{{Name: dataplane}}}})
	}
	on := &nodev1alpha1.Egress{Mode: "on", Sources: []string{"10.1.0.0/24"}}
	nameless := fakeAgent{namesErr: errors.New("broken"), status: &nodev1alpha1.StatusResponse{
		Egress: on, Dataplanes: []*nodev1alpha1.Dataplane{{Name: "ebpf"}}}}
	for _, row := range []struct{ want, socket string }{
		{"spillway: list connections of egress, which needs the agent: the agent at ", filepath.Join(t.TempDir(), "api.sock")},
		{"spillway: list Spillway's flows: the agent at ", nodeclienttest.Serve(t, fakeAgent{flowsErr: errors.New("broken")})},
		{"spillway: list connections of egress: egress is off: ", serve(nil, "ebpf")},
		{"spillway: list connections of egress: --proxy-mode nftables has them in conntrack: ", serve(on, "nftables")},
		{"spillway: list connections of egress: netfilter has them all: ", serve(&nodev1alpha1.Egress{Mode: "auto"}, "ebpf")},
		{"spillway: name Services, which needs the agent: the agent at ", nodeclienttest.Serve(t, nameless)},
		{"", serve(on, "ebpf")},
	} {
		text, warned := addressPages(t, top.Egress, cli.Table, row.socket)
		lines := strings.Count(warned, "\n")
		if text != "0 destinations of pods\n" || !strings.HasPrefix(warned, row.want) || lines != min(1, len(row.want)) {
			t.Errorf("%q, warned %q, want %q", text, warned, row.want)
		}
	}
}

func TestPagesWithoutAnAgentSaySoOnce(t *testing.T) {
	for want, socket := range map[string]string{
		"name Services, which needs the agent: the agent at ": filepath.Join(t.TempDir(), "api.sock"),
		"list Spillway's flows: the agent at ":                nodeclienttest.Serve(t, fakeAgent{flowsErr: errors.New("broken")}),
	} {
		text, warned := addressPages(t, top.Services, cli.Table, socket)
		if !strings.Contains(text, "0 services") || strings.Count(warned, want) != 1 {
			t.Errorf("%q, warned %q, want %q once", text, warned, want)
		}
	}
}

func TestTablesFitTheTerminal(t *testing.T) {
	reports := []conntrack.Report{
		{Namespace: conntrack.Namespace{Inode: 2, Names: []string{"cni-5b2c1d7e-0c3f-4a4e-9d8a-1f2e3d4c5b6a"}}, Entries: 261000,
			Limits:   conntrack.Limits{Max: 262144, Buckets: 65536},
			Counters: conntrack.Counters{Drop: 1234567, InsertFailed: 12345, EarlyDrop: 99}, Expectations: map[string]int{"tftp": 2}},
		{Namespace: conntrack.Namespace{Inode: 1, Own: true, PID: 1}, Entries: 5, Limits: conntrack.Limits{Max: 262144}},
	}
	var c top.Collector
	const serving = "the eBPF dataplane serves here, without conntrack"
	clitest.Pages(t, "namespaces", topTable{top.Namespaces, c.Compare(reports, time.Now()), serving})
	egress := []top.Row{
		{Address: top.Address{Protocol: "tcp", AddrPort: netip.MustParseAddrPort("203.0.113.5:443")}, Entries: 29000,
			Owner: top.Owner{Pod: "a-long-namespace-of-a-team/crawler-5b2c1d7e0c-3f4a4e9d8a-x7k2p"}, Compared: true, Rate: 120},
		{Address: top.Address{Protocol: "udp", AddrPort: netip.MustParseAddrPort("[2001:db8:1234:5678:9abc:def0:1234:5678]:443")},
			Client: netip.MustParseAddr("fd00::7"), Entries: 1, Compared: true},
	}
	clitest.Pages(t, "egress", topTable{top.Egress, egress, ""})
	clitest.Pages(t, "unused", topTable{top.Namespaces, nil, serving})
}
