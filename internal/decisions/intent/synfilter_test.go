package intent

import (
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

func TestSYNFilter(t *testing.T) {
	can, cannot := Config{NodeName: here, FilterSYNs: true}, Config{NodeName: here}
	for _, c := range []struct {
		name    string
		cfg     Config
		value   string
		want    uint16
		problem string // part of the only one; "" for none
	}{
		{"a number", can, "1000", 1000, ""},
		{"the largest", can, "65535", 65535, ""},
		{"too large", can, "65536", 0, `"65536" is not a number of SYNs a second`},
		{"none", can, "0", 0, `"0" is not a number`},
		{"negative", can, "-1", 0, "use 1 to 65535"},
		{"empty", can, "", 0, `"" is not a number`},
		{"a word", can, "on", 0, `"on" is not a number`},
		{"on a node that cannot", cannot, "1000", 0, "needs --proxy-mode ebpf and --xdp auto"},
	} {
		t.Run(c.name, func(t *testing.T) {
			svc := web(clusterIPs("10.96.0.1"), ports(model.ServicePort{Name: "web", Protocol: model.TCP, Port: 80},
				model.ServicePort{Name: "dns", Protocol: model.UDP, Port: 53}))
			svc.Annotations = map[string]string{SYNFilterAnnotation: c.value}
			tr := New(c.cfg)
			tr.Apply(delta(svc, sliceOf("s", at("10.1.0.1", there))))
			for _, p := range tr.State().Ports {
				want := c.want
				if p.ID.Protocol != model.TCP {
					want = 0
				}
				if p.SYNLimit != want {
					t.Errorf("%s takes %d SYNs, want %d", p.ID, p.SYNLimit, want)
				}
			}
			problems := tr.Problems()
			if (c.problem == "") != (len(problems) == 0) || c.problem != "" && !strings.Contains(problems[0].What, c.problem) {
				t.Errorf("problems %v, want %q", problems, c.problem)
			}
			again := svc
			again.Annotations = map[string]string{SYNFilterAnnotation: "7"}
			tr.Apply(delta(again))
			for _, p := range tr.State().Ports {
				if c.cfg.FilterSYNs && p.ID.Protocol == model.TCP && p.SYNLimit != 7 {
					t.Errorf("after a change, %s takes %d SYNs", p.ID, p.SYNLimit)
				}
			}
		})
	}
}

// A Service without TCP has no SYNs, whatever the node can do.
func TestSYNFilterWithoutTCP(t *testing.T) {
	svc := web(clusterIPs("10.96.0.1"), ports(model.ServicePort{Name: "dns", Protocol: model.UDP, Port: 53}))
	svc.Annotations = map[string]string{SYNFilterAnnotation: "5"}
	for _, can := range []bool{true, false} {
		tr := New(Config{NodeName: here, FilterSYNs: can})
		tr.Apply(delta(svc))
		if problems := tr.Problems(); len(problems) != 1 || !strings.Contains(problems[0].What, "no TCP port") {
			t.Errorf("problems %v", problems)
		}
	}
}
