package iptables

import (
	"errors"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// A port that iptables refuses is the only one that fails: others come and go, also in a full sync and
// after a restart.
func TestARefusedPortHoldsUpNoOther(t *testing.T) {
	eachVariant(t, func(b *bench) {
		six := service(6)
		six.ID.Family, six.Frontends[0], six.Endpoints[0] = model.IPv6, clusterIP("fd96::6", 80, intent.ToCluster), far("[fd44:2::6]:8080")
		for of, other := range map[*intent.ServicePort]*intent.ServicePort{service(5): six, six: service(5)} {
			bad := *of
			bad.ID.Service.Name = "bad"
			bad.Endpoints = other.Endpoints // of the other family
			be := b.open()
			wantOnly := func(when string, err error, want ...*intent.ServicePort) {
				t.Helper()
				var part *dataplane.PortErrors
				if !errors.As(err, &part) || len(part.Errors) != 1 || part.Errors[bad.ID] == nil {
					t.Errorf("%s: error %v, want one of the refused port", when, err)
				}
				have, err := be.Applied(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if !slices.EqualFunc(have.Ports, want, func(a, b *intent.ServicePort) bool { return a.ID == b.ID }) {
					t.Errorf("%s: %d ports are served, want %d", when, len(have.Ports), len(want))
				}
			}
			if err := be.Replace(t.Context(), intent.State{Ports: []*intent.ServicePort{service(1), service(2)}}); err != nil {
				t.Fatal(err)
			}
			err := be.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{service(3), &bad}, Deletes: []intent.PortID{service(1).ID}})
			wantOnly("changes", err, service(2), service(3))
			state := intent.State{Ports: []*intent.ServicePort{service(3), service(4), &bad}}
			wantOnly("a full sync", be.Replace(t.Context(), state), service(3), service(4))
			be = b.open()
			wantOnly("a restart", be.Replace(t.Context(), state), service(3), service(4))
			if err := be.Apply(t.Context(), intent.Changes{Deletes: []intent.PortID{bad.ID}}); err != nil {
				t.Errorf("the refused port is deleted: %v", err)
			}
		}
	})
}
