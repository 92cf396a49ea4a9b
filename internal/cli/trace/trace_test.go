package trace

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient/nodeclienttest"
	"spillway.dev/spillway/internal/facts/model"
)

// run executes a command line as the program does.
func run(args string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	code = cli.Program{Name: "spillway", Commands: []*cobra.Command{NewCommand()}}.Run(strings.Fields(args), &out, &errs)
	return code, out.String(), errs.String()
}

func TestWrongUsageIsOneLine(t *testing.T) {
	for args, want := range map[string]string{
		"trace":                                                                 "--from and --to are needed",
		"trace --from 10.0.0.1":                                                 "--from and --to are needed",
		"trace --from x --to 1.2.3.4":                                           `--from "x": use an address, or a pod as NAMESPACE/NAME`,
		"trace --from 10.0.0.1 --to 1.2.3.4":                                    `--to "1.2.3.4": use ADDRESS:PORT, or a Service as NAMESPACE/NAME[:PORT]`,
		"trace --from 10.0.0.1 --to 1.2.3.4:0":                                  `--to "1.2.3.4:0"`,
		"trace --from 10.0.0.1 --to [fd00::1]:80":                               "--from 10.0.0.1: has no address of the family of fd00::1",
		"trace --from 10.0.0.1 --to 1.2.3.4:80 --protocol sctp":                 `--protocol "sctp": use tcp or udp`,
		"trace --from 10.0.0.1 --to 1.2.3.4:80 --protocol icmp":                 "--protocol icmp: only connections with ports are traced",
		"trace --from 10.0.0.1 --to 1.2.3.4:80 --timeout 0s":                    "--timeout 0s",
		"trace --from 10.0.0.1 --to 1.2.3.4:80 --timeout 2h":                    "--timeout 2h",
		"trace --from 10.0.0.1 --to 1.2.3.4:80 --source-port 65536":             "--source-port",
		"trace --from 10.0.0.1 --to 1.2.3.4:80 -o xml":                          "xml",
		"trace --from 10.0.0.1 --to 1.2.3.4:80 --manifests . --kubeconfig x":    "--manifests replaces an API server",
		"trace --from 10.0.0.1 --to 1.2.3.4:80 extra":                           "extra",
		"trace --from a/b/c --to 1.2.3.4:80":                                    `--from "a/b/c"`,
		"trace --from 10.0.0.1 --to default/web:80:90 --manifests /nonexistent": "/nonexistent",
	} {
		code, out, errs := run(args)
		if code == cli.ExitDone || out != "" || strings.Count(errs, "\n") != 1 || !strings.Contains(errs, want) {
			t.Errorf("%s: exit code %d, %q, want %q", args, code, errs, want)
		}
	}
}

const manifests = `
apiVersion: v1
kind: Pod
metadata: {name: web-0, namespace: shop}
spec: {nodeName: a}
status: {podIP: 10.244.0.5, podIPs: [{ip: 10.244.0.5}, {ip: "fd44::5"}]}
---
apiVersion: v1
kind: Service
metadata: {name: cart, namespace: shop}
spec:
  clusterIP: fd10::1
  clusterIPs: ["fd10::1", 10.96.0.1]
  ipFamilies: [IPv6, IPv4]
  ports: [{name: http, port: 80}, {name: dns, port: 53, protocol: UDP}]
---
apiVersion: v1
kind: Service
metadata: {name: many, namespace: shop}
spec:
  clusterIP: 10.96.0.2
  clusterIPs: [10.96.0.2]
  ports: [{name: http, port: 80}, {name: https, port: 443}]
---
apiVersion: v1
kind: Service
metadata: {name: headless, namespace: shop}
spec: {clusterIP: None, clusterIPs: [None], ports: [{port: 80}]}
`

