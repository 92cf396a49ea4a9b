package intent

import (
	"strings"
	"testing"
	"time"
)

func TestBalanceOfAnnotations(t *testing.T) {
	for _, c := range []struct {
		name, balance, weights string
		affinity               time.Duration
		off                    bool // the dataplane can do neither
		set                    bool // the annotation is there, although empty
		want                   Balance
		problem                string // part of the only one; "" for none
	}{
		{name: "none", want: Random},
		{name: "random", balance: "random", want: Random},
		{name: "weighted", balance: "weighted", weights: "*=3", want: Random},
		{name: "least", balance: "least", want: LeastConnections},
		{name: "latency", balance: "latency", want: Latency},
		{name: "the agent does not count", balance: "least", off: true, want: Random,
			problem: "least has no effect on this node, and random is used: its agent needs --proxy-mode ebpf and --balance-by-load"},
		{name: "session affinity", balance: "latency", affinity: time.Hour, want: Random,
			problem: "latency has no effect with spec.sessionAffinity"},
		{name: "random with session affinity", balance: "random", affinity: time.Hour, want: Random},
		{name: "weights", balance: "least", weights: "*=3", want: LeastConnections,
			problem: "has no effect with spillway.dev/balance: least; use weighted or maglev there"},
		{name: "maglev", balance: "maglev", want: Maglev},
		{name: "maglev by weight", balance: "maglev", weights: "*=3", want: Maglev},
		{name: "the dataplane has no tables", balance: "maglev", off: true, want: Random,
			problem: "maglev has no effect on this node, and random is used"},
		{name: "maglev and session affinity", balance: "maglev", affinity: time.Hour, want: Random,
			problem: "maglev has no effect with spec.sessionAffinity"},
		{name: "empty", set: true, want: Random, problem: `"" is not a way to choose endpoints`},
		{name: "unknown", balance: "Least", want: Random,
			problem: `"Least" is not a way to choose endpoints, and random is used; use random, least, latency, maglev or weighted`},
	} {
		t.Run(c.name, func(t *testing.T) {
			svc := web(clusterIPs("10.96.0.1"))
			svc.Affinity, svc.Annotations = c.affinity, map[string]string{}
			if c.balance != "" || c.set {
				svc.Annotations[BalanceAnnotation] = c.balance
			}
			if c.weights != "" {
				svc.Annotations[WeightsAnnotation] = c.weights
			}
			cfg := Config{NodeName: here, BalanceByLoad: true, MaglevSize: 251}
			if c.off {
				cfg = Config{NodeName: here}
			}
			tr := New(cfg)
			tr.Apply(whole(delta(svc, sliceOf("s", at("10.1.0.1", here)))))
			if got := tr.State().Ports[0].Balance; got != c.want {
				t.Errorf("balance %s, want %s", got, c.want)
			}
			problems := tr.Problems()
			if len(problems) != min(len(c.problem), 1) || c.problem != "" && !strings.Contains(problems[0].What, c.problem) {
				t.Errorf("problems %v, want %q", problems, c.problem)
			}
		})
	}
}
