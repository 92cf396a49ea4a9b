package intent

import (
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

func TestDSRForwarding(t *testing.T) {
	can := Config{NodeName: here, MaglevSize: 251, CanForwardByDSR: true}
	hybrid := can
	hybrid.Forwarding = Hybrid
	cannot := Config{NodeName: here, MaglevSize: 251}
	for _, c := range []struct {
		name         string
		cfg          Config
		balance, way string
		want         bool
		problem      string // part of the only one; "" for none
	}{
		{"by default", can, "maglev", "", false, ""},
		{"by flag", hybrid, "maglev", "", true, ""},
		{"by flag, without a table", hybrid, "", "", false, ""},
		{"by annotation", can, "maglev", "hybrid", true, ""},
		{"UDP too", can, "maglev", "dsr", true, ""},
		{"UDP on a node that cannot", cannot, "maglev", "dsr", false, "dsr has no effect on this node"},
		{"against the flag", hybrid, "maglev", "snat", false, ""},
		{"on a node that cannot", cannot, "maglev", "hybrid", false, "needs --proxy-mode ebpf and --dsr-key-file"},
		{"unknown", can, "maglev", "fast", false, `"fast" is not a way to forward packets`},
		{"random", can, "", "hybrid", false, "it needs spillway.dev/balance: maglev"},
		{"hybrid for UDP alone", can, "maglev", "hybrid only UDP", false, "has no TCP port; use dsr"},
	} {
		t.Run(c.name, func(t *testing.T) {
			svc := web(clusterIPs("10.96.0.1"), ports(model.ServicePort{Name: "web", Protocol: model.TCP, Port: 80},
				model.ServicePort{Name: "dns", Protocol: model.UDP, Port: 53}))
			svc.Annotations = map[string]string{}
			if c.balance != "" {
				svc.Annotations[BalanceAnnotation] = c.balance
			}
			if way, rest, _ := strings.Cut(c.way, " "); way != "" {
				svc.Annotations[ForwardingAnnotation] = way
				if rest != "" {
					svc.Ports = svc.Ports[1:]
				}
			}
			tr := New(c.cfg)
			tr.Apply(delta(svc, sliceOf("s", at("10.1.0.1", there))))
			for _, p := range tr.State().Ports {
				if want := c.want && (p.ID.Protocol == model.TCP || c.way == DSR); p.DSR != want {
					t.Errorf("%s is forwarded directly: %v, want %v", p.ID, p.DSR, want)
				}
			}
			problems := tr.Problems()
			if (c.problem == "") != (len(problems) == 0) || c.problem != "" && !strings.Contains(problems[0].What, c.problem) {
				t.Errorf("problems %v, want %q", problems, c.problem)
			}
		})
	}
}

// TestNoDSRForwardingWithoutNode has one endpoint that may be outside the cluster.
func TestNoDSRForwardingWithoutNode(t *testing.T) {
	tr := New(Config{NodeName: here, MaglevSize: 251, CanForwardByDSR: true, Forwarding: DSR})
	svc := web(clusterIPs("10.96.0.1"), ports(model.ServicePort{Protocol: model.TCP, Port: 80}))
	svc.Annotations = map[string]string{BalanceAnnotation: "maglev"}
	for _, test := range []struct {
		endpoints []model.Endpoint
		want      bool
	}{
		{[]model.Endpoint{at("10.1.0.1", there)}, true},
		{[]model.Endpoint{at("10.1.0.1", there), at("203.0.113.1", "")}, false},
		{[]model.Endpoint{at("10.1.0.1", there), at("10.1.0.2", there)}, true},
	} {
		tr.Apply(delta(svc, sliceOf("s", test.endpoints...)))
		if got := tr.State().Ports[0].DSR; got != test.want {
			t.Errorf("%v: DSR replies %v, want %v", test.endpoints, got, test.want)
		}
	}
}
