package nftables

import (
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/nft"
	"spillway.dev/spillway/test/await"
)

func openPolicies(t *testing.T) *Policies {
	t.Helper()
	p, err := NewDoNotTrack(t.Context(), "", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

// listed is what nft shows of the policies' table, "" if there is none.
func listed(t *testing.T) string {
	t.Helper()
	out, err := runNft("list table inet " + PolicyTable)
	if err != nil {
		return ""
	}
	return string(out)
}

// world is a small world of policies that changes at random.
type policyWorld struct {
	*rand.Rand
}

func (w *policyWorld) change() model.Delta {
	name := model.Name{Namespace: "n", Name: fmt.Sprint("p", w.IntN(6))}
	role := func() *model.PodSelection {
		return &model.PodSelection{Pods: &model.Selector{MatchLabels: map[string]string{"role": fmt.Sprint(w.IntN(2))}}}
	}
	if w.IntN(3) > 0 {
		p := &model.Pod{Name: name, Node: []string{"here", "there"}[w.IntN(2)], Labels: map[string]string{"role": fmt.Sprint(w.IntN(2))},
			IPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, byte(w.IntN(5))}), netip.MustParseAddr(fmt.Sprintf("fd00::%d", w.IntN(5)))}}
		if w.IntN(4) == 0 {
			p = nil
		}
		return model.Delta{Pods: map[model.Name]*model.Pod{name: p}}
	}
	first := uint16(1 + w.IntN(6))
	rule := model.PolicyRule{Ports: []model.PortRange{{Protocol: model.TCP, First: first, Last: first + uint16(w.IntN(4))}}}
	if w.IntN(3) > 0 {
		rule.Peers = append(rule.Peers, model.PolicyPeer{Pods: role()})
	}
	if w.IntN(3) > 0 {
		rule.Peers = append(rule.Peers, model.PolicyPeer{Block: netip.MustParsePrefix([]string{"0.0.0.0/0", "10.0.0.0/30",
			"192.168.0.0/16"}[w.IntN(3)])},
			model.PolicyPeer{Block: netip.MustParsePrefix("::/0"),
				Except: []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("ff00::/%d", 8+w.IntN(3)))}})
	}
	d := &model.DoNotTrackPolicy{Name: fmt.Sprint("policy", w.IntN(3)), Pods: role(), Track: w.IntN(4) == 0, DenyOthers: w.IntN(2) == 0}
	if w.IntN(2) == 0 {
		d.Ingress = append(d.Ingress, rule)
	} else {
		d.Egress = append(d.Egress, rule)
	}
	name.Name = d.Name
	if w.IntN(4) == 0 {
		d = nil
	}
	return model.Delta{DoNotTrackPolicies: map[string]*model.DoNotTrackPolicy{name.Name: d}}
}

// translated returns connections that netfilter translates: now and then none.
func (w *policyWorld) translated() map[donottrack.Pair]bool {
	out := map[donottrack.Pair]bool{}
	end := func(format string) netip.Addr { return netip.MustParseAddr(fmt.Sprintf(format, w.IntN(5))) }
	for range w.IntN(2) * 40 {
		format := []string{"10.0.0.%d", "fd00::%d"}[w.IntN(2)]
		out[donottrack.Pair{Local: end(format), Peer: end(format), Protocol: model.TCP, Port: uint16(1 + w.IntN(9))}] = true
	}
	return out
}

// TestPoliciesThatChangedAreAsThoseWrittenAnew compares what changes have left in
// the kernel with what one full write makes, and a full write with itself.
func TestPoliciesThatChangedAreAsThoseWrittenAnew(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			enter(t)
			w := &policyWorld{Rand: rand.New(rand.NewPCG(seed, 2))}
			tr := donottrack.New(donottrack.Config{NodeName: "here"})
			p := openPolicies(t)
			if err := p.Replace(t.Context(), tr.State()); err != nil {
				t.Fatal(err)
			}
			for i := range 40 {
				c := tr.Apply(w.change())
				c.Tracked = tr.SetTracked(w.translated())
				if err := p.Apply(t.Context(), c); err != nil {
					t.Fatalf("change %d: %v\n%+v\n%s", i, err, c, listed(t))
				}
				if i%8 != 7 {
					continue
				}
				have := holdsPolicies(t)
				if err := CleanupPolicies(t.Context(), ""); err != nil {
					t.Fatal(err)
				}
				p.state = outdated
				if err := p.Replace(t.Context(), tr.State()); err != nil {
					t.Fatal(err)
				}
				if want := holdsPolicies(t); have != want {
					t.Fatalf("after change %d the kernel holds\n%s\nand anew\n%s", i, have, want)
				}
				p.state = outdated
				p.Repaired()
				if err := p.Replace(t.Context(), tr.State()); err != nil {
					t.Fatal(err)
				}
				if r := p.Repaired(); r.Any() {
					t.Fatalf("what was just written is repaired: %+v\n%s", r, listed(t))
				}
			}
			c := tr.Apply(model.Delta{Full: true})
			c.Tracked = tr.SetTracked(nil)
			if err := p.Apply(t.Context(), c); err != nil || listed(t) != "" {
				t.Fatalf("of nothing is left: %v\n%s", err, listed(t))
			}
		})
	}
}

