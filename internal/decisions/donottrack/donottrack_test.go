package donottrack

import (
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

func labeled(kv ...string) *model.Selector {
	s := &model.Selector{MatchLabels: map[string]string{}}
	for i := 0; i < len(kv); i += 2 {
		s.MatchLabels[kv[i]] = kv[i+1]
	}
	return s
}

func pod(ns, name, node string, role string, ips ...string) *model.Pod {
	p := &model.Pod{Name: model.Name{Namespace: ns, Name: name}, Node: node, Labels: map[string]string{"role": role}}
	for _, ip := range ips {
		p.IPs = append(p.IPs, netip.MustParseAddr(ip))
	}
	return p
}

func podsOf(list ...*model.Pod) map[model.Name]*model.Pod {
	out := map[model.Name]*model.Pod{}
	for _, p := range list {
		out[p.Name] = p
	}
	return out
}

func tcp(first, last uint16) model.PortRange {
	return model.PortRange{Protocol: model.TCP, First: first, Last: last}
}

// cache is a policy for pods of role cache on a port, whose peers are of role.
func cache(name string, first, last uint16, role string) *model.DoNotTrackPolicy {
	r := model.PolicyRule{Ports: []model.PortRange{tcp(first, last)}}
	if role != "" {
		r.Peers = []model.PolicyPeer{{Pods: &model.PodSelection{Pods: labeled("role", role)}}}
	}
	return &model.DoNotTrackPolicy{Name: name, Pods: &model.PodSelection{Pods: labeled("role", "cache")}, Ingress: []model.PolicyRule{r}}
}

func policiesOf(list ...*model.DoNotTrackPolicy) map[string]*model.DoNotTrackPolicy {
	out := map[string]*model.DoNotTrackPolicy{}
	for _, p := range list {
		out[p.Name] = p
	}
	return out
}

// targets writes a state's targets one a line.
func targets(s State) string {
	var out []string
	for _, t := range slices.SortedFunc(maps.Keys(s.Targets), Target.Compare) {
		out = append(out, fmt.Sprintf("%s %s %s %d-%d %s", t.Side, t.Addr, t.Protocol, t.First, t.Last, s.Targets[t]))
	}
	return strings.Join(out, "\n")
}

func TestOnePodMoreIsOneMemberMore(t *testing.T) {
	tr := New(Config{NodeName: "here"})
	d := model.Delta{Full: true, DoNotTrackPolicies: policiesOf(cache("c", 11211, 11211, "client")),
		Pods: podsOf(pod("a", "cache", "here", "cache", "10.0.0.1", "fd00::1"))}
	for i := range 10_000 {
		p := pod("a", fmt.Sprint("client", i), "there", "client", fmt.Sprintf("10.1.%d.%d", i/250, 1+i%250))
		d.Pods[p.Name] = p
	}
	tr.Apply(d)
	if n := len(tr.State().Members); n != 10_000 {
		t.Fatalf("%d members", n)
	}
	more := pod("a", "more", "there", "client", "10.2.0.1")
	c := tr.Apply(model.Delta{Pods: podsOf(more)})
	if want := []Change[Member, bool]{{Member{"in-c-0", more.IPs[0]}, false, true}}; !slices.Equal(c.Members, want) ||
		len(c.Rules)+len(c.Targets)+len(c.Verdicts) > 0 || c.Traversal != nil {
		t.Errorf("one pod more is %+v", c)
	}
	if c := tr.Apply(model.Delta{Pods: podsOf(pod("a", "stranger", "there", "other", "10.2.0.2"))}); !c.Empty() {
		t.Errorf("a stranger is %+v", c)
	}
}

func TestOlderPoliciesHoldAgainstThoseThatContradict(t *testing.T) {
	for _, field := range []string{"spec.deny", "spec.track"} {
		older, newer := cache("z", 10, 20, ""), cache("a", 20, 30, "")
		older.Created, newer.Created = time.Unix(1, 0), time.Unix(2, 0)
		if newer.DenyOthers = true; field == "spec.track" {
			newer.DenyOthers, newer.Track = false, true
		}
		tr := New(Config{NodeName: "here"})
		world := model.Delta{DoNotTrackPolicies: policiesOf(newer), Pods: podsOf(pod("n", "p", "here", "cache", "10.0.0.1"))}
		if c := tr.Apply(world); len(c.Refusals) > 0 {
			t.Errorf("alone: %v", c.Refusals)
		}
		c := tr.Apply(model.Delta{DoNotTrackPolicies: policiesOf(older)})
		if len(c.Refusals) != 1 || c.Refusals[0].Policy != "a" || c.Refusals[0].Field != field || c.Refusals[0].Reason != Contradiction {
			t.Errorf("refusals %+v, want one of a at %s", c.Refusals, field)
		}
		if got := targets(tr.State()); got != "ingress 10.0.0.1 TCP 10-20 in-z-0" {
			t.Errorf("targets %s", got)
		}
		c = tr.Apply(model.Delta{DoNotTrackPolicies: map[string]*model.DoNotTrackPolicy{"z": nil}})
		if c.Refusals == nil || len(c.Refusals) > 0 || targets(tr.State()) != "ingress 10.0.0.1 TCP 20-30 in-a-0" {
			t.Errorf("when the older is gone: %+v, targets %s", c.Refusals, targets(tr.State()))
		}
	}
}

func TestServicesThatNetfilterTranslatesRefusePolicies(t *testing.T) {
	name := model.Name{Namespace: "n", Name: "web"}
	svc := &model.Service{Name: name, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80, NodePort: 30000}}}
	slice := &model.EndpointSlice{Name: model.Name{Namespace: "n", Name: "web-1"}, Service: name,
		Ports:     []model.EndpointPort{{Protocol: model.TCP, Port: 11211}},
		Endpoints: []model.Endpoint{{Addr: netip.MustParseAddr("10.0.0.1")}}}
	out := cache("out", 80, 80, "")
	out.Ingress, out.Egress = nil, out.Ingress
	node := &model.DoNotTrackPolicy{Name: "node", Nodes: labeled("a", "b"),
		Ingress: []model.PolicyRule{{Ports: []model.PortRange{tcp(30000, 30000)}}}}
	all := []string{"in spec.ingress[0] " + NeedsNAT, "node spec.ingress[0] " + NeedsNAT, "out spec.egress[0] " + NeedsNAT}
	for _, test := range []struct {
		name    string
		cfg     Config
		refused []string
	}{
		{"ebpf", Config{}, []string{"node spec.ingress[0] " + NotSeen}},
		{"netfilter", Config{Netfilter: true}, all},
		{"beside another proxy", Config{ProxyName: "spillway"}, all},
	} {
		test.cfg.NodeName = "here"
		tr := New(test.cfg)
		tr.SetNodeAddrs([]netip.Addr{netip.MustParseAddr("192.0.2.1")})
		world := model.Delta{Full: true, DoNotTrackPolicies: policiesOf(cache("in", 11211, 11211, ""), out, node, cache("other", 99, 99, "")),
			Pods:     podsOf(pod("n", "p", "here", "cache", "10.0.0.1")),
			Nodes:    map[string]*model.Node{"here": {Name: "here", Labels: map[string]string{"a": "b"}}},
			Services: map[model.Name]*model.Service{name: svc}, Slices: map[model.Name]*model.EndpointSlice{slice.Name: slice}}
		tr.Apply(world)
		check := func(when string, want []string) {
			t.Helper()
			var got []string
			for _, r := range tr.Refusals() {
				if !strings.Contains(r.Message, "Service n/web") {
					t.Errorf("%s, %s: refusal %+v", test.name, when, r)
				}
				got = append(got, r.Policy+" "+r.Field+" "+r.Reason)
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s, %s: refused %q, want %q", test.name, when, got, want)
			}
		}
		check("all at once", test.refused)
		tr.Apply(model.Delta{Services: map[model.Name]*model.Service{name: nil}, Slices: map[model.Name]*model.EndpointSlice{slice.Name: nil}})
		tr.ServicesWritten()
		check("the Service gone", nil)
		tr.Apply(model.Delta{Slices: world.Slices})
		tr.Apply(model.Delta{Services: world.Services})
		check("the Service back", test.refused)
	}
}

