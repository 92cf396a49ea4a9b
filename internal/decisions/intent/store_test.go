package intent

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// The node that the tests decide for, and another one.
const (
	here  = "node-a"
	there = "node-b"
)

func addr(s string) netip.Addr     { return netip.MustParseAddr(s) }
func prefix(s string) netip.Prefix { return netip.MustParsePrefix(s) }
func name(s string) model.Name     { return model.Name{Namespace: "ns", Name: s} }

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, addr(s))
	}
	return out
}

func prefixes(list ...string) []netip.Prefix {
	out := []netip.Prefix{}
	for _, s := range list {
		out = append(out, prefix(s))
	}
	return out
}

// web returns ns/web of one unnamed port 80/TCP on 10.96.0.1, changed by
// the options.
func web(options ...func(*model.Service)) *model.Service {
	s := &model.Service{
		Name:       name("web"),
		Type:       model.ClusterIP,
		Created:    time.Unix(1000, 0),
		ClusterIPs: addrs("10.96.0.1"),
		Ports:      []model.ServicePort{{Protocol: model.TCP, Port: 80}},
	}
	for _, o := range options {
		o(s)
	}
	return s
}

func called(n string) func(*model.Service) {
	return func(s *model.Service) { s.Name = name(n) }
}

func born(at int64) func(*model.Service) {
	return func(s *model.Service) { s.Created = time.Unix(at, 0) }
}

// undated is as most manifests are written.
func undated(s *model.Service) { s.Created = time.Time{} }

func clusterIPs(list ...string) func(*model.Service) {
	return func(s *model.Service) { s.ClusterIPs = addrs(list...) }
}

func externalIPs(list ...string) func(*model.Service) {
	return func(s *model.Service) { s.ExternalIPs = addrs(list...) }
}

func nodePort(port uint16) func(*model.Service) {
	return func(s *model.Service) { s.Type = model.NodePort; s.Ports[0].NodePort = port }
}

func loadBalancer(list ...string) func(*model.Service) {
	return func(s *model.Service) { s.Type = model.LoadBalancer; s.LoadBalancerIPs = addrs(list...) }
}

func from(list ...string) func(*model.Service) {
	return func(s *model.Service) { s.SourceRanges = prefixes(list...) }
}

func healthCheck(port uint16) func(*model.Service) {
	return func(s *model.Service) { s.HealthCheckNodePort = port }
}

func externalLocal(s *model.Service) { s.ExternalLocal = true }
func internalLocal(s *model.Service) { s.InternalLocal = true }

func ports(list ...model.ServicePort) func(*model.Service) {
	return func(s *model.Service) { s.Ports = list }
}

// sliceOf returns the slice ns/<n> of ns/web with an unnamed port 8080/TCP.
func sliceOf(n string, eps ...model.Endpoint) *model.EndpointSlice {
	s := &model.EndpointSlice{
		Name: name(n), Service: name("web"), Family: model.IPv4, Endpoints: eps,
		Ports: []model.EndpointPort{{Protocol: model.TCP, Port: 8080}},
	}
	if len(eps) > 0 && eps[0].Addr.IsValid() {
		s.Family = model.FamilyOf(eps[0].Addr)
	}
	return s
}

func withPorts(s *model.EndpointSlice, list ...model.EndpointPort) *model.EndpointSlice {
	s.Ports = list
	return s
}

func ofService(s *model.EndpointSlice, n string) *model.EndpointSlice {
	s.Service = name(n)
	return s
}

// at returns a ready endpoint.
func at(a, node string, options ...func(*model.Endpoint)) model.Endpoint {
	ep := model.Endpoint{Addr: netip.MustParseAddr(a), Node: node, Ready: true, Serving: true}
	for _, o := range options {
		o(&ep)
	}
	return ep
}

func notReady(e *model.Endpoint)     { e.Ready, e.Serving = false, false }
func draining(e *model.Endpoint)     { e.Ready, e.Serving, e.Terminating = false, true, true }
func gone(e *model.Endpoint)         { e.Ready, e.Serving, e.Terminating = false, false, true }
func publishedEnd(e *model.Endpoint) { e.Ready, e.Serving, e.Terminating = true, true, true }

func pod(n string) func(*model.Endpoint) {
	return func(e *model.Endpoint) { e.Pod = name(n) }
}

func forZones(list ...string) func(*model.Endpoint) {
	return func(e *model.Endpoint) { e.Hints = &model.Hints{Zones: list, Nodes: hintsOf(e).Nodes} }
}

func forNodes(list ...string) func(*model.Endpoint) {
	return func(e *model.Endpoint) { e.Hints = &model.Hints{Zones: hintsOf(e).Zones, Nodes: list} }
}

