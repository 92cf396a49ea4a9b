// Package donottrack writes the maps of do-not-track policies.
package donottrack

import (
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
)

// Packets that do-not-track policies allow to ports of pods of this node bypass
// netfilter. Netfilter would neither track nor translate them, and has nothing else to
// decide:
//
//	Revoke ──> delete entries ──> netfilter's table is written ──> Grant ──> add entries
//
// So each entry is always allowed by netfilter's table too. Packets without an entry
// traverse the stack: ranges of ports, ports of connections that netfilter translates,
// entries that do not fit, and everything while there are egress rules, which may deny
// what others allow.

// Maps is the content of the maps of policies. It is their only writer. One goroutine uses it.
type Maps struct {
	ports, pods, blocks objects.Map
	have                entries
	next                *entries          // of a whole state, between Revoke and Grant
	ids                 map[string]uint32 // of rules, by name
	lastID              uint32
	egress              bool // there are egress rules
	tracked             map[objects.TCFrontendKey]bool
	unwritten           bool // some entries did not fit, and the log has said so: the next change may make room
	served              bool // see Served
	log                 *slog.Logger
	changed             func(untracking bool) error // receives whether there are ports
}

type entries struct {
	ports  map[objects.TCFrontendKey]objects.TCUntrackedPort
	pods   map[objects.TCUntrackedPodKey]uint8
	blocks map[objects.TCRangeKey]uint8
}

func newEntries() entries {
	return entries{map[objects.TCFrontendKey]objects.TCUntrackedPort{}, map[objects.TCUntrackedPodKey]uint8{}, map[objects.TCRangeKey]uint8{}}
}

// Open reads the entries of an earlier run. If its programs did not use them,
// an agent in between did not maintain them, and they may be outdated: then it deletes
// them.
func Open(o *objects.Objects, log *slog.Logger, changed func(untracking bool) error) (*Maps, error) {
	m, filter := o.Maps, o.Filter
	u := &Maps{
		ports: filter.Before(m[objects.TCMapUntrackedPorts]), pods: m[objects.TCMapUntrackedPods], blocks: m[objects.TCMapUntrackedBlocks],
		ids: map[string]uint32{}, log: log, changed: changed,
	}
	var s objects.TCSettings
	if err := m[objects.TCMapNodeSettings].Lookup(uint32(0), &s); err != nil {
		return nil, fmt.Errorf("read settings: %w", err)
	}
	if err := u.read(); err != nil {
		return nil, err
	}
	if s.TimeoutTcp != 0 && s.Flags&uint32(objects.TCSettingsFlagsSETTING_DRAINS) == 0 {
		if err := objects.Each(m[objects.TCMapFrontends], func(objects.TCFrontendKey, objects.TCFrontend) { u.served = true }); err != nil {
			return nil, err
		}
	}
	if s.Flags&uint32(objects.TCSettingsFlagsSETTING_UNTRACKED) == 0 {
		return u, u.revoke(newEntries())
	}
	return u, nil
}

func (u *Maps) read() error {
	u.have = newEntries()
	if err := objects.Each(u.ports, func(k objects.TCFrontendKey, v objects.TCUntrackedPort) { u.have.ports[k] = v }); err != nil {
		return err
	}
	if err := objects.Each(u.pods, func(k objects.TCUntrackedPodKey, v uint8) { u.have.pods[k] = v }); err != nil {
		return err
	}
	return objects.Each(u.blocks, func(k objects.TCRangeKey, v uint8) { u.have.blocks[k] = v })
}

// Served reports whether programs of an earlier run served Services when Open was called.
func (u *Maps) Served() bool { return u.served }

// id returns the number of a rule, which is never reused.
func (u *Maps) id(rule string) uint32 {
	if u.ids[rule] == 0 {
		u.lastID++
		u.ids[rule] = u.lastID
	}
	return u.ids[rule]
}

// port returns the entry of a target, if there is one.
func (u *Maps) port(s donottrack.State, t donottrack.Target) (k objects.TCFrontendKey, p objects.TCUntrackedPort, ok bool) {
	k = objects.PortKey(t.Addr, t.Protocol, t.First)
	v := s.Verdicts[s.Targets[t]]
	if v == nil || v.Track || u.tracked[k] || t.Side != donottrack.Ingress || t.First != t.Last || t.Protocol == model.SCTP {
		return k, p, false
	}
	if len(v.Rules) > len(p.Rules) {
		return k, p, false
	}
	for i, name := range v.Rules {
		r := s.Rules[name]
		var peers objects.TCUntrackedPeers
		if r.AnyPeer {
			peers |= objects.TCUntrackedPeersUNTRACKED_ANY
		}
		if r.Pods {
			peers |= objects.TCUntrackedPeersUNTRACKED_PODS
		}
		if len(r.Blocks) > 0 {
			peers |= objects.TCUntrackedPeersUNTRACKED_BLOCKS
		}
		p.Rules[i] = objects.TCUntrackedRule{Id: u.id(name), Peers: uint32(peers)}
	}
	return k, p, true
}

func (u *Maps) pod(m donottrack.Member) objects.TCUntrackedPodKey {
	return objects.TCUntrackedPodKey{Addr: objects.ToAddr(m.Addr), Family: uint32(objects.FamilyOf(m.Addr)), Rule: u.id(m.Rule)}
}

