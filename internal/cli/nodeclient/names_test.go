package nodeclient

import (
	"context"
	"errors"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/cli/nodeclient/nodeclienttest"
)

// namingAgent serves shop/web at 10.96.0.1, and has one endpoint.
type namingAgent struct {
	nodev1alpha1connect.UnimplementedNodeServiceHandler
	asked int // addresses
	err   error
}

func (a *namingAgent) Names(_ context.Context, req *nodev1alpha1.NamesRequest) (*nodev1alpha1.NamesResponse, error) {
	a.asked += len(req.Addresses)
	resp := &nodev1alpha1.NamesResponse{}
	web := &nodev1alpha1.ServicePortName{Namespace: "shop", Name: "web", Port: 80}
	for _, at := range req.Addresses {
		out := &nodev1alpha1.AddressNames{}
		switch at.Address {
		case "10.96.0.1":
			out.Service = web
		case "10.1.0.1":
			out.Pod, out.Node = "shop/web-1", "n2"
			out.EndpointOf = []*nodev1alpha1.ServicePortName{web, web, {Namespace: "shop", Name: "api", PortName: "grpc"}}
		}
		resp.Names = append(resp.Names, out)
	}
	return resp, a.err
}

func TestNamesAreAskedOnceAndRemembered(t *testing.T) {
	a := &namingAgent{}
	n := NewNames(Unix(nodeclienttest.Serve(t, a)))
	var addrs []Address
	for _, s := range []string{"10.96.0.1:80", "10.1.0.1:8080", "192.0.2.1:1", "10.96.0.1:80"} {
		addrs = append(addrs, Address{"tcp", netip.MustParseAddrPort(s)})
	}
	want := []string{"Service shop/web:80", "pod shop/web-1 on n2 (endpoint of shop/web:80, shop/api:grpc)", "", "Service shop/web:80"}
	check := func(wantErr string) {
		t.Helper()
		owners, err := n.Of(t.Context(), addrs)
		if wantErr != "" {
			wantLine(t, err, wantErr)
		} else if err != nil {
			t.Error(err)
		}
		var got []string
		for _, o := range owners {
			got = append(got, o.String())
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("owners %q, want %q", got, want)
		}
	}
	check("")
	check("")
	if a.asked != 3 {
		t.Errorf("the agent was asked for %d addresses, want 3", a.asked)
	}
	for a, o := range n.known {
		o.at = o.at.Add(-2 * namesFresh)
		n.known[a] = o
	}
	a.err = connect.NewError(connect.CodeUnavailable, errors.New("busy"))
	check("name Services, which needs the agent: the agent at ")
	check("busy")
	if a.asked != 6 {
		t.Errorf("an agent that did not answer was asked again at once, for %d addresses", a.asked)
	}
	n.failedAt, a.err = n.failedAt.Add(-2*namesPause), nil
	check("")
}

func TestManyNamesComeInParts(t *testing.T) {
	a := &namingAgent{}
	n := NewNames(Unix(nodeclienttest.Serve(t, a)))
	var addrs []Address
	for i := range uint16(3*namesAtOnce + 7) {
		addrs = append(addrs, Address{"udp", netip.AddrPortFrom(netip.MustParseAddr("10.96.0.1"), i+1)})
	}
	owners, err := n.Of(t.Context(), addrs)
	if err != nil || len(owners) != len(addrs) || owners[len(owners)-1].Service != "shop/web:80" || a.asked != len(addrs) {
		t.Errorf("%d owners of %d, %v", len(owners), a.asked, err)
	}
}

func TestAnOlderAgentHasNoNames(t *testing.T) {
	n := NewNames(Unix(nodeclienttest.Serve(t, nodev1alpha1connect.UnimplementedNodeServiceHandler{})))
	if err := n.Probe(t.Context()); err == nil || !strings.Contains(err.Error(), "does not offer this: it is older than this program") {
		t.Errorf("an older agent: %v", err)
	}
	if owners, err := n.Of(t.Context(), []Address{{}}); len(owners) != 1 || !owners[0].IsZero() || err == nil ||
		time.Since(n.failedAt) > time.Hour {
		t.Errorf("owners %v, %v", owners, err)
	}
}
