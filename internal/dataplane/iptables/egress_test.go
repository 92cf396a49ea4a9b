package iptables

import (
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/decisions/egress"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// withEgress is the node whose pods of these ranges get its address in egress.
func withEgress(sources, keep string) intent.Node {
	ranges := func(list string) (out []netip.Prefix) {
		for _, p := range strings.Fields(list) {
			if a, err := netip.ParseAddr(p); err == nil {
				out = append(out, host(a))
				continue
			}
			out = append(out, prefix(p))
		}
		return out
	}
	n := testNode()
	n.Egress = egress.Plan{Sources: ranges(sources), Keep: ranges(keep)}
	return n
}

func (b *bench) replaceNode(be *Backend, n intent.Node, ports ...*intent.ServicePort) {
	b.t.Helper()
	if err := be.Replace(b.t.Context(), intent.State{Node: n, Ports: ports}); err != nil {
		b.t.Fatal(err)
	}
}

func TestRulesForPodsThatLeave(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be := b.open()
		// Ranges that join, that lie in another, that are not masked, and of all addresses.
		b.replaceNode(be, withEgress("10.244.0.0/17 10.244.128.0/17 10.244.3.0/24 fd44::1/48",
			"10.0.0.0/8 10.96.0.0/12 169.254.169.254/32 224.0.0.0/4 fc00::/7"))
		b.golden("egress", b.dump())
		b.inSync(be)
		b.replaceNode(be, withEgress("0.0.0.0/0 ::/0", "0.0.0.0/0"))
		b.golden("egress-all", b.dump())
		b.inSync(be)
		for _, none := range []intent.Node{withEgress("", "0.0.0.0/0 ::/0"), testNode()} {
			b.replaceNode(be, none)
			b.golden("no-services", b.dump())
		}
	})
}

func TestPodsLeaveWithTheNodesAddress(t *testing.T) {
	eachVariant(t, func(b *bench) {
		m := netnstest.NewOutside(t)
		be := b.open()
		for _, x := range netnstest.OutsideFamilies {
			b.replaceNode(be, withEgress(x.Pods, x.Other))
			for _, network := range []string{"tcp", "udp"} {
				m.Sees(network, "pod1", x.Pod1, x.Server, x.Node)
				m.Sees(network, "pod1", x.Pod1, x.Other, x.Pod1)
				m.Sees(network, "node", x.Node, x.Server, x.Node)
				// A process of the node asks the node itself: by lo.
				m.Sees(network, "node", x.Gateway, x.Node, x.Gateway)
				if kept := m.PortsKept(network, x); kept > 1 {
					t.Errorf("%s to %s: %d of 8 connections kept their port", network, x.Server, kept)
				}
			}
			b.apply(be, intent.Changes{Node: new(withEgress(x.Pods, ""))})
			m.Sees("tcp", "pod1", x.Pod1, x.Other, x.Node)
			b.apply(be, intent.Changes{Node: new(withEgress(x.Pod1, ""))})
			m.Sees("tcp", "pod1", x.Pod1, x.Other, x.Node)
			m.Sees("tcp", "pod2", x.Pod2, x.Other, x.Pod2)
			b.apply(be, intent.Changes{Node: new(testNode())})
			m.Sees("tcp", "pod1", x.Pod1, x.Server, x.Pod1)
		}
	})
}

// The last bits of a pod's address choose: egress.Plan.ForPods. Pod 1 ends in 2, pod 2 in 3.
func TestPodsLeaveWithAddressesOfTheNode(t *testing.T) {
	eachVariant(t, func(b *bench) {
		m := netnstest.NewOutside(t)
		be := b.open()
		for _, x := range netnstest.OutsideFamilies {
			more := m.Own(x)
			n := withEgress(x.Pods, "")
			n.Egress.Addresses = []netip.Addr{netip.MustParseAddr(more[0]), netip.MustParseAddr(more[1])}
			b.replaceNode(be, n)
			b.inSync(be)
			m.SeesPodsAs(x, more)
			n.Egress.Addresses = n.Egress.Addresses[:1]
			b.apply(be, intent.Changes{Node: &n})
			m.Sees("tcp", "pod2", x.Pod2, x.Server, more[0])
			b.apply(be, intent.Changes{Node: new(withEgress(x.Pods, ""))})
			own, _ := m.Ask("tcp", "pod1", x.Pod1, x.Server) // which one, the kernel decides
			m.Sees("tcp", "pod2", x.Pod2, x.Server, own.Addr().String())
			if dump := b.dump(); strings.Contains(dump, chainEgressAddresses) {
				t.Errorf("without addresses, the kernel holds\n%s", dump)
			}
		}
	})
}

