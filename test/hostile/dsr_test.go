package hostile

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/dchest/siphash"
	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/suite"
)

// announcement is what a node tells an endpoint's node about a client's packet. A forger wants the
// endpoint to answer with an address of its choice, or to get packets of a source that no router
// would forward.
type announcement struct {
	client, service, endpoint netip.AddrPort
	proto                     string
	datagram                  bool // the packet travels within a datagram
	sender                    netip.Addr
}

// tag is that of bpf/lib/dsr/option.h.
func (a announcement) tag(secret string) uint64 {
	key := sha256.Sum256([]byte(secret))
	claim := make([]byte, 56)
	for i, end := range []netip.AddrPort{a.client, a.endpoint, a.service} {
		copy(claim[16*i:], end.Addr().AsSlice())
		binary.BigEndian.PutUint16(claim[48+2*i:], end.Port())
	}
	claim[54], claim[55] = map[string]byte{"tcp": 6, "udp": 17}[a.proto], 6
	if a.client.Addr().Is4() {
		claim[55] = 4
	}
	return siphash.Hash(binary.LittleEndian.Uint64(key[:8]), binary.LittleEndian.Uint64(key[8:16]), claim)
}

// option is the option with a tag.
func (a announcement) option(tag uint64) []byte {
	o := []byte{0x9e, 16}
	if a.client.Addr().Is6() {
		o = []byte{0x1e, 26}
	}
	o = binary.BigEndian.AppendUint16(o, a.service.Port())
	o = append(o, a.service.Addr().AsSlice()...)
	return binary.LittleEndian.AppendUint64(o, tag)
}

// frame is the packet as a node of the cluster would send it, with this tag.
func (a announcement) frame(s *sender, tag uint64) ([]byte, error) {
	p := packet{src: a.client, dst: a.endpoint, proto: a.proto, flags: "S", payload: []byte(honestMark)}
	if a.proto == "tcp" {
		p.payload = nil
	}
	option, stack := a.option(tag), p.layers()
	if a.datagram {
		inside, err := serialize(stack...)
		if err != nil {
			return nil, err
		}
		gue := []byte{byte(len(option) / 4), 4, 0, 0}
		if a.client.Addr().Is6() {
			gue[1] = 41
		}
		return s.frame(packet{src: netip.AddrPortFrom(a.sender, 50000), dst: netip.AddrPortFrom(a.endpoint.Addr(), 6080), proto: "udp",
			payload: bytes.Join([][]byte{gue, option, inside}, nil)})
	}
	eth := &layers.Ethernet{SrcMAC: s.own, DstMAC: s.via, EthernetType: layers.EthernetTypeIPv4}
	switch ip := stack[0].(type) {
	case *layers.IPv4:
		ip.Options = []layers.IPv4Option{{OptionType: option[0], OptionLength: option[1], OptionData: option[2:]}}
	case *layers.IPv6:
		eth.EthernetType = layers.EthernetTypeIPv6
		header := append([]byte{byte(ip.NextHeader), 3}, option...)
		ip.NextHeader = layers.IPProtocolIPv6Destination
		rest, err := serialize(stack[1:]...)
		if err != nil {
			return nil, err
		}
		stack = []gopacket.SerializableLayer{ip, gopacket.Payload(append(append(header, 1, 0), rest...))}
	}
	return serialize(append([]gopacket.SerializableLayer{eth}, stack...)...)
}

func serialize(stack ...gopacket.SerializableLayer) ([]byte, error) {
	buf := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(buf, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, stack...); err != nil {
		return nil, fmt.Errorf("build packet: %w", err)
	}
	return buf.Bytes(), nil
}

// secret is that of the cluster.
const secret = "a secret of the cluster"

var dsrVariants = []variant{{false, "elsewhere"}, {true, "elsewhere"}}