// TestWhatInsteadOfAServiceThatNetfilterTranslates has each kind of port that netfilter
// translates, and the advice that helps there: --proxy-mode ebpf where it is not.
func TestWhatInsteadOfAServiceThatNetfilterTranslates(t *testing.T) {
	const headless, mode, helper = "leave the port out, or use a headless Service", ", or --proxy-mode ebpf",
		", or annotate the Service with spillway.dev/helper=none if it is not FTP"
	name := model.Name{Namespace: "n", Name: "web"}
	ftp := func(s *model.Service) (out []bool) {
		for _, p := range s.Ports {
			out = append(out, p.Port == 21)
		}
		return out
	}
	ftpAndSCTP := func(s *model.Service) []bool {
		out := ftp(s)
		for i, p := range s.Ports {
			out[i] = out[i] || p.Protocol == model.SCTP
		}
		return out
	}
	for _, test := range []struct {
		cfg   Config
		proto model.Protocol
		port  uint16 // of the Service; its endpoint has 2121
		what  string // "": nothing is refused
	}{
		{Config{Netfilter: true}, model.TCP, 21, headless + mode}, {Config{Netfilter: true}, model.SCTP, 80, headless},
		{Config{ProxyName: "spillway"}, model.TCP, 21, headless}, {Config{}, model.TCP, 21, ""},
		{Config{NeedsFallback: ftp}, model.TCP, 21, headless + helper}, {Config{NeedsFallback: ftp}, model.TCP, 80, ""},
		{Config{NeedsFallback: ftpAndSCTP}, model.SCTP, 80, headless},
	} {
		test.cfg.NodeName = "here"
		p := cache("p", 2121, 2121, "client")
		p.Ingress[0].Ports[0].Protocol = test.proto
		tr := New(test.cfg)
		tr.Apply(model.Delta{Full: true, DoNotTrackPolicies: policiesOf(p), Pods: podsOf(pod("n", "p", "here", "cache", "10.0.0.1")),
			Services: map[model.Name]*model.Service{name: {Name: name,
				Ports: []model.ServicePort{{Name: "other", Protocol: test.proto, Port: 9}, {Name: "a", Protocol: test.proto, Port: test.port}}}},
			Slices: map[model.Name]*model.EndpointSlice{name: {Name: name, Service: name,
				Ports:     []model.EndpointPort{{Name: "a", Protocol: test.proto, Port: 2121}},
				Endpoints: []model.Endpoint{{Addr: netip.MustParseAddr("10.0.0.1")}}}}})
		r := tr.Refusals()
		if test.what == "" {
			if len(r) > 0 || len(tr.State().Targets) != 1 {
				t.Errorf("%+v: refused %v", test, r)
			}
		} else if len(r) != 1 || r[0].Reason != NeedsNAT || !strings.HasSuffix(r[0].Message, "; "+test.what) || len(tr.State().Targets) > 0 {
			t.Errorf("%+v: refused %+v", test, r)
		}
		tr.Apply(model.Delta{Services: map[model.Name]*model.Service{name: nil}, Slices: map[model.Name]*model.EndpointSlice{name: nil}})
		tr.ServicesWritten()
		if len(tr.nat.at)+len(tr.pendingRemoval.at) > 0 || len(tr.State().Targets) != 1 {
			t.Errorf("%+v: of the Service is left %v", test, tr.nat.at)
		}
	}
}

