package objectstest

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// SimplePort returns a Service with one clusterIP and n endpoints.
func SimplePort(i, n int) *intent.ServicePort {
	p := &intent.ServicePort{
		ID: intent.PortID{
			Service: model.Name{Namespace: "test", Name: fmt.Sprintf("simple-%05d", i)},
			Number:  80, Protocol: model.TCP, Family: model.IPv4,
		},
		Frontends: []intent.Frontend{{
			Addr: netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), Port: 80,
			ExternalRoute: intent.ToCluster, InternalRoute: intent.ToCluster,
		}},
	}
	for j := range n {
		p.Endpoints = append(p.Endpoints, intent.Endpoint{
			Addr:          netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(16 + j), byte(i >> 8), byte(i)}), 8080),
			ClusterPolicy: true,
		})
	}
	return p
}

// ManyPorts returns n simple ports.
func ManyPorts(n, endpoints int) []*intent.ServicePort {
	var out []*intent.ServicePort
	for i := range n {
		out = append(out, SimplePort(i, endpoints))
	}
	return out
}

// EndpointIDs returns the id in the maps of every endpoint of these ports.
func EndpointIDs(tb testing.TB, m map[string]*ebpf.Map, ports []*intent.ServicePort) map[string]uint32 {
	tb.Helper()
	frontends := ReadAll[objects.TCFrontendKey, objects.TCFrontend](tb, m[objects.TCMapFrontends])
	backends := ReadAll[uint32, objects.TCBackend](tb, m[objects.TCMapBackends])
	ids := map[string]uint32{}
	for _, p := range ports {
		service := frontends[objects.FrontendKey(p.ID, p.Frontends[0])].Service
		for id, b := range backends {
			if b.Service == service {
				ids[p.ID.String()+" "+objects.EndpointOf(b).String()] = id
			}
		}
	}
	return ids
}

// WantPorts fails unless the maps have kept these decisions and no others.
func WantPorts(t *testing.T, have, want []*intent.ServicePort) {
	t.Helper()
	lines := func(ports []*intent.ServicePort) []string {
		var out []string
		for _, p := range ports {
			out = append(out, PortText(p))
		}
		return out
	}
	WantLines(t, "applied", lines(have), lines(want))
}

// WantLines fails unless both lists have the same lines, in any order.
func WantLines(t *testing.T, what string, have, want []string) {
	t.Helper()
	for _, l := range have {
		if !slices.Contains(want, l) {
			t.Errorf("%s, unwanted: %s", what, l)
		}
	}
	for _, l := range want {
		if !slices.Contains(have, l) {
			t.Errorf("%s, missing: %s", what, l)
		}
	}
	if len(have) != len(want) {
		t.Errorf("%s: %d, want %d", what, len(have), len(want))
	}
}

// PortText describes all that the maps keep of a decision.
func PortText(p *intent.ServicePort) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s affinity %s helper %s", p.ID, p.Affinity, p.Helper)
	// The maps do not have the kind of an address.
	frontends := slices.Clone(p.Frontends)
	slices.SortFunc(frontends, func(a, b intent.Frontend) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Port, b.Port))
	})
	for _, f := range frontends {
		if f.Kind != intent.NodePort {
			f.Kind = intent.ClusterIP
		}
		fmt.Fprintf(&b, " frontend %v", f)
		if f.SourceRanges != nil {
			b.WriteString("(ranges)")
		}
	}
	for _, e := range p.Endpoints {
		fmt.Fprintf(&b, " endpoint %v", e)
	}
	for _, e := range p.ServingUnselected {
		fmt.Fprintf(&b, " unselected %v", e)
	}
	fmt.Fprintf(&b, " shares %v %v", p.Shares(intent.ToCluster), p.Shares(intent.ToLocal))
	return b.String()
}
