package trace

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/pflag"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/api/node/v1alpha1/nodev1alpha1connect"
	"spillway.dev/spillway/internal/cli"
	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/diagnosis/drops"
	"spillway.dev/spillway/internal/diagnosis/trace"
	"spillway.dev/spillway/internal/facts/kube"
	"spillway.dev/spillway/internal/facts/manifest"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
)

// source is where names of objects are looked up.
type source struct{ manifests, kubeconfig, master string }

func (s *source) addFlags(f *pflag.FlagSet) {
	f.StringVar(&s.manifests, "manifests", "", "Directory of Kubernetes YAML, to look up names, instead of the agent.")
	f.StringVar(&s.master, "master", "", "Address of the API server, to look up names, instead of the kubeconfig's.")
}

// given reports whether a flag names a source.
func (s *source) given() bool { return s.manifests != "" || s.kubeconfig != "" || s.master != "" }

// resolver looks up names. It reads the objects at most once.
type resolver struct {
	ctx     context.Context
	source  *source
	agent   nodeclient.Dialer // is asked without a source
	objects *model.Delta
}

func (r *resolver) load() (*model.Delta, error) {
	if r.objects != nil {
		return r.objects, nil
	}
	d, err := r.read()
	if err != nil {
		return nil, err
	}
	r.objects = &d
	return r.objects, nil
}

func (r *resolver) read() (model.Delta, error) {
	if r.source.manifests != "" {
		d, _, err := manifest.Load(r.source.manifests) // problems are those of other objects, or the name is missing
		return d, err
	}
	access := kube.Access{Kubeconfig: r.source.kubeconfig, Master: r.source.master, UserAgent: cli.UserAgent()}
	client, _, err := kube.Connect(access)
	if err != nil {
		return model.Delta{}, fmt.Errorf("look up names: %w: give --kubeconfig or --manifests, or addresses instead of names", err)
	}
	policies, err := kube.ConnectDynamic(access)
	if err != nil {
		return model.Delta{}, err
	}
	d, _, err := kube.Snapshot(r.ctx, client, policies)
	return d, err
}

// nameOf splits NAMESPACE/NAME.
func nameOf(text string) (n model.Name, ok bool) {
	namespace, name, ok := strings.Cut(text, "/")
	return model.Name{Namespace: namespace, Name: name}, ok && namespace != "" && name != "" && !strings.Contains(name, "/")
}

// client returns the addresses of --from.
func (r *resolver) client(text string) ([]netip.Addr, error) {
	if a, err := netip.ParseAddr(text); err == nil && a.Zone() == "" {
		return []netip.Addr{a.Unmap()}, nil
	}
	name, ok := nameOf(text)
	if !ok {
		return nil, cli.UsageErrorf("--from %q: use an address, or a pod as NAMESPACE/NAME", text)
	}
	if !r.source.given() {
		list, _ := conntrack.Namespaces() // a namespace that cannot be read counts as missing
		if pod, err := drops.FindPod(name.Name, list); err == nil && len(pod.Addresses) > 0 {
			return pod.Addresses, nil
		}
	}
	addrs, err := r.podAddrs(name)
	if err == nil && len(addrs) == 0 {
		return nil, cli.UsageErrorf("--from %s: no such pod, or it has no address yet", text)
	}
	return addrs, err
}

// podAddrs returns the addresses of a pod; none: it is not known.
func (r *resolver) podAddrs(name model.Name) (addrs []netip.Addr, err error) {
	d, err := r.objectsOr(func(ctx context.Context, agent nodev1alpha1connect.NodeServiceClient) error {
		resp, err := agent.Pods(ctx, &nodev1alpha1.PodsRequest{Namespace: name.Namespace, Name: name.Name})
		for _, p := range resp.GetPods() {
			for _, text := range p.Addresses {
				if a, err := netip.ParseAddr(text); err == nil {
					addrs = append(addrs, a)
				}
			}
		}
		return err
	})
	if d != nil && d.Pods[name] != nil {
		return d.Pods[name].IPs, nil
	}
	return addrs, err
}

// service returns a Service with its cluster IPs and ports; nil: it is not known.
func (r *resolver) service(name model.Name) (s *model.Service, err error) {
	d, err := r.objectsOr(func(ctx context.Context, agent nodev1alpha1connect.NodeServiceClient) error {
		resp, err := agent.GetService(ctx, &nodev1alpha1.GetServiceRequest{Namespace: name.Namespace, Name: name.Name})
		if connect.CodeOf(err) == connect.CodeNotFound {
			return nil
		}
		if err == nil {
			s = serviceOf(name, resp.Service)
		}
		return err
	})
	if d != nil {
		return d.Services[name], nil
	}
	return s, err
}

