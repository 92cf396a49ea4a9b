package store

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
)

const here = "here"

// TestIndexesFollowTheObjects compares a Store after many random Deltas with a fresh one
// that gets the same objects at once.
func TestIndexesFollowTheObjects(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		st := New(here)
		for range 200 {
			st.Apply(randomDelta(r))
		}
		fresh := New(here)
		fresh.Apply(everything(st))
		if got, want := describe(st), describe(fresh); !reflect.DeepEqual(got, want) {
			t.Fatalf("seed %d: indexes\n%v\nwant\n%v", seed, got, want)
		}
		st.Apply(model.Delta{Full: true})
		if got := describe(st); len(got) > 0 {
			t.Fatalf("seed %d: an empty Store has left %v", seed, got)
		}
	}
}

// TestReadersSeeEachChange replays to a Reader what a Store gets: the Reader's copy must
// equal the Store at each call.
func TestReadersSeeEachChange(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	st := New(here)
	pods, objects := map[model.Name]*model.Pod{}, map[model.Name]*model.EndpointSlice{}
	calls := 0
	st.Subscribe(Reader{
		Pod: func(name model.Name, before, now *model.Pod) {
			calls++
			if pods[name] != before || st.Pod(name) != now || before == nil && now == nil {
				t.Errorf("pod %s: before %p, had %p; now %p, the Store has %p", name, before, pods[name], now, st.Pod(name))
			}
			pods[name] = now
		},
		Slice: func(name model.Name, before, now *model.EndpointSlice) {
			calls++
			if objects[name] != before {
				t.Errorf("slice %s: before %p, had %p", name, before, objects[name])
			}
			objects[name] = now
			if now != nil && !slices.ContainsFunc(st.SlicesOf(now.Service, nil), func(s *Slice) bool { return s.Object == now }) {
				t.Errorf("slice %s is not in the index yet", name)
			}
		},
	})
	for range 500 {
		st.Apply(randomDelta(r))
	}
	if calls < 300 {
		t.Errorf("only %d calls", calls)
	}
}

// TestPoliciesUnknownIsOfTheLastFullDelta: a full Delta that does not say so knows them all.
func TestPoliciesUnknownIsOfTheLastFullDelta(t *testing.T) {
	yes := true
	st, told := New(here), 0
	st.Subscribe(Reader{NetworkPoliciesUnknown: func() { told++ }})
	for i, step := range []struct {
		d    model.Delta
		want bool
		told int
	}{
		{model.Delta{NetworkPoliciesUnknown: &yes}, true, 1},
		{model.Delta{}, true, 1},
		{model.Delta{Full: true}, false, 2},
		{model.Delta{Full: true, NetworkPoliciesUnknown: &yes}, true, 3},
	} {
		if st.Apply(step.d); st.NetworkPoliciesUnknown() != step.want || told != step.told {
			t.Errorf("step %d: unknown %v, told %d times", i, st.NetworkPoliciesUnknown(), told)
		}
	}
}

// TestAPolicyWithoutRulesIsNone: it restricts nothing.
func TestAPolicyWithoutRulesIsNone(t *testing.T) {
	st, n := New(here), model.Name{Namespace: "n", Name: "p"}
	st.Apply(model.Delta{NetworkPolicies: map[model.Name]*model.NetworkPolicy{n: {Name: n, Egress: true}}})
	if !st.AnyNetworkPolicy() || len(st.NetworkPolicies("n")) != 1 {
		t.Error("a policy with rules is not there")
	}
	st.Apply(model.Delta{NetworkPolicies: map[model.Name]*model.NetworkPolicy{n: {Name: n}}})
	if st.AnyNetworkPolicy() || len(st.NetworkPolicies("n")) != 0 {
		t.Error("a policy without rules is there")
	}
}

func pick[T any](r *rand.Rand, list ...T) T { return list[r.IntN(len(list))] }

// allNames are the names of all objects.
var allNames = []model.Name{{Namespace: "n", Name: "s"}, {Namespace: "n", Name: "t"}, {Namespace: "n", Name: "u"},
	{Namespace: "m", Name: "s"}, {Namespace: "m", Name: "t"}, {Namespace: "m", Name: "u"}}

// addrs is the number of addresses.
const addrs = 5

func randomName(r *rand.Rand) model.Name { return pick(r, allNames...) }

func addr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}) }

func randomAddr(r *rand.Rand) netip.Addr { return addr(r.IntN(addrs)) }

