package iptables

import (
	"net/netip"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/decisions/intent"
)

func TestPodsAreToldAsTheNodeSays(t *testing.T) {
	ranges := []netip.Prefix{prefix("10.0.0.0/8"), prefix("fd44::/16")}
	for _, test := range []struct {
		name            string
		local           intent.LocalTraffic
		noPodCIDRs      bool
		cluster, inside string // matches of table nat, of IPv4
	}{
		{"nothing is said", intent.LocalTraffic{}, false, "-s 10.244.0.0/23, -s 10.244.2.0/24", "-s 10.244.1.0/24"},
		{"--cluster-cidr", intent.LocalTraffic{Sources: ranges}, false, "-s 10.0.0.0/8", "-s 10.244.1.0/24"},
		{"--cluster-cidr, and the Node has no podCIDRs", intent.LocalTraffic{Sources: ranges}, true, "-s 10.0.0.0/8", "-s 10.0.0.0/8"},
		{"--cluster-cidr of the other family", intent.LocalTraffic{Sources: ranges[1:]}, false,
			"-s 10.244.0.0/23, -s 10.244.2.0/24", "-s 10.244.1.0/24"},
		{"NodeCIDR", intent.LocalTraffic{Sources: testNode().PodCIDRs}, false, "-s 10.244.1.0/24", "-s 10.244.1.0/24"},
		{"BridgeInterface", intent.LocalTraffic{Interface: "cni0"}, false, "-i cni0", "-i cni0"},
		{"InterfaceNamePrefix", intent.LocalTraffic{Prefix: "cali"}, false, "-i cali+", "-i cali+"},
	} {
		t.Run(test.name, func(t *testing.T) {
			eachVariant(t, func(b *bench) {
				s := intent.State{Node: testNode(), Ports: shapes()["local"]}
				s.Node.Local = test.local
				if test.noPodCIDRs {
					s.Node.PodCIDRs = nil
				}
				be := b.open()
				if err := be.Replace(t.Context(), s); err != nil {
					t.Fatal(err)
				}
				b.inSync(be)
				dump, _, _ := strings.Cut(b.dump(), "ip6tables-save")
				if got := matchesOf(dump, "-A SPW-SOURCES ", " -j RETURN"); got != test.cluster {
					t.Errorf("sources in the cluster are %q, want %q", got, test.cluster)
				}
				chains, _, _ := be.families[0].serviceChains(s.Ports[0])
				for _, c := range chains {
					if !strings.HasPrefix(c.name, chainPrefix+kindExternal) {
						continue
					}
					if got := matchesOf(dump, "-A "+c.name+" ", " -j SPW-SVC-"); got != "-m addrtype --src-type LOCAL, "+test.inside {
						t.Errorf("led past policy Local are %q, want %q", got, test.inside)
					}
				}
			})
		})
	}
}

// matchesOf returns the matches of a dump's rules that have the given beginning and end.
func matchesOf(dump, begin, target string) string {
	var found []string
	for line := range strings.Lines(dump) {
		if rule, ok := strings.CutPrefix(line, begin); ok {
			if match, _, ok := strings.Cut(rule, target); ok {
				found = append(found, match)
			}
		}
	}
	return strings.Join(found, ", ")
}

// An endpoint that is known to be on another node costs a rule, not a chain.
func TestOnlyEndpointsThatMayBeHereHaveAHairpinChain(t *testing.T) {
	b := newBench(t)
	b.use(Legacy)
	be := b.open()
	node := testNode()
	node.PodCIDRs, node.ClusterCIDRs = nil, []netip.Prefix{prefix("10.0.0.0/8")} // of a node without podCIDRs
	p := service(1)
	p.Endpoints = []intent.Endpoint{far("10.244.2.2:8080"), near("10.244.1.2:8080"), far("10.99.0.1:8080")}
	p.Endpoints[2].NodeUnknown = true
	if err := be.Replace(t.Context(), intent.State{Node: node, Ports: []*intent.ServicePort{p}}); err != nil {
		t.Fatal(err)
	}
	dump := b.dump()
	if got := matchesOf(dump, "-A SPW-EP-", " -j MARK"); strings.Count(got, "-s ") != 2 ||
		!strings.Contains(got, "-s 10.244.1.2/32") || !strings.Contains(got, "-s 10.99.0.1/32") {
		t.Errorf("hairpin is %q", got)
	}
}
