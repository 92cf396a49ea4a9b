package hostile

import (
	"net/netip"
	"regexp"
	"testing"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/testbed/topology"
)

// The parts of pods' connections to the outside: victim asks the server of honest, which is outside of the
// cluster; neighbor is a hostile pod of the same node.
const (
	victimPod = "a1"
	neighbor  = "a2"
)

// TestHostileEgress: pods and hosts outside attack a pod's connections to the outside, which get the node's
// address.
func TestHostileEgress(t *testing.T) {
	t.Parallel()
	e := startOf(t, topology.Spec{Name: "hostile-out", PodNetwork: topology.Routed, Masquerade: true}, "--egress", "auto")
	for _, v := range egressVariants {
		e.waitEgress(t, v)
	}
	t.Run("Together", func(t *testing.T) {
		for _, v := range egressVariants {
			for _, a := range forgeries {
				t.Run(a.name+"/"+v.String(), func(t *testing.T) {
					t.Parallel()
					a.play(t, e.egressForger(t, v))
				})
			}
		}
	})
	for _, v := range egressVariants {
		t.Run(v.String(), func(t *testing.T) {
			t.Run("An RST of another pod with the exact number", func(t *testing.T) { e.neighborResets(t, v) })
			t.Run("A misdirected ICMP error", func(t *testing.T) { e.misdirectedEgressError(t, v) })
			t.Run("Stray segments to all ports", func(t *testing.T) { e.strayAnswers(t, v) })
			t.Run("Fragments that overtake", func(t *testing.T) { e.fragmentsOvertake(t, v) })
			t.Run("A pod that takes all ports", func(t *testing.T) { e.portsTaken(t, v) })
		})
	}
}

var egressVariants = []variant{{false, "here"}, {true, "here"}}

// outsideServer is the address of honest's server.
func (e *env) outsideServer(v variant) netip.AddrPort {
	return netip.AddrPortFrom(e.addr(honest, v), endpointUp)
}

// connectOutside connects from a pod and asks.
func (e *env) connectOutside(pod string, v variant) (*connection, error) {
	host, err := e.Host(pod)
	if err != nil {
		return nil, err
	}
	return dial(host, honest, e.outsideServer(v))
}

