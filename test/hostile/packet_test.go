package hostile

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/await"
)

// packet is a frame to send, or one that a host has received.
type packet struct {
	src, dst netip.AddrPort
	proto    string // tcp, udp or icmp
	flags    string // of TCP: some of S, A, R, F, P
	seq, ack uint32
	payload  []byte
	vlan     bool // has an 802.1Q tag
	later    bool // is a fragment behind the first, without ports

	icmpType, icmpCode uint8  // of an ICMP error
	quoted             []byte // of an ICMP error: the packet that it is about
	mtu                uint32 // of an ICMP error about a packet that is too big
}

// sender sends frames from a host, with any source address.
type sender struct {
	fd       int
	ifindex  int
	own, via net.HardwareAddr
}

// sender opens a packet socket on a host. Its frames go to the receiving node,
// or, from a pod, to the node that the pod runs on.
func (e *env) sender(t testing.TB, host string) *sender {
	t.Helper()
	s := &sender{}
	h, err := e.Host(host)
	if err != nil {
		t.Fatal(err)
	}
	node, device := receiver, "eth0"
	if n := e.NodeOf(host); n != "" {
		node, device = n, "cni0"
	}
	if s.via, _, err = e.device(node, device); err != nil {
		t.Fatal(err)
	}
	if s.own, s.ifindex, err = e.device(host, "eth0"); err != nil {
		t.Fatal(err)
	}
	err = h.Do(func() error {
		s.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return os.NewSyscallError("socket", err)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(s.fd) })
	return s
}

// device returns the MAC and the index of a host's device.
func (e *env) device(host, name string) (mac net.HardwareAddr, ifindex int, err error) {
	h, err := e.Host(host)
	if err != nil {
		return nil, 0, err
	}
	err = h.Do(func() error {
		link, err := netlink.LinkByName(name)
		if err == nil {
			mac, ifindex = link.Attrs().HardwareAddr, link.Attrs().Index
		}
		return err
	})
	return mac, ifindex, err
}

// send sends packets.
func (s *sender) send(t testing.TB, packets ...packet) {
	t.Helper()
	for _, p := range packets {
		frame, err := s.frame(p)
		if err == nil {
			err = s.sendFrame(frame)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func (s *sender) sendFrame(frame []byte) error {
	for {
		err := unix.Sendto(s.fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: s.ifindex})
		if err == unix.ENOBUFS || err == unix.EINTR {
			time.Sleep(time.Millisecond)
			continue
		}
		return os.NewSyscallError("send frame", err)
	}
}

// paced is how many frames of a flood are sent in a millisecond: a burst would
// overflow the queue of the receiving CPU, which is not what a test is about.
const paced = 32

// flood sends count packets of a series.
func (s *sender) flood(t testing.TB, count int, next func(i int) packet) {
	t.Helper()
	for i := range count {
		s.send(t, next(i))
		if i%paced == paced-1 {
			time.Sleep(time.Millisecond)
		}
	}
}

// frame builds a frame with right lengths and checksums.
func (s *sender) frame(p packet) ([]byte, error) {
	eth := &layers.Ethernet{SrcMAC: s.own, DstMAC: s.via, EthernetType: layers.EthernetTypeIPv4}
	if p.dst.Addr().Is6() {
		eth.EthernetType = layers.EthernetTypeIPv6
	}
	stack := []gopacket.SerializableLayer{eth}
	if p.vlan {
		stack = append(stack, &layers.Dot1Q{VLANIdentifier: 7, Type: eth.EthernetType})
		eth.EthernetType = layers.EthernetTypeDot1Q
	}
	stack = append(stack, p.layers()...)
	buf := gopacket.NewSerializeBuffer()
	options := gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}
	if err := gopacket.SerializeLayers(buf, options, stack...); err != nil {
		return nil, fmt.Errorf("build frame: %w", err)
	}
	return buf.Bytes(), nil
}

// layers are the packet's headers from IP on, and its payload.
func (p packet) layers() []gopacket.SerializableLayer {
	network, ip := p.network()
	payload := gopacket.Payload(p.payload)
	switch p.proto {
	case "tcp":
		has := func(f string) bool { return strings.Contains(p.flags, f) }
		tcp := &layers.TCP{
			SrcPort: layers.TCPPort(p.src.Port()), DstPort: layers.TCPPort(p.dst.Port()), Seq: p.seq, Ack: p.ack,
			SYN: has("S"), ACK: has("A"), RST: has("R"), FIN: has("F"), PSH: has("P"), Window: 65535,
		}
		_ = tcp.SetNetworkLayerForChecksum(network)
		return []gopacket.SerializableLayer{ip, tcp, payload}
	case "udp":
		udp := &layers.UDP{SrcPort: layers.UDPPort(p.src.Port()), DstPort: layers.UDPPort(p.dst.Port())}
		_ = udp.SetNetworkLayerForChecksum(network)
		return []gopacket.SerializableLayer{ip, udp, payload}
	}
	rest := append(make([]byte, 4), p.quoted...)
	if p.dst.Addr().Is4() {
		return []gopacket.SerializableLayer{ip, &layers.ICMPv4{TypeCode: layers.CreateICMPv4TypeCode(p.icmpType, p.icmpCode)},
			gopacket.Payload(p.quoted)}
	}
	icmp := &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(p.icmpType, p.icmpCode)}
	_ = icmp.SetNetworkLayerForChecksum(network)
	return []gopacket.SerializableLayer{ip, icmp, gopacket.Payload(rest)}
}

