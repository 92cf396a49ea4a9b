package intent

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

const (
	benchEndpoints = 10
	benchNodes     = 50
	// benchRing is how many Services take turns, equally many at every size:
	// the benchmark compares work, not the processor's caches.
	benchRing = 64
)

func benchAddr(base byte, n int) netip.Addr {
	return netip.AddrFrom4([4]byte{base, byte(n >> 16), byte(n >> 8), byte(n)})
}

// benchSlice returns the slice of Service i, with its first endpoint ready or
// not.
func benchSlice(i int, ready bool) *model.EndpointSlice {
	n := model.Name{Namespace: fmt.Sprintf("ns-%d", i%100), Name: fmt.Sprintf("svc-%d", i)}
	s := &model.EndpointSlice{
		Name: model.Name{Namespace: n.Namespace, Name: n.Name + "-slice"}, Service: n, Family: model.IPv4,
		Ports:     []model.EndpointPort{{Name: "http", Protocol: model.TCP, Port: 8080}},
		Endpoints: make([]model.Endpoint, benchEndpoints),
	}
	for k := range s.Endpoints {
		id := i*benchEndpoints + k
		s.Endpoints[k] = model.Endpoint{
			Addr: benchAddr(10, id), Ready: ready || k > 0, Serving: true, Node: fmt.Sprintf("node-%d", id%benchNodes),
			Pod: model.Name{Namespace: n.Namespace, Name: fmt.Sprintf("%s-%d", n.Name, k)},
		}
	}
	return s
}

func benchWorld(services int) model.Delta {
	d := model.Delta{
		Full:     true,
		Services: make(map[model.Name]*model.Service, services),
		Slices:   make(map[model.Name]*model.EndpointSlice, services),
	}
	for i := range services {
		s := benchSlice(i, true)
		d.Slices[s.Name] = s
		d.Services[s.Service] = &model.Service{
			Name: s.Service, Type: model.ClusterIP, ClusterIPs: []netip.Addr{benchAddr(172, i)},
			Ports: []model.ServicePort{{Name: "http", Protocol: model.TCP, Port: 80}},
		}
	}
	return d
}

// BenchmarkEndpointFlip measures one endpoint that becomes ready or stops being
// so, in clusters of different sizes: the size must not show.
func BenchmarkEndpointFlip(b *testing.B) {
	for _, services := range []int{100, 10_000, 50_000} {
		b.Run(fmt.Sprintf("services=%d", services), func(b *testing.B) {
			tr := New(Config{NodeName: "node-0"})
			if c := tr.Apply(benchWorld(services)); len(c.Upserts) != services {
				b.Fatalf("%d ports, want %d", len(c.Upserts), services)
			}
			var flips [2][benchRing]model.Delta
			for i := range benchRing {
				at := i * (services / benchRing)
				for k := range flips {
					s := benchSlice(at, k == 1)
					flips[k][i] = model.Delta{Slices: map[model.Name]*model.EndpointSlice{s.Name: s}}
				}
			}
			b.ReportAllocs()
			runtime.GC() // what building the world left behind is not the flip's
			n := 0
			for b.Loop() {
				if c := tr.Apply(flips[n/benchRing%2][n%benchRing]); len(c.Upserts) != 1 {
					b.Fatalf("flip %d changes %d ports", n, len(c.Upserts))
				}
				n++
			}
		})
	}
}

// BenchmarkFullDelta measures the first sight of a cluster.
func BenchmarkFullDelta(b *testing.B) {
	for _, services := range []int{100, 10_000} {
		b.Run(fmt.Sprintf("services=%d", services), func(b *testing.B) {
			world := benchWorld(services)
			b.ReportAllocs()
			for b.Loop() {
				New(Config{NodeName: "node-0"}).Apply(world)
			}
		})
	}
}

// BenchmarkServicesThatDoNotFit measures a change of all Services of one namespace that ask for
// 524,288 endpoints each: one of them fits.
func BenchmarkServicesThatDoNotFit(b *testing.B) {
	const ports, endpoints = 512, 1024
	for _, services := range []int{1, 2, 16} {
		b.Run(fmt.Sprintf("services=%d", services), func(b *testing.B) {
			tr := New(Config{NodeName: "node-0", Capacity: Capacity{Endpoints: 2 * ports * endpoints}})
			d := model.Delta{Services: map[model.Name]*model.Service{}, Slices: map[model.Name]*model.EndpointSlice{}}
			for i := range services {
				s, slice := tenant("greedy", fmt.Sprint("s", i), int64(i), ports, 0, model.IPv4)
				for k := range endpoints - 1 {
					slice.Endpoints = append(slice.Endpoints, model.Endpoint{Addr: benchAddr(9, k), Ready: true, Node: there})
				}
				d.Services[s.Name], d.Slices[slice.Name] = s, slice
			}
			tr.Apply(d)
			b.ReportAllocs()
			for b.Loop() {
				for _, e := range tr.services {
					tr.markDirty(e)
				}
				tr.Changes()
			}
		})
	}
}
