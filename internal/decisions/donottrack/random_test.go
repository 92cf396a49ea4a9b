package donottrack

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"spillway.dev/spillway/internal/facts/model"
)

// dice makes objects of a small world, in which everything meets everything.
type dice struct{ *rand.Rand }

func (d dice) role() string { return []string{"cache", "client", "other"}[d.IntN(3)] }
func (d dice) addr() netip.Addr {
	if d.IntN(4) == 0 {
		return netip.MustParseAddr(fmt.Sprintf("fd00::%d", 1+d.IntN(6)))
	}
	return netip.AddrFrom4([4]byte{10, 0, 0, byte(1 + d.IntN(6))})
}

func (d dice) selection() *model.PodSelection {
	s := &model.PodSelection{Pods: labeled("role", d.role())}
	if d.IntN(3) == 0 {
		s.Namespaces = labeled("team", fmt.Sprint(d.IntN(2)))
	}
	return s
}

func (d dice) rule() model.PolicyRule {
	first := uint16(1 + d.IntN(4))
	r := model.PolicyRule{Ports: []model.PortRange{{Protocol: []model.Protocol{model.TCP, model.UDP}[d.IntN(2)], First: first,
		Last: first + uint16(d.IntN(3))}}}
	for range d.IntN(3) {
		if d.IntN(2) == 0 {
			r.Peers = append(r.Peers, model.PolicyPeer{Pods: d.selection()})
		} else {
			r.Peers = append(r.Peers, model.PolicyPeer{Block: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(d.IntN(2) * 4)}), 30)})
		}
	}
	return r
}

func (d dice) policy(name string) *model.DoNotTrackPolicy {
	p := &model.DoNotTrackPolicy{Name: name, Created: time.Unix(int64(d.IntN(2)), 0), Track: d.IntN(4) == 0, DenyOthers: d.IntN(2) == 0}
	if d.IntN(5) == 0 {
		p.Nodes = labeled("a", fmt.Sprint(d.IntN(2)))
	} else {
		p.Pods = d.selection()
	}
	for range 1 + d.IntN(2) {
		if d.IntN(3) > 0 {
			p.Ingress = append(p.Ingress, d.rule())
		} else {
			p.Egress = append(p.Egress, d.rule())
		}
	}
	return p
}

func (d dice) service(n model.Name) *model.Service {
	return &model.Service{Name: n, ClusterIPs: []netip.Addr{d.addr()},
		Ports: []model.ServicePort{{Protocol: model.TCP, Port: uint16(1 + d.IntN(5)), NodePort: uint16(d.IntN(4))}}}
}

func (d dice) slice(n, of model.Name) *model.EndpointSlice {
	s := &model.EndpointSlice{Name: n, Service: of, Ports: []model.EndpointPort{{Protocol: model.TCP, Port: uint16(1 + d.IntN(5))}}}
	for range d.IntN(3) {
		s.Endpoints = append(s.Endpoints, model.Endpoint{Addr: d.addr()})
	}
	return s
}

// change makes one change of the world.
func (d dice) change() (out model.Delta) {
	gone := d.IntN(4) == 0
	name := model.Name{Namespace: fmt.Sprint("ns", d.IntN(2)), Name: fmt.Sprint(d.IntN(5))}
	switch d.IntN(7) {
	case 0:
		var p *model.DoNotTrackPolicy
		if !gone {
			p = d.policy(name.Name)
		}
		out.DoNotTrackPolicies = map[string]*model.DoNotTrackPolicy{name.Name: p}
	case 1:
		var n *model.Namespace
		if !gone {
			n = &model.Namespace{Name: name.Namespace, Labels: map[string]string{"team": fmt.Sprint(d.IntN(2))}}
		}
		out.Namespaces = map[string]*model.Namespace{name.Namespace: n}
	case 2:
		var n *model.Node
		if !gone {
			n = &model.Node{Name: "here", Labels: map[string]string{"a": fmt.Sprint(d.IntN(2))}}
		}
		out.Nodes = map[string]*model.Node{"here": n}
	case 3:
		var s *model.Service
		if !gone {
			s = d.service(name)
		}
		out.Services = map[model.Name]*model.Service{name: s}
	case 4:
		var s *model.EndpointSlice
		if !gone {
			s = d.slice(name, model.Name{Namespace: name.Namespace, Name: fmt.Sprint(d.IntN(5))})
		}
		out.Slices = map[model.Name]*model.EndpointSlice{name: s}
	default:
		var p *model.Pod
		if !gone {
			p = &model.Pod{Name: name, Node: []string{"here", "there"}[d.IntN(2)], Labels: map[string]string{"role": d.role()},
				IPs: []netip.Addr{d.addr(), d.addr()}}
			if d.IntN(2) == 0 { // it may stay where it is, and have another role
				p.Node, p.IPs = "here", []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, name.Name[0] - '0' + 1})}
			}
			if d.IntN(4) == 0 {
				p.HostPorts = []model.HostPort{{Protocol: model.TCP, Port: uint16(1 + d.IntN(5)), Host: 8080}}
			}
		}
		out.Pods = map[model.Name]*model.Pod{name: p}
	}
	return out
}

