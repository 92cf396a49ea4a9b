package ebpf

import (
	"net/netip"
	"testing"

	untracked "spillway.dev/spillway/internal/dataplane/ebpf/donottrack"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/dataplane/ebpf/objects/objectstest"
	"spillway.dev/spillway/internal/dataplane/ebpf/upgrade"
	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/test/must"
)

func TestPacketUntracked(t *testing.T) {
	n := newPacketNode(t)
	t.Run("Peers", func(t *testing.T) { eachTransport(t, n, n.untrackedPeers) })
	t.Run("Spoofed", func(t *testing.T) { eachTransport(t, n, n.untrackedSpoofed) })
	t.Run("Policed", func(t *testing.T) { eachTransport(t, n, n.untrackedPoliced) })
	t.Run("Changes", func(t *testing.T) { eachTransport(t, n, n.untrackedChanges) })
	t.Run("StackOnly", func(t *testing.T) { eachTransport(t, n, n.untrackedStackOnly) })
	t.Run("Maps", func(t *testing.T) { n.untrackedMaps(t) })
}

const cachePort = 11211

// policyWorld has a tracker's changes written as reconcile does, but for netfilter's.
type policyWorld struct {
	n  *packetNode
	tr *donottrack.Tracker
}

// newPolicyWorld has a cache in pod1, and clients in pod2 and in far.
func newPolicyWorld(t *testing.T, n *packetNode, p *plan) *policyWorld {
	w := &policyWorld{n, donottrack.New(donottrack.Config{NodeName: "node"})}
	n.serve(t)
	w.tr.Apply(model.Delta{Full: true, Pods: policyPods(policyPod("cache", "cache", "node", p.pod1),
		policyPod("near", "client", "node", p.pod2), policyPod("far", "client", "far", p.far), policyPod("far2", "other", "far", p.far2))})
	w.write(t, nil)
	t.Cleanup(func() { w.tr = donottrack.New(donottrack.Config{}); w.write(t, nil) })
	return w
}

func policyPods(list ...*model.Pod) map[model.Name]*model.Pod {
	out := map[model.Name]*model.Pod{}
	for _, p := range list {
		out[p.Name] = p
	}
	return out
}

func policyPod(name, role, node string, a netip.Addr) *model.Pod {
	return &model.Pod{Name: model.Name{Name: name}, Labels: map[string]string{"role": role}, Node: node, IPs: []netip.Addr{a}}
}

func (w *policyWorld) write(t *testing.T, c *donottrack.Changes) {
	t.Helper()
	w.n.onThread(t, func() error { return w.n.Revoke(w.tr.State(), c) })
	w.n.onThread(t, func() error { return w.n.Grant(w.tr.State(), c) })
}

func (w *policyWorld) apply(t *testing.T, d model.Delta) {
	t.Helper()
	c := w.tr.Apply(d)
	w.write(t, &c)
}

func (w *policyWorld) set(t *testing.T, policies ...*model.DoNotTrackPolicy) {
	t.Helper()
	d := model.Delta{DoNotTrackPolicies: map[string]*model.DoNotTrackPolicy{}}
	for name := range w.tr.Policies() {
		d.DoNotTrackPolicies[name] = nil
	}
	for _, p := range policies {
		d.DoNotTrackPolicies[p.Name] = p
	}
	w.apply(t, d)
}

func ofRole(role string) *model.PodSelection {
	return &model.PodSelection{Pods: &model.Selector{MatchLabels: map[string]string{"role": role}}}
}

// cachePolicy is about the cache's port, with all protocols.
func cachePolicy(name string, peers ...model.PolicyPeer) *model.DoNotTrackPolicy {
	var ports []model.PortRange
	for _, proto := range []model.Protocol{model.TCP, model.UDP, model.SCTP} {
		ports = append(ports, model.PortRange{Protocol: proto, First: cachePort, Last: cachePort})
	}
	return &model.DoNotTrackPolicy{Name: name, Pods: ofRole("cache"), Ingress: []model.PolicyRule{{Ports: ports, Peers: peers}}}
}

