package intent

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

func TestTheOlderOfTwoServicesWinsAndTheOtherTakesOver(t *testing.T) {
	hc := func(s *model.Service) {
		s.Type, s.ExternalLocal, s.HealthCheckNodePort = model.LoadBalancer, true, 31000
	}
	rows := []struct {
		name  string
		claim func(*model.Service)
		taken string // the frontend both want, as lines names it
		field string
		what  string
	}{
		{"a clusterIP and port", clusterIPs("10.96.0.1"), "ClusterIP 10.96.0.1:80", "spec.clusterIPs[0]", "10.96.0.1:80/TCP"},
		{"a NodePort", nodePort(30080), "NodePort *:30080", "spec.ports[0].nodePort", "NodePort 30080/TCP (IPv4)"},
		{"an externalIP and port", externalIPs("198.51.100.1"), "ExternalIP 198.51.100.1:80", "spec.externalIPs[0]", "198.51.100.1:80/TCP"},
		{"a LoadBalancer IP and port", loadBalancer("192.0.2.1"), "LoadBalancerIP 192.0.2.1:80",
			"status.loadBalancer.ingress", "192.0.2.1:80/TCP"},
		{"a healthCheckNodePort", hc, "", "spec.healthCheckNodePort", "healthCheckNodePort 31000"},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			older := web(called("older"), born(1), clusterIPs("10.96.0.7"), row.claim)
			younger := web(called("a-younger"), born(2), clusterIPs("10.96.0.8"), row.claim)
			if row.taken == "ClusterIP 10.96.0.1:80" {
				nodePort(30001)(older) // so that something is left to both
				nodePort(30002)(younger)
			}
			owners := func(tr *Tracker) string {
				var out []string
				for _, sp := range tr.State().Ports {
					if row.taken != "" && strings.Contains(describe([]*ServicePort{sp}), "\n"+row.taken+" ") {
						out = append(out, sp.ID.Service.Name)
					}
				}
				for _, h := range tr.HealthChecks() {
					out = append(out, h.Service.Name)
				}
				return strings.Join(out, " ")
			}
			problem := model.Problem{Object: model.ObjectRef{Kind: model.KindService, Name: model.Name{Namespace: "ns", Name: "a-younger"}},
				Where: "Service ns/a-younger", Field: row.field,
				What: row.what + " is already taken by Service ns/older; change one of the two"}

			tr := newTracker(younger)
			same(t, "owner while alone", owners(tr), "a-younger")
			c := tr.Apply(delta(older))
			same(t, "owner after the older came", owners(tr), "older")
			if len(c.Problems) != 1 || c.Problems[0] != problem {
				t.Errorf("problems %v, want %v", c.Problems, problem)
			}
			if len(tr.State().Ports) != 2 {
				t.Errorf("what is not contested is not served: %s", describe(tr.State().Ports))
			}
			if again := tr.Apply(delta(older)); !again.Empty() {
				t.Errorf("the same Service again changes %+v", again)
			}
			c = tr.Apply(model.Delta{Services: map[model.Name]*model.Service{name("older"): nil}})
			same(t, "owner after the older went", owners(tr), "a-younger")
			if c.Problems == nil || len(c.Problems) != 0 {
				t.Errorf("problems %#v after the conflict, want an empty list", c.Problems)
			}
			if len(c.Deletes) != 1 || len(c.Upserts)+len(c.HealthChecks) == 0 {
				t.Errorf("not taken over in the same Changes: %+v", c)
			}
		})
	}
}

