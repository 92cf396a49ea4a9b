package proxymode

import (
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf"
	"spillway.dev/spillway/internal/dataplane/nftables"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// With nftables, each address of a Service has slots of its own: a Service of 3,000 addresses and as
// many endpoints has room in each list, and 9 million elements.
func TestAddressesTimesEndpointsFitIntoNftables(t *testing.T) {
	for mode, fallsBack := range map[string]func(*intent.ServicePort) bool{
		"nftables": nil,
		"ebpf":     func(p *intent.ServicePort) bool { return ebpf.NeedsFallback(p.ID.Protocol, p.Helper) != nil },
	} {
		for family, first := range map[model.Family]string{model.IPv4: "10.0.0.1", model.IPv6: "fd00::1"} {
			tracker := intent.New(intent.Config{NodeName: "node0", Capacity: Capacity(Config{Mode: mode}), FallsBack: fallsBack})
			name, addr := model.Name{Namespace: "greedy", Name: "web"}, netip.MustParseAddr(first)
			s := &model.Service{Name: name, ClusterIPs: []netip.Addr{addr}, Ports: []model.ServicePort{{Protocol: model.SCTP, Port: 80}}}
			slice := &model.EndpointSlice{Name: name, Service: name, Family: family, Ports: []model.EndpointPort{{Protocol: model.SCTP, Port: 80}}}
			for range 3000 {
				addr = addr.Next()
				s.ExternalIPs = append(s.ExternalIPs, addr)
				slice.Endpoints = append(slice.Endpoints, model.Endpoint{Addr: addr, Ready: true, Serving: true})
			}
			tracker.Apply(model.Delta{Full: true, Services: map[model.Name]*model.Service{name: s},
				Slices: map[model.Name]*model.EndpointSlice{name: slice}})
			for _, p := range tracker.State().Ports {
				if n := len(p.Frontends) * len(p.Endpoints); n > nftables.Capacity.Slots {
					t.Errorf("%s, %s: a port has %d slots", mode, family, n)
				}
			}
		}
	}
}