// TestAPortOfTheNodeThatLeadsToAPodRefusesPolicies has a hostPort come and go, of a pod
// here and of one elsewhere, with eBPF, which has no part in it.
func TestAPortOfTheNodeThatLeadsToAPodRefusesPolicies(t *testing.T) {
	deny := cache("deny", 90, 90, "client")
	deny.DenyOthers = true
	with := func(p *model.Pod, ports ...model.HostPort) map[model.Name]*model.Pod {
		p.HostPorts = ports
		return podsOf(p)
	}
	here := func() *model.Pod { return pod("n", "p", "here", "cache", "10.0.0.1") }
	for _, after := range []bool{false, true} { // the policy
		tr := New(Config{NodeName: "here"})
		tr.Apply(model.Delta{Full: true, Pods: with(here(), model.HostPort{Protocol: model.TCP, Port: 80, Host: 8080})})
		if !after {
			tr = New(Config{NodeName: "here"})
		}
		tr.Apply(model.Delta{DoNotTrackPolicies: policiesOf(cache("c", 80, 80, "client"), deny)})
		tr.Apply(model.Delta{Pods: with(here(), model.HostPort{Protocol: model.TCP, Port: 80, Host: 8080},
			model.HostPort{Protocol: model.TCP, Port: 90, Host: 9090})})
		r := tr.Refusals()
		if len(r) != 2 || r[0].Reason != HostPort || !strings.Contains(r[0].Message,
			"is not applied to 10.0.0.1: hostPort 8080 of pod n/p leads there") ||
			!strings.Contains(r[1].Message, "is applied with conntrack to 10.0.0.1: hostPort 9090 of pod n/p leads there") ||
			!strings.HasSuffix(r[0].Message, "leave the port out, or take the hostPort out of the pod") {
			t.Errorf("refusals %+v", r)
		}
		if got, want := targets(tr.State()), "ingress 10.0.0.1 TCP 90-90 in-deny-0-tracked"; got != want {
			t.Errorf("targets %s, want %s", got, want)
		}
		tr.Apply(model.Delta{Pods: with(here(), model.HostPort{Protocol: model.UDP, Port: 80, Host: 8080})})
		if len(tr.Refusals()) > 0 || len(tr.State().Targets) != 2 {
			t.Errorf("another protocol: %+v", tr.Refusals())
		}
		tr.Apply(model.Delta{Pods: with(pod("n", "q", "there", "cache", "10.0.1.1"), model.HostPort{Protocol: model.TCP, Port: 80, Host: 8080})})
		if len(tr.Refusals()) > 0 {
			t.Errorf("another node's pod: %+v", tr.Refusals())
		}
		tr.Apply(model.Delta{Pods: map[model.Name]*model.Pod{here().Name: nil}})
		if len(tr.nat.at) > 0 {
			t.Errorf("of the pod is left %v", tr.nat.at)
		}
	}
}