// TestWhatIsServedStays has the address of z claimed by a, which comes later
// though its name is first.
func TestWhatIsServedStays(t *testing.T) {
	type opts []func(*model.Service)
	const address = "198.51.100.1"
	rows := []struct {
		name    string
		z, a    opts
		atOnce  string // who has the address if both come at once
		after   string // and if a comes later
		another string // and after who had it went and came back
	}{
		{"neither has a timestamp", opts{undated}, opts{undated}, "a", "z", "a"},
		{"the later one alone has a timestamp", opts{undated}, opts{born(1)}, "a", "z", "a"},
		{"the one that serves alone has a timestamp", opts{born(2)}, opts{undated}, "z", "z", "a"},
		{"the later one is younger", opts{born(1)}, opts{born(2)}, "z", "z", "z"},
		{"the later one is older", opts{born(2)}, opts{born(1)}, "a", "a", "a"},
		{"both are of one second", opts{born(1)}, opts{born(1)}, "a", "a", "a"},
		{"it is the clusterIP of the later one", opts{undated}, opts{undated, clusterIPs(address)}, "a", "a", "a"},
		{"it is the clusterIP of the one that serves", opts{undated, clusterIPs(address)}, opts{born(1)}, "z", "z", "z"},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			objects := map[string]*model.Service{
				"z": web(append(opts{called("z"), clusterIPs("10.96.0.1"), externalIPs(address)}, row.z...)...),
				"a": web(append(opts{called("a"), clusterIPs("10.96.0.2"), externalIPs(address)}, row.a...)...),
			}
			z, a := objects["z"], objects["a"]
			same(t, "owner if both come at once", ownerOf(newTracker(z, a), address), row.atOnce)
			tr := newTracker(z)
			tr.Apply(delta(a))
			same(t, "owner", ownerOf(tr, address), row.after)
			tr.Apply(whole(delta(z, a)))
			same(t, "owner after a whole world", ownerOf(tr, address), row.after)
			for _, s := range objects {
				edited := *s
				edited.Affinity, edited.Ports = time.Hour, []model.ServicePort{{Name: "new", Protocol: model.TCP, Port: 80}}
				tr.Apply(delta(&edited))
				same(t, "owner after an edit of "+s.Name.Name, ownerOf(tr, address), row.after)
			}
			tr.Apply(withoutService(row.after))
			same(t, "owner after the owner went", ownerOf(tr, address), map[string]string{"a": "z", "z": "a"}[row.after])
			tr.Apply(delta(objects[row.after]))
			same(t, "owner after it came back", ownerOf(tr, address), row.another)
		})
	}
}

// TestALoadBalancerGetsAnAddressThatAnExternalIPNamedBefore: a controller assigns the address
// of its pool to a Service that is younger than the one that lies in wait for it. The order in
// which a node learns of both makes no difference.
func TestALoadBalancerGetsAnAddressThatAnExternalIPNamedBefore(t *testing.T) {
	for _, address := range []string{"192.0.2.1", "2001:db8::1"} {
		for _, age := range []func(*model.Service){born(3), undated} {
			thief := web(called("a-thief"), born(1), clusterIPs("10.96.0.7", "fd00::7"), externalIPs(address))
			pending := web(called("young"), age, clusterIPs("10.96.0.8", "fd00::8"))
			assigned := web(called("young"), age, clusterIPs("10.96.0.8", "fd00::8"), loadBalancer(address))

			tr := newTracker(thief, pending)
			same(t, "owner before the assignment", ownerOf(tr, address), "a-thief")
			c := tr.Apply(delta(assigned))
			same(t, "owner", ownerOf(tr, address), "young")
			if len(c.Moves) != 1 || c.Moves[0].From.Service != name("a-thief") || c.Moves[0].To.Service != name("young") {
				t.Errorf("moves %v, want one from the thief", c.Moves)
			}
			wantProblem(t, "assigned", tr, "Service ns/a-thief: spec.externalIPs[0]: "+addressKey{Addr: addrs(address)[0], Protocol: model.TCP,
				Port: 80}.String()+" is already taken by Service ns/young")
			same(t, "owner at once", ownerOf(newTracker(thief, assigned), address), "young")
			late := newTracker(assigned)
			late.Apply(delta(thief))
			same(t, "owner if the thief comes later", ownerOf(late, address), "young")
			tr.Apply(delta(pending))
			same(t, "owner after the assignment", ownerOf(tr, address), "a-thief")
		}
	}
}

// ownerOf names the Services that are served on an address.
func ownerOf(tr *Tracker, address string) string {
	var out []string
	for _, sp := range tr.State().Ports {
		if slices.ContainsFunc(sp.Frontends, func(f Frontend) bool { return f.Addr == addrs(address)[0] }) {
			out = append(out, sp.ID.Service.Name)
		}
	}
	return strings.Join(out, " ")
}