func clientsOnly() model.PolicyPeer { return model.PolicyPeer{Pods: ofRole("client")} }

// passes and stays say what becomes of a packet.
func (n *packetNode) passes(t *testing.T, what string, hook at, proto uint8, src, dst netip.AddrPort, way uint32, hops uint8) {
	t.Helper()
	in := frame{proto: proto, src: src, dst: dst, flags: "S", payload: []byte("abc")}
	r := n.send(t, hook, in)
	if r.code != actRedirect || r.verdicts[objects.TCVerdictPASSED_UNTRACKED] != 1 {
		t.Errorf("%s: %s to %s: code %d, verdicts %s, want it passed", what, src, dst, r.code, verdictList(r.verdicts))
		return
	}
	sameBut(t, in.bytes(n, hook.iface), r.out, hops)
	if w := n.lastNextHop(t); w.kind != way {
		t.Errorf("%s: %s to %s goes %+v", what, src, dst, w)
	}
}

func (n *packetNode) stays(t *testing.T, what string, hook at, proto uint8, src, dst netip.AddrPort) {
	t.Helper()
	n.untouched(t, what+": "+src.String()+" to "+dst.String(), hook, frame{proto: proto, src: src, dst: dst, flags: "S"}.bytes(n, hook.iface),
		objects.TCVerdictPASS_OTHER)
}

// forged is stays for a source that the device does not have.
func (n *packetNode) forged(t *testing.T, what string, hook at, proto uint8, src, dst netip.AddrPort) {
	t.Helper()
	n.untouched(t, what+": "+src.String()+" to "+dst.String(), hook, frame{proto: proto, src: src, dst: dst, flags: "S"}.bytes(n, hook.iface),
		objects.TCVerdictPASS_SOURCE)
}

// untrackedPeers: what a policy allows passes both ways, all else is netfilter's.
func (n *packetNode) untrackedPeers(t *testing.T, p *plan, proto uint8) {
	w := newPolicyWorld(t, n, p)
	cache := ap(p.pod1, cachePort)
	n.stays(t, "no policy", inTun0, proto, ap(p.far, 4000), cache)
	block, err := p.client.Prefix(p.client.BitLen() - 1) // both
	must.Do(t, err)
	except := netip.PrefixFrom(p.client2, p.client2.BitLen())
	w.set(t, cachePolicy("a", clientsOnly()), cachePolicy("b", model.PolicyPeer{Block: block, Except: []netip.Prefix{except}}))
	must.Do(t, objects.Each(n.m(objects.TCMapUntrackedPorts), func(k objects.TCFrontendKey, _ objects.TCUntrackedPort) {
		if model.Protocol(k.Proto) == model.SCTP {
			t.Error("an SCTP port is in the map, whose packets the programs do not parse")
		}
	}))
	for _, peer := range []struct {
		addr netip.Addr
		from at
		way  uint32
		hops uint8
	}{{p.far, inTun0, nextHopNeigh, 1}, {p.pod2, inPod2, nextHopPod, 0}, {p.client, inEth0, nextHopNeigh, 1}} {
		n.passes(t, "question", peer.from, proto, ap(peer.addr, 4000), cache, nextHopPod, 0)
		n.passes(t, "answer", inPod1, proto, cache, ap(peer.addr, 4000), peer.way, peer.hops)
		n.stays(t, "another port", peer.from, proto, ap(peer.addr, 4000), ap(p.pod1, cachePort+1))
		n.stays(t, "from another port", inPod1, proto, ap(p.pod1, cachePort+1), ap(peer.addr, 4000))
		n.stays(t, "the port as a source", peer.from, proto, ap(peer.addr, cachePort), ap(p.pod1, 4000))
	}
	for _, stranger := range []struct {
		addr netip.Addr
		from at
	}{{p.far2, inTun0}, {p.client2, inEth0}, {p.router, inEth0}} {
		n.stays(t, "stranger", stranger.from, proto, ap(stranger.addr, 4000), cache)
		n.stays(t, "answer to a stranger", inPod1, proto, cache, ap(stranger.addr, 4000))
	}
	n.stays(t, "last hop", inPod1, proto, cache, ap(p.eth0, 4000)) // the node itself
}

