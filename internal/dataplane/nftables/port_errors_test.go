package nftables

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// A port that the kernel refuses is the only one that fails: others come and go, also after a restart.
func TestARefusedPortHoldsUpNoOther(t *testing.T) {
	for f, ip := range map[model.Family]string{model.IPv4: "10.96.0.", model.IPv6: "fd96::"} {
		t.Run(f.String(), func(t *testing.T) {
			enter(t)
			b := open(t)
			service := func(name string) *intent.ServicePort {
				return port(name, f, clusterIP(ip+name, intent.ToCluster),
					endpoints(map[model.Family]string{model.IPv4: "10.244.2.1:8080", model.IPv6: "[fd44:2::1]:8080"}[f]))
			}
			bad := service("9")
			bad.ID.Service.Name = strings.Repeat("x", 300) // a comment has 255 characters at most
			want := func(when string, err error, names ...string) {
				t.Helper()
				var part *dataplane.PortErrors
				if !errors.As(err, &part) || len(part.Errors) != 1 || part.Errors[bad.ID] == nil {
					t.Errorf("%s: error %v, want one of the refused port", when, err)
				}
				have, err := b.Applied(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				var got []string
				for _, p := range have.Ports {
					got = append(got, p.ID.Service.Name)
				}
				if !slices.Equal(got, names) {
					t.Errorf("%s: %v are served, want %v", when, got, names)
				}
			}
			state := func(names ...string) (s intent.State) {
				for _, name := range names {
					s.Ports = append(s.Ports, service(name))
				}
				return s
			}
			if err := b.Replace(t.Context(), state("1", "2")); err != nil {
				t.Fatal(err)
			}
			now := state("2", "3")
			now.Ports = append(now.Ports, bad)
			_ = b.Apply(t.Context(), intent.Changes{Upserts: now.Ports[1:], Deletes: []intent.PortID{service("1").ID}})
			// After an error the whole state follows.
			want("the whole state", b.Replace(t.Context(), now), "2", "3")
			if err := b.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{service("4")},
				Deletes: []intent.PortID{service("2").ID}}); err != nil {
				t.Errorf("a change of others: %v", err)
			}
			b.Close()
			b = open(t)
			now = state("3", "4", "5")
			now.Ports = append(now.Ports, bad)
			want("a restart", b.Replace(t.Context(), now), "3", "4", "5")
			if err := b.Apply(t.Context(), intent.Changes{Deletes: []intent.PortID{bad.ID}}); err != nil {
				t.Errorf("the refused port is deleted: %v", err)
			}
		})
	}
}

// A port of more endpoints than there are slots gives up what it had, with the batch of others.
func TestAPortOfTooManyEndpointsKeepsNoAddressFromOthers(t *testing.T) {
	for f, ip := range map[model.Family]string{model.IPv4: "10.96.0.", model.IPv6: "fd96::"} {
		t.Run(f.String(), func(t *testing.T) {
			enter(t)
			b := open(t)
			endpoint := endpoints(map[model.Family]string{model.IPv4: "10.244.2.1:8080", model.IPv6: "[fd44:2::1]:8080"}[f])
			large := port("large", f, clusterIP(ip+"1", intent.ToCluster), clusterIP(ip+"2", intent.ToCluster), endpoint)
			if err := b.Replace(t.Context(), intent.State{Node: node(), Ports: []*intent.ServicePort{large}}); err != nil {
				t.Fatal(err)
			}
			grown := port("large", f, clusterIP(ip+"1", intent.ToCluster))
			for range classes[len(classes)-1] + 1 {
				grown.Endpoints = append(grown.Endpoints, large.Endpoints...)
			}
			other := port("other", f, clusterIP(ip+"2", intent.ToCluster), endpoint,
				endpoints(map[model.Family]string{model.IPv4: "10.244.2.2:8080", model.IPv6: "[fd44:2::2]:8080"}[f]))
			err := b.Apply(t.Context(), intent.Changes{Upserts: []*intent.ServicePort{grown, other}})
			var part *dataplane.PortErrors
			if !errors.As(err, &part) || len(part.Errors) != 1 || part.Errors[grown.ID] == nil {
				t.Errorf("error %v, want one of the large port", err)
			}
			if err := b.Apply(t.Context(), intent.Changes{Deletes: []intent.PortID{grown.ID}}); err != nil {
				t.Errorf("the large port is deleted: %v", err)
			}
			b.Close()
			have, err := open(t).Applied(t.Context())
			if err != nil || len(have.Ports) != 1 || have.Ports[0].ID != other.ID || len(have.Ports[0].Endpoints) != 2 {
				t.Errorf("served are %v: %v", have.Ports, err)
			}
		})
	}
}
