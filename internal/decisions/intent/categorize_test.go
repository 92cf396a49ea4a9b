package intent

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// clusterIPLeadsTo wants these endpoints behind ns/web's ClusterIP.
const clusterIPLeadsTo = "ns/web:80/TCP/IPv4\nClusterIP 10.96.0.1:80 outside cluster inside cluster\n"

func TestEndpoints(t *testing.T) {
	zone1, node := inZone("zone-1"), &model.Node{Name: here}
	local := func(outside string) string {
		return "ns/web:80/TCP/IPv4\nClusterIP 10.96.0.1:80 outside cluster inside cluster\nNodePort *:30080 outside " +
			outside + " inside cluster\n"
	}
	runDecisions(t, []decision{
		{"endpoints that are not ready are left out", []any{web(), sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", there, notReady))},
			clusterIPLeadsTo + `-> 10.1.0.1:8080 cluster here`},
		{"terminating endpoints are left out while others are ready",
			[]any{web(), sliceOf("s", at("10.1.0.1", here, draining), at("10.1.0.2", there))},
			clusterIPLeadsTo + `-> 10.1.0.2:8080 cluster`},
		{"terminating endpoints that still serve are used when none is ready",
			[]any{web(), sliceOf("s", at("10.1.0.1", here, draining), at("10.1.0.2", there, gone), at("10.1.0.3", there, notReady))},
			clusterIPLeadsTo + `-> 10.1.0.1:8080 cluster here`},
		{"an endpoint that serves but is neither ready nor terminating is not a last resort", []any{web(), sliceOf("s",
			at("10.1.0.1", here, func(e *model.Endpoint) { e.Ready = false }))},
			"ns/web:80/TCP/IPv4\nClusterIP 10.96.0.1:80 outside reject inside reject"},
		{"each policy falls back on its own", []any{web(nodePort(30080), externalLocal),
			sliceOf("s", at("10.1.0.1", here, draining), at("10.1.0.2", there))},
			local("local") + "-> 10.1.0.1:8080 local here\n-> 10.1.0.2:8080 cluster"},
		{"a ready endpoint here comes before a terminating one for policy Local",
			[]any{web(nodePort(30080), externalLocal), sliceOf("s", at("10.1.0.1", here, draining), at("10.1.0.2", here))},
			local("local") + "-> 10.1.0.2:8080 cluster local here"},
		{"publishNotReadyAddresses counts through the slices' ready, also for terminating endpoints", []any{
			web(), sliceOf("s", at("10.1.0.1", here, publishedEnd), at("10.1.0.2", there, notReady))},
			clusterIPLeadsTo + `-> 10.1.0.1:8080 cluster here`},

		{"zone hints keep traffic in the zone", []any{web(), zone1,
			sliceOf("s", at("10.1.0.1", there, forZones("zone-1")), at("10.1.0.2", here, forZones("zone-2")))},
			clusterIPLeadsTo + `-> 10.1.0.1:8080 cluster`},
		{"an endpoint may be hinted for several zones",
			[]any{web(), zone1, sliceOf("s", at("10.1.0.1", there, forZones("zone-2", "zone-1")), at("10.1.0.2", here, forZones("zone-2")))},
			clusterIPLeadsTo + `-> 10.1.0.1:8080 cluster`},
		{"hints are ignored if a ready endpoint has none",
			[]any{web(), zone1, sliceOf("s", at("10.1.0.1", there, forZones("zone-1")), at("10.1.0.2", here))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster\n-> 10.1.0.2:8080 cluster here"},
		{"hints are obeyed if only an endpoint that is not ready has none",
			[]any{web(), zone1, sliceOf("s", at("10.1.0.1", there, forZones("zone-1")), at("10.1.0.2", here, forZones("zone-2")),
				at("10.1.0.3", here, notReady))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster"},
		{"hints are ignored if none is for this zone",
			[]any{web(), inZone("zone-3"), sliceOf("s", at("10.1.0.1", there, forZones("zone-1")), at("10.1.0.2", here, forZones("zone-2")))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster\n-> 10.1.0.2:8080 cluster here"},
		{"hints are ignored if the one for this zone is of an endpoint that is not ready",
			[]any{web(), zone1, sliceOf("s", at("10.1.0.1", there, forZones("zone-1"), notReady), at("10.1.0.2", here, forZones("zone-2")))},
			clusterIPLeadsTo + "-> 10.1.0.2:8080 cluster here"},
		{"zone hints are ignored on a node without a zone",
			[]any{web(), node, sliceOf("s", at("10.1.0.1", there, forZones("zone-1")), at("10.1.0.2", here, forZones("")))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster\n-> 10.1.0.2:8080 cluster here"},
		{"hints do not count in the fall-back to terminating endpoints",
			[]any{web(), zone1, sliceOf("s", at("10.1.0.1", there, forZones("zone-1"), draining),
				at("10.1.0.2", here, forZones("zone-2"), draining))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster\n-> 10.1.0.2:8080 cluster here"},
		{"hints do not count for policy Local", []any{web(nodePort(30080), externalLocal), zone1,
			sliceOf("s", at("10.1.0.1", there, forZones("zone-1")), at("10.1.0.2", here, forZones("zone-2")))},
			local("local") + "-> 10.1.0.1:8080 cluster\n-> 10.1.0.2:8080 local here"},
		{"node hints keep traffic on the node", []any{web(),
			sliceOf("s", at("10.1.0.1", there, forNodes(there)), at("10.1.0.2", here, forNodes(here)))},
			clusterIPLeadsTo + "-> 10.1.0.2:8080 cluster here"},
		{"node hints come before zone hints", []any{web(), zone1,
			sliceOf("s", at("10.1.0.1", there, forNodes(there), forZones("zone-1")), at("10.1.0.2", here, forNodes(here), forZones("zone-1")))},
			clusterIPLeadsTo + "-> 10.1.0.2:8080 cluster here"},
		{"zone hints are used if no node hint is for this node",
			[]any{web(), zone1, sliceOf("s", at("10.1.0.1", there, forNodes(there), forZones("zone-1")),
				at("10.1.0.2", "node-c", forNodes("node-c"), forZones("zone-2")))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster"},
		{"zone hints are used if an endpoint lacks a node hint",
			[]any{web(), zone1, sliceOf("s", at("10.1.0.1", there, forZones("zone-1")), at("10.1.0.2", here, forNodes(here), forZones("zone-2")))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster"},

		{"several slices are one list, sorted", []any{web(), sliceOf("b", at("10.1.0.1", here)),
			sliceOf("a", at("10.1.0.10", there), at("10.1.0.2", there))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster here\n-> 10.1.0.2:8080 cluster\n-> 10.1.0.10:8080 cluster"},
		{"of duplicates the ready one counts", []any{web(), sliceOf("a", at("10.1.0.1", here, notReady)), sliceOf("b", at("10.1.0.1", here)),
			sliceOf("c", at("10.1.0.1", here, gone))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster here"},
		{"of duplicates that serve and stay the ready one counts",
			[]any{web(), sliceOf("a", at("10.1.0.1", here, func(e *model.Endpoint) { e.Ready = false })), sliceOf("b", at("10.1.0.1", here))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster here"},
		{"of duplicates that are not ready the serving one counts",
			[]any{web(), sliceOf("a", at("10.1.0.1", here, gone)), sliceOf("b", at("10.1.0.1", here, draining))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster here"},
		{"of duplicates the one here counts", []any{web(nodePort(30080), externalLocal), sliceOf("a", at("10.1.0.1", "")),
			sliceOf("b", at("10.1.0.1", here))},
			local("local") + "-> 10.1.0.1:8080 cluster local here"},
		{"of duplicates the one that stays counts, though the other was here",
			[]any{web(), sliceOf("s", at("10.1.0.1", here, gone), at("10.1.0.1", there))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster"},
		{"of duplicates the one that stays counts, in another slice and published",
			[]any{web(), sliceOf("a", at("10.1.0.1", there)), sliceOf("b", at("10.1.0.1", here, publishedEnd))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster"},
		{"of duplicates the ready one counts, though the other is here",
			[]any{web(), sliceOf("s", at("10.1.0.1", here, notReady), at("10.1.0.1", there))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster"},
		{"one address on two ports is two endpoints", []any{web(), sliceOf("a", at("10.1.0.1", here)),
			withPorts(sliceOf("b", at("10.1.0.1", here)), model.EndpointPort{Protocol: model.TCP, Port: 8081})},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster here\n-> 10.1.0.1:8081 cluster here"},
		{"slices of the other family are ignored", []any{web(), sliceOf("s", at("10.1.0.1", here)), sliceOf("s6", at("fd00::1", here))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster here"},
		{"a slice counts only in the family that it is said to be of",
			[]any{web(), &model.EndpointSlice{Name: name("s"), Service: name("web"), Family: model.IPv6,
				Ports: []model.EndpointPort{{Protocol: model.TCP, Port: 8080}}, Endpoints: []model.Endpoint{at("10.1.0.1", here)}}},
			"ns/web:80/TCP/IPv4\nClusterIP 10.96.0.1:80 outside reject inside reject"},
		{"an address of the wrong family in a slice is ignored", []any{web(), sliceOf("s", at("10.1.0.1", here), at("fd00::1", here))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster here"},
		{"an endpoint without an address is ignored", []any{web(), sliceOf("s", at("10.1.0.1", here),
			at("10.1.0.2", here, func(e *model.Endpoint) { e.Addr = netip.Addr{} }))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster here"},
		{"an endpoint port 0 is ignored", []any{web(), withPorts(sliceOf("s", at("10.1.0.1", here)), model.EndpointPort{Protocol: model.TCP})},
			"ns/web:80/TCP/IPv4\nClusterIP 10.96.0.1:80 outside reject inside reject"},
		{"a manual slice's endpoints need no pod and no node",
			[]any{web(nodePort(30080), externalLocal), sliceOf("manual", at("203.0.113.80", ""))},
			local("drop") + "-> 203.0.113.80:8080 cluster"},
		{"a hostNetwork endpoint here is on the host", []any{web(), &model.Node{Name: here, Addresses: addrs("192.168.0.1")},
			sliceOf("s", at("192.168.0.1", here), at("192.168.0.2", there), at("10.1.0.1", here))},
			clusterIPLeadsTo + "-> 10.1.0.1:8080 cluster here\n-> 192.168.0.1:8080 cluster here host\n-> 192.168.0.2:8080 cluster"},
		{"an endpoint without a node at this node's address is on the host, but not for policy Local", []any{web(nodePort(30080), externalLocal),
			&model.Node{Name: here, Addresses: addrs("192.168.0.1")}, sliceOf("s", at("192.168.0.1", ""))},
			local("drop") + "-> 192.168.0.1:8080 cluster here host"},
	})
}

func TestNewestTriggerOfTheFamilyCounts(t *testing.T) {
	a, b := sliceOf("a", at("10.1.0.1", here)), sliceOf("b")
	c := sliceOf("c", at("fd00::1", here))
	a.Triggered, b.Triggered, c.Triggered = time.Unix(5, 0), time.Unix(7, 0), time.Unix(9, 0)
	tr := newTracker(web(clusterIPs("10.96.0.1", "fd00::9")), a, b, c)
	got := tr.State().Ports
	if !got[0].Triggered.Equal(time.Unix(7, 0)) || !got[1].Triggered.Equal(time.Unix(9, 0)) {
		t.Errorf("triggered at %v and %v, want 7 s and 9 s", got[0].Triggered, got[1].Triggered)
	}
}

func TestHealthCheck(t *testing.T) {
	lb := func(more ...func(*model.Service)) *model.Service {
		return web(append([]func(*model.Service){loadBalancer("192.0.2.1"), externalLocal, healthCheck(31000)}, more...)...)
	}
	two := func(s *model.Service) {
		s.Ports = []model.ServicePort{{Name: "a", Protocol: model.TCP, Port: 80}, {Name: "b", Protocol: model.TCP, Port: 81}}
	}
	twoPorts := []model.EndpointPort{{Name: "a", Protocol: model.TCP, Port: 8080}, {Name: "b", Protocol: model.TCP, Port: 8081}}
	rows := []struct {
		name    string
		objects []any
		want    []HealthCheck
	}{
		{"it counts ready endpoints here", []any{lb(), sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", here), at("10.1.0.3", there))},
			[]HealthCheck{{name("web"), 31000, 2}}},
		{"it counts none that terminates, ready or not",
			[]any{lb(), sliceOf("s", at("10.1.0.1", here, draining), at("10.1.0.2", here, publishedEnd), at("10.1.0.3", here, notReady))},
			[]HealthCheck{{name("web"), 31000, 0}}},
		{"it is there without endpoints", []any{lb()}, []HealthCheck{{name("web"), 31000, 0}}},
		{"an endpoint of two ports is one", []any{lb(two), withPorts(sliceOf("s", at("10.1.0.1", here)), twoPorts...)},
			[]HealthCheck{{name("web"), 31000, 1}}},
		{"an endpoint of two families is one", []any{lb(clusterIPs("10.96.0.1", "fd00::9")), sliceOf("s", at("10.1.0.1", here)),
			sliceOf("s6", at("fd00::1", here))},
			[]HealthCheck{{name("web"), 31000, 1}}},
		{"a Service that is no LoadBalancer has none", []any{web(nodePort(30080), externalLocal, healthCheck(31000))}, nil},
		{"a Service of policy Cluster has none", []any{web(loadBalancer("192.0.2.1"), healthCheck(31000))}, nil},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			got := newTracker(row.objects...).HealthChecks()
			if len(got) != len(row.want) || len(got) == 1 && got[0] != row.want[0] {
				t.Errorf("got %+v, want %+v", got, row.want)
			}
		})
	}
}

func TestHealthChecksChangeWithEndpointsAndGoWithTheService(t *testing.T) {
	lb := web(loadBalancer("192.0.2.1"), externalLocal, healthCheck(31000))
	tr := newTracker(lb)
	for _, step := range []struct {
		name  string
		delta model.Delta
		want  []HealthCheck
	}{
		{"an endpoint comes", delta(sliceOf("s", at("10.1.0.1", here))), []HealthCheck{{name("web"), 31000, 1}}},
		{"one elsewhere comes", delta(sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", there))), nil},
		{"it terminates", delta(sliceOf("s", at("10.1.0.1", here, draining), at("10.1.0.2", there))), []HealthCheck{{name("web"), 31000, 0}}},
		{"the Service becomes a NodePort", delta(web(nodePort(30080))), []HealthCheck{{name("web"), 0, 0}}},
		{"and back", delta(lb), []HealthCheck{{name("web"), 31000, 0}}},
		{"the Service goes", model.Delta{Services: map[model.Name]*model.Service{name("web"): nil}}, []HealthCheck{{name("web"), 0, 0}}},
	} {
		got := tr.Apply(step.delta).HealthChecks
		if len(got) != len(step.want) || len(got) == 1 && got[0] != step.want[0] {
			t.Errorf("%s: got %+v, want %+v", step.name, got, step.want)
		}
	}
}

func TestRetainedEndpointsServeButAreNotUsed(t *testing.T) {
	udp := ports(model.ServicePort{Port: 53, Protocol: model.UDP, NodePort: 30053})
	dns := []model.EndpointPort{{Protocol: model.UDP, Port: 5353}}
	for _, row := range []struct {
		name    string
		objects []any
		want    string
	}{
		{"terminating while another is ready", []any{web(udp),
			withPorts(sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", here, draining), at("10.1.0.3", here, gone),
				at("10.1.0.4", there, notReady)), dns...)}, "[10.1.0.2:5353]"},
		{"terminating and used", []any{web(udp), withPorts(sliceOf("s", at("10.1.0.2", here, draining)), dns...)}, "[]"},
		{"outside the zone", []any{web(udp), inZone("zone-1"),
			withPorts(sliceOf("s", at("10.1.0.1", here, forZones("zone-1")), at("10.1.0.2", there, forZones("zone-2"))), dns...)},
			"[10.1.0.2:5353]"},
		{"elsewhere, with policy Local alone", []any{web(udp, internalLocal, externalLocal, func(s *model.Service) { s.Ports[0].NodePort = 0 }),
			withPorts(sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", there)), dns...)}, "[10.1.0.2:5353]"},
		{"of a TCP port nobody asks", []any{web(), sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", here, draining))}, "[]"},
	} {
		sp := newTracker(row.objects...).State().Ports[0]
		var addrs []netip.AddrPort
		for _, e := range sp.ServingUnselected {
			addrs = append(addrs, e.Addr)
		}
		same(t, row.name, fmt.Sprint(addrs), row.want)
	}
	// One that is retained no more is a change, though nothing else is.
	tr := newTracker(web(udp), withPorts(sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", here, draining)), dns...))
	c := tr.Apply(delta(withPorts(sliceOf("s", at("10.1.0.1", here)), dns...)))
	if len(c.Upserts) != 1 || c.Upserts[0].ServingUnselected != nil {
		t.Errorf("after the last flow's endpoint went: %+v", c)
	}
}
