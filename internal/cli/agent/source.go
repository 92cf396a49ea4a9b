package agent

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/facts/kube"
	"spillway.dev/spillway/internal/facts/manifest"
	"spillway.dev/spillway/internal/facts/model"
)

// source is the origin of Services.
type source interface {
	Run(context.Context, func(model.Delta, []model.Problem)) error
}

// input is a source and its related parts.
type input struct {
	source
	name string // for the log
	// apiServer is the API server's address; invalid if it is a name, and for files.
	apiServer netip.AddrPort
	tell      func([]model.Problem)
	event     func(note string) // about the node; nil: not reported
	// refused receives a text for each address that a pod announces and does not get. nil:
	// only the log has it.
	refused func(note string)
	// finding receives what is wrong with a Service from now on; nil: not reported.
	finding func(service model.Name, id, title string)
	// policies receives the policies that do not apply on this node; nil: not reported.
	policies func([]model.PolicyRefusal, error)
	parts    []func(context.Context) error
	metrics  []prometheus.Collector
}

// findingBegan reports a finding about a Service. What may be intended, which is info, is left out.
func (in *input) findingBegan(f doctor.Finding) {
	if name, is := f.Object.Service(); is && f.Severity != doctor.Info && in.finding != nil {
		in.finding(name, f.ID, f.Title)
	}
}

// openSource opens the source that the command line selects.
func openSource(c Config, log *slog.Logger) (*input, error) {
	if c.Manifests != "" {
		s, err := manifest.New(manifest.Config{Dir: c.Manifests, Logger: log})
		if err != nil {
			return nil, err
		}
		return &input{source: s, name: c.Manifests}, nil
	}
	kube.LogClients(log)
	monitor := kube.NewServerMonitor()
	access := kube.Access{
		Monitor:    monitor,
		Kubeconfig: c.Kubeconfig, Master: c.Master, ContentType: c.client.ContentType,
		QPS: c.client.QPS, Burst: c.client.Burst, UserAgent: cli.UserAgent(),
	}
	client, server, err := kube.Connect(access)
	if err != nil {
		return nil, fmt.Errorf("run agent: %w", err)
	}
	policies, err := kube.ConnectDynamic(access)
	if err != nil {
		return nil, fmt.Errorf("run agent: %w", err)
	}
	s, err := kube.New(kube.Config{
		Client: client, Server: server, NodeName: c.NodeName, ProxyName: c.ProxyName,
		NetworkPolicies: c.EBPF.Bypass == "auto", NodePods: c.HostPorts || c.ProxyMode == "ebpf" && c.EBPF.SocketHooks == ebpf.HooksAll,
		DoNotTrack: policies, Monitor: monitor, Access: &access, Logger: log,
		Nodes: kube.NodesConfig{OwnOnly: c.ProxyMode != "ebpf", WithExternalIPs: c.AllowExternalIPs},
	})
	if err != nil {
		return nil, fmt.Errorf("run agent: %w", err)
	}
	events := kube.NewEvents(client, c.NodeName, s.UID, log)
	status := kube.NewPolicyStatus(s, events)
	return &input{
		source: s, name: server, apiServer: addressOf(server), tell: events.Emit, event: events.EmitNode,
		refused: events.EmitRefused, finding: events.EmitFinding, policies: status.Update,
		parts:   []func(context.Context) error{events.Run, status.Run},
		metrics: slices.Concat(monitor.Collectors(), s.Collectors(), events.Collectors(), kube.RequestCollectors()),
	}, nil
}

// addressOf returns the address and port of a server, and an invalid one if it has a name.
func addressOf(server string) netip.AddrPort {
	if a, err := netip.ParseAddrPort(server); err == nil {
		return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
	}
	if a, err := netip.ParseAddr(strings.Trim(server, "[]")); err == nil {
		return netip.AddrPortFrom(a.Unmap(), 443) // of https
	}
	return netip.AddrPort{}
}
