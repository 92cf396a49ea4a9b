package change

import (
	"fmt"
	"net/netip"

	"spillway.dev/spillway/internal/facts/model"
)

// Endpoints is how many endpoints each Service of the world has.
const Endpoints = 10

// The probe is the one Service whose endpoint is real. All others only fill
// the tables.
const (
	ProbePort     = 80
	ProbeNodePort = 30080
)

var probe = model.Name{Namespace: "probe", Name: "probe"}

// world returns so many Services of ten endpoints each, and the probe.
func world(services int, node string, pod netip.Addr) model.Delta {
	d := model.Delta{
		Full:     true,
		Services: make(map[model.Name]*model.Service, services+1),
		Slices:   make(map[model.Name]*model.EndpointSlice, services+1),
	}
	for i := range services {
		s := slice(i, true)
		d.Slices[s.Name] = s
		d.Services[s.Service] = &model.Service{
			Name: s.Service, Type: model.ClusterIP, ClusterIPs: []netip.Addr{address(172, 0x100000+i)},
			Ports: []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80}},
		}
	}
	d.Services[probe] = &model.Service{
		Name: probe, Type: model.NodePort, ClusterIPs: []netip.Addr{address(172, 0x1fff01)},
		Ports: []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80, NodePort: ProbeNodePort}},
	}
	d.Slices[probe] = &model.EndpointSlice{
		Name: probe, Service: probe, Family: model.IPv4,
		Ports: []model.EndpointPort{{Name: "http", Protocol: model.TCP, Port: ProbePort}},
		Endpoints: []model.Endpoint{{Addr: pod, Ready: true, Serving: true, Node: node,
			Pod: model.Name{Namespace: "probe", Name: "probe-0"}}},
	}
	return d
}

// slice is that of Service i, with its first endpoint ready or not.
func slice(i int, ready bool) *model.EndpointSlice {
	name := model.Name{Namespace: fmt.Sprintf("team-%d", i%100), Name: fmt.Sprintf("service-%d", i)}
	s := &model.EndpointSlice{
		Name: model.Name{Namespace: name.Namespace, Name: name.Name + "-x7k2p"}, Service: name, Family: model.IPv4,
		Ports:     []model.EndpointPort{{Name: "http", Protocol: model.TCP, Port: 8080}},
		Endpoints: make([]model.Endpoint, Endpoints),
	}
	for k := range s.Endpoints {
		id := i*Endpoints + k
		s.Endpoints[k] = model.Endpoint{
			Addr: address(10, id), Ready: ready || k > 0, Serving: true,
			Node: fmt.Sprintf("node-%d", id%100), Pod: model.Name{Namespace: name.Namespace, Name: fmt.Sprintf("%s-%d", name.Name, k)},
		}
	}
	return s
}

// address counts upwards in a /8. The first million of 10.0.0.0/8 excludes the lab's pods
// (10.244.0.0/16). The first 900,000 of 172.16.0.0/12 exclude its machines
// (172.30.0.0/24).
func address(net byte, n int) netip.Addr {
	return netip.AddrFrom4([4]byte{net, byte(n >> 16), byte(n >> 8), byte(n)})
}
