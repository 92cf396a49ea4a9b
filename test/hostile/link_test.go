package hostile

import (
	"bytes"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

var linkScenarios = []scenario{
	{name: "Frames with a VLAN tag", run: vlanTagged},
	// Linux drops them for IPv4 only: with netfilter, IPv6 ones are served.
	{name: "A source address that is the node's own", run: ownSource,
		unless: func(mode string, v variant) bool { return mode != "ebpf" && v.v6 }},
	{name: "The node's own address takes a UDP answer away", run: ownSourceTakesAnswer, places: []string{"elsewhere"}},
	{name: "A pod sends in the name of a client", run: podAsClient},
	{name: "A pod adds the address of another pod", run: addsAddress},
	{name: "A virtual machine announces the address of a pod elsewhere", run: announcesAddress, places: []string{"elsewhere"}},
	// A Linux bridge accepts the new owner of the address: with netfilter only the CNI can prevent it.
	{name: "A virtual machine announces the address of a pod here", run: announcesAddress, places: []string{"here"},
		unless: func(mode string, _ variant) bool { return mode != "ebpf" }},
}

// marked tells whether a packet carries a text.
func marked(text string) func(packet) bool {
	return func(p packet) bool { return bytes.Contains(p.payload, []byte(text)) }
}

// vlanTagged: a frame of a VLAN that the node does not have is not served.
func vlanTagged(t *testing.T, e *env, v variant) {
	attacker := e.sender(t, outsider)
	arrived := e.capture(t, v.endpoint(), func(p packet) bool {
		return marked("tagged")(p) || marked("plain")(p) || p.seq == attackerISN
	})
	own := netip.AddrPortFrom(e.addr(outsider, v), 20000)
	udp, tcp := e.nodePort(t, v.place, "udp", v), e.nodePort(t, v.place, "tcp", v)
	for range 5 {
		attacker.send(t,
			packet{src: own, dst: udp, proto: "udp", payload: []byte("tagged"), vlan: true},
			packet{src: own, dst: tcp, proto: "tcp", flags: "S", seq: attackerISN, vlan: true})
	}
	for _, p := range arrived.settled() {
		t.Fatalf("the endpoint received a frame that was tagged: %s from %s, still tagged: %v", p.proto, p.src, p.vlan)
	}
	attacker.send(t, packet{src: own, dst: udp, proto: "udp", payload: []byte("plain")})
	if len(arrived.wait(1)) != 1 {
		t.Error("the endpoint did not receive the frame without a tag")
	}
}

// ownSource: what comes from the LAN with an address of the node as its source
// is not served.
func ownSource(t *testing.T, e *env, v variant) {
	attacker := e.sender(t, outsider)
	arrived := e.capture(t, v.endpoint(), func(p packet) bool { return marked("own source")(p) || p.seq == attackerISN })
	for _, own := range []netip.Addr{e.addr("a", v), e.addr("a/bridge", v)} {
		src := netip.AddrPortFrom(own, 20001)
		attacker.send(t,
			packet{src: src, dst: e.nodePort(t, v.place, "udp", v), proto: "udp", payload: []byte("own source")},
			packet{src: src, dst: e.nodePort(t, v.place, "tcp", v), proto: "tcp", flags: "S", seq: attackerISN})
	}
	for _, p := range arrived.settled() {
		t.Fatalf("the endpoint received %s from %s", p.proto, p.src)
	}
}

// ownSourceTakesAnswer: an endpoint takes its time to answer a datagram. Meanwhile
// the attacker sends one to the endpoint with the source that the flow has there.
func ownSourceTakesAnswer(t *testing.T, e *env, v variant) {
	attacker := e.sender(t, outsider)
	q := e.askLate(t, v)
	attacker.send(t, packet{src: q.from, dst: e.backend(v, latePort), proto: "udp", payload: []byte("forged")})
	time.Sleep(100 * time.Millisecond)
	q.answer(t)
}

// podAsClient: a pod sends datagrams with the address and port of a client that waits for
// its answer. The node must not tell the client that the port is closed.
func podAsClient(t *testing.T, e *env, v variant) {
	q := e.askLate(t, v)
	forged := packet{
		src: netip.MustParseAddrPort(q.client.LocalAddr().String()), dst: e.nodePort(t, "late-"+v.place, "udp", v),
		proto: "udp", payload: []byte("forged"),
	}
	e.sender(t, "a1").send(t, forged, forged, forged)
	time.Sleep(100 * time.Millisecond)
	q.answer(t)
}

// lateQuestion is a datagram of an honest client that its endpoint has not
// answered yet.
type lateQuestion struct {
	client net.Conn
	server net.PacketConn
	from   netip.AddrPort // the client as the endpoint sees it
}

// askLate sends a datagram through the late Service and waits until it has
// arrived.
func (e *env) askLate(t *testing.T, v variant) *lateQuestion {
	t.Helper()
	q := &lateQuestion{}
	network := string(v.combo("udp"))
	pod, err := e.Host(v.endpoint())
	if err != nil {
		t.Fatal(err)
	}
	if q.server, err = pod.ListenPacket(t.Context(), network, netip.AddrPortFrom(e.addr(v.endpoint(), v), latePort).String()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { q.server.Close() })
	client, err := e.Host(honest)
	if err != nil {
		t.Fatal(err)
	}
	if q.client, err = client.Dial(t.Context(), network, e.nodePort(t, "late-"+v.place, "udp", v).String()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { q.client.Close() })
	if _, err := q.client.Write([]byte("question")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 100)
	_ = q.server.SetReadDeadline(time.Now().Add(patience))
	n, from, err := q.server.ReadFrom(buf)
	if err != nil || string(buf[:n]) != "question" {
		t.Fatalf("the endpoint received %q, %v", buf[:n], err)
	}
	q.from = from.(*net.UDPAddr).AddrPort()
	return q
}

// answer sends the answer, which must arrive.
func (q *lateQuestion) answer(t *testing.T) {
	t.Helper()
	if _, err := q.server.WriteTo([]byte("answer"), net.UDPAddrFromAddrPort(q.from)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 100)
	_ = q.client.SetReadDeadline(time.Now().Add(patience))
	if n, err := q.client.Read(buf); err != nil || string(buf[:n]) != "answer" {
		t.Errorf("the client received %q, %v, want the endpoint's answer", buf[:n], err)
	}
}

// addsAddress: a pod with NET_ADMIN gives itself the address of the endpoint.
func addsAddress(t *testing.T, e *env, v variant) {
	stolen := e.addr(v.endpoint(), v)
	e.Do(t, "a1", func() error { return changeAddress(stolen, netlink.AddrAdd) })
	t.Cleanup(func() { e.Do(t, "a1", func() error { return changeAddress(stolen, netlink.AddrDel) }) })
	if v.place == "elsewhere" {
		e.sender(t, "a1").announce(t, e, stolen, v)
	}
	e.visitFor(t, v, 1500*time.Millisecond)
}

// changeAddress adds an address to eth0 of the calling thread's namespace, or
// deletes it.
func changeAddress(addr netip.Addr, change func(netlink.Link, *netlink.Addr) error) error {
	link, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	return change(link, &netlink.Addr{
		IPNet: &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())},
		Flags: unix.IFA_F_NODAD,
	})
}