// entries returns the entries of a whole state.
func (u *Maps) entries(s donottrack.State) entries {
	out := newEntries()
	maps.DeleteFunc(u.ids, func(rule string, _ uint32) bool { return s.Rules[rule] == nil })
	u.egress = false
	for _, r := range s.Rules {
		u.egress = u.egress || r.Side == donottrack.Egress
	}
	u.tracked = map[objects.TCFrontendKey]bool{}
	for p := range s.Tracked {
		u.tracked[objects.PortKey(p.Local, p.Protocol, p.Port)] = true
	}
	if u.egress {
		return out
	}
	for _, name := range slices.Sorted(maps.Keys(s.Rules)) { // the next run assigns the same numbers
		id := u.id(name)
		for _, b := range s.Rules[name].Blocks {
			for _, p := range b.Prefixes() {
				out.blocks[objects.RangeKey(id, p)] = 1
			}
		}
	}
	for m := range s.Members {
		out.pods[u.pod(m)] = 1
	}
	for t := range s.Targets {
		if k, p, ok := u.port(s, t); ok {
			out.ports[k] = p
		}
	}
	return out
}

// revoke removes unwanted entries, ports first.
func (u *Maps) revoke(want entries) error {
	if err := keepOnly(u.ports, u.have.ports, want.ports); err != nil {
		return err
	}
	if err := keepOnly(u.pods, u.have.pods, want.pods); err != nil {
		return err
	}
	return keepOnly(u.blocks, u.have.blocks, want.blocks)
}

func keepOnly[K, V comparable](m objects.Map, have, want map[K]V) error {
	for k, v := range have {
		if w, ok := want[k]; ok && w == v {
			continue
		}
		if err := objects.Remove(m, k); err != nil {
			return err
		}
		delete(have, k)
	}
	return nil
}

// grant adds wanted entries, ports last. It returns the number of entries that did not
// fit.
func (u *Maps) grant(want entries) (unwritten int) {
	return addTo(u.blocks, u.have.blocks, want.blocks) + addTo(u.pods, u.have.pods, want.pods) + addTo(u.ports, u.have.ports, want.ports)
}

func addTo[K, V comparable](m objects.Map, have, want map[K]V) (unwritten int) {
	for k, v := range want {
		if have[k] == v {
			continue
		}
		if err := m.Put(k, v); err != nil {
			unwritten++
			continue
		}
		have[k] = v
	}
	return unwritten
}

// Revoke deletes the entries that this state does not allow to bypass netfilter.
func (u *Maps) Revoke(s donottrack.State, c *donottrack.Changes) error {
	u.next = nil
	if c != nil && len(c.Rules)+len(c.Verdicts)+len(c.Tracked) == 0 && !u.unwritten {
		return u.revokeBy(s, c)
	}
	before := u.have
	if c == nil {
		if err := u.read(); err != nil {
			return err
		}
		if n := differences(before.ports, u.have.ports) + differences(before.pods, u.have.pods) +
			differences(before.blocks, u.have.blocks); n > 0 {
			u.log.Warn("another program changed the entries of policies that bypass netfilter; they are restored", "entries", n)
		}
	}
	next := u.entries(s)
	if err := u.revoke(next); err != nil {
		return err
	}
	u.next = &next
	return u.changed(u.Any())
}

// revokeBy deletes the entries of pods and peers that these changes remove.
func (u *Maps) revokeBy(s donottrack.State, c *donottrack.Changes) error {
	for _, t := range c.Targets {
		if k, _, _ := u.port(s, t.Key); t.Had != "" && t.Key.Side == donottrack.Ingress && t.Key.First == t.Key.Last {
			if err := objects.Remove(u.ports, k); err != nil {
				return err
			}
			delete(u.have.ports, k)
		}
	}
	for _, m := range c.Members {
		if !m.Want {
			if err := objects.Remove(u.pods, u.pod(m.Key)); err != nil {
				return err
			}
			delete(u.have.pods, u.pod(m.Key))
		}
	}
	return nil
}

// Grant adds the entries that this state allows to bypass netfilter.
func (u *Maps) Grant(s donottrack.State, c *donottrack.Changes) error {
	want := newEntries()
	switch {
	case u.next != nil:
		want = *u.next
	case c != nil && !u.egress:
		for _, m := range c.Members {
			if m.Want {
				want.pods[u.pod(m.Key)] = 1
			}
		}
		for _, t := range c.Targets {
			if k, p, ok := u.port(s, t.Key); ok && t.Want != "" {
				want.ports[k] = p
			}
		}
	}
	unwritten := u.grant(want)
	if unwritten > 0 && !u.unwritten {
		u.log.Warn("Some packets that policies leave untracked traverse netfilter: an eBPF map is full", "entries", unwritten)
	}
	u.next, u.unwritten = nil, unwritten > 0
	return u.changed(u.Any())
}

// Any reports whether some port of a pod bypasses netfilter.
func (u *Maps) Any() bool { return len(u.have.ports) > 0 }

func differences[K, V comparable](a, b map[K]V) (n int) {
	for k, v := range a {
		if w, ok := b[k]; !ok || w != v {
			n++
		}
	}
	for k := range b {
		if _, ok := a[k]; !ok {
			n++
		}
	}
	return n
}
