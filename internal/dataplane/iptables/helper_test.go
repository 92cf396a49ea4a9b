package iptables

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/await"
)

func tftp() *intent.ServicePort {
	return &intent.ServicePort{
		ID: id("boot", "", 69, model.UDP, model.IPv4), Helper: intent.TFTP,
		Frontends: []intent.Frontend{
			clusterIP("10.96.0.69", 69, intent.ToCluster), nodePort(30069, intent.ToCluster, intent.ToCluster),
		},
		Endpoints: []intent.Endpoint{near("10.244.1.2:1069"), far("10.244.2.2:1069")},
	}
}

// raw returns table raw, "" if it does not exist. Reading it by iptables-save would
// create it.
func (b *bench) raw() string {
	b.t.Helper()
	text, err := b.command("iptables-save").Output()
	if err != nil {
		b.t.Fatal(err)
	}
	_, raw, _ := strings.Cut(string(text), "*raw")
	raw, _, _ = strings.Cut(raw, "COMMIT")
	return raw
}

func TestHelpersAreGivenToTheirServicesOnlyAndGoWithThem(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be := b.open()
		web := shapes()["cluster-ip"][0]
		b.replace(be, web)
		if raw := b.raw(); strings.Contains(raw, chainPrefix) {
			t.Errorf("without a Service that needs it, table raw holds\n%s", raw)
		}
		apply := func(c intent.Changes) {
			t.Helper()
			if err := be.Apply(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			b.inSync(be)
		}
		wants := func(raw string, want ...string) {
			t.Helper()
			for _, w := range want {
				if !strings.Contains(raw, w) {
					t.Errorf("%q is missing in\n%s", w, raw)
				}
			}
		}
		apply(intent.Changes{Upserts: []*intent.ServicePort{tftp()}})
		nodePorts := testNode().NodePortAddrs
		wants(b.raw(), "-A PREROUTING -m comment --comment \"spillway: helpers\" -j SPW-HELPERS", "-A OUTPUT ",
			"-A SPW-HELPERS -d 10.96.0.69/32 -p udp -m udp --dport 69 -j CT --helper tftp",
			"-A SPW-HELPERS -d 10.244.1.2/32 -p udp -m udp --dport 1069 -j CT --helper tftp",
			"-A SPW-HELPERS -d "+nodePorts[0].String()+"/32 -p udp -m udp --dport 30069 -j CT --helper tftp")
		if strings.Contains(b.raw(), "10.244.2.2") || strings.Contains(b.raw(), "10.96.0.1/32") {
			t.Errorf("another address has a helper:\n%s", b.raw())
		}
		wants(b.dump(), "-A SPW-EXPECTED -s 10.244.1.2/32 -j SNAT --to-source 10.244.1.2")
		// Other changes keep it, and the agent restores it after a flush.
		apply(intent.Changes{Deletes: []intent.PortID{web.ID}})
		wants(b.raw(), "--dport 69 -j CT --helper tftp")
		b.mustRun("iptables -t raw -F SPW-HELPERS", "iptables -t raw -F PREROUTING")
		b.replace(be, tftp())
		wants(b.raw(), "--dport 69 -j CT --helper tftp", "-A PREROUTING ")
		// A new process finds it, and removes it with the Service.
		again := b.open()
		b.replace(again, web)
		if strings.Contains(b.raw(), chainPrefix) || strings.Contains(b.dump(), chainExpected) {
			t.Errorf("left over:\n%s\n%s", b.raw(), b.dump())
		}
		b.replace(again, web, tftp())
		plain := tftp()
		plain.Helper = intent.NoHelper
		be = again
		apply(intent.Changes{Upserts: []*intent.ServicePort{plain}})
		if strings.Contains(b.raw(), chainPrefix) || strings.Contains(b.dump(), chainExpected) {
			t.Errorf("left over when it is no TFTP any more:\n%s\n%s", b.raw(), b.dump())
		}
	})
}