// untrackedSpoofed: the stack looks where a source belongs, and so do the programs.
func (n *packetNode) untrackedSpoofed(t *testing.T, p *plan, proto uint8) {
	w := newPolicyWorld(t, n, p)
	w.set(t, cachePolicy("a")) // anybody
	cache := ap(p.pod1, cachePort)
	n.passes(t, "anybody", inEth0, proto, ap(p.router, 4000), cache, nextHopPod, 0)
	n.forged(t, "a pod's address from the network", inTun0, proto, ap(p.pod2, 4000), cache)
	n.forged(t, "the node's from the network", inEth0, proto, ap(p.eth0, 4000), cache)
	n.forged(t, "another pod's address", inPod2, proto, ap(p.pod1, 4000), cache)
	n.forged(t, "an address from elsewhere", inPod2, proto, ap(p.far, 4000), cache)
	n.forged(t, "another pod's answer", inPod2, proto, cache, ap(p.far, 4000))
	n.forged(t, "an answer from the network", inTun0, proto, cache, ap(p.pod2, 4000))
}

// untrackedPoliced: who else judges packets of a pod goes on doing so.
func (n *packetNode) untrackedPoliced(t *testing.T, p *plan, proto uint8) {
	w := newPolicyWorld(t, n, p)
	w.set(t, cachePolicy("a", clientsOnly()))
	cache, near, far := ap(p.pod1, cachePort), ap(p.pod2, 4000), ap(p.far, 4000)
	for _, c := range []struct {
		what               string
		policed, guarded   netip.Addr
		unknown, far, near bool
	}{
		{what: "nobody", far: true, near: true},
		{what: "the cache by a NetworkPolicy", policed: p.pod1},
		{what: "the cache by a guard", policed: p.pod1, guarded: p.pod1, far: true, near: true},
		{what: "the client by a NetworkPolicy", policed: p.pod2, far: true},
		{what: "the client by a guard", policed: p.pod2, guarded: p.pod2, far: true},
		{what: "not known", unknown: true},
	} {
		n.setNode(t, func(node *intent.Node) {
			node.PoliciesUnknown = c.unknown
			if c.policed.IsValid() {
				node.MustTraverseNetfilter = []netip.Addr{c.policed}
			}
			if c.guarded.IsValid() {
				node.DenyRuleOnlyPods = []netip.Addr{c.guarded}
			}
		})
		for _, peer := range []struct {
			addr   netip.AddrPort
			from   at
			passes bool
			way    uint32
			hops   uint8
		}{{far, inTun0, c.far, nextHopNeigh, 1}, {near, inPod2, c.near, nextHopPod, 0}} {
			if peer.passes {
				n.passes(t, c.what, peer.from, proto, peer.addr, cache, nextHopPod, 0)
				n.passes(t, c.what, inPod1, proto, cache, peer.addr, peer.way, peer.hops)
			} else {
				n.stays(t, c.what, peer.from, proto, peer.addr, cache)
				n.stays(t, c.what, inPod1, proto, cache, peer.addr)
			}
		}
	}
}