// TestAServiceDoesNotOpenWhatAPolicyDenies puts a Service, of whichever namespace, over
// a pod of which others are denied: they still are, with conntrack.
func TestAServiceDoesNotOpenWhatAPolicyDenies(t *testing.T) {
	name := model.Name{Namespace: "elsewhere", Name: "mine"}
	slice := &model.EndpointSlice{Name: name, Service: name, Ports: []model.EndpointPort{{Protocol: model.TCP, Port: 11211}},
		Endpoints: []model.Endpoint{{Addr: netip.MustParseAddr("10.0.0.1")}}}
	deny := cache("c", 11211, 11211, "client")
	deny.DenyOthers = true
	tr := New(Config{NodeName: "here", Netfilter: true})
	tr.Apply(model.Delta{Full: true, DoNotTrackPolicies: policiesOf(deny),
		Pods: podsOf(pod("n", "p", "here", "cache", "10.0.0.1"), pod("n", "q", "here", "cache", "10.0.0.2"))})
	c := tr.Apply(model.Delta{Services: map[model.Name]*model.Service{name: {Name: name}},
		Slices: map[model.Name]*model.EndpointSlice{name: slice}})
	if got, want := targets(tr.State()), "ingress 10.0.0.1 TCP 11211-11211 in-c-0-tracked\ningress 10.0.0.2 TCP 11211-11211 "+
		"in-c-0"; got != want {
		t.Errorf("targets\n%s\nwant\n%s", got, want)
	}
	if v := tr.State().Verdicts["in-c-0-tracked"]; v == nil || !v.Track || !v.Deny || !slices.Equal(v.Rules, []string{"in-c-0"}) {
		t.Errorf("verdict %+v", v)
	}
	if len(c.Refusals) != 1 || c.Refusals[0].Reason != NeedsNAT || !strings.Contains(c.Refusals[0].Message, "others are denied there") {
		t.Errorf("refusals %+v", c.Refusals)
	}
}

// TestASliceLiftsNoDenialOfRequests: any author of a slice can name an address that a rule of
// egress allows. The rule still denies all others.
func TestASliceLiftsNoDenialOfRequests(t *testing.T) {
	for _, peer := range []string{"10.0.1.1", "fd00:1::1"} {
		peer := netip.MustParseAddr(peer)
		pods := podsOf(pod("n", "p", "here", "cache", "10.0.0.1", "fd00::1"))
		out := cache("out", 80, 80, "")
		out.Ingress[0].Peers = []model.PolicyPeer{{Block: netip.PrefixFrom(peer, peer.BitLen())}}
		out.Ingress, out.Egress, out.DenyOthers = nil, out.Ingress, true
		name := model.Name{Namespace: "tenant", Name: "mine"}
		tr := New(Config{NodeName: "here", Netfilter: true})
		tr.Apply(model.Delta{Full: true, DoNotTrackPolicies: policiesOf(out), Pods: pods})
		tr.Apply(model.Delta{Services: map[model.Name]*model.Service{name: {Name: name}}, Slices: map[model.Name]*model.EndpointSlice{name: {
			Name: name, Service: name, Ports: []model.EndpointPort{{Protocol: model.TCP, Port: 80}}, Endpoints: []model.Endpoint{{Addr: peer}}}}})
		s := tr.State()
		for _, a := range pods[model.Name{Namespace: "n", Name: "p"}].IPs {
			v := s.Verdicts[s.Targets[Target{Egress, a, model.TCP, 80, 80}]]
			if v == nil || !v.Deny || !v.Track {
				t.Errorf("a slice names %s: the verdict of %s is %+v, want one that tracks and denies", peer, a, v)
			}
		}
		if r := tr.Refusals(); len(r) != 1 || r[0].Reason != NeedsNAT || !strings.Contains(r[0].Message, "others are denied there") {
			t.Errorf("a slice names %s: refusals %+v", peer, r)
		}
	}
}