func TestAnOldServiceThatClaimsAnewComesLater(t *testing.T) {
	tr := newTracker(web(called("a"), undated))
	tr.Apply(delta(web(called("z"), undated, clusterIPs("10.96.0.2"), externalIPs("198.51.100.1"))))
	tr.Apply(delta(web(called("a"), undated, externalIPs("198.51.100.1"))))
	same(t, "owner", ownerOf(tr, "198.51.100.1"), "z")
}

func TestConflicts(t *testing.T) {
	twoPorts := ports(model.ServicePort{Name: "a", Protocol: model.TCP, Port: 80, NodePort: 30080},
		model.ServicePort{Name: "b", Protocol: model.TCP, Port: 81, NodePort: 30080})
	rows := []struct {
		name    string
		objects []any
		loser   string // "Service field", "" for no conflict
		by      string
	}{
		{"of one age, the first by name wins", []any{web(called("b")), web(called("a"))}, "Service ns/b spec.clusterIPs[0]", "ns/a"},
		{"another port of the address is no conflict",
			[]any{web(called("a")), web(called("b"), ports(model.ServicePort{Protocol: model.TCP, Port: 81}))}, "", ""},
		{"another protocol is no conflict", []any{web(called("a")), web(called("b"), ports(model.ServicePort{Protocol: model.UDP, Port: 80}))},
			"", ""},
		{"a NodePort of another protocol is no conflict", []any{web(called("a"), nodePort(30080)),
			web(called("b"), clusterIPs("10.96.0.2"), ports(model.ServicePort{Protocol: model.UDP, Port: 80, NodePort: 30080}))}, "", ""},
		{"a NodePort of another family is no conflict",
			[]any{web(called("a"), nodePort(30080)), web(called("b"), clusterIPs("fd00::1"), nodePort(30080))}, "", ""},
		{"an externalIP never takes a clusterIP, however old",
			[]any{web(called("a"), born(2)), web(called("b"), born(1), clusterIPs("10.96.0.2"), externalIPs("10.96.0.1"))},
			"Service ns/b spec.externalIPs[0]", "ns/a"},
		{"an externalIP and a LoadBalancer IP are one address",
			[]any{web(called("a"), born(1), externalIPs("192.0.2.1")),
				web(called("b"), born(2), clusterIPs("10.96.0.2"), loadBalancer("192.0.2.1"))},
			"Service ns/a spec.externalIPs[0]", "ns/b"},
		{"a LoadBalancer IP never takes a clusterIP, however old",
			[]any{web(called("a"), born(2)), web(called("b"), born(1), clusterIPs("10.96.0.2"), loadBalancer("10.96.0.1"))},
			"Service ns/b status.loadBalancer.ingress", "ns/a"},
		{"of two LoadBalancer IPs the older wins", []any{web(called("a"), born(2), loadBalancer("192.0.2.1")),
			web(called("b"), born(1), clusterIPs("10.96.0.2"), loadBalancer("192.0.2.1"))},
			"Service ns/a status.loadBalancer.ingress", "ns/b"},
		{"two ports of one Service may conflict", []any{web(called("a"), twoPorts)}, "Service ns/a spec.ports[1].nodePort",
			`port "a" of the same Service`},
		{"a Service of another proxy claims nothing",
			[]any{web(called("b")), web(called("a"), func(s *model.Service) { s.ProxyName = "other" })}, "", ""},
	}
	for _, row := range rows {
		t.Run(row.name, func(t *testing.T) {
			got := newTracker(row.objects...).Problems()
			if row.loser == "" {
				if len(got) > 0 {
					t.Errorf("problems %v, want none", got)
				}
				return
			}
			if len(got) != 1 || got[0].Where+" "+got[0].Field != row.loser || !strings.Contains(got[0].What, row.by) {
				t.Errorf("problems %v, want %s to lose to %s", got, row.loser, row.by)
			}
		})
	}
}