// untrackedChanges: peers, pods and policies come and go.
func (n *packetNode) untrackedChanges(t *testing.T, p *plan, proto uint8) {
	w := newPolicyWorld(t, n, p)
	w.set(t, cachePolicy("a", clientsOnly()))
	cache, far, far2 := ap(p.pod1, cachePort), ap(p.far, 4000), ap(p.far2, 4000)
	come := func(pods ...*model.Pod) { w.apply(t, model.Delta{Pods: policyPods(pods...)}) }
	n.stays(t, "no client yet", inTun0, proto, far2, cache)
	come(policyPod("far2", "client", "far", p.far2))
	n.passes(t, "a client that came", inTun0, proto, far2, cache, nextHopPod, 0)
	come(policyPod("far2", "other", "far", p.far2))
	n.stays(t, "a client no more", inTun0, proto, far2, cache)
	w.apply(t, model.Delta{Pods: map[model.Name]*model.Pod{{Name: "cache"}: nil}})
	n.stays(t, "a pod that is gone", inTun0, proto, far, cache)
	n.stays(t, "a pod that is gone", inPod1, proto, cache, far)
	come(policyPod("cache", "cache", "node", p.pod1))
	n.passes(t, "a pod that is back", inTun0, proto, far, cache, nextHopPod, 0)

	// Of the same name, with other peers: no packet may bypass netfilter by what it allowed before.
	w.set(t, cachePolicy("a", model.PolicyPeer{Pods: ofRole("other")}))
	n.stays(t, "other peers", inTun0, proto, far, cache)
	n.passes(t, "other peers", inTun0, proto, far2, cache, nextHopPod, 0)
	kept := map[donottrack.Pair]bool{{Local: p.pod1, Peer: p.far2, Protocol: model.Protocol(proto), Port: cachePort}: true}
	keep := func() { w.write(t, &donottrack.Changes{Tracked: w.tr.SetTracked(kept)}) }
	keep()
	n.stays(t, "netfilter translates a connection of the port", inTun0, proto, far2, cache)
	n.stays(t, "netfilter translates a connection of the port", inPod1, proto, cache, far2)
	come(policyPod("far", "client", "far", p.far), policyPod("near", "other", "node", p.pod2)) // other changes meanwhile
	n.stays(t, "netfilter still translates it", inPod1, proto, cache, far2)
	w.write(t, nil)
	n.stays(t, "netfilter still translates it, all anew", inPod1, proto, cache, far2)
	clear(kept)
	keep()
	n.passes(t, "netfilter translates none any more", inTun0, proto, far2, cache, nextHopPod, 0)
	w.set(t)
	n.stays(t, "no policy", inTun0, proto, far2, cache)
	ports := objectstest.ReadAll[objects.TCFrontendKey, objects.TCUntrackedPort](t, n.m(objects.TCMapUntrackedPorts))
	pods := objectstest.ReadAll[objects.TCUntrackedPodKey, uint8](t, n.m(objects.TCMapUntrackedPods))
	blocks := objectstest.ReadAll[objects.TCRangeKey, uint8](t, n.m(objects.TCMapUntrackedBlocks))
	flag := objectstest.Settings(t, n.objects).Flags & uint32(objects.TCSettingsFlagsSETTING_UNTRACKED)
	if flag != 0 || len(ports)+len(pods)+len(blocks) > 0 {
		t.Errorf("without a policy there is left: flag %d, %v, %v, %v", flag, ports, pods, blocks)
	}

	// What a change takes away goes before netfilter's table is written, and what it
	// brings comes after.
	w.set(t, cachePolicy("a", clientsOnly()))
	c := w.tr.Apply(model.Delta{Pods: policyPods(policyPod("far", "other", "far", p.far), policyPod("far2", "client", "far", p.far2))})
	n.onThread(t, func() error { return n.Revoke(w.tr.State(), &c) })
	n.stays(t, "between", inTun0, proto, far, cache)
	n.stays(t, "between", inTun0, proto, far2, cache)
	n.onThread(t, func() error { return n.Grant(w.tr.State(), &c) })
	n.passes(t, "after", inTun0, proto, far2, cache, nextHopPod, 0)
	n.stays(t, "after", inTun0, proto, far, cache)
	c = w.tr.Apply(model.Delta{DoNotTrackPolicies: map[string]*model.DoNotTrackPolicy{
		"a": nil, "b": cachePolicy("b", model.PolicyPeer{Pods: ofRole("other")})}})
	n.onThread(t, func() error { return n.Revoke(w.tr.State(), &c) })
	n.stays(t, "between policies", inTun0, proto, far2, cache)
	n.stays(t, "between policies", inTun0, proto, far, cache)
	n.onThread(t, func() error { return n.Grant(w.tr.State(), &c) })
	n.passes(t, "after policies", inTun0, proto, far, cache, nextHopPod, 0)
	w.set(t, cachePolicy("b"))
	n.passes(t, "anybody", inTun0, proto, far2, cache, nextHopPod, 0)
	c = w.tr.Apply(model.Delta{DoNotTrackPolicies: map[string]*model.DoNotTrackPolicy{"b": cachePolicy("b", clientsOnly())}})
	n.onThread(t, func() error { return n.Revoke(w.tr.State(), &c) })
	n.stays(t, "anybody no more", inTun0, proto, far, cache)
}