// TestReplaceWritesAnotherState: no other program has written to nf_tables since, yet the
// state is another. Repair is for the same state.
func TestReplaceWritesAnotherState(t *testing.T) {
	enter(t)
	w := &policyWorld{Rand: rand.New(rand.NewPCG(1, 2))}
	p, tr := openPolicies(t), donottrack.New(donottrack.Config{NodeName: "here"})
	for i := range 20 {
		tr.Apply(w.change())
		if err := p.Replace(t.Context(), tr.State()); err != nil {
			t.Fatal(err)
		}
		have := holdsPolicies(t)
		if err := CleanupPolicies(t.Context(), ""); err != nil {
			t.Fatal(err)
		}
		if err := p.Repair(t.Context(), tr.State()); err != nil {
			t.Fatal(err)
		}
		if want := holdsPolicies(t); have != want {
			t.Fatalf("after change %d the kernel holds\n%s\nand anew\n%s", i, have, want)
		}
	}
}

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// holdsPolicies is what the kernel holds, in order.
func holdsPolicies(t *testing.T) string {
	var conn nft.Conn
	defer conn.Close()
	img, err := conn.Read(t.Context(), nft.Table{Family: unix.NFPROTO_INET, Name: PolicyTable}, true)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, name := range sortedKeys(img.Sets) {
		fmt.Fprintf(&b, "set %s %x\n", name, img.Sets[name].Flags)
		for _, key := range sortedKeys(img.Sets[name].Elements) {
			v := img.Sets[name].Elements[key]
			fmt.Fprintf(&b, "  %x-%x %t %s\n", key, v.KeyEnd, v.IntervalEnd, v.Jump)
		}
	}
	for _, name := range sortedKeys(img.Chains) {
		fmt.Fprintf(&b, "chain %s %v %x\n", name, img.Chains[name].Hook, img.Chains[name].Sums)
	}
	return b.String()
}

func oneCache(deny bool) model.Delta {
	sel := func(role string) *model.PodSelection {
		return &model.PodSelection{Pods: &model.Selector{MatchLabels: map[string]string{"role": role}}}
	}
	pod := func(name, node, role, ip string) *model.Pod {
		return &model.Pod{Name: model.Name{Namespace: "n", Name: name}, Node: node, Labels: map[string]string{"role": role},
			IPs: []netip.Addr{netip.MustParseAddr(ip)}}
	}
	cache, client := pod("cache", "here", "cache", "10.244.0.2"), pod("client", "there", "client", "10.244.1.2")
	return model.Delta{Full: true, Pods: map[model.Name]*model.Pod{cache.Name: cache, client.Name: client},
		DoNotTrackPolicies: map[string]*model.DoNotTrackPolicy{"cache": {Name: "cache", Pods: sel("cache"), DenyOthers: deny,
			Ingress: []model.PolicyRule{{Ports: []model.PortRange{{Protocol: model.TCP, First: 11211, Last: 11211}},
				Peers: []model.PolicyPeer{{Pods: sel("client")}, {Block: netip.MustParsePrefix("192.0.2.0/24")}}}}}}}
}