// TestPortsThatPodsAskFrom has policies be about ports that the pods' own connections
// to Services may come from: those answers would not be translated back.
func TestPortsThatPodsAskFrom(t *testing.T) {
	name := model.Name{Namespace: "n", Name: "web"}
	svc := &model.Service{Name: name, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}}}
	for _, test := range []struct {
		first, last uint16
		block       string // "": anybody
		netfilter   bool
		refused     int
	}{
		{30000, 65535, "", true, 1}, {40000, 40000, "", true, 1}, {30000, 65535, "10.0.0.0/8", true, 1}, {60999, 60999, "", true, 1},
		{30000, 65535, "10.0.0.0/16", true, 0}, {30000, 32767, "", true, 0}, {61000, 65535, "", true, 0}, {30000, 65535, "", false, 0},
	} {
		p := cache("c", test.first, test.last, "")
		if test.block != "" {
			p.Ingress[0].Peers = []model.PolicyPeer{{Block: netip.MustParsePrefix(test.block)}}
		}
		tr := New(Config{NodeName: "here", Netfilter: test.netfilter})
		tr.Apply(model.Delta{Full: true, DoNotTrackPolicies: policiesOf(p), Pods: podsOf(pod("n", "p", "here", "cache", "10.0.0.1"))})
		if len(tr.Refusals()) > 0 || len(tr.State().Targets) != 1 {
			t.Errorf("%+v: without a Service %v", test, tr.Refusals())
		}
		tr.Apply(model.Delta{Services: map[model.Name]*model.Service{name: svc}})
		if len(tr.Refusals()) != test.refused || len(tr.State().Targets) != 1-test.refused {
			t.Errorf("%+v: refusals %v", test, tr.Refusals())
		}
		tr.Apply(model.Delta{Services: map[model.Name]*model.Service{name: nil}})
		tr.ServicesWritten()
		if len(tr.Refusals()) > 0 || len(tr.State().Targets) != 1 {
			t.Errorf("%+v: the Service gone: %v", test, tr.Refusals())
		}
	}
}

func TestWhatAnybodyMayReachIsOpened(t *testing.T) {
	tr := New(Config{NodeName: "here"})
	world := func(change func(*model.DoNotTrackPolicy)) model.Delta {
		p := cache("c", 5, 6, "")
		change(p)
		return model.Delta{DoNotTrackPolicies: policiesOf(p), Pods: podsOf(pod("n", "p", "here", "cache", "10.0.0.1"))}
	}
	want := Target{Ingress, netip.MustParseAddr("10.0.0.1"), model.TCP, 5, 6}
	c := tr.Apply(world(func(p *model.DoNotTrackPolicy) { p.DenyOthers = true }))
	if c.Traversal == nil || !slices.Equal(c.Traversal.AllowsAny, []Target{want}) || len(c.Traversal.DenyRulePods) > 0 {
		t.Errorf("traversal %+v", c.Traversal)
	}
	for name, change := range map[string]func(*model.DoNotTrackPolicy){
		"track": func(p *model.DoNotTrackPolicy) { p.Track = true },
		"peers": func(p *model.DoNotTrackPolicy) {
			p.Ingress[0].Peers = []model.PolicyPeer{{Block: netip.MustParsePrefix("10.0.0.0/8")}}
		},
		"egress": func(p *model.DoNotTrackPolicy) { p.Ingress, p.Egress = nil, p.Ingress },
	} {
		if c := tr.Apply(world(change)); c.Traversal == nil || len(c.Traversal.AllowsAny) > 0 {
			t.Errorf("%s: opened %v", name, c.Traversal)
		}
		tr.Apply(world(func(*model.DoNotTrackPolicy) {}))
	}
}

func TestBlocksWithoutExceptions(t *testing.T) {
	for _, test := range []struct {
		block  string
		except []string
		want   string
	}{
		{"10.0.0.0/24", nil, "[{10.0.0.0 10.0.0.255}]"},
		{"10.0.0.0/24", []string{"10.0.0.0/25"}, "[{10.0.0.128 10.0.0.255}]"},
		{"10.0.0.0/24", []string{"10.0.0.128/25"}, "[{10.0.0.0 10.0.0.127}]"},
		{"0.0.0.0/0", []string{"255.255.255.255/32", "255.0.0.0/8", "0.0.0.0/32"}, "[{0.0.0.1 254.255.255.255}]"},
		{"fd00::/126", []string{"fd00::1/128", "fd00::2/128"}, "[{fd00:: fd00::} {fd00::3 fd00::3}]"},
		{"10.0.0.0/31", []string{"10.0.0.0/32", "10.0.0.1/32"}, "[]"},
	} {
		var except []netip.Prefix
		for _, e := range test.except {
			except = append(except, netip.MustParsePrefix(e))
		}
		slices.SortFunc(except, netip.Prefix.Compare)
		if got := fmt.Sprint(without(netip.MustParsePrefix(test.block), except)); got != test.want {
			t.Errorf("%s without %v: %s, want %s", test.block, test.except, got, test.want)
		}
	}
}

