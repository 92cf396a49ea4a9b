package drops

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/cli/nodeclient/nodeclienttest"
	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/page"
)

func TestDropsRefusesWhatItCannotFilterBy(t *testing.T) {
	for _, row := range []struct{ args, want string }{
		{"--address 10.0.0", "--address"},
		{"--port 0", "--port 0"},
		{"--port 65536", "--port 65536"},
		{"--protocol tpc", "--protocol"},
		{"--netns nowhere", "no such network namespace"},
		{"--pod nowhere", "nowhere"},
		{"--rate -1", "rate -1"},
		{"--for -1s", "--for"},
		{"--reason A,!B", "not both"},
		{"-o xml", "xml"},
		{"more", "more"},
	} {
		var out, errs bytes.Buffer
		if code := run(append([]string{"drops"}, strings.Fields(row.args)...), &out, &errs); code != cli.ExitUsage ||
			!strings.Contains(errs.String(), row.want) || strings.Count(errs.String(), "\n") != 1 {
			t.Errorf("%s: exit code %d: %s", row.args, code, errs.String())
		}
	}
}

func TestDropsPrintsPacketHopAndMeaning(t *testing.T) {
	d := drops.Drop{
		Reason: "NETFILTER_DROP", By: "nft", Meaning: "a rule dropped it",
		Packet: drops.Packet{Protocol: "tcp", TCPFlags: "S", Source: netip.MustParseAddr("fd00::1"), SourcePort: 4000,
			Destination: netip.MustParseAddr("10.0.0.1"), DestinationPort: 80, Length: 60},
		Place: drops.Place{Namespace: "cni-1", Pod: "web-0", Interface: "eth0", Hook: "INPUT", Table: "filter", Chain: "in",
			Location: "nft_do_chain+0x1"},
	}
	var table bytes.Buffer
	if err := (dropResult{Drop: &d, explained: explained{}}).Write(&table); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"tcp S [fd00::1]:4000 > 10.0.0.1:80, 60 bytes\n",
		"  NETFILTER_DROP in pod web-0 (cni-1) from eth0 at INPUT, nft filter/in, nft_do_chain+0x1\n",
		"  a rule dropped it\n",
	} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("%q is not in %q", want, table.String())
		}
	}
	d.Pod, d.Interface, d.Table = "web\x1b[2J", "a\nb", "t\x07"
	table.Reset()
	if err := (dropResult{Drop: &d, explained: explained{}}).Write(&table); err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(table.String(), "\x1b\x07") || strings.Count(table.String(), "\n") != 3 ||
		!strings.Contains(table.String(), `web\x1b[2J`) {
		t.Errorf("a terminal acts on %q", table.String())
	}
	var out strings.Builder
	c := config{output: cli.JSON}
	if err := c.print(&out, dropResult{Drop: &d, explained: explained{}}); err != nil {
		t.Fatal(err)
	}
	if strings.Count(out.String(), "\n") != 1 || !strings.Contains(out.String(), `"namespace":"cni-1"`) {
		t.Errorf("%s", &out)
	}
	for line := range strings.Lines(wrapped(t, &d)) {
		if n := len([]rune(line)) - 1; n > 80 {
			t.Errorf("%d columns: %q", n, line)
		}
	}
}

// An explanation is printed again when another policy, for example, is the cause.
func TestDropsExplainsACauseOnce(t *testing.T) {
	seen := explained{}
	for i, row := range []struct {
		reason, chain, meaning string
		lines                  int
	}{
		{"NETFILTER_DROP", "in", "policy a denied it", 3},
		{"NETFILTER_DROP", "in", "policy a denied it", 2},
		{"NO_SOCKET", "", "nothing listens", 3},
		{"NETFILTER_DROP", "in", "policy a denied it", 2},
		{"NETFILTER_DROP", "out", "policy a denied it", 3},
		{"NETFILTER_DROP", "in", "policy b denied it", 3},
		{"NETFILTER_DROP", "in", "policy a denied it", 3},
	} {
		d := drops.Drop{Reason: row.reason, Meaning: row.meaning, Place: drops.Place{Chain: row.chain}}
		var out strings.Builder
		if err := (dropResult{Drop: &d, explained: seen}).Write(&out); err != nil {
			t.Fatal(err)
		}
		if strings.Count(out.String(), "\n") != row.lines || strings.Contains(out.String(), row.meaning) != (row.lines == 3) {
			t.Errorf("drop %d: %q, want %d lines", i, out.String(), row.lines)
		}
		// A program reads each line alone.
		out.Reset()
		if err := (&config{output: cli.JSON}).print(&out, dropResult{Drop: &d, explained: seen}); err != nil ||
			!strings.Contains(out.String(), row.meaning) {
			t.Errorf("drop %d: %v, %s", i, err, &out)
		}
	}
}