func TestPoliciesReadWellInNft(t *testing.T) {
	enter(t)
	p, tr := openPolicies(t), donottrack.New(donottrack.Config{NodeName: "here"})
	tr.Apply(oneCache(true))
	if err := p.Replace(t.Context(), tr.State()); err != nil {
		t.Fatal(err)
	}
	text := listed(t)
	for _, line := range []string{
		"type filter hook prerouting priority raw; policy accept;", "type filter hook output priority raw; policy accept;",
		`th dport 11211 ip daddr . meta l4proto . th dport vmap @asked4 comment "requests to ports of addresses here"`,
		"elements = { 10.244.0.2 . tcp . 11211 : jump in-cache-0-from }",
		"ip saddr @in-cache-0-pods4 counter packets 0 bytes 0 notrack accept",
		"ip daddr @in-cache-0-pods4 counter packets 0 bytes 0 notrack return",
		"ip saddr @in-cache-0-ranges4 counter packets 0 bytes 0 notrack accept",
		`iif 0 fib saddr type local return comment "the node itself"`, `iif "lo" fib saddr type local return comment "the node itself"`,
		`fib daddr type local return comment "the node itself"`,
		"elements = { 10.244.1.2 }", "elements = { 192.0.2.0/24 }",
		`counter packets 0 bytes 0 drop comment "DoNotTrackPolicy cache, deny: others"`,
	} {
		if !strings.Contains(text, line) {
			t.Errorf("nft does not show %s", line)
		}
	}
	if t.Failed() || testing.Verbose() {
		t.Log(text)
	}
	// Who asks may be denied it by an egress rule: requests must go on to these then.
	asking := oneCache(true)
	asking.DoNotTrackPolicies["asking"] = &model.DoNotTrackPolicy{Name: "asking",
		Pods: asking.DoNotTrackPolicies["cache"].Pods, DenyOthers: true,
		Egress: []model.PolicyRule{{Ports: []model.PortRange{{Protocol: model.TCP, First: 53, Last: 53}}}}}
	if err := p.Apply(t.Context(), tr.Apply(asking)); err != nil {
		t.Fatal(err)
	}
	if text := listed(t); strings.Contains(text, "notrack accept") ||
		!strings.Contains(text, "ip saddr @in-cache-0-pods4 counter packets 0 bytes 0 notrack return") {
		t.Errorf("beside a policy with egress rules:\n%s", text)
	}
	if err := p.Apply(t.Context(), tr.Apply(oneCache(true))); err != nil || !strings.Contains(listed(t), "notrack accept") {
		t.Errorf("without egress rules again: %v\n%s", err, listed(t))
	}
	// The ports of all targets bound what is looked for.
	wider := oneCache(true)
	ingress := &wider.DoNotTrackPolicies["cache"].Ingress[0]
	ingress.Ports = append(ingress.Ports, model.PortRange{Protocol: model.UDP, First: 80, Last: 80})
	if err := p.Apply(t.Context(), tr.Apply(wider)); err != nil ||
		!strings.Contains(listed(t), "th dport 80-11211 ip daddr . meta l4proto . th dport vmap @asked4") {
		t.Errorf("with a second port: %v\n%s", err, listed(t))
	}
	tracked := oneCache(true)
	tracked.DoNotTrackPolicies["cache"].Track = true
	if err := p.Apply(t.Context(), tr.Apply(tracked)); err != nil {
		t.Fatal(err)
	}
	if text := listed(t); strings.Contains(text, " notrack ") ||
		!strings.Contains(text, "ip saddr @in-cache-0-pods4 counter packets 0 bytes 0 return") {
		t.Errorf("track: true is\n%s", text)
	}
}

// TestHoldsTellsWhatAnEarlierAgentLeft asks of a table as it comes and goes.
func TestHoldsTellsWhatAnEarlierAgentLeft(t *testing.T) {
	enter(t)
	p, tr := openPolicies(t), donottrack.New(donottrack.Config{NodeName: "here"})
	check := func(when string, p *Policies, want bool) {
		t.Helper()
		if got, err := p.HasPolicies(t.Context()); err != nil || got != want {
			t.Errorf("%s: holds %v, %v", when, got, err)
		}
	}
	check("nothing", p, false)
	tr.Apply(oneCache(true))
	if err := p.Replace(t.Context(), tr.State()); err != nil {
		t.Fatal(err)
	}
	check("a table", p, true)
	check("another agent", openPolicies(t), true)
	if err := p.Apply(t.Context(), tr.Apply(model.Delta{Full: true})); err != nil {
		t.Fatal(err)
	}
	check("emptied", p, false)
}