// randomDelta changes a few objects out of few, so that they meet.
func randomDelta(r *rand.Rand) model.Delta {
	d := model.Delta{Full: r.IntN(50) == 0, Pods: map[model.Name]*model.Pod{}, Slices: map[model.Name]*model.EndpointSlice{},
		Services: map[model.Name]*model.Service{}, NetworkPolicies: map[model.Name]*model.NetworkPolicy{}, Nodes: map[string]*model.Node{}}
	for range 1 + r.IntN(3) {
		n := randomName(r)
		switch r.IntN(5) {
		case 0:
			d.Pods[n] = nil
			if r.IntN(3) > 0 {
				d.Pods[n] = &model.Pod{Name: n, Node: pick(r, here, "there"), IPs: []netip.Addr{randomAddr(r), randomAddr(r)}[:r.IntN(3)]}
			}
		case 1:
			d.Slices[n] = nil
			if r.IntN(3) > 0 {
				s := &model.EndpointSlice{Name: n, Service: randomName(r)}
				for range r.IntN(3) {
					s.Endpoints = append(s.Endpoints, model.Endpoint{Addr: randomAddr(r), Node: pick(r, "", here, "there"),
						Pod: pick(r, model.Name{}, randomName(r)), Ready: r.IntN(2) == 0})
				}
				d.Slices[n] = s
			}
		case 2:
			d.Services[n] = pick(r, nil, &model.Service{Name: n})
		case 3:
			d.NetworkPolicies[n] = pick(r, nil, &model.NetworkPolicy{Name: n, Ingress: r.IntN(2) == 0})
		case 4:
			d.Nodes[n.Name] = pick(r, nil, &model.Node{Name: n.Name})
		}
	}
	return d
}

// everything returns the objects of a Store as a full Delta.
func everything(st *Store) model.Delta {
	d := model.Delta{Full: true, Pods: st.pods.objects, Services: st.services.objects, NetworkPolicies: st.networkPolicies.objects,
		Nodes: st.nodes.objects, Slices: map[model.Name]*model.EndpointSlice{}}
	for n, s := range st.slices.entries {
		d.Slices[n] = s.Object
	}
	return d
}

// describe writes all objects and indexes of a Store as sorted lists by key.
func describe(st *Store) map[string][]string {
	out := map[string][]string{}
	add := func(key string, v any) { out[key] = append(out[key], fmt.Sprint(v)) }
	for n := range st.Pods() {
		add("pods", n)
	}
	for n := range st.Services() {
		add("services", n)
	}
	for _, n := range st.NodeNames() {
		add("nodes", n)
	}
	for s := range st.Slices() {
		add("slices", s.Object.Name)
	}
	for a, list := range st.podsAt {
		for _, n := range list {
			add("pods at "+a.String(), n)
		}
	}
	for ns := range st.podsIn {
		for n := range st.PodsIn(ns) {
			add("pods in "+ns, n)
		}
	}
	for ns := range st.policiesIn {
		for _, p := range st.NetworkPolicies(ns) {
			add("policies in "+ns, p.Name)
		}
	}
	for _, key := range allNames {
		if list := st.SlicesOf(key, nil); len(list) > 0 {
			add(fmt.Sprint("sorted slices of ", key), names(list))
		}
	}
	for _, key := range allNames {
		for _, s := range st.SlicesOfPod(key) {
			add(fmt.Sprint("slices of pod ", key), s.Object.Name)
		}
	}
	for i := range addrs {
		for _, s := range st.SlicesAt(addr(i)) {
			add("slices at "+addr(i).String(), s.Object.Name)
		}
	}
	for name, x := range map[string]map[uint64]*Slice{"services": st.slices.ofService.one, "pods": st.slices.ofPod.one,
		"addresses": st.slices.ofAddr.one} {
		if len(x) > 0 {
			add("indexed "+name, len(x))
		}
	}
	for name, x := range map[string]index[uint64, *Slice]{"services": st.slices.ofService.more, "pods": st.slices.ofPod.more,
		"addresses": st.slices.ofAddr.more} {
		for _, list := range x {
			add(name+" of more than one slice", len(list))
		}
	}
	for ns := range st.slices.in {
		for s := range st.SlicesIn(ns) {
			add("slices in "+ns, s.Object.Name)
		}
	}
	for s := range st.SlicesOnNode() {
		add("slices on the node", s.Object.Name)
	}
	for _, list := range out {
		slices.Sort(list)
	}
	return out
}

func names(list []*Slice) (out []model.Name) {
	for _, s := range list {
		out = append(out, s.Object.Name)
	}
	return out
}