// wrapped prints a drop on a terminal of 80 columns.
func wrapped(t *testing.T, d *drops.Drop) string {
	t.Helper()
	var out strings.Builder
	d.Meaning = strings.Repeat("a long explanation ", 12)
	if err := (dropResult{Drop: d, explained: explained{}}).Write(&page.Page{Writer: &out, Width: 80}); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// agent names 10.96.0.1 as a Service, and 10.1.0.1 as a pod of two.
type agent struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
}

func (agent) Names(_ context.Context, req *nodev1alpha1.NamesRequest) (*nodev1alpha1.NamesResponse, error) {
	resp := &nodev1alpha1.NamesResponse{}
	web := &nodev1alpha1.ServicePortName{Namespace: "shop", Name: "web", PortName: "http"}
	for _, a := range req.Addresses {
		out := &nodev1alpha1.AddressNames{}
		switch {
		case a.Protocol != nodev1alpha1.Protocol_PROTOCOL_TCP:
		case a.Address == "10.96.0.1" && a.Port == 80:
			out.Service = web
		case a.Address == "10.1.0.1":
			out.Pod, out.Node = "shop/web-1", "n2"
			out.EndpointOf = []*nodev1alpha1.ServicePortName{web, {Namespace: "shop", Name: "api\x1b", Port: 81}}
		case a.Address == "10.1.0.9":
			out.Pod = "shop/client"
		}
		resp.Names = append(resp.Names, out)
	}
	return resp, nil
}

func TestDropsNamesServicesAndEndpoints(t *testing.T) {
	asked := nodeclient.NewNames(nodeclient.Unix(nodeclienttest.Serve(t, agent{})))
	none := nodeclient.NewNames(nodeclient.Unix(filepath.Join(t.TempDir(), "api.sock")))
	for _, row := range []struct {
		names                  *nodeclient.Names
		protocol, from, to     string
		line, services, inJSON string
	}{
		{asked, "tcp", "10.1.0.9:4000", "10.96.0.1:80", "  from pod shop/client to Service shop/web:http\n", "shop/web:http",
			`"services":["shop/web:http"],"sourceName":{"pod":"shop/client"},"destinationName":{"service":"shop/web:http"}`},
		{asked, "tcp", "10.1.0.1:8080", "192.0.2.1:4000", "  from pod shop/web-1 on n2 (endpoint of shop/web:http, shop/api\\x1b:81)\n",
			"shop/web:http shop/api\x1b:81", `"endpointOf":["shop/web:http",`},
		{asked, "tcp", "192.0.2.1:4000", "10.1.0.1:8080", "  to pod shop/web-1 on n2 (endpoint of ", "shop/web:http shop/api\x1b:81",
			`"destinationName":{"endpointOf":`},
		{asked, "icmp", "192.0.2.1:0", "10.96.0.1:0", "", "", ""},
		{none, "tcp", "10.1.0.9:4000", "10.96.0.1:80", "", "", ""},
	} {
		from, to := netip.MustParseAddrPort(row.from), netip.MustParseAddrPort(row.to)
		d := drops.Drop{Reason: "R", Meaning: "m", Packet: drops.Packet{Protocol: row.protocol, Source: from.Addr(), SourcePort: from.Port(),
			Destination: to.Addr(), DestinationPort: to.Port()}}
		result := dropResult{Drop: &d, names: namesOf(t.Context(), row.names, &d.Packet), explained: explained{}}
		if got := strings.Join(result.Services, " "); got != row.services {
			t.Errorf("%s to %s belongs to %q, want %q", row.from, row.to, got, row.services)
		}
		var text, object strings.Builder
		c := config{output: cli.JSON}
		if err := errors.Join(result.Write(&text), c.print(&object, result)); err != nil {
			t.Fatal(err)
		}
		if row.line == "" && (strings.Count(text.String(), "\n") != 3 || strings.Contains(object.String(), "_name")) {
			t.Errorf("%s to %s has names: %s%s", row.from, row.to, &text, &object)
		}
		if !strings.Contains(text.String(), row.line) || !strings.Contains(object.String(), row.inJSON) {
			t.Errorf("%s to %s: want %q and %q in\n%s%s", row.from, row.to, row.line, row.inJSON, &text, &object)
		}
	}
}

func TestTheSummaryNamesWhatWasNotShown(t *testing.T) {
	got := reasonsText(map[string]uint64{"NETFILTER_DROP": 4981, "NO_SOCKET": 2, "TCP_CSUM": 1},
		map[string]uint64{"NETFILTER_DROP": 98, "NO_SOCKET": 2, "TCP_LISTEN_OVERFLOW": 3})
	if want := "NETFILTER_DROP 4981 (98 shown), TCP_LISTEN_OVERFLOW 3, NO_SOCKET 2, TCP_CSUM 1 (0 shown)"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
