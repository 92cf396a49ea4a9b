package server

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/diagnosis/doctor"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/reconcile"
)

// egressPlane has pods' connections to the outside. It had refused none at the first reading.
type egressPlane struct {
	fakePlane
	use      dataplane.EgressUse
	readings int
}

func (p *egressPlane) EgressUse() (*dataplane.EgressUse, error) {
	use := p.use
	if p.readings++; p.readings == 1 {
		use.Refused = 0
	}
	return &use, nil
}

func TestPortsOfEgressAreFound(t *testing.T) {
	for _, row := range []struct {
		connections int
		refused     uint64
		severity    string
	}{{79, 0, ""}, {80, 0, "warning"}, {95, 0, "critical"}, {60, 3, "critical"}} {
		t.Run(fmt.Sprint(row), func(t *testing.T) {
			pods := []dataplane.EgressPod{{Addr: netip.MustParseAddr("10.1.1.1"), Connections: 50}}
			p := &egressPlane{use: dataplane.EgressUse{Ports: 100, Refused: row.refused, Busiest: []dataplane.EgressDestination{
				{Protocol: model.TCP, Source: netip.MustParseAddr("192.0.2.1"), Destination: netip.MustParseAddrPort("198.51.100.7:443"),
					Connections: row.connections, Pods: pods},
				{Protocol: model.TCP, Connections: 1},
			}}}
			_, found := findingsOf(t, p)
			if row.severity == "" {
				if len(found) != 0 {
					t.Errorf("found %v, want nothing", found)
				}
				return
			}
			if len(found) != 1 || found[0].Id != "egress-ports-exhausted" || found[0].Severity != row.severity {
				t.Fatalf("found %v, want %s", found, row.severity)
			}
			want := []string{
				"pods' new connections to 198.51.100.7:443 ", fmt.Sprintf("%d of 100 ports of 192.0.2.1", row.connections),
				"50 of pod default/pod-10.1.1.1",
			}
			if row.refused > 0 {
				want = append(want, fmt.Sprintf("%d packets without a port", row.refused))
			}
			for _, text := range want {
				if all := fmt.Sprint(found); !strings.Contains(all, text) {
					t.Errorf("%q is not in %s", text, all)
				}
			}
		})
	}
}

func TestStatusDescribesEgress(t *testing.T) {
	sources := []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}
	for _, row := range []struct {
		mode egress.Mode
		plan egress.Plan
		want string
	}{
		{"", egress.Plan{}, "<nil>"},
		{egress.Off, egress.Plan{}, "<nil>"},
		{egress.Auto, egress.Plan{}, `mode:"auto"  connections:7`},
		{egress.Auto, egress.Plan{Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}, `mode:"auto" connections:7 addresses:"192.0.2.1"`},
		{egress.On, egress.Plan{Sources: sources, Keep: sources}, `mode:"on"  sources:"10.1.0.0/16"  kept:1  connections:7`},
	} {
		plane := &egressPlane{use: dataplane.EgressUse{Connections: 7}}
		s := &Server{cfg: Config{Backends: []dataplane.Backend{plane}}, log: slog.New(slog.DiscardHandler)}
		got := fmt.Sprint(s.describeEgress(reconcile.Status{EgressMode: row.mode, Egress: row.plan}))
		if strings.Join(strings.Fields(got), " ") != strings.Join(strings.Fields(row.want), " ") {
			t.Errorf("%s, %v: %s, want %s", row.mode, row.plan, got, row.want)
		}
		if n := len(s.egress.readings); n > 0 {
			t.Errorf("a status leaves %d readings: clients that ask often would fill the memory", n)
		}
	}
}

// TestRulesThatEgressBypassesAreFound: the agent knows which packets bypass them, and the node its rules.
func TestRulesThatEgressBypassesAreFound(t *testing.T) {
	plan := egress.Plan{Sources: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}}
	bypasses := dataplane.EgressUse{Bypasses: true, Devices: []string{"eth0"}}
	for _, row := range []struct {
		name  string
		plane dataplane.Backend
		plan  egress.Plan
		found bool
	}{
		{"egress", &egressPlane{use: bypasses}, plan, true},
		{"--bypass never", &egressPlane{use: dataplane.EgressUse{Devices: bypasses.Devices}}, plan, false},
		{"no pods", &egressPlane{use: bypasses}, egress.Plan{}, false},
		{"another dataplane", &fakePlane{}, plan, false},
	} {
		h := start(t, func(c *Config) {
			c.State, c.Backends = &fakeState{status: reconcile.Status{Egress: row.plan}}, []dataplane.Backend{row.plane}
			c.examine = func(context.Context) (*doctor.Node, error) {
				ns := doctor.Namespace{Report: conntrack.Report{Namespace: conntrack.OwnNamespace()},
					MarkRules: []doctor.MarkRule{{Text: "500: from all fwmark 0x1 lookup 100"}}}
				ns.Rules = zeroOf(ns.Rules)
				return &doctor.Node{Namespaces: []doctor.Namespace{ns}}, nil
			}
		}).wait(t)
		resp, err := h.client.Findings(t.Context(), &nodev1alpha1.FindingsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		found := slices.ContainsFunc(resp.Findings, func(f *nodev1alpha1.Finding) bool { return f.Id == "egress-bypasses-rules" })
		if found != row.found {
			t.Errorf("%s: findings %v, %v", row.name, resp.Findings, resp.Problems)
		}
	}
}

// zeroOf returns a zero value for a pointer of a type whose package is not imported.
func zeroOf[T any](*T) *T { return new(T) }
