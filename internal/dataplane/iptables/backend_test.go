package iptables

import (
	"context"
	"testing"

	"spillway.dev/spillway/internal/intent"
	"spillway.dev/spillway/internal/model"
)

func TestFirst(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be := b.open()
		p := &intent.ServicePort{ID: id("web", "http", 80, model.TCP, model.IPv4),
			Frontends: []intent.Frontend{clusterIP("10.96.0.1", 80, intent.ToCluster), nodePort(30080, intent.ToLocal, intent.ToCluster)},
			Endpoints: []intent.Endpoint{near("10.244.1.2:8080"), far("10.244.2.2:8080"), far("10.244.2.3:8080")}}
		p6 := &intent.ServicePort{ID: id("web", "http", 80, model.TCP, model.IPv6),
			Frontends: []intent.Frontend{clusterIP("fd96::1", 80, intent.ToCluster), nodePort(30080, intent.ToLocal, intent.ToCluster)},
			Endpoints: []intent.Endpoint{near("[fd44:1::2]:8080"), far("[fd44:2::2]:8080")}}
		b.replace(be, p, p6)
		b.t.Log(b.dump())
		d, err := be.repair(context.Background())
		b.t.Log(d, err, be.known)
		s, err := be.Applied(context.Background())
		b.t.Log(s.Ports[0].ID, len(s.Ports), err)
		b.t.Log(b.log)
	})
}