func TestPoliciesThatOthersChangeAreRestored(t *testing.T) {
	enter(t)
	p, tr := openPolicies(t), donottrack.New(donottrack.Config{NodeName: "here"})
	tr.Apply(oneCache(true))
	if err := p.Replace(t.Context(), tr.State()); err != nil {
		t.Fatal(err)
	}
	want := holdsPolicies(t)
	for _, edit := range []string{
		"flush ruleset", "delete table inet spillway-policy", "flush table inet spillway-policy",
		"flush chain inet spillway-policy in-cache-0-from", "flush map inet spillway-policy asked4",
		"delete element inet spillway-policy in-cache-0-pods4 { 10.244.1.2 }", "add element inet spillway-policy in-cache-0-pods4 { 10.9.9.9 }",
		"flush set inet spillway-policy in-cache-0-ranges4", "add chain inet spillway-policy mine",
		"add set inet spillway-policy mine { type ipv4_addr; }",
		"insert rule inet spillway-policy in-cache-0-from accept", "add table inet spillway-policy { flags dormant; }",
		"add element inet spillway-policy in-cache-0-ranges4 { 198.51.100.0/24 }",
	} {
		if out, err := runNft(edit); err != nil {
			t.Fatalf("%s: %v %s", edit, err, out)
		}
		select {
		case <-p.Drifted():
		case <-time.After(time.Minute):
			t.Fatalf("%s is not heard", edit)
		}
		if err := p.Replace(t.Context(), tr.State()); err != nil {
			t.Fatalf("after %s: %v", edit, err)
		}
		if r := p.Repaired(); !r.Any() {
			t.Errorf("%s: nothing is told as repaired", edit)
		}
		if got := holdsPolicies(t); got != want {
			t.Errorf("after %s:\n%s\nwant\n%s", edit, got, want)
		}
	}
}

// TestWhatAPolicyLeavesIsKeptForRunningConnections looks at the table of what is left: of
// targets that are removed or tracked, by changes and by a whole state, where netfilter
// translates. The table must be removed with that of the policies.
func TestWhatAPolicyLeavesIsKeptForRunningConnections(t *testing.T) {
	left := func() string {
		out, err := runNft("list table inet " + PolicyTable + leftPolicies)
		if err != nil {
			return ""
		}
		return string(out)
	}
	world := func() model.Delta {
		d := oneCache(true)
		p := d.DoNotTrackPolicies["cache"]
		p.Ingress[0].Ports = append(p.Ingress[0].Ports, model.PortRange{Protocol: model.UDP, First: 5000, Last: 5000},
			model.PortRange{Protocol: model.TCP, First: 7000, Last: 7009}, model.PortRange{Protocol: model.UDP, First: 6000, Last: 6009})
		return d
	}
	for _, test := range []struct {
		name   string
		change func(t *testing.T, p *Policies, tr *donottrack.Tracker) error
	}{
		{"a change", func(t *testing.T, p *Policies, tr *donottrack.Tracker) error {
			return p.Apply(t.Context(), tr.Apply(model.Delta{Full: true}))
		}},
		{"a whole state", func(t *testing.T, p *Policies, tr *donottrack.Tracker) error {
			tr.Apply(model.Delta{Full: true})
			return openPolicies(t).Replace(t.Context(), tr.State())
		}},
		{"a whole state of something else", func(t *testing.T, p *Policies, tr *donottrack.Tracker) error {
			d := world()
			d.DoNotTrackPolicies["cache"].Ingress[0].Ports = []model.PortRange{{Protocol: model.TCP, First: 1, Last: 1}}
			tr.Apply(d)
			return openPolicies(t).Replace(t.Context(), tr.State())
		}},
		{"tracked now", func(t *testing.T, p *Policies, tr *donottrack.Tracker) error {
			web := model.Name{Namespace: "n", Name: "web"}
			slice := &model.EndpointSlice{Name: web, Service: web, Endpoints: []model.Endpoint{{Addr: netip.MustParseAddr("10.244.0.2")}}}
			for _, r := range world().DoNotTrackPolicies["cache"].Ingress[0].Ports {
				slice.Ports = append(slice.Ports, model.EndpointPort{Protocol: r.Protocol, Port: r.First})
			}
			return p.Apply(t.Context(), tr.Apply(model.Delta{Services: map[model.Name]*model.Service{web: {Name: web}},
				Slices: map[model.Name]*model.EndpointSlice{web: slice}}))
		}},
	} {
		for _, nat := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, nat %v", test.name, nat), func(t *testing.T) {
				enter(t)
				if nat {
					if out, err := runNft("add table ip cni; add chain ip cni post { type nat hook postrouting priority 100; }"); err != nil {
						t.Fatalf("%v %s", err, out)
					}
				}
				p, tr := openPolicies(t), donottrack.New(donottrack.Config{NodeName: "here", Netfilter: true})
				tr.Apply(world())
				if err := p.Replace(t.Context(), tr.State()); err != nil || left() != "" {
					t.Fatalf("%v\n%s", err, left())
				}
				for range 2 { // the second time all is there
					if err := test.change(t, p, tr); err != nil {
						t.Fatal(err)
					}
					text := strings.NewReplacer(" . 6 ", " . tcp ", " . 17 ", " . udp ").Replace(left()) // as nft names them without /etc/protocols
					for _, want := range []string{"type nat hook postrouting priority srcnat - 3", "10.244.0.2 . tcp . 11211 timeout 1d expires",
						"10.244.0.2 . udp . 5000 timeout 5m",
						"10.244.0.2 . tcp timeout 1d", "sport @left4 snat ip to ip saddr"} {
						if strings.Contains(text, want) != nat {
							t.Errorf("nft shows %q, or not:\n%s", want, text)
						}
					}
					if strings.Contains(text, "10.244.0.2 . udp timeout") {
						t.Errorf("all that a pod sends over UDP keeps its source:\n%s", text)
					}
					tr = donottrack.New(donottrack.Config{NodeName: "here", Netfilter: true})
					tr.Apply(world())
					p = openPolicies(t)
					if err := p.Replace(t.Context(), tr.State()); err != nil {
						t.Fatal(err)
					}
				}
				if nat {
					emptyLeft(t)
				}
				p.leftLook = time.Now()
				if err := p.Replace(t.Context(), tr.State()); err != nil || left() != "" {
					t.Errorf("when its time is up: %v\n%s", err, left())
				}
				if err := test.change(t, p, tr); err != nil {
					t.Fatal(err)
				}
				if err := CleanupPolicies(t.Context(), ""); err != nil || left() != "" {
					t.Errorf("cleaned up: %v\n%s", err, left())
				}
			})
		}
	}
}

