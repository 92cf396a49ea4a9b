package e2e

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/net/ipv6"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/topology"
)

// TestALateAnswerDoesNotHoldASocket: a pod's connected UDP socket follows its Service to
// another endpoint, although the old one answers once more when it is gone. No
// program translates this answer, so netfilter takes it for the first packet of a connection.
func TestALateAnswerDoesNotHoldASocket(t *testing.T) {
	spec := topology.DefaultSpec("e2e-late")
	spec.Conntrack = true
	e := startSpec(t, spec)
	s := e.Load(t, nodePort("b0"))
	client := e.MustProbe(t, "a1")
	question := func(combo flows.Combo) probe.Answer {
		t.Helper()
		resp, err := client.Do(t.Context(), probe.Request{
			Op: probe.Try, Proto: "udp", Dst: s.MustAddress(t, flows.ClusterIP, combo), TimeoutMS: patienceMS, Socket: string(combo),
		})
		must.Do(t, err)
		return resp.Answers[0]
	}
	sources := map[flows.Combo]string{}
	for _, combo := range flows.UDP {
		got := question(combo)
		if got.Server != "b0" {
			t.Fatalf("first question, %s: answer %+v, want server b0", combo, got)
		}
		sources[combo] = got.Source
	}
	must.Do(t, s.Write([]flows.Object{nodePort("b1")}))
	must.Do(t, s.Wait(t.Context()))
	for _, combo := range flows.UDP {
		to, err := netip.ParseAddrPort(sources[combo])
		must.Do(t, err)
		from := netip.AddrPortFrom(e.Addr("b0", combo.IPv6()), 8080)
		e.Do(t, "b0", func() error { return sendDatagram(from, to) })
		question(combo) // takes the late answer for its own
		if got := question(combo); got.Server != "b1" {
			t.Errorf("question after a late answer, %s: answer %+v, want server b1", combo, got)
		}
	}
}

// sendDatagram sends an empty datagram from an address and port that another socket has.
func sendDatagram(from, to netip.AddrPort) error {
	network := "ip4:udp"
	if to.Addr().Is6() {
		network = "ip6:udp"
	}
	conn, err := net.ListenPacket(network, from.Addr().String())
	if err != nil {
		return err
	}
	defer conn.Close()
	header := make([]byte, 8)
	binary.BigEndian.PutUint16(header, from.Port())
	binary.BigEndian.PutUint16(header[2:], to.Port())
	binary.BigEndian.PutUint16(header[4:], uint16(len(header)))
	if to.Addr().Is6() {
		if err := ipv6.NewPacketConn(conn).SetChecksum(true, 6); err != nil {
			return err
		}
	}
	_, err = conn.WriteTo(header, &net.IPAddr{IP: to.Addr().AsSlice()})
	return err
}
