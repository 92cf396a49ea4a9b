package server

import (
	"fmt"
	"net/netip"
	"testing"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/reconcile"
	"spillway.dev/spillway/test/await"
)

// The largest Services that an author can write cost an answer of the API some seconds at most: with
// a look at all ports, slices or endpoints for each port or endpoint, hours.
func TestALargeServiceIsConvertedInOnePass(t *testing.T) {
	const ports, slices, endpoints = 60_000, 70, 400_000
	many := reconcile.Service{Inspected: intent.Inspected{Spec: &model.Service{}}}
	var named []model.EndpointPort
	for i := range ports {
		port := model.EndpointPort{Name: fmt.Sprint("p", i), Protocol: model.TCP, Port: uint16(i + 1)}
		named = append(named, port)
		many.Spec.Ports = append(many.Spec.Ports, model.ServicePort{Name: port.Name, Protocol: model.TCP, Port: port.Port})
		many.Ports = append(many.Ports, &intent.ServicePort{ID: intent.PortID{Port: port.Name, Number: port.Port,
			Protocol: model.TCP, Family: model.IPv6}})
	}
	for range slices {
		many.Slices = append(many.Slices, &model.EndpointSlice{Family: model.IPv6, Ports: named})
	}
	one := reconcile.Service{Inspected: intent.Inspected{Spec: &model.Service{Ports: many.Spec.Ports[:1]},
		Ports: []*intent.ServicePort{{ID: many.Ports[0].ID}}}}
	slice := &model.EndpointSlice{Family: model.IPv6, Ports: named[:1]}
	for i := range endpoints {
		addr := netip.AddrFrom16([16]byte{0: 0xfd, 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)})
		slice.Endpoints = append(slice.Endpoints, model.Endpoint{Addr: addr})
		one.Ports[0].Endpoints = append(one.Ports[0].Endpoints, intent.Endpoint{Addr: netip.AddrPortFrom(addr, 1), Ejected: i == endpoints-1})
	}
	one.Slices = []*model.EndpointSlice{slice}
	for _, s := range []*reconcile.Service{&many, &one} {
		s.Sync = make([]reconcile.PortSync, len(s.Ports))
		done := make(chan []bool, 1)
		go func() {
			var ejected []bool
			for _, p := range convertService(*s, nil, true).Ports {
				for _, e := range p.Endpoints {
					ejected = append(ejected, e.Ejected)
				}
			}
			done <- ejected
		}()
		var ejected []bool
		await.True(t, "the Service is converted", func() bool {
			select {
			case ejected = <-done:
				return true
			default:
				return false
			}
		})
		if s == &one && (len(ejected) != endpoints || ejected[0] || !ejected[endpoints-1]) {
			t.Errorf("%d endpoints, or another one is ejected", len(ejected))
		}
	}
}