// Every packet of the node traverses these chains, and any author of a Service can have ports with a
// helper.
func TestManyPortsWithAHelperMakeNoLongChain(t *testing.T) {
	port := func(f model.Family, i int) *intent.ServicePort {
		addr, endpoint := netip.AddrFrom4([4]byte{10, 96, 1, byte(i)}), netip.AddrFrom4([4]byte{10, 244, 1, byte(i)})
		if f == model.IPv6 {
			addr, endpoint = netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(i)}), netip.AddrFrom16([16]byte{0: 0xfd, 1: 1, 15: byte(i)})
		}
		return &intent.ServicePort{
			ID: id("boot", fmt.Sprint("p", i), uint16(1000+i), model.UDP, f), Helper: intent.TFTP,
			Frontends: []intent.Frontend{{Addr: addr, Port: uint16(1000 + i), ExternalRoute: intent.ToCluster, InternalRoute: intent.ToCluster}},
			Endpoints: []intent.Endpoint{{Addr: netip.AddrPortFrom(endpoint, 69), ClusterPolicy: true, OnThisNode: true}},
		}
	}
	eachVariant(t, func(b *bench) {
		be := b.open()
		var all []*intent.ServicePort
		for i := range 100 {
			all = append(all, port(model.IPv4, i), port(model.IPv6, i))
		}
		b.replace(be, all...)
		check := func(rules int) {
			t.Helper()
			b.inSync(be)
			for _, save := range []string{"iptables-save", "ip6tables-save"} {
				text, err := b.command(save).Output()
				if err != nil {
					t.Fatal(err)
				}
				_, raw, _ := strings.Cut(string(text), "*raw")
				raw, _, _ = strings.Cut(raw, "COMMIT")
				if n := strings.Count(raw, "-j CT --helper tftp"); n != rules {
					t.Errorf("%s: %d rules give a helper, want %d", save, n, rules)
				}
				chains := map[string]int{}
				for line := range strings.Lines(raw) {
					if rule, is := strings.CutPrefix(line, "-A "); is {
						name, _, _ := strings.Cut(rule, " ")
						chains[name]++
					}
				}
				for name, n := range chains {
					if n > leafSize {
						t.Errorf("%s: chain %s has %d rules", save, name, n)
					}
				}
			}
		}
		check(200)
		change := intent.Changes{Upserts: []*intent.ServicePort{port(model.IPv4, 200), port(model.IPv6, 200)}}
		if err := be.Apply(t.Context(), change); err != nil {
			t.Fatal(err)
		}
		check(202)
		change = intent.Changes{Deletes: []intent.PortID{all[0].ID, all[1].ID, change.Upserts[0].ID, change.Upserts[1].ID}}
		for _, p := range all[2:194] {
			change.Deletes = append(change.Deletes, p.ID)
		}
		if err := be.Apply(t.Context(), change); err != nil {
			t.Fatal(err)
		}
		check(6)
	})
}

func ftp() *intent.ServicePort {
	return &intent.ServicePort{
		ID: id("files", "", 21, model.TCP, model.IPv4), Helper: intent.FTP,
		Frontends: []intent.Frontend{
			clusterIP("10.96.0.21", 21, intent.ToCluster), nodePort(30021, intent.ToCluster, intent.ToCluster),
			{Kind: intent.LoadBalancerIP, Addr: netip.MustParseAddr("192.0.2.21"), Port: 21, ExternalRoute: intent.ToCluster,
				InternalRoute: intent.ToCluster},
		},
		Endpoints: []intent.Endpoint{near("10.244.1.2:21"), far("10.244.2.2:21")},
	}
}

// mangle returns the agent's rules in table mangle, without counters.
func (b *bench) mangle() string {
	b.t.Helper()
	text, err := b.command("iptables-save").Output()
	if err != nil {
		b.t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "*mangle")
	table, _, _ = strings.Cut(table, "COMMIT")
	return table
}

