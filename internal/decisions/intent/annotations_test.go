package intent

import (
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

func TestUnknownAnnotationsAreProblems(t *testing.T) {
	svc := web(clusterIPs("10.96.0.1"), ports(model.ServicePort{Protocol: model.TCP, Port: 80}))
	svc.Annotations = map[string]string{BalanceAnnotation: "maglev", "spillway.dev/forwardings": "dsr", "spillway.dev/a": ""}
	tr := New(Config{NodeName: here, MaglevSize: 251})
	tr.Apply(delta(svc, sliceOf("s", at("10.1.0.1", there))))
	var got []string
	for _, p := range tr.Problems() {
		if !strings.Contains(p.What, "has no effect: this agent knows spillway.dev/ with balance, forwarding, ") {
			t.Errorf("problem %+v", p)
		}
		got = append(got, p.Field)
	}
	if want := "metadata.annotations[spillway.dev/a] metadata.annotations[spillway.dev/forwardings]"; strings.Join(got, " ") != want {
		t.Errorf("problems of %q, want %s", got, want)
	}
}