func (e *env) mustConnectOutside(t *testing.T, pod string, v variant) *connection {
	t.Helper()
	c, err := e.connectOutside(pod, v)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// probeOutside is a new connection of a pod.
func (e *env) probeOutside(pod string, v variant) error {
	c, err := e.connectOutside(pod, v)
	if err == nil {
		err = c.Close()
	}
	return err
}

// egressConnections is the counter of a dataplane, from 1 on. That of iptables does not exist.
var egressConnections = regexp.MustCompile(
	`(?m)^spillway_(ebpf_verdicts_total\{verdict="egress_created"\}|egress_connections_total\{family="IPv[46]"\}) [1-9]`)

// waitEgress waits until a pod's connections get the node's address from the agent, and not from the CNI.
func (e *env) waitEgress(t *testing.T, v variant) {
	t.Helper()
	await.NoError(t, func() error { return e.probeOutside(victimPod, v) })
	if e.Mode == "iptables" {
		return
	}
	await.True(t, "the agent gives connections of pods the node's address", func() bool {
		text, err := e.Agent(receiver).Metrics(t.Context())
		if err != nil || e.probeOutside(victimPod, v) != nil {
			return false
		}
		return egressConnections.MatchString(text)
	})
}

// egressForger opens a connection of the victim to the outside and learns its numbers. Its segments of the
// client come from another pod, and those of the server from another host.
func (e *env) egressForger(t *testing.T, v variant) *forger {
	t.Helper()
	f := &forger{
		t: t, v: v, outside: e.sender(t, neighbor), beside: e.sender(t, outsider), dst: e.outsideServer(v), backend: e.outsideServer(v),
		again: func() error { return e.probeOutside(victimPod, v) },
	}
	watch := e.capture(t, victimPod, func(p packet) bool { return p.proto == "tcp" && p.src == f.dst })
	f.victim = e.mustConnectOutside(t, victimPod, v)
	f.learn(t, watch)
	return f
}

// neighborResets: a pod cannot speak for another one. With netfilter that is the kernel's rp_filter, or the
// CNI's business.
func (e *env) neighborResets(t *testing.T, v variant) {
	if e.Mode != "ebpf" {
		return // not a skip: there is nothing to ask
	}
	f := e.egressForger(t, v)
	f.client("R", f.clientNext, 0)
	f.client("RA", f.clientNext, f.serverNext)
	f.wantWorking(t)
}

// misdirectedEgressError: as misdirectedError, about a connection of a pod to the outside.
func (e *env) misdirectedEgressError(t *testing.T, v variant) {
	attacker := e.sender(t, outsider)
	victim := e.mustConnectOutside(t, victimPod, v)
	relayed := e.capture(t, victimPod, isUnreachable)
	quoted, err := packet{src: victim.seenAs(), dst: e.outsideServer(v), proto: "tcp", flags: "A", seq: 1}.quote()
	if err != nil {
		t.Fatal(err)
	}
	report := packet{src: stranger(v, 0), proto: "icmp", icmpType: 3, icmpCode: 1, quoted: quoted}
	if v.v6 {
		report.icmpType, report.icmpCode = 1, 0
	}
	for _, host := range []string{neighbor, "a/bridge", "b0", outsider} {
		report.dst = netip.AddrPortFrom(e.addr(host, v), 0)
		attacker.send(t, report)
	}
	for range relayed.settled() {
		t.Fatal("the victim received an ICMP error that was addressed to another host")
	}
	report.dst = netip.AddrPortFrom(victim.seenAs().Addr(), 0)
	attacker.send(t, report)
	if len(relayed.wait(1)) != 1 {
		t.Error("the victim did not receive the ICMP error that was addressed to it")
	}
	if err := victim.ask(); err != nil {
		t.Error(err)
	}
}

// strayAnswers: forged answers to each port of the node reach no pod, except for those to the port of a
// connection from the address that it asks: with eBPF its TCP compares their numbers.
func (e *env) strayAnswers(t *testing.T, v variant) {
	e.forgetFlows(t) // those of connections that have just ended
	attacker := e.sender(t, outsider)
	victim := e.mustConnectOutside(t, victimPod, v)
	node, own := victim.seenAs().Addr(), victim.local().Port()
	foreign := e.capture(t, victimPod, func(p packet) bool { return marked("foreign")(p) && p.dst.Port() != own })
	for _, flags := range []string{"PA", "SA", "R"} {
		attacker.flood(t, 2*snatPorts, func(i int) packet {
			port := uint16(33792 + i%snatPorts)
			return packet{
				src: e.outsideServer(v), dst: netip.AddrPortFrom(node, port), proto: "tcp", flags: flags,
				seq: uint32(i) * 77_777, ack: uint32(i) * 99_991, payload: []byte("foreign\n"),
			}
		})
	}
	for range foreign.settled() {
		t.Fatal("the pod received a forged answer")
	}
	if err := victim.ask(); err != nil {
		t.Error(err)
	}
}

// portsTaken: a pod opens as many connections to one destination as there are ports, and leaves some for
// another pod.
func (e *env) portsTaken(t *testing.T, v variant) {
	idle := e.mustConnectOutside(t, victimPod, v)
	held := e.hoardFrom(t, neighbor, e.addr(neighbor, v), e.outsideServer(v), 2*snatPorts)
	t.Logf("the attacker holds %d connections", held)
	for range 3 {
		if err := e.probeOutside(victimPod, v); err != nil {
			t.Error(err)
			break
		}
	}
	if err := idle.ask(); err != nil {
		t.Error(err)
	}
}
