package nftables

import (
	"testing"
	"time"

	"spillway.dev/spillway/internal/intent"
	"spillway.dev/spillway/internal/model"
)

func TestFirst(t *testing.T) {
	enter(t)
	b := open(t)
	s := intent.State{Node: node(), Ports: []*intent.ServicePort{
		port("web", model.IPv4, clusterIP("10.96.0.1", intent.ToCluster), nodePort(30080, intent.ToLocal, intent.ToCluster), endpoints("10.244.1.2:8080", "10.244.1.3:8080"), here("10.244.0.2:8080")),
		port("one", model.IPv6, clusterIP("fd96::1", intent.ToCluster), endpoints("[fd44:0:0:1::2]:8080")),
		port("none", model.IPv4, clusterIP("10.96.0.2", intent.Reject)),
		port("sticky", model.IPv4, clusterIP("10.96.0.3", intent.ToCluster), endpoints("10.244.1.2:8080", "10.244.1.3:8080"), func(p *intent.ServicePort) { p.Affinity = time.Hour }),
	}}
	if err := b.Replace(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	t.Log(run(t, "nft", "list", "ruleset"))
}
