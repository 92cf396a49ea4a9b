package top

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/diagnosis/top"
)

const (
	mostFlows     = 20_000 // in a response, as many as an agent sends
	flowsTimeout  = 5 * time.Second
	statusTimeout = time.Second
)

// agent is a node's agent for top.Collector.
type agent struct {
	dialer nodeclient.Dialer
	client nodev1alpha1connect.NodeServiceClient
	names  *nodeclient.Names
}

func newAgent(d nodeclient.Dialer) *agent {
	return &agent{dialer: d, client: nodeclient.New(d), names: nodeclient.NewNames(d)}
}

// Flows implements top.Agent. An agent that does not name addresses is not asked for flows:
// Owners returns the one error of both.
func (a *agent) Flows(ctx context.Context, egress bool) (flows []top.Flow, more bool, err error) {
	if a.names.Probe(ctx) != nil {
		return nil, false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, flowsTimeout)
	defer cancel()
	resp, err := a.client.ListFlows(ctx, &nodev1alpha1.ListFlowsRequest{Limit: mostFlows, Egress: egress})
	if err != nil {
		return nil, false, nodeclient.Error("list Spillway's flows", a.dialer, err)
	}
	for _, f := range resp.Flows {
		flows = append(flows, top.Flow{
			Protocol: nodeclient.ConntrackProtocol(f.Protocol), Client: addrPort(f.Client), Service: addrPort(f.ServiceAddress),
			Endpoint: addrPort(f.Endpoint), Egress: f.Egress, Pod: f.Client.GetPod(),
		})
	}
	return flows, resp.More, nil
}

// WithoutEgress implements top.Agent.
func (a *agent) WithoutEgress(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	st, err := a.client.Status(ctx, &nodev1alpha1.StatusRequest{})
	switch {
	case err != nil:
		return nodeclient.Error("list connections of egress, which needs the agent", a.dialer, err)
	case st.Egress == nil:
		return errors.New("list connections of egress: egress is off: give the agent --egress auto")
	case !slices.ContainsFunc(st.Dataplanes, func(d *nodev1alpha1.Dataplane) bool { return d.Name == "ebpf" }):
		return fmt.Errorf("list connections of egress: --proxy-mode %s has them in conntrack: use 'conntrack -L --src-nat'", st.ProxyMode)
	case len(st.Egress.Sources) == 0:
		return errors.New("list connections of egress: netfilter has them all: see Egress in 'spillway status'")
	}
	return a.names.Probe(ctx) // Flows asks for none after its error
}

// addrPort is invalid for an unknown address.
func addrPort(p *nodev1alpha1.Peer) netip.AddrPort {
	addr, err := netip.ParseAddr(p.GetAddress())
	if err != nil {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(addr, uint16(p.Port))
}

// Owners implements top.Agent.
func (a *agent) Owners(ctx context.Context, addrs []top.Address) ([]top.Owner, error) {
	requested := make([]nodeclient.Address, len(addrs))
	for i, addr := range addrs {
		requested[i] = nodeclient.Address(addr)
	}
	list, err := a.names.Of(ctx, requested)
	owners := make([]top.Owner, len(list))
	for i, o := range list {
		owners[i] = top.Owner{Service: o.Service, EndpointOf: o.EndpointOf, Pod: o.Pod}
	}
	return owners, err
}