// same compares what two trackers want.
func same(t *testing.T, a, b *Tracker) {
	t.Helper()
	x, y := a.State(), b.State()
	if !reflect.DeepEqual(x.Targets, y.Targets) || !maps.Equal(x.Members, y.Members) || !maps.EqualFunc(x.Rules, y.Rules, sameRule) ||
		!maps.EqualFunc(x.Verdicts, y.Verdicts, sameVerdict) {
		t.Fatalf("states differ:\n%v\n%v\n%v\n--\n%v\n%v\n%v", targets(x), slices.Collect(maps.Keys(x.Rules)), x.Members, targets(y),
			slices.Collect(maps.Keys(y.Rules)), y.Members)
	}
	if !slices.Equal(a.Refusals(), b.Refusals()) {
		t.Fatalf("refusals differ:\n%v\n%v", a.Refusals(), b.Refusals())
	}
	if !maps.Equal(a.allowsAny, b.allowsAny) {
		t.Fatalf("opened differ: %v, %v", a.allowsAny, b.allowsAny)
	}
	if !maps.Equal(a.hasDenyRule, b.hasDenyRule) {
		t.Fatalf("guarded differ: %v, %v", a.hasDenyRule, b.hasDenyRule)
	}
}

// TestUnseenIsWhatNoPacketOfReachesConntrack asks of both ends, and of both directions.
func TestUnseenIsWhatNoPacketOfReachesConntrack(t *testing.T) {
	p, denying, tracked := cache("p", 80, 80, "client"), cache("q", 90, 99, "client"), cache("r", 70, 70, "client")
	denying.DenyOthers, tracked.Track, tracked.DenyOthers = true, true, true
	out := cache("s", 60, 60, "client")
	out.Ingress, out.Egress = nil, out.Ingress
	tr := New(Config{NodeName: "here"})
	tr.SetNodeAddrs([]netip.Addr{netip.MustParseAddr("192.0.2.1")})
	tr.Apply(model.Delta{Full: true, DoNotTrackPolicies: policiesOf(p, denying, tracked, out),
		Pods: podsOf(pod("n", "p", "here", "cache", "10.0.0.1"), pod("n", "c", "there", "client", "10.0.1.1"))})
	for _, test := range []struct {
		from, to string
		want     bool
	}{
		{"10.0.1.1:4000", "10.0.0.1:80", true}, {"10.0.0.1:80", "10.0.1.1:4000", true}, {"10.0.1.2:4000", "10.0.0.1:80", false},
		{"10.0.1.1:80", "10.0.0.1:4000", false}, {"10.0.1.1:4000", "10.0.0.1:81", false}, {"10.0.1.1:4000", "10.0.0.2:80", false},
		{"10.0.1.2:4000", "10.0.0.1:95", true}, {"192.0.2.1:4000", "10.0.0.1:95", false}, // denied; the node itself is not
		{"10.0.1.1:4000", "10.0.0.1:70", false}, {"10.0.1.2:4000", "10.0.0.1:70", true},
		{"10.0.0.1:4000", "10.0.1.1:60", true}, {"10.0.1.1:60", "10.0.0.1:4000", true}, {"10.0.0.1:60", "10.0.1.1:4000", false},
		{"10.0.0.1:4000", "10.0.1.2:60", false},
	} {
		from, to := netip.MustParseAddrPort(test.from), netip.MustParseAddrPort(test.to)
		if got := tr.NotTracked(model.TCP, from, to); got != test.want {
			t.Errorf("%s to %s: unseen %v", from, to, got)
		}
		if tr.NotTracked(model.UDP, from, to) {
			t.Errorf("%s to %s: UDP is unseen", from, to)
		}
	}
}

// webPod is the address of a pod of this node and endpoint of Service web, on port 80.
const webPod = "10.0.0.1"

var web = model.Name{Namespace: "n", Name: "web"}

// webWorld has Service web, its pod, and these policies.
func webWorld(policies ...*model.DoNotTrackPolicy) model.Delta {
	ports := []model.EndpointPort{{Protocol: model.TCP, Port: 80}}
	return model.Delta{Full: true, Pods: podsOf(pod("n", "a", "here", "cache", webPod)), DoNotTrackPolicies: policiesOf(policies...),
		Services: map[model.Name]*model.Service{web: {Name: web, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
			Ports: []model.ServicePort{{Protocol: model.TCP, Port: 80}}}},
		Slices: map[model.Name]*model.EndpointSlice{web: {Name: web, Service: web, Ports: ports,
			Endpoints: []model.Endpoint{{Addr: netip.MustParseAddr(webPod)}}}}}
}

// withoutWeb deletes Service web and its slice.
func withoutWeb() model.Delta {
	return model.Delta{Services: map[model.Name]*model.Service{web: nil}, Slices: map[model.Name]*model.EndpointSlice{web: nil}}
}

// untracksWeb reports whether a policy leaves packets to the pod of Service web untracked.
func untracksWeb(tr *Tracker) bool {
	return len(tr.Untracks(model.TCP, netip.MustParseAddrPort(webPod+":80"), netip.MustParseAddrPort("10.0.0.9:4000"))) > 0
}

