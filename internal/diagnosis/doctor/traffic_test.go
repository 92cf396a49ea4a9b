package doctor

import (
	"slices"
	"strings"
	"testing"
	"time"
)

// TestFindingsOfTrafficSayWhatIsKnown: names and addresses may be missing.
func TestFindingsOfTrafficSayWhatIsKnown(t *testing.T) {
	clients := map[string]int{"192.0.2.1": 1, "192.0.2.2": 5, "192.0.2.3": 1, "192.0.2.4": 1, "192.0.2.5": 1}
	silent := FailingEndpoint{Service: "shop/web:http", Protocol: "TCP", Endpoint: "[fd00::1]:80", Flows: 9, Window: 30 * time.Second,
		Longest: 7 * time.Second, Clients: clients}
	ports := Refusal{Reason: ReasonSNATPorts, Service: "shop/web", Packets: 1, Window: time.Minute, Clients: map[string]int{"pod shop/a": 1}}
	n := &Node{Traffic: &Traffic{Unanswered: []FailingEndpoint{silent},
		Refusals: []Refusal{ports, {Reason: "drop_no_route", Service: "shop/web"}}}}
	found := Examine(n)
	if len(found) != 2 {
		t.Fatalf("found %+v", found)
	}
	if f := found[0]; f.ID != "endpoint-unanswered" ||
		f.Title != "connections to Service shop/web:http fail: endpoint [fd00::1]:80 does not answer" ||
		!strings.HasSuffix(f.Evidence[0], "from 192.0.2.2 (5), 192.0.2.1 (1), 192.0.2.3 (1) and 2 more clients") || f.Numbers["clients"] != 5 ||
		!slices.Equal(f.Commands, []string{"spillway drops --address fd00::1 --port 80 --for 10s"}) {
		t.Errorf("%+v", f)
	}
	if f := found[1]; f.ID != "service-snat-ports-exhausted" || !strings.Contains(f.Title, "towards one of its endpoints") ||
		!strings.Contains(f.Evidence[0], "from pod shop/a (1)") {
		t.Errorf("%+v", f)
	}
	silent.Node = "n1\nreboot"
	if f := Examine(&Node{Traffic: &Traffic{Unanswered: []FailingEndpoint{silent}}})[0]; !strings.Contains(f.Commands[0], "# on node n1") ||
		strings.Contains(f.Commands[0], "\n") {
		t.Errorf("a hostile name of a node: %q", f.Commands)
	}
	if found := Examine(&Node{Traffic: &Traffic{}}); len(found) > 0 {
		t.Errorf("without traffic: %+v", found)
	}
}

// TestPolicyMayBeWhyAnEndpointIsSilent: the pod is well where a policy denies its clients.
func TestPolicyMayBeWhyAnEndpointIsSilent(t *testing.T) {
	const hint = "DoNotTrackPolicy api denied packets recently"
	traffic := &Traffic{Unanswered: []FailingEndpoint{{Service: "shop/api:http", Protocol: "TCP", Endpoint: "10.244.0.3:8081", Flows: 3}}}
	for _, denials := range [][]Denial{nil, {{Policy: "api", Packets: 7}}} {
		traffic.Denials = denials
		f := endpointUnanswered{}.Find(&Node{Traffic: traffic})[0]
		if got := strings.Contains(strings.Join(f.Evidence, "\n"), hint); got != (denials != nil) {
			t.Errorf("with denials %v: evidence %q", denials, f.Evidence)
		}
	}
}