// untrackedStackOnly: packets that never bypass the stack.
func (n *packetNode) untrackedStackOnly(t *testing.T, p *plan, proto uint8) {
	w := newPolicyWorld(t, n, p)
	cache, far := ap(p.pod1, cachePort), ap(p.far, 4000)
	tracked, ranges, several := cachePolicy("a", clientsOnly()), cachePolicy("a", clientsOnly()), []*model.DoNotTrackPolicy{}
	tracked.Track = true
	for i := range ranges.Ingress[0].Ports {
		ranges.Ingress[0].Ports[i].Last++
	}
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		several = append(several, cachePolicy(name, clientsOnly()))
	}
	egress := &model.DoNotTrackPolicy{Name: "egress", Pods: ofRole("cache"),
		Egress: []model.PolicyRule{{Ports: []model.PortRange{{Protocol: model.TCP, First: 80, Last: 80}}}}}
	for _, c := range []struct {
		what     string
		policies []*model.DoNotTrackPolicy
		passes   bool
	}{
		{"tracked", []*model.DoNotTrackPolicy{tracked}, false},
		{"untracked", []*model.DoNotTrackPolicy{cachePolicy("a", clientsOnly())}, true},
		{"beside a rule of egress", []*model.DoNotTrackPolicy{cachePolicy("a", clientsOnly()), egress}, false},
		{"without it", []*model.DoNotTrackPolicy{cachePolicy("a", clientsOnly())}, true},
		{"ranges", []*model.DoNotTrackPolicy{ranges}, false},
		{"four rules", several[:4], true},
		{"five rules", several, false},
	} {
		w.set(t, c.policies...)
		if c.passes {
			n.passes(t, c.what, inTun0, proto, far, cache, nextHopPod, 0)
		} else {
			n.stays(t, c.what, inTun0, proto, far, cache)
			n.stays(t, c.what, inPod1, proto, cache, far)
		}
	}
	w.set(t, cachePolicy("a", clientsOnly()))
	n.onThread(t, func() error { return upgrade.StartDraining(n.m(objects.TCMapNodeSettings)) })
	n.stays(t, "draining", inTun0, proto, far, cache)
	n.setNode(t, func(*intent.Node) {})
	n.passes(t, "draining no more", inTun0, proto, far, cache, nextHopPod, 0)
}