// TestAPolicyWaitsUntilNothingTranslates: what a Service was in the way of is left
// untracked only when the kernel serves it no more. What a Service gets in the way of
// is tracked at once.
func TestAPolicyWaitsUntilNothingTranslates(t *testing.T) {
	world := func() model.Delta { return webWorld(cache("p", 80, 80, "")) }
	without := []struct {
		what string
		d    model.Delta
	}{
		{"the Service goes", withoutWeb()},
		{"its slice goes", model.Delta{Slices: map[model.Name]*model.EndpointSlice{web: nil}}},
		{"an endpoint goes", model.Delta{Slices: map[model.Name]*model.EndpointSlice{web: {Name: web, Service: web,
			Ports: world().Slices[web].Ports}}}},
		{"the next state is without", model.Delta{Full: true, Pods: world().Pods, DoNotTrackPolicies: world().DoNotTrackPolicies}},
	}
	for _, c := range without {
		tr := New(Config{NodeName: "here", Netfilter: true})
		tr.Apply(world())
		tr.ServicesWritten()
		tr.Apply(c.d)
		if untracksWeb(tr) {
			t.Errorf("%s: the policy holds while rules translate", c.what)
		}
		if ch := tr.ServicesWritten(); !untracksWeb(tr) || !ch.MayAffectRunning || len(ch.Refusals) != 0 || ch.Refusals == nil {
			t.Errorf("%s, and its rules: holds %v, changes %+v", c.what, untracksWeb(tr), ch)
		}
		if tr.Apply(world()); untracksWeb(tr) {
			t.Errorf("%s and comes back: the policy holds", c.what)
		}
	}
	tr := New(Config{NodeName: "here"})
	tr.StartTakeover()
	if c := tr.Apply(world()); untracksWeb(tr) || c.Refusals != nil {
		t.Errorf("kube-proxy's rules translate: the policy holds: %v, refused: %v", untracksWeb(tr), c.Refusals)
	}
	if c := tr.ReportRefusals(); len(c.Refusals) != 1 ||
		!strings.HasSuffix(c.Refusals[0].Message, "; leave the port out, or wait until eBPF serves it") {
		t.Errorf("it takes long: told %+v", c.Refusals)
	}
	if c := tr.ServicesWritten(); !untracksWeb(tr) || !c.MayAffectRunning || c.Refusals == nil || len(c.Refusals) > 0 {
		t.Errorf("eBPF serves: the policy holds: %v, changes %+v", untracksWeb(tr), c)
	}
	if c := tr.ServicesWritten(); !c.Empty() || c.Refusals != nil {
		t.Errorf("told twice: %+v", c)
	}
}

// TestTheFirstPolicyWaitsUntilNothingTranslates: it comes with, or after, the end of the
// Service, while the kernel still serves it.
func TestTheFirstPolicyWaitsUntilNothingTranslates(t *testing.T) {
	first := withoutWeb()
	first.DoNotTrackPolicies = policiesOf(cache("p", 80, 80, ""))
	replaced := model.Delta{DoNotTrackPolicies: policiesOf(cache("p", 80, 80, ""))}
	replaced.DoNotTrackPolicies["before"] = nil
	for _, c := range []struct {
		what   string
		before []*model.DoNotTrackPolicy
		deltas []model.Delta
	}{
		{"a policy comes with the end of the Service", nil, []model.Delta{first}},
		{"a policy replaces another after the end of the Service", []*model.DoNotTrackPolicy{cache("before", 90, 90, "")},
			[]model.Delta{withoutWeb(), replaced}},
	} {
		for range 20 { // orders of a map
			tr := New(Config{NodeName: "here", Netfilter: true})
			tr.Apply(webWorld(c.before...))
			tr.ServicesWritten()
			for _, d := range c.deltas {
				tr.Apply(d)
			}
			if untracksWeb(tr) {
				t.Fatalf("%s: the policy holds while rules translate", c.what)
			}
			if tr.ServicesWritten(); !untracksWeb(tr) {
				t.Fatalf("%s: the policy does not hold after the rules", c.what)
			}
		}
	}
}

// TestANewPeerWaitsUntilNothingTranslates: a pod becomes a peer of an egress rule while the
// kernel still serves a deleted Service with that pod.
func TestANewPeerWaitsUntilNothingTranslates(t *testing.T) {
	out := cache("out", 80, 80, "client")
	out.Pods.Pods = labeled("role", "source")
	out.Ingress, out.Egress = nil, out.Ingress
	source := pod("n", "b", "here", "source", "10.0.0.2")
	tr := New(Config{NodeName: "here", Netfilter: true})
	world := webWorld(out)
	world.Pods[source.Name] = source
	tr.Apply(world)
	tr.ServicesWritten()
	tr.Apply(withoutWeb())
	tr.Apply(model.Delta{Pods: podsOf(pod("n", "a", "here", "client", webPod))})
	const want = "egress 10.0.0.2 TCP 80-80 out-out-0"
	if got := targets(tr.State()); got != "" {
		t.Errorf("targets while rules translate: %s", got)
	}
	if tr.ServicesWritten(); targets(tr.State()) != want {
		t.Errorf("targets after the rules: %s, want %s", targets(tr.State()), want)
	}
}