func TestNamesAreLookedUp(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "all.yaml"), []byte(manifests), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		from, to string
		proto    model.Protocol
		want     string // or the error
	}{
		{"shop/web-0", "shop/cart", model.TCP, "fd44::5 > [fd10::1]:80"}, // the first of the Service,
		{"10.0.0.9", "shop/cart", model.UDP, "10.0.0.9 > 10.96.0.1:53"},
		{"fd44::9", "shop/cart:80", model.TCP, "fd44::9 > [fd10::1]:80"},
		{"shop/web-0", "shop/many:443", model.TCP, "10.244.0.5 > 10.96.0.2:443"},
		{"shop/web-0", "shop/many:https", model.TCP, "10.244.0.5 > 10.96.0.2:443"},
		{"shop/web-0", "[fd10::1]:80", model.TCP, "fd44::5 > [fd10::1]:80"},
		{"::ffff:10.0.0.1", "10.96.0.1:80", model.TCP, "10.0.0.1 > 10.96.0.1:80"},
		{"shop/web-0", "shop/many", model.TCP, "several ports: add one of 80, 443"},
		{"shop/web-0", "shop/many:81", model.TCP, "no such port: use one of 80, 443"},
		{"shop/web-0", "shop/many", model.UDP, "no port of UDP"},
		{"shop/web-0", "shop/headless", model.TCP, "no cluster IP"},
		{"shop/web-0", "shop/none", model.TCP, "no such Service"},
		{"shop/none", "shop/cart", model.TCP, "no such pod"},
		{"fd44::9", "shop/many:80", model.TCP, "no address of the family"},
	} {
		c := config{from: row.from, to: row.to, protocol: strings.ToLower(row.proto.String()), source: source{manifests: dir}}
		cmd := NewCommand()
		c.pins.AddFlag(cmd.InheritedFlags(), "")
		c.socket.AddFlag(cmd.InheritedFlags())
		q, err := c.question(t.Context())
		got := q.From.Addr.String() + " > " + netip.AddrPortFrom(q.To.Addr, q.Port).String()
		if err != nil {
			got = err.Error()
		}
		if err == nil && got != row.want || err != nil && !strings.Contains(got, row.want) {
			t.Errorf("%s to %s: %s, want %s", row.from, row.to, got, row.want)
		}
	}
}

// agent knows a pod and a Service of two families.
type agent struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
}

func (agent) Pods(_ context.Context, req *nodev1alpha1.PodsRequest) (*nodev1alpha1.PodsResponse, error) {
	resp := &nodev1alpha1.PodsResponse{}
	if req.Namespace == "shop" && req.Name == "web-0" {
		resp.Pods = append(resp.Pods, &nodev1alpha1.Pod{Namespace: "shop", Name: "web-0", Addresses: []string{"10.244.0.5", "fd44::5"}})
	}
	return resp, nil
}

func (agent) GetService(_ context.Context, req *nodev1alpha1.GetServiceRequest) (*nodev1alpha1.GetServiceResponse, error) {
	if req.Name != "cart" {
		return nil, connect.NewError(connect.CodeNotFound, errors.New("no such Service"))
	}
	port := func(addr string) *nodev1alpha1.ServicePort {
		return &nodev1alpha1.ServicePort{Name: "http", Port: 80, Protocol: nodev1alpha1.Protocol_PROTOCOL_TCP,
			Frontends: []*nodev1alpha1.Frontend{{Kind: "nodePort"}, {Kind: "clusterIP", Address: addr}}}
	}
	return &nodev1alpha1.GetServiceResponse{Service: &nodev1alpha1.Service{Namespace: "shop", Name: "cart",
		Ports: []*nodev1alpha1.ServicePort{port("10.96.0.1"), port("fd10::1")}}}, nil
}

func (agent) Names(_ context.Context, req *nodev1alpha1.NamesRequest) (*nodev1alpha1.NamesResponse, error) {
	return &nodev1alpha1.NamesResponse{Names: []*nodev1alpha1.AddressNames{
		{Service: &nodev1alpha1.ServicePortName{Namespace: "shop", Name: "cart", PortName: "at-" + req.Addresses[0].Address}}}}, nil
}

// Without a source, the agent knows the names, and which Service an address has.
func TestTheAgentLooksUpNames(t *testing.T) {
	path := nodeclienttest.Serve(t, agent{})
	for _, row := range []struct{ from, to, want string }{
		{"shop/web-0", "shop/cart", "10.244.0.5 > 10.96.0.1:80 shop/cart:at-10.96.0.1"},
		{"fd44::9", "shop/cart:http", "fd44::9 > [fd10::1]:80 shop/cart:at-fd10::1"},
		{"shop/web-0", "10.96.0.9:80", "10.244.0.5 > 10.96.0.9:80 shop/cart:at-10.96.0.9"},
		{"shop/none", "shop/cart", "no such pod"},
		{"shop/web-0", "shop/none", "no such Service"},
	} {
		c, cmd := config{from: row.from, to: row.to, protocol: "tcp"}, NewCommand()
		c.pins.AddFlag(cmd.InheritedFlags(), "")
		c.socket.AddFlag(cmd.InheritedFlags())
		if err := cmd.InheritedFlags().Set("api-socket", path); err != nil {
			t.Fatal(err)
		}
		q, err := c.question(t.Context())
		got := ""
		if err != nil {
			got = err.Error()
		} else {
			got = q.From.Addr.String() + " > " + netip.AddrPortFrom(q.To.Addr, q.Port).String() + " " + c.serviceOf(t.Context(), &q)
		}
		if !strings.Contains(got, row.want) {
			t.Errorf("%s to %s: %s, want %s", row.from, row.to, got, row.want)
		}
	}
}
