package reconcile

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/decisions/outlier"
	"spillway.dev/spillway/internal/decisions/policy"
	"spillway.dev/spillway/internal/facts/model"
)

// handshakeBackend also counts handshakes.
type handshakeBackend struct {
	*fakeBackend
	outcomes []outlier.Outcome
	looks    int
	err      error
}

func (b *handshakeBackend) Outcomes() ([]outlier.Outcome, error) {
	b.looks++
	return slices.Clone(b.outcomes), b.err
}

func TestEndpointsThatRefuseAreEjected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &handshakeBackend{fakeBackend: newFakeBackend("ebpf")}
		g := start(t, func(c *Config) {
			c.Backends = []dataplane.Backend{b}
			c.Tracker = decisions.New(intent.Config{NodeName: "n1", OutlierEjection: true}, policy.Config{NodeName: "n1"})
		})
		web := &model.Service{
			Name: svcName("web"), ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")}, Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}},
			Annotations: map[string]string{intent.OutlierEjectionAnnotation: "true"},
		}
		slice := &model.EndpointSlice{Name: svcName("web-1"), Service: svcName("web"), Family: model.IPv4, Ports: []model.EndpointPort{{Protocol: model.TCP, Port: 8080}}}
		for _, a := range []string{"10.1.0.1", "10.1.0.2"} {
			slice.Endpoints = append(slice.Endpoints, model.Endpoint{Addr: netip.MustParseAddr(a), Ready: true, Serving: true})
		}
		g.after(5 * time.Second)
		if b.looks > 0 {
			t.Errorf("%d looks without a Service", b.looks)
		}
		g.Deliver(model.Delta{Full: true, Services: map[model.Name]*model.Service{web.Name: web}, Slices: map[model.Name]*model.EndpointSlice{slice.Name: slice}}, nil)
		g.after(5 * time.Second)
		// written returns which endpoints the last write has ejected.
		written := func() string {
			for _, c := range slices.Backward(b.log()) {
				for _, p := range c.ports {
					return fmt.Sprint(p.Endpoints[0].Ejected, p.Endpoints[1].Ejected)
				}
			}
			return "nothing"
		}
		want := func(when, ejected string) {
			t.Helper()
			if got := written(); got != ejected {
				t.Errorf("%s: ejected %s, want %s", when, got, ejected)
			}
		}
		id := intent.PortID{Service: web.Name, Number: 80, Protocol: model.TCP, Family: model.IPv4}
		b.outcomes = []outlier.Outcome{{ID: 1, Port: id, Endpoint: netip.MustParseAddrPort("10.1.0.2:8080"), Failed: 5, Refused: 5, Since: time.Now()}}
		g.after(handshakeInterval)
		want("after five refusals", "false true")
		b.err = errors.New("the map is gone")
		g.after(15 * time.Second)
		want("while nothing can be read", "false true")
		b.err, b.outcomes[0] = nil, outlier.Outcome{ID: 1, Port: id, Endpoint: b.outcomes[0].Endpoint, Accepted: time.Now()}
		g.after(handshakeInterval)
		want("after the back-off", "false false")
		if n := strings.Count(g.log.String(), "Handshakes with endpoints cannot be read"); n != 1 {
			t.Errorf("%d warnings, want 1", n)
		}
	})
}