// TestAServiceOpensNoNode: any author of a Service can name the node's address in externalIPs, and
// may not even be served there.
func TestAServiceOpensNoNode(t *testing.T) {
	const node = "192.0.2.1"
	rule := model.PolicyRule{Ports: []model.PortRange{tcp(10250, 10250)},
		Peers: []model.PolicyPeer{{Block: netip.MustParsePrefix("198.51.100.1/32")}}}
	policy := &model.DoNotTrackPolicy{Name: "kubelet", Nodes: labeled("a", "b"), DenyOthers: true, Ingress: []model.PolicyRule{rule}}
	svc := &model.Service{Name: model.Name{Namespace: "tenant", Name: "s"}, ExternalIPs: []netip.Addr{netip.MustParseAddr(node)},
		Ports: []model.ServicePort{{Protocol: model.TCP, Port: 10250}}}
	for _, netfilter := range []bool{false, true} {
		tr := New(Config{NodeName: "here", Netfilter: netfilter})
		tr.SetNodeAddrs(svc.ExternalIPs)
		tr.Apply(model.Delta{Full: true, DoNotTrackPolicies: policiesOf(policy),
			Nodes:    map[string]*model.Node{"here": {Name: "here", Labels: map[string]string{"a": "b"}}},
			Services: map[model.Name]*model.Service{svc.Name: svc}})
		s := tr.State()
		v := s.Verdicts[s.Targets[Target{Ingress, svc.ExternalIPs[0], model.TCP, 10250, 10250}]]
		if v == nil || !v.Deny || !v.Track {
			t.Errorf("netfilter %t: the verdict is %+v, want one that tracks and denies", netfilter, v)
		}
		if n := len(tr.Refusals()); n != 1 {
			t.Errorf("netfilter %t: %d refusals, want one", netfilter, n)
		}
	}
}

// TestALargeSliceIsKnownWhereRulesAre: any author of slices can name 20,000 ports of 1,000
// endpoints, and an entry for each is gigabytes.
func TestALargeSliceIsKnownWhereRulesAre(t *testing.T) {
	svc := &model.Service{Name: model.Name{Namespace: "tenant", Name: "s"}, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.1")}}
	slice := &model.EndpointSlice{Name: svc.Name, Service: svc.Name, Family: model.IPv4}
	for i := range uint16(100) {
		svc.Ports = append(svc.Ports, model.ServicePort{Name: fmt.Sprint("p", i), Protocol: model.TCP, Port: 1 + i})
		slice.Ports = append(slice.Ports, model.EndpointPort{Name: fmt.Sprint("p", i), Protocol: model.TCP, Port: 1000 + i})
	}
	for i := range byte(100) {
		slice.Endpoints = append(slice.Endpoints, model.Endpoint{Addr: netip.AddrFrom4([4]byte{10, 0, 0, i}), Ready: true})
	}
	tr := New(Config{NodeName: "here", Netfilter: true})
	tr.Apply(model.Delta{Full: true, DoNotTrackPolicies: policiesOf(cache("a", 1001, 1002, "")),
		Pods:     podsOf(pod("n", "p", "here", "cache", "10.0.0.1")),
		Services: map[model.Name]*model.Service{svc.Name: svc}, Slices: map[model.Name]*model.EndpointSlice{slice.Name: slice}})
	check := func(when string, want int, refused ...string) {
		t.Helper()
		n := 0
		for _, keys := range tr.nat.at {
			for k := range keys {
				if !k.frontend {
					n++
				}
			}
		}
		var got []string
		for _, r := range tr.Refusals() {
			got = append(got, r.Policy)
		}
		if n != want || !slices.Equal(got, refused) {
			t.Errorf("%s: %d entries, %q refused; want %d, %q", when, n, got, want, refused)
		}
	}
	check("two ports", 200, "a")
	tr.Apply(model.Delta{DoNotTrackPolicies: policiesOf(cache("b", 1050, 1050, ""))})
	check("three ports", 300, "a", "b")
	tr.Apply(model.Delta{DoNotTrackPolicies: map[string]*model.DoNotTrackPolicy{"a": nil}})
	check("one port", 100, "b")
	tr.Apply(model.Delta{Slices: map[model.Name]*model.EndpointSlice{slice.Name: nil}})
	tr.ServicesWritten()
	check("without the slice", 0)
	if n := len(tr.pendingRemoval.at); n != 0 {
		t.Errorf("%d addresses wait for their removal", n)
	}
}