// FTP may not announce a Service's port. These ports follow the Services, and a sync
// writes only the chain that names them.
func TestPortsThatFTPMayNotAnnounceFollowTheServices(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be := b.open()
		web := service(1)
		b.replace(be, web, tftp())
		if m := b.mangle(); strings.Contains(m, chainPrefix) {
			t.Errorf("without FTP, table mangle holds\n%s", m)
		}
		b.apply(be, upserts(ftp()))
		has := func(when, rule string, want bool) {
			t.Helper()
			if got := strings.Contains(b.mangle(), rule+"\n"); got != want {
				t.Errorf("%s: %q is there: %v, want %v\n%s", when, rule, got, want, b.mangle())
			}
			b.inSync(be)
		}
		const local = "-A SPW-TAKEN -p tcp -m addrtype --dst-type LOCAL -m tcp --dport "
		for _, rule := range []string{
			"-A SPW-TAKEN -p tcp -m tcp --dport 1:1023 -j DROP", local + "10248:10259 -j DROP", local + "30021 -j DROP",
			"-A SPW-TAKEN -d 192.0.2.21/32 -p tcp -m tcp --dport 21 -j DROP",
			"-A SPW-ANNOUNCED -s 10.244.2.2/32 -m conntrack --ctstate DNAT -j SPW-TAKEN",
			"-A SPW-LISTENING -m conntrack --ctstate DNAT --ctreplsrc 10.244.1.2 -j DROP",
		} {
			has("FTP", rule, true)
		}
		partly := func(when string, c intent.Changes) {
			t.Helper()
			before := be.verified
			if b.apply(be, c); be.verified != before {
				t.Errorf("%s: a full sync", when)
			}
		}
		web = service(1)
		web.Frontends = append(web.Frontends, nodePort(30022, intent.ToCluster, intent.ToCluster))
		partly("a NodePort comes", upserts(web))
		has("a NodePort comes", local+"30021:30022 -j DROP", true)
		more := ftp()
		more.Endpoints = append(more.Endpoints, near("10.244.1.3:21"))
		partly("an endpoint comes", upserts(more))
		has("an endpoint comes", "-A SPW-ANNOUNCED -m conntrack --ctstate DNAT --ctreplsrc 10.244.1.3 -j SPW-TAKEN", true)
		partly("the NodePort goes", intent.Changes{Deletes: []intent.PortID{web.ID}})
		has("the NodePort goes", local+"30021 -j DROP", true)
		wantMetric(t, be, partialFailures, 0)
		b.asFromScratch(intent.State{Node: testNode(), Ports: []*intent.ServicePort{tftp(), more}})
		b.apply(be, intent.Changes{Deletes: []intent.PortID{more.ID}})
		if m := b.mangle(); strings.Contains(m, chainPrefix) {
			t.Errorf("left over:\n%s", m)
		}
	})
}

// The kernel has no helper of this name. That simulates a kernel without TFTP's helper.
// The rules about a Service's FTP endpoints are not made anew for each change of another Service:
// here that would be hundreds of millions.
func TestAChangeDoesNotDependOnFTPEndpointsOfOthers(t *testing.T) {
	for f, addr := range map[model.Family]netip.Addr{model.IPv4: netip.MustParseAddr("10.0.0.1"), model.IPv6: netip.MustParseAddr("fd00::1")} {
		large := &intent.ServicePort{ID: id("files", "", 21, model.TCP, f), Helper: intent.FTP,
			Frontends: []intent.Frontend{{Addr: addr, Port: 21}}}
		for e := addr; len(large.Endpoints) < 100_000; e = e.Next() {
			large.Endpoints = append(large.Endpoints, intent.Endpoint{Addr: netip.AddrPortFrom(e, 21), ClusterPolicy: true})
		}
		r := newRuleset(nodeInputs{family: f})
		r.apply([]*intent.ServicePort{large}, nil)
		r.recomputeHelpers()
		done := make(chan bool, 1)
		go func() {
			named := true
			for i := range 2000 {
				r.apply([]*intent.ServicePort{{ID: id("web", "", 80, model.TCP, f),
					Frontends: []intent.Frontend{{Kind: intent.NodePort, Port: uint16(30000 + 2*i)}}}}, nil)
				diffs, full := r.recomputeHelpers()
				named = named && !full && len(diffs) == 1 && len(diffs[0].fill) == 1 && diffs[0].fill[0].name == chainTaken
			}
			done <- named
		}()
		await.True(t, f.String()+": all changes are made", func() bool { return len(done) > 0 })
		if !<-done {
			t.Errorf("%s: not each change is one of chain %s alone", f, chainTaken)
		}
	}
}

func TestAKernelWithoutAHelperServesThePortAndSaysSo(t *testing.T) {
	kernelName = func(intent.Helper) string { return "none-such" }
	t.Cleanup(func() { kernelName = intent.Helper.String })
	eachVariant(t, func(b *bench) {
		err := b.open().Replace(t.Context(), intent.State{Node: testNode(), Ports: []*intent.ServicePort{tftp()}})
		var failed *dataplane.PortErrors
		if !errors.As(err, &failed) || failed.Errors[tftp().ID] == nil ||
			!strings.Contains(failed.Errors[tftp().ID].Error(), "load nf_conntrack_tftp, nf_nat_tftp") {
			t.Errorf("error %v, want one of the port that names the modules", err)
		}
		if !strings.Contains(b.dump(), "10.96.0.69/32") || strings.Contains(b.raw(), chainPrefix) {
			t.Errorf("the port is not served, or with a helper:\n%s\n%s", b.dump(), b.raw())
		}
	})
}