// emptyLeft has all that is in the table of what is left expire.
func emptyLeft(t *testing.T) {
	t.Helper()
	left := PolicyTable + leftPolicies
	if out, err := runNft(fmt.Sprintf("flush set inet %s left4; flush set inet %[1]s left-hosts4; add element inet %[1]s left4 { "+
		"10.244.0.2 . tcp . 11211 timeout 10ms }", left)); err != nil {
		t.Fatalf("%v %s", err, out)
	}
	await.NoError(t, func() error {
		if out, err := runNft("list set inet " + left + " left4"); err != nil || strings.Contains(string(out), "11211") {
			return fmt.Errorf("it does not expire: %v %s", err, out)
		}
		return nil
	})
}

// TestWhatAPolicyLeftGoesWhoeverMadeIt has agents begin anew all the time: none is there
// long enough to see the end of what it has left.
func TestWhatAPolicyLeftGoesWhoeverMadeIt(t *testing.T) {
	left := func() bool { _, err := runNft("list table inet " + PolicyTable + leftPolicies); return err == nil }
	nat := func(verb string) {
		if out, err := runNft(verb + " table ip cni; " +
			map[string]string{"add": "add chain ip cni post { type nat hook postrouting priority 100; }"}[verb]); err != nil {
			t.Fatalf("%v %s", err, out)
		}
	}
	begin := func() *Policies {
		p := openPolicies(t)
		if err := p.Replace(t.Context(), donottrack.New(donottrack.Config{NodeName: "here"}).State()); err != nil {
			t.Fatal(err)
		}
		return p
	}
	look := func(p *Policies) {
		p.leftLook = time.Now()
		if err := p.Replace(t.Context(), donottrack.New(donottrack.Config{NodeName: "here"}).State()); err != nil {
			t.Fatal(err)
		}
	}
	for _, how := range []string{"emptied", "nobody translates"} {
		t.Run(how, func(t *testing.T) {
			enter(t)
			nat("add")
			p, tr := openPolicies(t), donottrack.New(donottrack.Config{NodeName: "here"})
			tr.Apply(oneCache(true))
			if err := p.Replace(t.Context(), tr.State()); err != nil {
				t.Fatal(err)
			}
			if err := p.Apply(t.Context(), tr.Apply(model.Delta{Full: true})); err != nil || !left() {
				t.Fatalf("nothing is left: %v", err)
			}
			p = begin()
			if look(p); !left() {
				t.Fatal("it goes while it holds something")
			}
			if how == "emptied" {
				emptyLeft(t)
				if begin(); left() {
					t.Error("the next agent leaves it although it is empty")
				}
				return
			}
			nat("delete")
			if look(p); !left() {
				t.Error("it goes although somebody translated just now")
			}
			if begin(); !left() {
				t.Error("it goes although it is not known who translated before")
			}
			if look(p); left() {
				t.Error("nobody translates any more, and it stays")
			}
			nat("add")
			tr = donottrack.New(donottrack.Config{NodeName: "here"})
			tr.Apply(oneCache(true))
			if err := p.Replace(t.Context(), tr.State()); err != nil {
				t.Fatal(err)
			}
			if err := p.Apply(t.Context(), tr.Apply(model.Delta{Full: true})); err != nil || !left() {
				t.Errorf("it is not made again when it is needed: %v", err)
			}
		})
	}
}
