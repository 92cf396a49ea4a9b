package donottrack

import (
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

// world has random policies, and the maps that follow them.
type world struct {
	t     *testing.T
	r     *rand.Rand
	o     *objects.Objects
	u     *Maps
	state donottrack.State
	any   bool // what the programs were told last
}

func newWorld(t *testing.T, seed uint64) *world {
	_, o := objectstest.Objects(t, objects.Config{})
	w := &world{t: t, r: rand.New(rand.NewPCG(seed, 0)), o: o, state: donottrack.State{
		Rules: map[string]*donottrack.Rule{}, Verdicts: map[string]*donottrack.Verdict{},
		Targets: map[donottrack.Target]string{}, Members: map[donottrack.Member]bool{}, Tracked: map[donottrack.Pair]bool{},
	}}
	w.open(slog.New(slog.NewTextHandler(io.Discard, nil)))
	return w
}

func (w *world) open(log *slog.Logger) {
	w.t.Helper()
	u, err := Open(w.o, log, func(any bool) error { w.any = any; return nil })
	must.Do(w.t, err)
	w.u = u
}

// pod returns one of five addresses.
func pod(i int) netip.Addr {
	return netip.MustParseAddr([]string{"10.244.0.1", "10.244.0.2", "10.244.0.3", "fd44::1", "fd44::2"}[i])
}

func (w *world) pick(percent int) bool { return w.r.IntN(100) < percent }

// changeRules changes a rule and a verdict. Their members and targets go with them.
func (w *world) changeRules() {
	s := w.state
	name := fmt.Sprint("rule", w.r.IntN(6))
	delete(s.Rules, name)
	if w.pick(80) {
		r := &donottrack.Rule{Name: name, AnyPeer: w.pick(20), Pods: w.pick(60)}
		if w.pick(5) {
			r.Side = donottrack.Egress
		}
		if w.pick(40) {
			first := netip.AddrFrom4([4]byte{203, 0, 113, byte(w.r.IntN(8))})
			r.Blocks = []donottrack.Range{{First: first, Last: first.Next().Next()}}
		}
		s.Rules[name] = r
	}
	maps.DeleteFunc(s.Members, func(m donottrack.Member, _ bool) bool { return s.Rules[m.Rule] == nil || !s.Rules[m.Rule].Pods })
	name = fmt.Sprint("verdict", w.r.IntN(4))
	var of []string
	for _, rule := range slices.Sorted(maps.Keys(s.Rules)) {
		if s.Rules[rule].Side == donottrack.Ingress && w.pick(60) {
			of = append(of, rule)
		}
	}
	s.Verdicts[name] = &donottrack.Verdict{Name: name, Rules: of, Track: w.pick(10)}
	for verdict, v := range s.Verdicts {
		ofOthers := func(r string) bool { return s.Rules[r] == nil || s.Rules[r].Side == donottrack.Egress }
		if len(v.Rules) == 0 || slices.ContainsFunc(v.Rules, ofOthers) {
			delete(s.Verdicts, verdict)
		}
	}
	maps.DeleteFunc(s.Targets, func(_ donottrack.Target, v string) bool { return s.Verdicts[v] == nil })
	if w.pick(20) {
		pair := donottrack.Pair{Local: pod(w.r.IntN(5)), Peer: pod(w.r.IntN(5)), Protocol: model.TCP, Port: 80}
		if s.Tracked[pair] {
			delete(s.Tracked, pair)
		} else {
			s.Tracked[pair] = true
		}
	}
}

// changePods changes members and targets.
func (w *world) changePods() {
	s := w.state
	for range 1 + w.r.IntN(3) {
		if rules := slices.Sorted(maps.Keys(s.Rules)); len(rules) > 0 {
			m := donottrack.Member{Rule: rules[w.r.IntN(len(rules))], Addr: pod(w.r.IntN(5))}
			if s.Members[m] {
				delete(s.Members, m)
			} else if s.Rules[m.Rule].Pods {
				s.Members[m] = true
			}
		}
		protocols := []model.Protocol{model.TCP, model.UDP, model.SCTP}
		t := donottrack.Target{Addr: pod(w.r.IntN(5)), Protocol: protocols[w.r.IntN(3)], First: 80, Last: 80}
		if w.pick(20) {
			t.Last = 90
		}
		if verdicts := slices.Sorted(maps.Keys(s.Verdicts)); len(verdicts) > 0 && w.pick(70) {
			s.Targets[t] = verdicts[w.r.IntN(len(verdicts))]
		} else {
			delete(s.Targets, t)
		}
	}
}

func clone(s donottrack.State) donottrack.State {
	return donottrack.State{Rules: maps.Clone(s.Rules), Verdicts: maps.Clone(s.Verdicts), Targets: maps.Clone(s.Targets),
		Members: maps.Clone(s.Members), Tracked: maps.Clone(s.Tracked)}
}

func difference[K comparable, V comparable](had, want map[K]V) (list []donottrack.Change[K, V]) {
	for k, v := range had {
		if want[k] != v {
			list = append(list, donottrack.Change[K, V]{Key: k, Had: v, Want: want[k]})
		}
	}
	for k, v := range want {
		if _, ok := had[k]; !ok {
			list = append(list, donottrack.Change[K, V]{Key: k, Want: v})
		}
	}
	return list
}

// allowed returns what may bypass netfilter, a line each, by the meaning of the state.
func allowed(s donottrack.State) (lines []string) {
	for _, r := range s.Rules {
		if r.Side == donottrack.Egress {
			return nil // egress rules may deny what others allow
		}
	}
	for t, verdict := range s.Targets {
		v := s.Verdicts[verdict]
		excepted := false
		for p := range s.Tracked {
			excepted = excepted || p.Local == t.Addr && p.Protocol == t.Protocol && p.Port == t.First
		}
		if v.Track || excepted || t.First != t.Last || t.Protocol == model.SCTP || len(v.Rules) > 4 {
			continue
		}
		for _, name := range v.Rules {
			if r := s.Rules[name]; r.AnyPeer {
				lines = append(lines, fmt.Sprint(t, " from any"))
			}
			for m := range s.Members {
				if m.Rule == name {
					lines = append(lines, fmt.Sprint(t, " from ", m.Addr))
				}
			}
			for _, b := range s.Rules[name].Blocks {
				for a := b.First; a.Compare(b.Last) <= 0; a = a.Next() {
					lines = append(lines, fmt.Sprint(t, " from ", a))
				}
			}
		}
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}

// bypasses returns what bypasses netfilter by the content of the maps, as bpf/lib/donottrack reads it.
func (w *world) bypasses() (lines []string) {
	ports := objectstest.ReadAll[objects.TCFrontendKey, objects.TCUntrackedPort](w.t, w.o.Maps[objects.TCMapUntrackedPorts])
	pods := objectstest.ReadAll[objects.TCUntrackedPodKey, uint8](w.t, w.o.Maps[objects.TCMapUntrackedPods])
	blocks := objectstest.ReadAll[objects.TCRangeKey, uint8](w.t, w.o.Maps[objects.TCMapUntrackedBlocks])
	for k, port := range ports {
		t := donottrack.Target{Addr: objects.FromAddr(k.Addr, k.Family), Protocol: model.Protocol(k.Proto), First: 80, Last: 80}
		if k != objects.PortKey(t.Addr, t.Protocol, 80) {
			w.t.Fatalf("port %+v", k)
		}
		for _, rule := range port.Rules {
			peers := objects.TCUntrackedPeers(rule.Peers)
			if peers&objects.TCUntrackedPeersUNTRACKED_ANY != 0 {
				lines = append(lines, fmt.Sprint(t, " from any"))
			}
			for pod := range pods {
				if pod.Rule == rule.Id && peers&objects.TCUntrackedPeersUNTRACKED_PODS != 0 {
					lines = append(lines, fmt.Sprint(t, " from ", objects.FromAddr(pod.Addr, uint8(pod.Family))))
				}
			}
			for block := range blocks {
				if block.Scope != rule.Id || peers&objects.TCUntrackedPeersUNTRACKED_BLOCKS == 0 {
					continue
				}
				p := netip.PrefixFrom(objects.FromAddr(block.Addr, uint8(block.Family)), int(block.Prefixlen)-64)
				for a := p.Addr(); p.Contains(a); a = a.Next() {
					lines = append(lines, fmt.Sprint(t, " from ", a))
				}
			}
		}
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}

// TestMapsFollowPolicies: nothing bypasses netfilter that netfilter's table does not allow, neither the
// one before a change nor the one after it, and afterwards the whole state does.
func TestMapsFollowPolicies(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			w := newWorld(t, seed)
			changes, most := 0, 0
			for step := range 300 {
				before := clone(w.state)
				if w.pick(30) {
					w.changeRules()
				}
				w.changePods()
				c := &donottrack.Changes{
					Rules: difference(before.Rules, w.state.Rules), Verdicts: difference(before.Verdicts, w.state.Verdicts),
					Targets: difference(before.Targets, w.state.Targets), Members: difference(before.Members, w.state.Members),
					Tracked: difference(before.Tracked, w.state.Tracked),
				}
				if w.pick(5) {
					c = nil // a whole state
				}
				must.Do(t, w.u.Revoke(w.state, c))
				had, want := allowed(before), allowed(w.state)
				for _, line := range w.bypasses() {
					if !slices.Contains(had, line) || !slices.Contains(want, line) {
						t.Fatalf("step %d: after Revoke %s bypasses netfilter", step, line)
					}
				}
				must.Do(t, w.u.Grant(w.state, c))
				have := w.bypasses()
				if !slices.Equal(have, want) {
					t.Fatalf("step %d: bypassing netfilter:\n%s\nwant:\n%s", step, strings.Join(have, "\n"), strings.Join(want, "\n"))
				}
				ports := objectstest.ReadAll[objects.TCFrontendKey, objects.TCUntrackedPort](t, w.o.Maps[objects.TCMapUntrackedPorts])
				if w.any != (len(ports) > 0) {
					t.Fatalf("step %d: %d ports, and the programs were told %t", step, len(ports), w.any)
				}
				changes, most = changes+len(difference(toSet(had), toSet(want))), max(most, len(want))
			}
			if changes < 300 || most < 10 {
				t.Errorf("the world is dull: %d changes, at most %d ways", changes, most)
			}
		})
	}
}