func TestConnectionsToServicesAreNotOnesToTheOutside(t *testing.T) {
	eachVariant(t, func(b *bench) {
		m := netnstest.NewOutside(t)
		be := b.open()
		for i, x := range netnstest.OutsideFamilies {
			service := []string{"10.96.0.1", "fd96::1"}[i]
			web := &intent.ServicePort{
				ID:        id("web", "http", 8080, model.TCP, []model.Family{model.IPv4, model.IPv6}[i]),
				Frontends: []intent.Frontend{clusterIP(service, 8080, intent.ToCluster)},
				Endpoints: []intent.Endpoint{far(net.JoinHostPort(x.Server, "8080"))},
			}
			n := withEgress(x.Pods, "")
			n.Local.Sources = slices.Clone(n.Egress.Sources)
			b.replaceNode(be, n, web)
			m.Sees("tcp", "pod1", x.Pod1, service, x.Pod1)
			m.Sees("tcp", "pod1", x.Pod1, x.Server, x.Node)
		}
	})
}

// The CNI's rule decides about the rest.
func TestTheRuleForPodsThatLeaveIsAheadOfTheCNIs(t *testing.T) {
	eachVariant(t, func(b *bench) {
		m := netnstest.NewOutside(t)
		x := netnstest.OutsideIPv4
		b.mustRun("iptables -t nat -A POSTROUTING -s 10.244.0.0/16 -j SNAT --to-source 198.51.100.77")
		be := b.open()
		b.replaceNode(be, withEgress(x.Pods, x.Other+"/32"))
		m.Sees("tcp", "pod1", x.Pod1, x.Server, x.Node)
		m.Sees("tcp", "pod1", x.Pod1, x.Other, "198.51.100.77")
		if err := Cleanup(t.Context(), b.cfg); err != nil {
			t.Fatal(err)
		}
		m.Sees("tcp", "pod1", x.Pod1, x.Server, "198.51.100.77")
		if dump := b.dump(); strings.Contains(dump, chainPrefix) {
			t.Errorf("after the cleanup, the kernel holds\n%s", dump)
		}
	})
}

func TestEditsOfTheRulesForPodsThatLeaveAreUndone(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be := b.open()
		s := intent.State{Node: withEgress("10.244.0.0/16", "10.0.0.0/8"), Ports: []*intent.ServicePort{service(1)}}
		b.replaceNode(be, s.Node, s.Ports...)
		jump := be.families[0].egress.jump().rule
		for _, row := range []struct{ edit, found string }{
			{"iptables -t nat -F SPW-EGRESS", "chain SPW-EGRESS emptied"},
			{"iptables -t nat -D SPW-EGRESS 1", "chain SPW-EGRESS changed"},
			{"", "jump from POSTROUTING changed"},
		} {
			if row.edit != "" {
				b.mustRun(row.edit)
			} else {
				b.must("*nat\n-D POSTROUTING " + jump + "\nCOMMIT\n")
			}
			b.replaceNode(be, s.Node, s.Ports...)
			if r := be.Repaired(); !strings.Contains(r.Found, row.found) {
				t.Errorf("%q: repaired %+v", row.edit, r)
			}
			b.asWritten(be)
		}
		// A partial sync notices a missing jump.
		b.must("*nat\n-D POSTROUTING " + jump + "\nCOMMIT\n")
		s.Ports = append(s.Ports, service(2))
		b.apply(be, upserts(service(2)))
		b.asWritten(be)
		b.asFromScratch(s)
	})
}

// asWritten fails unless the kernel holds the rules for pods that leave.
func (b *bench) asWritten(be *Backend) {
	b.t.Helper()
	b.inSync(be)
	if dump := b.dump(); !strings.Contains(dump, "-A SPW-EGRESS -s 10.244.0.0/16 -j MASQUERADE") ||
		!strings.Contains(dump, "-j SPW-EGRESS\n") {
		b.t.Errorf("the kernel holds\n%s", dump)
	}
}

// Another node translated the request. It does not know an answer of this node's address.
func TestAnswersThatAHelperExpectsKeepTheirSource(t *testing.T) {
	eachVariant(t, func(b *bench) {
		m := netnstest.NewOutside(t)
		be := b.open()
		for i, x := range netnstest.OutsideFamilies {
			boot := &intent.ServicePort{
				ID:        id("boot", "tftp", 69, model.UDP, []model.Family{model.IPv4, model.IPv6}[i]),
				Frontends: []intent.Frontend{clusterIP([]string{"10.96.0.1", "fd96::1"}[i], 69, intent.ToCluster)},
				Endpoints: []intent.Endpoint{near(net.JoinHostPort(x.Pod1, "69"))},
				Helper:    intent.TFTP,
			}
			b.replaceNode(be, withEgress(x.Pods, ""), boot)
			if got := m.AskTFTP(x); got.String() != x.Pod1 {
				t.Errorf("the client gets an answer from %s, want %s", got, x.Pod1)
			}
		}
	})
}