// merge keeps the whole world.
func merge(w *model.Delta, d model.Delta) {
	into(&w.DoNotTrackPolicies, d.DoNotTrackPolicies)
	into(&w.Namespaces, d.Namespaces)
	into(&w.Nodes, d.Nodes)
	into(&w.Services, d.Services)
	into(&w.Slices, d.Slices)
	into(&w.Pods, d.Pods)
}

func into[K comparable, V any](dst *map[K]*V, src map[K]*V) {
	if *dst == nil {
		*dst = map[K]*V{}
	}
	maps.Copy(*dst, src)
	maps.DeleteFunc(*dst, func(_ K, v *V) bool { return v == nil })
}

// applied is a state that is kept by Changes alone, as a dataplane does.
type applied State

func (a *applied) take(t *testing.T, c Changes) {
	t.Helper()
	for _, ch := range c.Rules {
		set(t, a.Rules, ch, sameRule)
	}
	for _, ch := range c.Verdicts {
		set(t, a.Verdicts, ch, sameVerdict)
	}
	for _, ch := range c.Targets {
		set(t, a.Targets, ch, func(x, y string) bool { return x == y })
	}
	for _, ch := range c.Members {
		set(t, a.Members, ch, func(x, y bool) bool { return x == y })
	}
	for _, ch := range c.Tracked {
		set(t, a.Tracked, ch, func(x, y bool) bool { return x == y })
	}
	for m := range a.Members {
		if a.Rules[m.Rule] == nil {
			t.Fatalf("member %v is of no rule", m)
		}
	}
	for _, name := range a.Targets {
		if a.Verdicts[name] == nil {
			t.Fatalf("a target leads to verdict %q, which there is not", name)
		}
	}
}

func set[K comparable, V any](t *testing.T, m map[K]V, c Change[K, V], same func(a, b V) bool) {
	t.Helper()
	var none V
	if !same(m[c.Key], c.Had) {
		t.Fatalf("%v had %v, and a change says %v", c.Key, m[c.Key], c.Had)
	}
	if m[c.Key] = c.Want; same(c.Want, none) {
		delete(m, c.Key)
	}
}

