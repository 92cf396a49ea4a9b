package scale

import (
	"fmt"
	"math/rand/v2"
	"net/netip"

	"spillway.dev/spillway/internal/facts/model"
)

// deleted is the version of a Service that was deleted.
const deleted = 0

// world is a cluster of Services of two endpoints each. The endpoints' port is
// the version of their Service, so that no two states of a Service look alike.
type world struct {
	random  *rand.Rand
	version [services]uint16
	last    [services]uint16
}

func newWorld() *world {
	w := &world{random: rand.New(rand.NewPCG(10, 4))}
	for i := range services {
		w.version[i], w.last[i] = 1, 1
	}
	return w
}

func name(i int) model.Name {
	return model.Name{Namespace: "scale", Name: fmt.Sprintf("svc-%05d", i)}
}

func address(first byte, n int) netip.Addr {
	return netip.AddrFrom4([4]byte{first, byte(n >> 16), byte(n >> 8), byte(n)})
}

func (w *world) endpoints(i int) [2]netip.AddrPort {
	return [2]netip.AddrPort{
		netip.AddrPortFrom(address(10, 2*i+2), w.version[i]), netip.AddrPortFrom(address(10, 2*i+3), w.version[i]),
	}
}

// put adds the state of a Service to a delta.
func (w *world) put(d *model.Delta, i int) {
	n := name(i)
	if w.version[i] == deleted {
		d.Services[n], d.Slices[n] = nil, nil
		return
	}
	d.Services[n] = &model.Service{
		Name: n, Type: model.ClusterIP, ClusterIPs: []netip.Addr{address(172, i+1)},
		Ports: []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80}},
	}
	slice := &model.EndpointSlice{
		Name: n, Service: n, Family: model.IPv4,
		Ports: []model.EndpointPort{{Name: "http", Protocol: model.TCP, Port: w.version[i]}},
	}
	for _, e := range w.endpoints(i) {
		slice.Endpoints = append(slice.Endpoints, model.Endpoint{
			Addr: e.Addr(), Ready: true, Serving: true, Node: "node-1",
		})
	}
	d.Slices[n] = slice
}

func newDelta() model.Delta {
	return model.Delta{Services: map[model.Name]*model.Service{}, Slices: map[model.Name]*model.EndpointSlice{}}
}

// all returns the Full Delta of the cluster.
func (w *world) all() model.Delta {
	d := newDelta()
	d.Full = true
	for i := range services {
		w.put(&d, i)
	}
	return d
}

// change gives a Service new endpoints, or deletes it.
func (w *world) change(i int, remove bool) model.Delta {
	if w.last[i] == 65535 {
		w.last[i] = 0 // wrap; the increment skips 0, which is deleted
	}
	w.last[i]++
	w.version[i] = w.last[i]
	if remove {
		w.version[i] = deleted
	}
	d := newDelta()
	w.put(&d, i)
	return d
}

// count returns the number of Services.
func (w *world) count() (n int) {
	for _, v := range w.version {
		if v != deleted {
			n++
		}
	}
	return n
}
