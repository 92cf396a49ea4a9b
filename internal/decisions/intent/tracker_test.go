package intent

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// outline names the ports that Changes upsert (+) and delete (-).
func outline(c Changes) string {
	var out []string
	for _, sp := range c.Upserts {
		out = append(out, "+"+sp.ID.String())
	}
	for _, id := range c.Deletes {
		out = append(out, "-"+id.String())
	}
	return strings.Join(out, " ")
}

func withoutService(n string) model.Delta {
	return model.Delta{Services: map[model.Name]*model.Service{name(n): nil}}
}

func withoutSlice(n string) model.Delta {
	return model.Delta{Slices: map[model.Name]*model.EndpointSlice{name(n): nil}}
}

func TestChangesFollowTheDeltas(t *testing.T) {
	triggered := sliceOf("s", at("10.1.0.1", here))
	triggered.Triggered = time.Unix(99, 0)
	annotated := web()
	annotated.Annotations = map[string]string{"a": "b"}
	dual := web(clusterIPs("10.96.0.1", "fd00::1"))
	dual2 := web(clusterIPs("10.96.0.1", "fd00::1"), ports(
		model.ServicePort{Protocol: model.TCP, Port: 80}, model.ServicePort{Name: "b", Protocol: model.TCP, Port: 81}))

	tr := newTracker(web(called("other"), clusterIPs("10.96.0.9")))
	for _, step := range []struct {
		name  string
		delta model.Delta
		want  string
	}{
		{"slices come before the Service", delta(sliceOf("s", at("10.1.0.1", here))), ""},
		{"the Service comes", delta(web()), "+ns/web:80/TCP/IPv4"},
		{"the same objects again", delta(web(), sliceOf("s", at("10.1.0.1", here))), ""},
		{"only the trigger time differs", delta(triggered), ""},
		{"only annotations differ", delta(annotated), ""},
		{"an endpoint comes", delta(sliceOf("s", at("10.1.0.1", here), at("10.1.0.2", there))), "+ns/web:80/TCP/IPv4"},
		{"endpoints in another order", delta(sliceOf("s", at("10.1.0.2", there), at("10.1.0.1", here))), ""},
		{"an endpoint moves to another slice", delta(sliceOf("s", at("10.1.0.1", here)), sliceOf("s2", at("10.1.0.2", there))), ""},
		{"an endpoint that is not ready comes", delta(sliceOf("s2", at("10.1.0.2", there), at("10.1.0.3", there, notReady))), ""},
		{"a slice goes", withoutSlice("s2"), "+ns/web:80/TCP/IPv4"},
		{"a slice that is not there goes", withoutSlice("s2"), ""},
		{"a slice moves to another Service", delta(ofService(sliceOf("s", at("10.1.0.1", here)), "other")),
			"+ns/other:80/TCP/IPv4 +ns/web:80/TCP/IPv4"},
		{"and back", delta(sliceOf("s", at("10.1.0.1", here))), "+ns/other:80/TCP/IPv4 +ns/web:80/TCP/IPv4"},
		{"a family comes", delta(dual), "+ns/web:80/TCP/IPv6"},
		{"a port comes", delta(dual2), "+ns/web:b/TCP/IPv4 +ns/web:b/TCP/IPv6"},
		{"both go", delta(web()), "-ns/web:80/TCP/IPv6 -ns/web:b/TCP/IPv4 -ns/web:b/TCP/IPv6"},
		{"the port changes its number", delta(web(ports(model.ServicePort{Protocol: model.TCP, Port: 88}))),
			"+ns/web:88/TCP/IPv4 -ns/web:80/TCP/IPv4"},
		{"the Service goes", withoutService("web"), "-ns/web:88/TCP/IPv4"},
		{"it is gone", withoutService("web"), ""},
		{"its slice goes", withoutSlice("s"), ""},
		{"a whole world that is the same", whole(delta(web(called("other"), clusterIPs("10.96.0.9")))), ""},
		{"a whole world that is another", whole(delta(web(), sliceOf("s", at("10.1.0.1", here)))), "+ns/web:80/TCP/IPv4 -ns/other:80/TCP/IPv4"},
		{"an empty whole world", whole(model.Delta{}), "-ns/web:80/TCP/IPv4"},
	} {
		same(t, step.name, outline(tr.Apply(step.delta)), step.want)
	}
	if len(tr.services)+len(tr.addresses.requesters) > 0 {
		t.Errorf("an empty world leaves entries behind: %+v %+v", tr.services, tr.addresses)
	}
}

func TestEqualDecisionsStayTheSameValue(t *testing.T) {
	tr := newTracker(web(), sliceOf("s", at("10.1.0.1", here)))
	before := tr.State().Ports[0]
	tr.Apply(delta(web(), sliceOf("s", at("10.1.0.1", here))))
	if after := tr.State().Ports[0]; after != before {
		t.Error("an unchanged port is another value")
	}
}

func TestChangesAreSorted(t *testing.T) {
	var objects []any
	for i := range 20 {
		objects = append(objects, web(called(fmt.Sprintf("s%02d", i)), clusterIPs(fmt.Sprintf("10.96.0.%d", i+1)), healthCheck(uint16(31000+i)),
			externalLocal, externalIPs("0.0.0.0"), func(s *model.Service) { s.Type = model.LoadBalancer }))
	}
	tr := New(Config{NodeName: here})
	c := tr.Apply(delta(objects...))
	for i := range 20 {
		want := fmt.Sprintf("s%02d", i)
		if c.Upserts[i].ID.Service.Name != want || c.HealthChecks[i].Service.Name != want || c.Problems[i].Where != "Service ns/"+want {
			t.Fatalf("entry %d is not of %s: %v %v %v", i, want, c.Upserts[i].ID, c.HealthChecks[i], c.Problems[i])
		}
	}
	c = tr.Apply(whole(model.Delta{}))
	for i, id := range c.Deletes {
		if want := fmt.Sprintf("s%02d", i); id.Service.Name != want {
			t.Errorf("deletion %d is of %v", i, id)
		}
	}
}

func TestPortIDsReadWell(t *testing.T) {
	for want, id := range map[string]PortID{
		"ns/web:http/TCP/IPv4": {Service: name("web"), Port: "http", Number: 80, Protocol: model.TCP, Family: model.IPv4},
		"ns/web:53/UDP/IPv6":   {Service: name("web"), Number: 53, Protocol: model.UDP, Family: model.IPv6},
	} {
		same(t, "PortID", id.String(), want)
	}
}