// startDirect starts a cluster that forwards so, with a Service whose endpoint is not at the receiving
// node.
func startDirect(t *testing.T, name, forwarding string) (*env, *suite.File) {
	t.Helper()
	e := start(t, name, "--forwarding", forwarding, "--dsr-key-file", secretFile(t))
	return e, e.Load(t, flows.Service{Type: corev1.ServiceTypeNodePort, Endpoints: flows.On("b0"),
		Annotations: map[string]string{intent.BalanceAnnotation: "maglev"}})
}

// secretFile writes the secret for agents.
func secretFile(t *testing.T) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(file, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestForgedAnnouncements has a host of the LAN, a pod beside the endpoint and one of another node
// forge what nodes tell each other about connections with DSR. Nothing of it may reach the
// endpoint, or have it answer with the forger's address, and honest connections go on. With the
// cluster's secret the same packets arrive: so the forgeries lack nothing but that.
func TestForgedAnnouncements(t *testing.T) {
	if flag.Lookup("proxy-mode").Value.String() != "ebpf" {
		return // not a skip: the other dataplanes read no announcements
	}
	e, s := startDirect(t, "hostile-direct", "dsr")
	for _, v := range dsrVariants {
		conn := e.mustConnect(t, v, netip.MustParseAddrPort(s.MustAddress(t, flows.NodePort(receiver), v.combo("tcp"))))
		if conn.source != conn.local().String() {
			t.Fatalf("%s: the endpoint sees %s, so nothing is direct here", v, conn.source)
		}
		for _, attacker := range []string{outsider, "a1", "b1"} {
			for _, proto := range []string{"tcp", "udp"} {
				for _, datagram := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s %s %s datagram %v", v, attacker, proto, datagram),
						func(t *testing.T) { e.announce(t, v, attacker, proto, datagram) })
				}
			}
		}
		if err := conn.ask(); err != nil {
			t.Error(err)
		}
	}
}

// forgedService is an address that no Service has, in a network for documentation.
var forgedService = map[bool]netip.AddrPort{false: netip.MustParseAddrPort("198.51.100.66:53"),
	true: netip.MustParseAddrPort("[2001:db8:bad::66]:53")}