// TestMovesNameBothPorts that an address passes between, and no others.
func TestMovesNameBothPorts(t *testing.T) {
	taken := externalIPs("198.51.100.1")
	younger := web(called("younger"), born(2), clusterIPs("10.96.0.8"), taken)
	renamed := web(called("younger"), born(2), clusterIPs("10.96.0.8"), ports(model.ServicePort{Name: "new", Protocol: model.TCP, Port: 80}))
	id := func(service, port string) PortID {
		return PortID{Service: name(service), Port: port, Number: 80, Protocol: model.TCP, Family: model.IPv4}
	}
	tr := New(Config{NodeName: here})
	for _, step := range []struct {
		what  string
		delta model.Delta
		want  []Move
	}{
		{"its first Service", delta(younger), nil},
		{"endpoints", delta(ofService(sliceOf("s", at("10.1.0.1", there)), "younger")), nil},
		{"an older Service with its address", delta(web(called("older"), born(1), clusterIPs("10.96.0.7"), taken)),
			[]Move{{id("younger", ""), id("older", "")}}},
		{"another name of the port", delta(renamed), []Move{{id("younger", ""), id("younger", "new")}}},
		{"no older Service", withoutService("older"), nil},
	} {
		if c := tr.Apply(step.delta); !slices.Equal(c.Moves, step.want) {
			t.Errorf("%s: moves %v, want %v", step.what, c.Moves, step.want)
		}
	}
}

// TestExternalIPDoesNotTakeTheAPIServer: an agent that lost its API server to a Service
// would not see that the Service is deleted.
func TestExternalIPDoesNotTakeTheAPIServer(t *testing.T) {
	tr := New(Config{NodeName: here, APIServer: netip.MustParseAddrPort("192.0.2.1:80")})
	tr.Apply(delta(
		web(clusterIPs("10.96.0.9"), externalIPs("192.0.2.1", "192.0.2.2")),
		web(called("other"), clusterIPs("10.96.0.8"), externalIPs("192.0.2.1"), portNumber(81)),
	))
	same(t, "state", describe(tr.State().Ports), text(`
		ns/other:81/TCP/IPv4
		ClusterIP 10.96.0.8:81 outside reject inside reject
		ExternalIP 192.0.2.1:81 outside reject inside reject
		ns/web:80/TCP/IPv4
		ClusterIP 10.96.0.9:80 outside reject inside reject
		ExternalIP 192.0.2.2:80 outside reject inside reject`))
	got := tr.Problems()
	if len(got) != 1 || got[0].Where != "Service ns/web" || got[0].Field != "spec.externalIPs[0]" ||
		!strings.Contains(got[0].What, "192.0.2.1:80/TCP is the API server") {
		t.Errorf("problems %v, want one about 192.0.2.1:80", got)
	}
}

func TestExternalIPsThatAreRefusedTakeNoAddressAndAreReported(t *testing.T) {
	tr := New(Config{NodeName: here, RefuseExternalIPs: true})
	tr.Apply(delta(
		web(called("taker"), born(1), clusterIPs("10.96.0.9"), externalIPs("192.0.2.1", "8.8.8.8"), nodePort(30080)),
		web(born(2), loadBalancer("192.0.2.1")), sliceOf("s", at("10.1.0.1", here)),
	))
	same(t, "state", describe(tr.State().Ports), text(`
		ns/taker:80/TCP/IPv4
		ClusterIP 10.96.0.9:80 outside reject inside reject
		NodePort *:30080 outside reject inside reject
		ns/web:80/TCP/IPv4
		ClusterIP 10.96.0.1:80 outside cluster inside cluster
		LoadBalancerIP 192.0.2.1:80 outside cluster inside cluster
		-> 10.1.0.1:8080 cluster here`))
	got := tr.Problems()
	if len(got) != 1 || got[0].Where != "Service ns/taker" || got[0].Field != "spec.externalIPs" ||
		!strings.Contains(got[0].What, "--allow-external-ips=false") || !strings.Contains(got[0].What, "CVE-2020-8554") {
		t.Errorf("problems %v, want one that names the field, the flag and the reason", got)
	}
}
