package intent

import (
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

// redirected returns the endpoints of the only port, with "L" for those of the Local policy.
func redirected(tr *Tracker) (out []string) {
	for _, p := range tr.State().Ports {
		if p.ID.Service != name("web") {
			continue
		}
		for _, e := range p.Endpoints {
			text := e.Addr.Addr().String()
			if e.LocalPolicy {
				text += "L"
			}
			out = append(out, text)
		}
	}
	return out
}

func TestLocalRedirect(t *testing.T) {
	cache := func(eps ...model.Endpoint) *model.EndpointSlice {
		s := sliceOf("cache-1", eps...)
		s.Service, s.Family, s.Ports[0].Port = name("cache"), model.IPv4, 5353
		return s
	}
	toCache := func(s *model.Service) { s.Annotations = map[string]string{LocalRedirectAnnotation: "cache"} }
	behind := sliceOf("s", at("10.1.0.1", here), at("10.2.0.1", there))
	all := []string{"10.1.0.1", "10.2.0.1"}
	cacheService := web()
	cacheService.Name, cacheService.ClusterIPs = name("cache"), addrs("10.96.0.2")
	tr := newTracker(web(toCache), behind)
	if problems := tr.Problems(); len(problems) != 1 || !strings.Contains(problems[0].What, "names \"cache\", which is no Service") {
		t.Errorf("without the Service cache: problems %v", problems)
	}
	if c := tr.Apply(delta(cacheService)); c.Problems == nil || len(c.Problems) != 0 {
		t.Errorf("with the Service cache: problems %v", c.Problems)
	}
	step := func(what string, want []string, objects ...any) {
		t.Helper()
		tr.Apply(delta(objects...))
		if got := redirected(tr); !slices.Equal(got, want) {
			t.Errorf("%s: endpoints %v, want %v", what, got, want)
		}
	}
	step("no cache", all)
	step("caches elsewhere", all, cache(at("10.2.0.9", there)))
	step("one starts here", all, cache(at("10.2.0.9", there), at("10.1.0.9", here, notReady)))
	step("it is ready", []string{"10.1.0.9"}, cache(at("10.2.0.9", there), at("10.1.0.9", here)))
	step("it ends", all, cache(at("10.2.0.9", there), at("10.1.0.9", here, draining)))
	step("it ends and is published", all, cache(at("10.1.0.9", here, publishedEnd)))
	step("the next one is ready", []string{"10.1.0.10"}, cache(at("10.1.0.9", here, publishedEnd), at("10.1.0.10", here)))
	for _, p := range tr.State().Ports {
		if port := p.Endpoints[0].Addr.Port(); port != 5353 {
			t.Errorf("%s leads to port %d", p.ID, port)
		}
	}
	local := func(s *model.Service) { s.InternalLocal = true }
	step("a Local policy", []string{"10.1.0.10L"}, web(toCache, local))
	step("a Service without endpoints", []string{"10.1.0.10"}, web(toCache), sliceOf("s"))
	tr.Apply(model.Delta{Slices: map[model.Name]*model.EndpointSlice{name("cache-1"): nil}})
	step("the cache's slice is deleted", nil)
}

// TestLocalRedirectKeepsFlowsOfTheServiceOnly: UDP flows to the Service's own endpoints go on,
// those to a cache that ends do not. Sockets of both continue.
func TestLocalRedirectKeepsFlowsOfTheServiceOnly(t *testing.T) {
	svc := web(func(s *model.Service) {
		s.Ports[0].Protocol = model.UDP
		s.Annotations = map[string]string{LocalRedirectAnnotation: "cache"}
	})
	behind, cache := sliceOf("s", at("10.2.0.1", there)), sliceOf("c", at("10.1.0.9", here))
	for _, s := range []*model.EndpointSlice{behind, cache} {
		s.Ports[0].Protocol = model.UDP
	}
	cache.Service = name("cache")
	tr := New(Config{NodeName: here, Lingering: true})
	tr.Apply(whole(delta(svc, behind, cache)))
	p := tr.State().Ports[0]
	if len(p.ServingUnselected) != 1 || p.ServingUnselected[0].Addr.Addr() != addr("10.2.0.1") || len(p.Lingering) != 1 {
		t.Errorf("a cache that is ready: %v serve, %v linger", p.ServingUnselected, p.Lingering)
	}
	ends := *cache
	ends.Endpoints = []model.Endpoint{at("10.1.0.9", here, draining)}
	tr.Apply(delta(&ends))
	p = tr.State().Ports[0]
	if len(p.ServingUnselected) != 0 || len(p.Lingering) != 1 || p.Lingering[0].Addr() != addr("10.1.0.9") {
		t.Errorf("a cache that ends: %v serve, %v linger", p.ServingUnselected, p.Lingering)
	}
}

func TestLocalRedirectComplains(t *testing.T) {
	for value, problem := range map[string]string{
		"web": "names this Service itself", "a/\x1b": `names "a/\x1b", which is no Service of this namespace`,
		"": `names "", which is no Service`,
	} {
		svc := web()
		svc.Annotations = map[string]string{LocalRedirectAnnotation: value}
		tr := newTracker(svc, sliceOf("s", at("10.1.0.1", here)))
		if problems := tr.Problems(); len(problems) != 1 || !strings.Contains(problems[0].What, problem) {
			t.Errorf("%q: problems %v, want %q", value, problems, problem)
		}
		if got := redirected(tr); !slices.Equal(got, []string{"10.1.0.1"}) {
			t.Errorf("%q: endpoints %v", value, got)
		}
	}
}

// TestARedirectIsReadWhereItLeads: many Services may redirect to one that is large.
func TestARedirectIsReadWhereItLeads(t *testing.T) {
	toCache := func(s *model.Service) { s.Annotations = map[string]string{LocalRedirectAnnotation: "cache"} }
	cache := func(node string) *model.EndpointSlice {
		return ofService(sliceOf("c", at("10.1.0.1", there), at("10.1.0.2", ""), at("10.1.0.3", node)), "cache")
	}
	tr := newTracker(web(toCache), web(called("cache"), clusterIPs("10.96.0.2")), cache(there))
	e := tr.services[name("web")]
	if near := tr.slicesNear(e); near != nil {
		t.Errorf("%d slices without an endpoint on this node are read", len(near.slices))
	}
	tr.Apply(delta(cache(here)))
	if near := tr.slicesNear(e); near == nil {
		t.Error("the slice with an endpoint on this node is not read")
	}
}
