package reconcile

import (
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"spillway.dev/spillway/internal/decisions"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

func TestSharesGrowWithTimeAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newFakeBackend("ebpf")
		g := start(t, func(c *Config) {
			c.Tracker = decisions.New(intent.Config{NodeName: "n1"}, donottrack.Config{NodeName: "n1"})
		}, b)
		slice := func(endpoints ...string) model.Delta {
			s := &model.EndpointSlice{Name: svcName("web-1"), Service: svcName("web"), Family: model.IPv4,
				Ports: []model.EndpointPort{{Protocol: model.TCP, Port: 8080}}}
			for _, e := range endpoints {
				s.Endpoints = append(s.Endpoints, model.Endpoint{Addr: netip.MustParseAddr(e), Ready: true, Serving: true})
			}
			return model.Delta{Slices: map[model.Name]*model.EndpointSlice{s.Name: s}}
		}
		all := slice("10.1.0.1")
		all.Full = true
		all.Services = map[model.Name]*model.Service{svcName("web"): {
			Name: svcName("web"), ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
			Ports:       []model.ServicePort{{Protocol: model.TCP, Port: 80}},
			Annotations: map[string]string{intent.SlowStartAnnotation: "9s"},
		}}
		g.Deliver(all, nil)
		g.after(10 * time.Second)
		before := len(b.log())
		g.Deliver(slice("10.1.0.1", "10.1.0.2"), nil)
		g.after(20 * time.Second)
		var got []string
		for _, c := range b.log()[before:] {
			for _, p := range c.ports {
				got = append(got, fmt.Sprint(p.Weights))
			}
		}
		want := "[[10 1] [10 2] [10 3] [10 4] [10 5] [10 6] [10 7] [10 8] [10 9] [10 10]]"
		if fmt.Sprint(got) != want {
			t.Errorf("the backend got weights %v, want %s", got, want)
		}
	})
}