func podObject(n, node string, labels map[string]string, ips ...string) *model.Pod {
	return &model.Pod{Name: name(n), Node: node, Labels: labels, IPs: addrs(ips...)}
}

func networkPolicy(n string, labels map[string]string) *model.NetworkPolicy {
	return &model.NetworkPolicy{Name: name(n), Ingress: true, Selector: model.Selector{MatchLabels: labels}}
}

func inZone(zone string) *model.Node {
	return &model.Node{Name: here, Labels: map[string]string{zoneLabel: zone}}
}

// delta makes a Delta of objects.
func delta(objects ...any) model.Delta {
	d := model.Delta{
		Services:        map[model.Name]*model.Service{},
		Slices:          map[model.Name]*model.EndpointSlice{},
		Nodes:           map[string]*model.Node{},
		Pods:            map[model.Name]*model.Pod{},
		NetworkPolicies: map[model.Name]*model.NetworkPolicy{},
	}
	for _, o := range objects {
		switch o := o.(type) {
		case *model.Service:
			d.Services[o.Name] = o
		case *model.EndpointSlice:
			d.Slices[o.Name] = o
		case *model.Node:
			d.Nodes[o.Name] = o
		case *model.Pod:
			d.Pods[o.Name] = o
		case *model.NetworkPolicy:
			d.NetworkPolicies[o.Name] = o
		default:
			panic(fmt.Sprintf("delta of a %T", o))
		}
	}
	return d
}

func whole(d model.Delta) model.Delta {
	d.Full = true
	return d
}

var (
	routeNames = map[Route]string{Reject: "reject", Drop: "drop", ToCluster: "cluster", ToLocal: "local"}
	kindNames  = map[FrontendKind]string{ClusterIP: "ClusterIP", NodePort: "NodePort", ExternalIP: "ExternalIP",
		LoadBalancerIP: "LoadBalancerIP"}
)

// lines describes a Service port, a line an item:
//
//	ns/web:80/TCP/IPv4 affinity 10s
//	ClusterIP 10.96.0.1:80 outside cluster inside cluster
//	-> 10.1.0.1:8080 cluster local here host policed
func lines(sp *ServicePort) []string {
	head := sp.ID.String()
	if sp.Affinity != 0 {
		head += " affinity " + sp.Affinity.String()
	}
	if sp.Weights != nil {
		head += fmt.Sprintf(" weights %v", sp.Weights)
	}
	out := []string{head}
	for _, f := range sp.Frontends {
		where := fmt.Sprintf("*:%d", f.Port)
		if f.Addr.IsValid() {
			where = netip.AddrPortFrom(f.Addr, f.Port).String()
		}
		line := fmt.Sprintf("%s %s outside %s inside %s", kindNames[f.Kind], where, routeNames[f.ExternalRoute], routeNames[f.InternalRoute])
		if f.SourceRanges != nil {
			line += fmt.Sprintf(" from %v", f.SourceRanges)
		}
		out = append(out, line)
	}
	for _, e := range sp.Endpoints {
		line := "-> " + e.Addr.String()
		for _, flag := range []struct {
			set  bool
			name string
		}{{e.ClusterPolicy, "cluster"}, {e.LocalPolicy, "local"}, {e.OnThisNode, "here"}, {e.HostNetwork, "host"},
			{e.MustTraverseNetfilter, "policed"}} {
			if flag.set {
				line += " " + flag.name
			}
		}
		out = append(out, line)
	}
	return out
}

func describe(ports []*ServicePort) string {
	var out []string
	for _, sp := range ports {
		out = append(out, lines(sp)...)
	}
	return strings.Join(out, "\n")
}

// text strips the indentation of a wanted description.
func text(s string) string {
	var out []string
	for line := range strings.Lines(s) {
		if line = strings.TrimSpace(line); line != "" {
			out = append(out, line)
		}
	}
	return strings.Join(out, "\n")
}

func same(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s:\n%s\nwant:\n%s", what, got, want)
	}
}

// newTracker returns a Tracker of node-a that has been told this.
func newTracker(objects ...any) *Tracker {
	t := New(Config{NodeName: here})
	t.Apply(whole(delta(objects...)))
	return t
}

// decision is one row of a table: in a world of these objects, these Service
// ports are wanted.
type decision struct {
	name    string
	objects []any
	want    string
}

func runDecisions(t *testing.T, rows []decision) {
	t.Helper()
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			tr := newTracker(row.objects...)
			same(t, "state", describe(tr.State().Ports), text(row.want))
			// The order in which objects appear must not matter.
			backwards := New(Config{NodeName: here})
			for _, o := range slices.Backward(row.objects) {
				backwards.Apply(delta(o))
			}
			same(t, "state of objects one by one, last first", describe(backwards.State().Ports), text(row.want))
		})
	}
}