func (p packet) network() (gopacket.NetworkLayer, gopacket.SerializableLayer) {
	src, dst := p.src.Addr().AsSlice(), p.dst.Addr().AsSlice()
	if p.dst.Addr().Is4() {
		proto := map[string]layers.IPProtocol{"tcp": layers.IPProtocolTCP, "udp": layers.IPProtocolUDP}[p.proto]
		if proto == 0 {
			proto = layers.IPProtocolICMPv4
		}
		ip := &layers.IPv4{Version: 4, TTL: 64, Protocol: proto, SrcIP: src, DstIP: dst}
		return ip, ip
	}
	proto := map[string]layers.IPProtocol{"tcp": layers.IPProtocolTCP, "udp": layers.IPProtocolUDP}[p.proto]
	if proto == 0 {
		proto = layers.IPProtocolICMPv6
	}
	ip := &layers.IPv6{Version: 6, HopLimit: 64, NextHeader: proto, SrcIP: src, DstIP: dst}
	return ip, ip
}

// capture collects the packets that a host receives.
type capture struct {
	fd   int
	done chan struct{}

	mu   sync.Mutex
	seen []packet
	stop bool
}

// capture starts to collect the packets that arrive at a host's eth0 and that
// keep accepts.
func (e *env) capture(t testing.TB, host string, keep func(packet) bool) *capture {
	t.Helper()
	h, err := e.Host(host)
	if err != nil {
		t.Fatal(err)
	}
	c := &capture{done: make(chan struct{})}
	if err := h.Do(c.open); err != nil {
		t.Fatal(err)
	}
	go c.read(keep)
	t.Cleanup(c.close)
	return c
}

func (c *capture) open() error {
	everything := int(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, unix.ETH_P_ALL)))
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, everything)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	c.fd = fd
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 16<<20)
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_AUXDATA, 1); err != nil {
		return os.NewSyscallError("setsockopt PACKET_AUXDATA", err)
	}
	return setTimeout(fd, unix.SO_RCVTIMEO, unix.Timeval{Usec: 50_000})
}

func (c *capture) close() {
	c.mu.Lock()
	c.stop = true
	c.mu.Unlock()
	<-c.done
	unix.Close(c.fd)
}

func (c *capture) read(keep func(packet) bool) {
	defer close(c.done)
	frame, control := make([]byte, 1<<16), make([]byte, 256)
	for {
		c.mu.Lock()
		stop := c.stop
		c.mu.Unlock()
		if stop {
			return
		}
		n, nc, _, from, err := unix.Recvmsg(c.fd, frame, control, 0)
		link, ok := from.(*unix.SockaddrLinklayer)
		if err != nil || !ok || link.Pkttype == unix.PACKET_OUTGOING || link.Pkttype == unix.PACKET_OTHERHOST {
			continue
		}
		p := decode(frame[:n])
		p.vlan = p.vlan || tagged(control[:nc])
		if keep(p) {
			c.mu.Lock()
			c.seen = append(c.seen, p)
			c.mu.Unlock()
		}
	}
}

