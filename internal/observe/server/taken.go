package server

import (
	"cmp"
	"context"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/reconcile"
)

// mostTaken limits the listeners that are compared with Services.
const mostTaken = 4096

// taken returns the ports that a Service has and a process of the node listens on. A Service
// whose endpoint is that process takes nothing from it.
func (s *Server) taken(ctx context.Context) (list []doctor.TakenPort, err error) {
	listeners, own := s.cfg.listeners, s.cfg.addrs
	if listeners == nil {
		listeners, own = kernel.Listeners, kernel.Addrs
	}
	sockets, err := listeners()
	if err != nil {
		return nil, err
	}
	addrs, err := own()
	if err != nil {
		return nil, err
	}
	var names []reconcile.Address
	for _, l := range sockets {
		protocol := model.TCP
		if l.Protocol == unix.IPPROTO_UDP {
			protocol = model.UDP
		}
		for _, a := range addrs {
			if len(names) < mostTaken && receives(l.Addr.Addr(), a) {
				names = append(names, reconcile.Address{Protocol: protocol, AddrPort: netip.AddrPortFrom(a, l.Addr.Port()),
					EndpointOfMax: maxEndpointOf})
			}
		}
	}
	if err := s.cfg.State.Names(ctx, names); err != nil {
		return nil, err
	}
	for _, a := range names {
		if a.Service.Service.Name != "" && !slices.Contains(a.EndpointOf, a.Service) {
			list = append(list, doctor.TakenPort{Service: model.OwnerText(a.Service.Service), Protocol: a.Protocol.String(),
				Port: a.AddrPort.Port()})
		}
	}
	slices.SortFunc(list, func(a, b doctor.TakenPort) int {
		return cmp.Or(cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Service, b.Service))
	})
	list = slices.Compact(list)
	return list[:min(len(list), mostTraffic)], nil
}

// receives reports whether a socket at an address gets packets to one of the node's.
func receives(socket, node netip.Addr) bool {
	if socket = socket.Unmap(); socket.IsUnspecified() {
		return socket.Is6() || node.Is4()
	}
	return socket == node
}