func toSet(lines []string) map[string]bool {
	set := map[string]bool{}
	for _, l := range lines {
		set[l] = true
	}
	return set
}

// TestMapsOfAnEarlierRun: entries stay if its programs used them, and go if they did not; another
// program's entries go with the next whole state, with one line in the log.
func TestMapsOfAnEarlierRun(t *testing.T) {
	w := newWorld(t, 1)
	for len(allowed(w.state)) == 0 || !w.any {
		w.changeRules()
		w.changePods()
		must.Do(t, w.u.Revoke(w.state, nil))
		must.Do(t, w.u.Grant(w.state, nil))
	}
	want := w.bypasses()
	settings := objectstest.Settings(t, w.o)
	settings.Flags |= uint32(objects.TCSettingsFlagsSETTING_UNTRACKED)
	must.Do(t, w.o.Maps[objects.TCMapNodeSettings].Put(uint32(0), settings))
	var log strings.Builder
	w.open(slog.New(slog.NewTextHandler(&log, nil)))
	if have := w.bypasses(); !slices.Equal(have, want) || !w.u.Any() {
		t.Errorf("a new run leaves %q, want %q", have, want)
	}

	foreign := objects.PortKey(netip.MustParseAddr("10.244.9.9"), model.TCP, 80)
	must.Do(t, w.o.Maps[objects.TCMapUntrackedPorts].Put(foreign, objects.TCUntrackedPort{}))
	for range 2 {
		must.Do(t, w.u.Revoke(w.state, nil))
		must.Do(t, w.u.Grant(w.state, nil))
	}
	if have := w.bypasses(); !slices.Equal(have, want) {
		t.Errorf("with another program's entry: %q, want %q", have, want)
	}
	if n := strings.Count(log.String(), "another program changed"); n != 1 {
		t.Errorf("%d lines about another program, want 1: %s", n, log.String())
	}

	settings.Flags &^= uint32(objects.TCSettingsFlagsSETTING_UNTRACKED)
	must.Do(t, w.o.Maps[objects.TCMapNodeSettings].Put(uint32(0), settings))
	w.open(slog.New(slog.DiscardHandler))
	if have := w.bypasses(); len(have) != 0 || w.u.Any() {
		t.Errorf("entries that no program used stay: %q", have)
	}
}