// TestChangesLeadWhereTheWholeWorldDoes compares, after every change of a random
// world, what changes have led to with what a fresh Tracker makes of the whole.
func TestChangesLeadWhereTheWholeWorldDoes(t *testing.T) {
	for seed := range uint64(150) {
		d := dice{rand.New(rand.NewPCG(seed, 1))}
		cfg := Config{NodeName: "here", Netfilter: d.IntN(2) == 0}
		own := []netip.Addr{netip.MustParseAddr("10.0.0.6"), netip.MustParseAddr("fd00::6")}
		tr := New(cfg)
		tr.SetNodeAddrs(own)
		if d.IntN(2) == 0 {
			tr.StartTakeover()
		}
		kept := applied{map[string]*Rule{}, map[string]*Verdict{}, map[Target]string{}, map[Member]bool{}, map[Pair]bool{}}
		var world model.Delta
		run := d.connections()
		for range 60 {
			change := d.change()
			for d.IntN(3) == 0 {
				more := d.change()
				merge2(&change, more)
			}
			old, before := maps.Clone(world.Pods), fates(tr, run)
			merge(&world, change)
			for _, step := range []func() Changes{func() Changes { return tr.Apply(change) }, tr.ServicesWritten} {
				c := step()
				kept.take(t, c)
				for i, now := range fates(tr, run) {
					if now == untracked && before[i] != untracked && !c.MayAffectRunning && !comes(old, change, run[i]) {
						t.Fatalf("seed %d: %v may run, and is tracked no more; nobody is told that", seed, run[i])
					}
					before[i] = now
				}
			}
			all := map[Pair]bool{}
			for i, fate := range fates(tr, run) {
				pairs := tr.Untracks(run[i].proto, run[i].from, run[i].to)
				if (len(pairs) > 0) != (fate == untracked) {
					t.Fatalf("seed %d: %v: fate %d, pairs %v", seed, run[i], fate, pairs)
				}
				for _, p := range pairs {
					all[p] = true
				}
			}
			kept.take(t, Changes{Tracked: tr.SetTracked(all)})
			for i, fate := range fates(tr, run) {
				if unseen := tr.NotTracked(run[i].proto, run[i].from, run[i].to); unseen != (fate == denied) {
					t.Fatalf("seed %d: %v: fate %d, and all is kept: unseen %v", seed, run[i], fate, unseen)
				}
			}
			if !maps.Equal(kept.Tracked, tr.State().Tracked) || !maps.Equal(kept.Tracked, all) {
				t.Fatalf("seed %d: changes lead to %v", seed, kept.Tracked)
			}
			fresh := New(cfg)
			fresh.SetNodeAddrs(own)
			whole := world
			whole.Full = true
			fresh.Apply(whole)
			same(t, tr, fresh)
			if !maps.Equal(kept.Targets, fresh.State().Targets) || !maps.Equal(kept.Members, fresh.State().Members) ||
				!maps.EqualFunc(kept.Rules, fresh.State().Rules, sameRule) {
				t.Fatalf("seed %d: changes do not lead to the state", seed)
			}
		}
		kept.take(t, tr.Apply(model.Delta{Full: true}))
		if s := tr.State(); len(kept.Targets)+len(s.Rules)+len(s.Verdicts)+len(s.Members)+len(tr.used)+len(tr.installed)+len(tr.hasDenyRule) > 0 {
			t.Fatalf("seed %d: of nothing is left %+v, %v", seed, s, tr.used)
		}
	}
}

type connection struct {
	proto    model.Protocol
	from, to netip.AddrPort
}

// connections returns some translated connections, at any port of any address.
func (d dice) connections() (out []connection) {
	for range 300 {
		proto := []model.Protocol{model.TCP, model.UDP}[d.IntN(2)]
		out = append(out, connection{proto, netip.AddrPortFrom(d.addr(), uint16(1+d.IntN(7))), netip.AddrPortFrom(d.addr(), uint16(1+d.IntN(7)))})
	}
	return out
}

func fates(t *Tracker, run []connection) (out []packetVerdict) {
	for _, c := range run {
		out = append(out, t.verdict(c.proto, c.from, c.to))
	}
	return out
}

// comes reports whether an end of a connection is another pod's than before.
func comes(old map[model.Name]*model.Pod, change model.Delta, c connection) bool {
	for name, p := range change.Pods {
		for _, p := range []*model.Pod{p, old[name]} {
			same := p != nil && old[name] != nil && change.Pods[name] != nil && old[name].Node == change.Pods[name].Node &&
				slices.Equal(old[name].IPs, change.Pods[name].IPs)
			if p != nil && !same && (slices.Contains(p.IPs, c.from.Addr()) || slices.Contains(p.IPs, c.to.Addr())) {
				return true
			}
		}
	}
	return false
}

// merge2 puts a change over another, with what is gone.
func merge2(dst *model.Delta, src model.Delta) {
	over(&dst.DoNotTrackPolicies, src.DoNotTrackPolicies)
	over(&dst.Namespaces, src.Namespaces)
	over(&dst.Nodes, src.Nodes)
	over(&dst.Services, src.Services)
	over(&dst.Slices, src.Slices)
	over(&dst.Pods, src.Pods)
}

func over[K comparable, V any](dst *map[K]*V, src map[K]*V) {
	if *dst == nil {
		*dst = map[K]*V{}
	}
	maps.Copy(*dst, src)
}