// untrackedMaps: what a whole state finds in the maps, and what an earlier run left.
func (n *packetNode) untrackedMaps(t *testing.T) {
	p := plans["IPv4"]
	w := newPolicyWorld(t, n, p)
	block := netip.MustParsePrefix("203.0.113.0/24")
	w.set(t, cachePolicy("a", clientsOnly(), model.PolicyPeer{Block: block, Except: []netip.Prefix{netip.MustParsePrefix("203.0.113.11/32")}}))
	// a /24 without one address
	if blocks := objectstest.ReadAll[objects.TCRangeKey, uint8](t, n.m(objects.TCMapUntrackedBlocks)); len(blocks) != 8 {
		t.Errorf("a block without an address is %d prefixes", len(blocks))
	}
	cache, far, far2 := ap(p.pod1, cachePort), ap(p.far, 4000), ap(p.far2, 4000)
	var rule uint32 // there is one
	for pod := range objectstest.ReadAll[objects.TCUntrackedPodKey, uint8](t, n.m(objects.TCMapUntrackedPods)) {
		rule = pod.Rule
	}
	foreign := objects.TCUntrackedPodKey{Addr: objects.ToAddr(p.far2), Family: 4, Rule: rule}
	must.Do(t, n.m(objects.TCMapUntrackedPods).Put(foreign, uint8(1)))
	must.Do(t, n.m(objects.TCMapUntrackedPods).Delete(objects.TCUntrackedPodKey{Addr: objects.ToAddr(p.far), Family: 4, Rule: rule}))
	n.stays(t, "taken away", inTun0, protoTCP, far, cache)
	w.write(t, nil)
	n.passes(t, "restored", inTun0, protoTCP, far, cache, nextHopPod, 0)
	n.stays(t, "foreign", inTun0, protoTCP, far2, cache)

	// The next run takes it over, and numbers rules anew.
	next, err := untracked.Open(n.objects, n.cfg.Log, n.node.SetUntracking)
	must.Do(t, err)
	if !next.Any() {
		t.Error("the next run finds nothing")
	}
	n.policies = next
	n.passes(t, "taken over", inTun0, protoTCP, far, cache, nextHopPod, 0)
	w.tr.Apply(model.Delta{DoNotTrackPolicies: map[string]*model.DoNotTrackPolicy{"0": cachePolicy("0",
		model.PolicyPeer{Pods: ofRole("other")})}})
	w.write(t, nil)
	n.passes(t, "another rule", inTun0, protoTCP, far2, cache, nextHopPod, 0)
	n.passes(t, "the same rule", inTun0, protoTCP, far, cache, nextHopPod, 0)

	// Only programs that a run has set up, with Services, and that are not about to go, serve.
	var s objects.TCSettings
	must.Do(t, n.m(objects.TCMapNodeSettings).Lookup(uint32(0), &s))
	if next.Served() {
		t.Error("it serves no Service, and says that it does")
	}
	frontend := objects.PortKey(p.clusterIP, model.TCP, 80)
	must.Do(t, n.m(objects.TCMapFrontends).Put(frontend, objects.TCFrontend{}))
	drains := s
	drains.Flags |= uint32(objects.TCSettingsFlagsSETTING_DRAINS)
	for settings, serves := range map[objects.TCSettings]bool{s: true, drains: false, {}: false} {
		must.Do(t, n.m(objects.TCMapNodeSettings).Put(uint32(0), settings))
		if err = n.openPolicies(); err != nil || n.Serves() != serves {
			t.Errorf("settings %+v: serves %v, %v", settings, n.Serves(), err)
		}
	}
	must.Do(t, n.m(objects.TCMapFrontends).Delete(frontend))

	// After a run that knew nothing of it nothing holds.
	s.Flags &^= uint32(objects.TCSettingsFlagsSETTING_UNTRACKED)
	must.Do(t, n.m(objects.TCMapNodeSettings).Put(uint32(0), s))
	if err = n.openPolicies(); err != nil {
		t.Fatal(err)
	}
	entries := 0
	must.Do(t, objects.Each(n.m(objects.TCMapUntrackedPorts), func(objects.TCFrontendKey, objects.TCUntrackedPort) { entries++ }))
	if entries > 0 {
		t.Errorf("%d entries that nobody vouches for", entries)
	}
}