// machine is the pod that stands for a virtual machine: its namespace shows no
// address.
const machine = "a3"

// announcesAddress: a virtual machine asks the node for its MAC address, with the
// endpoint's address as its own.
func announcesAddress(t *testing.T, e *env, v variant) {
	e.Do(t, machine, removeAddresses)
	time.Sleep(time.Second) // the agent hears of it
	t.Cleanup(func() {
		e.Output(t, receiver, "ip", "neighbor", "flush", "dev", "cni0", "to", e.addr(v.endpoint(), v).String())
	})
	s := e.sender(t, machine)
	for range 3 {
		s.announce(t, e, e.addr(v.endpoint(), v), v)
		e.visitFor(t, v, 500*time.Millisecond)
	}
}

func removeAddresses() error {
	link, err := netlink.LinkByName("eth0")
	if err != nil {
		return err
	}
	addrs, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		if a.IP.IsGlobalUnicast() {
			if err := netlink.AddrDel(link, &a); err != nil {
				return err
			}
		}
	}
	return nil
}

// visitFor has honest clients connect for a while, outside ones and a pod that
// goes to the endpoint itself, as a socket hook has it do. Each must be answered
// by the endpoint.
func (e *env) visitFor(t *testing.T, v variant, d time.Duration) {
	t.Helper()
	dst := e.nodePort(t, v.place, "tcp", v)
	for end := time.Now().Add(d * time.Duration(longer())); time.Now().Before(end); {
		if err := e.probe(v, dst); err != nil {
			t.Fatal(err)
		}
		if v.place == "elsewhere" { // here the bridge leads there, without any proxy
			e.visitDirectly(t, v)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func (e *env) visitDirectly(t *testing.T, v variant) {
	t.Helper()
	pod, err := e.Host("a2")
	if err != nil {
		t.Fatal(err)
	}
	c, err := dial(pod, v.endpoint(), e.backend(v, endpointUp))
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

// announce asks the node's bridge for its MAC address as if the sender had an
// address: the node then believes the address to be the sender's.
func (s *sender) announce(t *testing.T, e *env, addr netip.Addr, v variant) {
	t.Helper()
	frame := neighborSolicitation
	if !v.v6 {
		frame = arpRequest
	}
	buf := gopacket.NewSerializeBuffer()
	options := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	if err := gopacket.SerializeLayers(buf, options, frame(s, addr, e.addr("a/bridge", v))...); err != nil {
		t.Fatal(err)
	}
	if err := s.sendFrame(buf.Bytes()); err != nil {
		t.Fatal(err)
	}
}

func arpRequest(s *sender, from, to netip.Addr) []gopacket.SerializableLayer {
	return []gopacket.SerializableLayer{
		&layers.Ethernet{SrcMAC: s.own, DstMAC: layers.EthernetBroadcast, EthernetType: layers.EthernetTypeARP},
		&layers.ARP{
			AddrType: layers.LinkTypeEthernet, Protocol: layers.EthernetTypeIPv4, HwAddressSize: 6, ProtAddressSize: 4,
			Operation: layers.ARPRequest, SourceHwAddress: s.own, SourceProtAddress: from.AsSlice(),
			DstHwAddress: make([]byte, 6), DstProtAddress: to.AsSlice(),
		},
	}
}

func neighborSolicitation(s *sender, from, to netip.Addr) []gopacket.SerializableLayer {
	ip := &layers.IPv6{Version: 6, HopLimit: 255, NextHeader: layers.IPProtocolICMPv6, SrcIP: from.AsSlice(), DstIP: to.AsSlice()}
	icmp := &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(layers.ICMPv6TypeNeighborSolicitation, 0)}
	_ = icmp.SetNetworkLayerForChecksum(ip)
	return []gopacket.SerializableLayer{
		&layers.Ethernet{SrcMAC: s.own, DstMAC: s.via, EthernetType: layers.EthernetTypeIPv6}, ip, icmp,
		&layers.ICMPv6NeighborSolicitation{
			TargetAddress: to.AsSlice(),
			Options:       layers.ICMPv6Options{{Type: layers.ICMPv6OptSourceAddress, Data: s.own}},
		},
	}
}