func (e *env) announce(t *testing.T, v variant, attacker, proto string, datagram bool) {
	from := e.sender(t, attacker)
	if attacker == outsider {
		var err error
		if from.via, _, err = e.device("b", "eth0"); err != nil { // past the receiving node
			t.Fatal(err)
		}
	}
	victim := netip.AddrPortFrom(e.addr(honest, v), uint16(20000+rand.IntN(10000)))
	a := announcement{client: victim, service: forgedService[v.v6], endpoint: netip.AddrPortFrom(e.addr("b0", v), endpointUp), proto: proto,
		datagram: datagram, sender: e.addr(attacker, v)}
	atEndpoint := e.capture(t, "b0", func(p packet) bool { return p.src == victim })
	atVictim := e.capture(t, honest, func(p packet) bool { return p.src == a.service && p.dst == victim })
	genuine := a.tag(secret)
	other := a
	other.client = netip.AddrPortFrom(victim.Addr(), victim.Port()+1)
	tags := []uint64{0, ^uint64(0), genuine ^ 1, genuine ^ 1<<63, other.tag(secret), a.tag("another secret of a cluster")}
	for range 50 {
		tags = append(tags, rand.Uint64())
	}
	send := func(tag uint64) {
		frame, err := a.frame(from, tag)
		if err == nil {
			err = from.sendFrame(frame)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, tag := range tags {
		send(tag)
	}
	if got := atEndpoint.settled(); len(got) > 0 && !(attacker == "b1" && !datagram) {
		// A pod's packets are forwarded with any source, unless the CNI checks it: no program reads them.
		t.Errorf("forged packets reach the endpoint, such as %+v", got[0])
	}
	if got := atVictim.settled(); len(got) > 0 {
		t.Errorf("the endpoint answers with the forger's address: %+v", got[0])
	}
	if attacker == outsider {
		send(genuine)
		if len(atEndpoint.wait(1)) == 0 {
			t.Error("the genuine packet did not arrive either: the forgeries show nothing")
		}
	}
}

// The ports of the honest client, all of which a forger names.
const firstPort, clientPorts = 40000, 512

// forgedStarts are the segments that a forger sends from each port of the client. own: the first one
// is a SYN, and the second one fits it.
var forgedStarts = []struct {
	name, flags string
	own         bool
}{
	{"ACK", "A", false}, {"FIN", "FA", false}, {"RST", "R", false}, {"SYN and ACK", "A", true},
}

// TestForgedStarts forges segments of a client's ports, on a network that drops DSR replies. New
// connections of the client still get the node's address, in time.
func TestForgedStarts(t *testing.T) {
	if flag.Lookup("proxy-mode").Value.String() != "ebpf" {
		return // not a skip: the other dataplanes have no DSR replies
	}
	e, s := startDirect(t, "hostile-starts", "hybrid")
	e.Do(t, honest, func() error {
		return os.WriteFile("/proc/sys/net/ipv4/ip_local_port_range", fmt.Appendf(nil, "%d %d", firstPort, firstPort+clientPorts-1), 0)
	})
	for _, v := range dsrVariants {
		dst := netip.MustParseAddrPort(s.MustAddress(t, flows.NodePort(receiver), v.combo("tcp")))
		if conn := e.mustConnect(t, v, dst); conn.source != conn.local().String() {
			t.Fatalf("%s: the endpoint sees %s, so nothing is direct here", v, conn.source)
		}
		e.dropDirect(t, dst)
		for _, kind := range forgedStarts {
			t.Run(fmt.Sprintf("%s %s", v, kind.name), func(t *testing.T) {
				e.forgetFlows(t)
				e.forgetMap(t, "dsr_paths")
				attack := e.forgeStarts(t, v, dst, kind.flags, kind.own)
				attack()
				for range 2 {
					if err := e.probe(v, dst); err != nil {
						t.Fatal(err)
					}
				}
				if !kind.own { // a SYN in the middle of a handshake is another attack
					e.probeDuring(t, v, dst, attack)
				}
			})
		}
	}
}

// dropDirect has the network drop what the endpoint's node sends to clients in the Service's name.
func (e *env) dropDirect(t *testing.T, dst netip.AddrPort) {
	t.Helper()
	family := "ip"
	if dst.Addr().Is6() {
		family = "ip6"
	}
	e.OnLAN(t, fmt.Sprintf("table bridge direct {\n chain forward {\n  type filter hook forward priority 0;\n  iifname %q %s saddr %s "+
		"tcp sport %d drop\n }\n}\n",
		e.MustHost(t, "b").Name, family, dst.Addr(), dst.Port()), "nft", "-f", "-")
}

// forgeStarts returns a function that sends segments from each port of the honest client.
func (e *env) forgeStarts(t *testing.T, v variant, dst netip.AddrPort, flags string, own bool) func() {
	from := e.sender(t, outsider)
	return func() {
		t.Helper()
		kinds := []packet{{flags: flags, seq: attackerISN + 1, ack: 1}}
		if own {
			kinds = append([]packet{{flags: "S", seq: attackerISN}}, kinds...)
		}
		from.flood(t, len(kinds)*clientPorts, func(i int) packet {
			p := kinds[i%len(kinds)]
			p.proto, p.dst = "tcp", dst
			p.src = netip.AddrPortFrom(e.addr(honest, v), uint16(firstPort+i/len(kinds)))
			return p
		})
	}
}

// probeDuring is probe, while an attack goes on.
func (e *env) probeDuring(t *testing.T, v variant, dst netip.AddrPort, attack func()) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- e.probe(v, dst) }()
	for {
		attack()
		select {
		case err := <-done:
			if err != nil {
				t.Fatal(err)
			}
			return
		case <-time.After(100 * time.Millisecond):
		}
	}
}