// tagged tells whether the kernel has taken an 802.1Q tag off the frame.
func tagged(control []byte) bool {
	msgs, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return false
	}
	for _, m := range msgs {
		if m.Header.Level == unix.SOL_PACKET && m.Header.Type == unix.PACKET_AUXDATA && len(m.Data) >= 4 {
			return binary.NativeEndian.Uint32(m.Data)&unix.TP_STATUS_VLAN_VALID != 0
		}
	}
	return false
}

// packets returns what has been collected so far.
func (c *capture) packets() []packet {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]packet(nil), c.seen...)
}

// settled returns what has been collected when no packet has come for a while.
func (c *capture) settled() []packet {
	for have := -1; ; {
		got := c.packets()
		if len(got) == have {
			return got
		}
		have = len(got)
		time.Sleep(300 * time.Millisecond)
	}
}

// wait waits until count packets have been collected, await.Limit at most.
func (c *capture) wait(count int) []packet {
	_ = await.Error(func() error {
		if got := len(c.packets()); got < count {
			return fmt.Errorf("%d packets", got)
		}
		return nil
	})
	return c.packets()
}

// decode reads what a test asks of a frame.
func decode(frame []byte) packet {
	var p packet
	var src, dst netip.Addr
	decoded := gopacket.NewPacket(append([]byte(nil), frame...), layers.LayerTypeEthernet, gopacket.NoCopy)
	for _, l := range decoded.Layers() {
		switch l := l.(type) {
		case *layers.Dot1Q:
			p.vlan = true
		case *layers.IPv4:
			src, dst = netip.AddrFrom4([4]byte(l.SrcIP.To4())), netip.AddrFrom4([4]byte(l.DstIP.To4()))
			p.later = l.FragOffset > 0
		case *layers.IPv6:
			src, dst = netip.AddrFrom16([16]byte(l.SrcIP)), netip.AddrFrom16([16]byte(l.DstIP))
		case *layers.IPv6Fragment:
			p.later = l.FragmentOffset > 0
		case *layers.TCP:
			p.proto, p.seq, p.ack, p.payload, p.flags = "tcp", l.Seq, l.Ack, l.Payload, tcpFlags(l)
			src, dst = p.ports(src, dst, uint16(l.SrcPort), uint16(l.DstPort))
		case *layers.UDP:
			p.proto, p.payload = "udp", l.Payload
			src, dst = p.ports(src, dst, uint16(l.SrcPort), uint16(l.DstPort))
		case *layers.ICMPv4:
			p.proto, p.icmpType, p.icmpCode, p.quoted = "icmp", l.TypeCode.Type(), l.TypeCode.Code(), l.Payload
			p.mtu = uint32(l.Seq)
		case *layers.ICMPv6:
			p.proto, p.icmpType, p.icmpCode = "icmp", l.TypeCode.Type(), l.TypeCode.Code()
			if len(l.Payload) >= 4 {
				p.quoted, p.mtu = l.Payload[4:], binary.BigEndian.Uint32(l.Payload)
			}
		}
	}
	if !p.src.IsValid() {
		p.src, p.dst = netip.AddrPortFrom(src, 0), netip.AddrPortFrom(dst, 0)
	}
	return p
}

func (p *packet) ports(src, dst netip.Addr, sport, dport uint16) (netip.Addr, netip.Addr) {
	p.src, p.dst = netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, dport)
	return src, dst
}

func tcpFlags(l *layers.TCP) string {
	var flags strings.Builder
	for _, f := range []struct {
		set  bool
		name string
	}{{l.SYN, "S"}, {l.ACK, "A"}, {l.RST, "R"}, {l.FIN, "F"}, {l.PSH, "P"}} {
		if f.set {
			flags.WriteString(f.name)
		}
	}
	return flags.String()
}

// stranger returns an unassigned address outside the LAN: the router drops packets
// to it.
func stranger(v variant, i int) netip.AddrPort {
	port := uint16(1024 + i%60000)
	if v.v6 {
		a := netip.MustParseAddr("2001:db8:bad::").As16()
		binary.BigEndian.PutUint32(a[12:], uint32(i)+1)
		return netip.AddrPortFrom(netip.AddrFrom16(a), port)
	}
	a := [4]byte{198, 18}
	binary.BigEndian.PutUint16(a[2:], uint16(i)+1)
	return netip.AddrPortFrom(netip.AddrFrom4(a), port)
}