// objectsOr returns the objects of the source that a flag names. Without one it asks the agent, and
// where no agent is it returns those of the API server, if this is a Pod of a cluster.
func (r *resolver) objectsOr(ask func(context.Context, nodev1alpha1connect.NodeServiceClient) error) (*model.Delta, error) {
	if r.source.given() {
		return r.load()
	}
	ctx, cancel := context.WithTimeout(r.ctx, nodeclient.Timeout)
	defer cancel()
	err := ask(ctx, nodeclient.New(r.agent))
	if err == nil {
		return nil, nil
	}
	if nodeclient.Absent(err) {
		if d, err := r.load(); err == nil {
			return d, nil
		}
	}
	return nil, fmt.Errorf("%w: or give --kubeconfig or --manifests, or addresses instead of names",
		nodeclient.Error("look up names", r.agent, err))
}

// serviceOf converts what an agent serves. Of each port and family it has an entry.
func serviceOf(name model.Name, from *nodev1alpha1.Service) *model.Service {
	s := &model.Service{Name: name}
	for _, p := range from.GetPorts() {
		proto, known := protocols[p.Protocol]
		if !known {
			continue
		}
		for _, f := range p.Frontends {
			a, err := netip.ParseAddr(f.Address)
			if f.Kind == "clusterIP" && err == nil && !slices.Contains(s.ClusterIPs, a) {
				s.ClusterIPs = append(s.ClusterIPs, a)
			}
		}
		port := model.ServicePort{Name: p.Name, Protocol: proto, Port: uint16(p.Port)}
		if !slices.ContainsFunc(s.Ports, func(q model.ServicePort) bool { return q.Port == port.Port && q.Protocol == proto }) {
			s.Ports = append(s.Ports, port)
		}
	}
	return s
}

// protocols are those that trace knows.
var protocols = map[nodev1alpha1.Protocol]model.Protocol{
	nodev1alpha1.Protocol_PROTOCOL_TCP: model.TCP, nodev1alpha1.Protocol_PROTOCOL_UDP: model.UDP,
}

// server returns the address and port of --to.
func (r *resolver) server(text string, proto model.Protocol, clients []netip.Addr) (peer trace.Peer, port uint16, err error) {
	if at, err := netip.ParseAddrPort(text); err == nil && at.Port() != 0 && at.Addr().Zone() == "" {
		return trace.Peer{Addr: at.Addr().Unmap()}, at.Port(), nil
	}
	service, number, hasPort := strings.Cut(text, ":")
	name, ok := nameOf(service)
	if !ok {
		return peer, 0, cli.UsageErrorf("--to %q: use ADDRESS:PORT, or a Service as NAMESPACE/NAME[:PORT]", text)
	}
	s, err := r.service(name)
	if err != nil {
		return peer, 0, err
	}
	if s == nil || len(s.ClusterIPs) == 0 {
		return peer, 0, cli.UsageErrorf("--to %s: no such Service, or it has no cluster IP", text)
	}
	if port, err = portOf(s, number, hasPort, proto); err != nil {
		return peer, 0, cli.UsageErrorf("--to %s: %v", text, err)
	}
	for _, a := range s.ClusterIPs {
		for _, c := range clients {
			if a.Is4() == c.Is4() {
				return trace.Peer{Name: service, Addr: a}, port, nil
			}
		}
	}
	return trace.Peer{Name: service, Addr: s.ClusterIPs[0]}, port, nil
}

// portOf finds a port of a Service by its number or name, or the only one of the protocol.
func portOf(s *model.Service, text string, given bool, proto model.Protocol) (uint16, error) {
	var all []string
	var only uint16
	number, _ := strconv.ParseUint(text, 10, 16)
	for _, p := range s.Ports {
		if p.Protocol != proto {
			continue
		}
		if given && (uint64(p.Port) == number || text != "" && p.Name == text) {
			return p.Port, nil
		}
		all, only = append(all, strconv.Itoa(int(p.Port))), p.Port
	}
	switch {
	case len(all) == 0:
		return 0, fmt.Errorf("the Service has no port of %s: give --protocol", proto)
	case given:
		return 0, fmt.Errorf("the Service has no such port: use one of %s", strings.Join(all, ", "))
	case len(all) > 1:
		return 0, fmt.Errorf("the Service has several ports: add one of %s", strings.Join(all, ", "))
	}
	return only, nil
}
