package server

import (
	"context"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/reconcile"
)

// atNode serves a Service at an address and port of the node.
func atNode(name, at string, endpoints ...string) reconcile.Service {
	s := serviceOf("default", name, 1)
	addr := netip.MustParseAddrPort(at)
	s.Ports[0].Frontends = []intent.Frontend{{Kind: intent.ExternalIP, Addr: addr.Addr(), Port: addr.Port()}}
	s.Ports[0].Endpoints = nil
	for _, e := range endpoints {
		s.Ports[0].Endpoints = append(s.Ports[0].Endpoints, intent.Endpoint{Addr: netip.MustParseAddrPort(e)})
	}
	return s
}

func TestAPortOfAProcessIsFound(t *testing.T) {
	h := start(t, func(c *Config) {
		c.examine = func(context.Context) (*doctor.Node, error) { return &doctor.Node{}, nil }
		c.State = &fakeState{services: []reconcile.Service{
			atNode("dual", "10.2.0.1:81"), atNode("own", "10.2.0.1:82", "10.2.0.1:82"), atNode("pod/web-0", "10.2.0.1:80"),
			atNode("udp", "10.2.0.1:83"),
		}}
		c.listeners = func() (list []kernel.Listener, err error) {
			for _, at := range []string{"0.0.0.0:80", "[::]:81", "10.2.0.1:82", "127.0.0.1:83", "10.2.0.9:83", "0.0.0.0:84"} {
				list = append(list, kernel.Listener{Protocol: unix.IPPROTO_TCP, Addr: netip.MustParseAddrPort(at)})
			}
			return list, nil
		}
	}).wait(t)
	resp, err := h.client.Findings(t.Context(), &nodev1alpha1.FindingsRequest{})
	if err != nil || len(resp.Problems) > 0 {
		t.Fatalf("findings %v, %v", resp, err)
	}
	var titles []string
	for _, f := range resp.Findings {
		titles = append(titles, f.Title)
	}
	want := []string{
		"the hostPort of Pod default/web-0 takes port 80/TCP from a process of the node",
		"Service default/dual takes port 81/TCP from a process of the node",
	}
	if !slices.Equal(titles, want) {
		t.Errorf("found %q, want %q", titles, want)
	}
}
