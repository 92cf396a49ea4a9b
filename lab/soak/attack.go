package soak

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/testbed/topology"
)

// attacker sends frames with any source from a host to a node.
type attacker struct {
	name     string
	fd       int
	index    int
	own, via net.HardwareAddr
}

// newAttacker opens a packet socket on a host for frames to a device of a node.
func newAttacker(host, node *topology.Host, device string) (*attacker, error) {
	a := &attacker{name: host.Name}
	var err error
	if a.via, _, err = link(node, device); err != nil {
		return nil, err
	}
	if a.own, a.index, err = link(host, "eth0"); err != nil {
		return nil, err
	}
	err = host.Do(func() error {
		a.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return os.NewSyscallError("socket", err)
	})
	if err != nil {
		return nil, fmt.Errorf("open packet socket on %s: %w", host.Name, err)
	}
	return a, nil
}

func (a *attacker) close() { unix.Close(a.fd) }

// link returns the MAC and the index of a host's device.
func link(h *topology.Host, name string) (mac net.HardwareAddr, index int, err error) {
	err = h.Do(func() error {
		l, err := netlink.LinkByName(name)
		if err == nil {
			mac, index = l.Attrs().HardwareAddr, l.Attrs().Index
		}
		return err
	})
	if err != nil {
		return nil, 0, fmt.Errorf("find %s of %s: %w", name, h.Name, err)
	}
	return mac, index, nil
}

// send sends a frame. A device that is down loses it.
func (a *attacker) send(frame []byte) error {
	err := unix.Sendto(a.fd, frame, unix.MSG_DONTWAIT, &unix.SockaddrLinklayer{Ifindex: a.index})
	switch err {
	case nil, unix.ENOBUFS, unix.EAGAIN, unix.EINTR, unix.ENETDOWN, unix.EMSGSIZE, unix.EINVAL:
		return nil
	}
	return fmt.Errorf("send frame from %s: %w", a.name, err)
}

// forgery is a packet with a forged source.
type forgery struct {
	src, dst netip.AddrPort
	udp      bool
	flags    uint8 // of TCP
	seq, ack uint32
	payload  []byte
}

// The TCP flags.
const (
	fin = 1 << iota
	syn
	rst
	psh
	ack
)

// frame builds a frame with right lengths and checksums.
func (a *attacker) frame(f forgery) ([]byte, error) {
	ether := &layers.Ethernet{SrcMAC: a.own, DstMAC: a.via, EthernetType: layers.EthernetTypeIPv4}
	network, ip := ipOf(f.src.Addr(), f.dst.Addr(), layers.IPProtocolTCP)
	if f.udp {
		network, ip = ipOf(f.src.Addr(), f.dst.Addr(), layers.IPProtocolUDP)
	}
	if f.dst.Addr().Is6() {
		ether.EthernetType = layers.EthernetTypeIPv6
	}
	var transport gopacket.SerializableLayer
	if f.udp {
		udp := &layers.UDP{SrcPort: layers.UDPPort(f.src.Port()), DstPort: layers.UDPPort(f.dst.Port())}
		_ = udp.SetNetworkLayerForChecksum(network) // a network layer that it knows
		transport = udp
	} else {
		tcp := &layers.TCP{
			SrcPort: layers.TCPPort(f.src.Port()), DstPort: layers.TCPPort(f.dst.Port()), Seq: f.seq, Ack: f.ack, Window: 65535,
			FIN: f.flags&fin != 0, SYN: f.flags&syn != 0, RST: f.flags&rst != 0, PSH: f.flags&psh != 0, ACK: f.flags&ack != 0,
		}
		_ = tcp.SetNetworkLayerForChecksum(network) // a network layer that it knows
		transport = tcp
	}
	return serialize(ether, ip, transport, gopacket.Payload(f.payload))
}

func serialize(parts ...gopacket.SerializableLayer) ([]byte, error) {
	buf := gopacket.NewSerializeBuffer()
	err := gopacket.SerializeLayers(buf, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, parts...)
	if err != nil {
		return nil, fmt.Errorf("build frame: %w", err)
	}
	return buf.Bytes(), nil
}

func ipOf(src, dst netip.Addr, protocol layers.IPProtocol) (gopacket.NetworkLayer, gopacket.SerializableLayer) {
	if dst.Is4() {
		ip := &layers.IPv4{Version: 4, TTL: 64, Protocol: protocol, SrcIP: src.AsSlice(), DstIP: dst.AsSlice()}
		return ip, ip
	}
	ip := &layers.IPv6{Version: 6, HopLimit: 64, NextHeader: protocol, SrcIP: src.AsSlice(), DstIP: dst.AsSlice()}
	return ip, ip
}

// stranger returns an address outside the lab (RFC 2544, RFC 3849).
func stranger(r *rand.Rand, v6 bool) netip.AddrPort {
	port := uint16(1024 + r.IntN(60000))
	if v6 {
		addr := netip.MustParseAddr("2001:db8:bad::").As16()
		binary.BigEndian.PutUint32(addr[12:], r.Uint32())
		return netip.AddrPortFrom(netip.AddrFrom16(addr), port)
	}
	addr := [4]byte{198, 18}
	binary.BigEndian.PutUint16(addr[2:], uint16(r.Uint32()))
	return netip.AddrPortFrom(netip.AddrFrom4(addr), port)
}

// paced is how many frames are sent in a millisecond. A burst would overflow the queue
// of the receiving CPU, at the cost of honest datagrams.
const paced = 16

// flood sends count frames of a series.
func (a *attacker) flood(count int, next func(i int) (forgery, bool)) error {
	for i := range count {
		f, ok := next(i)
		if !ok {
			return nil
		}
		frame, err := a.frame(f)
		if err == nil {
			err = a.send(frame)
		}
		if err != nil {
			return err
		}
		if i%paced == paced-1 {
			time.Sleep(time.Millisecond)
		}
	}
	return nil
}

// victim is an open socket of an honest client.
type victim struct {
	event
	from string // node of the client
}

// The hostile actions: what one sends, with the answer for the log.
type attack func(r *run, d *rand.Rand, a *attacker) (string, error)

// attacks are chosen by the name of the action.
var attacks = map[string]attack{
	"syn-flood":    synFlood,
	"forge-client": forgeClient,
	"forge-server": forgeServer,
	"forge-icmp":   forgeICMP,
	"forge-udp":    forgeUDP,
	"fragments":    sendFragments,
	"garbage":      sendGarbage,
}

// target is an address of a Service at the node that the attackers send to.
func (r *run) target(d *rand.Rand, udp bool) netip.AddrPort {
	s, v6 := r.world.services[d.IntN(len(r.world.services))], d.IntN(2) == 0
	protocol := protocolTCP
	if udp {
		protocol = protocolUDP
	}
	if d.IntN(3) == 0 {
		return netip.AddrPortFrom(s.external(v6), servicePort)
	}
	return netip.AddrPortFrom(r.addr(0, v6), s.nodePort(protocol))
}

func synFlood(r *run, d *rand.Rand, a *attacker) (string, error) {
	to, count, flags := r.target(d, false), 50+d.IntN(450), []uint8{syn, syn, syn, ack, rst, fin | ack, syn | ack}[d.IntN(7)]
	err := a.flood(count, func(int) (forgery, bool) {
		return forgery{src: stranger(d, to.Addr().Is6()), dst: to, flags: flags, seq: d.Uint32(), ack: d.Uint32()}, true
	})
	return fmt.Sprintf("%d segments with flags %#x to %s", count, flags, to), err
}

// segmentFlags are the combinations that forged segments have.
var segmentFlags = []uint8{syn, syn | ack, ack, psh | ack, rst, rst | ack, fin, fin | ack, syn | rst, syn | fin, 0, 0x1f}

// forgeClient sends segments with the addresses of an honest client. An attacker who sees
// no packet of it can only guess sequence numbers.
func forgeClient(r *run, d *rand.Rand, a *attacker) (string, error) {
	v, ok := r.victim(d, stream)
	if !ok {
		return "no victim", nil
	}
	count := 1 + d.IntN(30)
	err := a.flood(count, func(int) (forgery, bool) {
		return forgery{src: v.Local, dst: v.Remote, flags: segmentFlags[d.IntN(len(segmentFlags))], seq: d.Uint32(), ack: d.Uint32(),
			payload: make([]byte, d.IntN(100))}, true
	})
	return fmt.Sprintf("%d segments as %s to %s", count, v.Local, v.Remote), err
}

// forgeServer sends segments with the addresses of an honest server.
func forgeServer(r *run, d *rand.Rand, a *attacker) (string, error) {
	v, ok := r.victim(d, stream)
	server, known := r.endpoint(v)
	if !ok || !known {
		return "no victim", nil
	}
	count := 1 + d.IntN(30)
	src, dst := server, v.Seen
	if d.IntN(3) == 0 {
		src, dst = v.Remote, v.Local
	}
	err := a.flood(count, func(int) (forgery, bool) {
		return forgery{src: src, dst: dst, flags: segmentFlags[d.IntN(len(segmentFlags))], seq: d.Uint32(), ack: d.Uint32(),
			payload: make([]byte, d.IntN(100))}, true
	})
	return fmt.Sprintf("%d segments as %s to %s", count, src, dst), err
}

// forgeICMP sends errors about an honest connection, with guessed sequence numbers.
func forgeICMP(r *run, d *rand.Rand, a *attacker) (string, error) {
	v, ok := r.victim(d, stream)
	server, known := r.endpoint(v)
	if !ok || !known {
		return "no victim", nil
	}
	quoted, err := a.frame(forgery{src: v.Seen, dst: server, flags: ack, seq: d.Uint32()})
	if err != nil {
		return "", err
	}
	quoted = quoted[14:]
	from := stranger(d, v.Seen.Addr().Is6()).Addr()
	ether := &layers.Ethernet{SrcMAC: a.own, DstMAC: a.via, EthernetType: layers.EthernetTypeIPv4}
	var frame []byte
	var kind [2]uint8
	if v.Seen.Addr().Is4() {
		kind = [][2]uint8{{3, 0}, {3, 1}, {3, 3}, {11, 0}, {12, 0}}[d.IntN(5)]
		_, ip := ipOf(from, v.Seen.Addr(), layers.IPProtocolICMPv4)
		frame, err = serialize(ether, ip, &layers.ICMPv4{TypeCode: layers.CreateICMPv4TypeCode(kind[0], kind[1])}, gopacket.Payload(quoted))
	} else {
		kind = [][2]uint8{{1, 0}, {1, 1}, {1, 4}, {3, 0}, {4, 0}}[d.IntN(5)]
		ether.EthernetType = layers.EthernetTypeIPv6
		network, ip := ipOf(from, v.Seen.Addr(), layers.IPProtocolICMPv6)
		icmp := &layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(kind[0], kind[1])}
		_ = icmp.SetNetworkLayerForChecksum(network) // a network layer that it knows
		frame, err = serialize(ether, ip, icmp, gopacket.Payload(append(make([]byte, 4), quoted...)))
	}
	if err == nil {
		err = a.send(frame)
	}
	return fmt.Sprintf("ICMP %v about %s", kind, v.Seen), err
}

// forgeUDP sends datagrams from strangers, and with the source of an honest client. The
// client ignores their answers. The server's receive buffer has room for all of them: a full
// one would drop honest datagrams, whatever carries them.
func forgeUDP(r *run, d *rand.Rand, a *attacker) (string, error) {
	to, count := r.target(d, true), 30+d.IntN(100)
	v, ok := r.victim(d, keptUDP)
	as := ok && d.IntN(2) == 0
	if as {
		to = v.Remote
	}
	err := a.flood(count, func(int) (forgery, bool) {
		f := forgery{src: stranger(d, to.Addr().Is6()), dst: to, udp: true, payload: make([]byte, d.IntN(60))}
		if as {
			f.src = v.Local
		}
		return f, true
	})
	return fmt.Sprintf("%d datagrams to %s, with an honest source: %v", count, to, as), err
}

// sendFragments sends fragments that never become a datagram: without a first one, overlapping, and
// as many as a flood.
func sendFragments(r *run, d *rand.Rand, a *attacker) (string, error) {
	to, count := r.target(d, true), 10+d.IntN(90)
	for i := range count {
		frame, err := a.frame(forgery{src: stranger(d, to.Addr().Is6()), dst: to, udp: true, payload: make([]byte, 64)})
		if err != nil {
			return "", err
		}
		if to.Addr().Is4() {
			fragment4(frame, uint16(d.IntN(20)), d.IntN(2) == 0)
		} else {
			frame = fragment6(frame, uint16(d.IntN(20)), d.IntN(2) == 0, d.Uint32())
		}
		if err := a.send(frame); err != nil {
			return "", err
		}
		if i%paced == paced-1 {
			time.Sleep(time.Millisecond)
		}
	}
	return fmt.Sprintf("%d fragments to %s", count, to), nil
}

// fragment4 makes an IPv4 frame a fragment at an offset, in units of 8 bytes.
func fragment4(frame []byte, offset uint16, more bool) {
	if more {
		offset |= 1 << 13
	}
	header := frame[14:34]
	binary.BigEndian.PutUint16(header[6:], offset)
	binary.BigEndian.PutUint16(header[10:], 0)
	sum := uint32(0)
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(header[i:]))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	binary.BigEndian.PutUint16(header[10:], ^uint16(sum))
}

// fragment6 inserts a fragment header into an IPv6 frame.
func fragment6(frame []byte, offset uint16, more bool, id uint32) []byte {
	header := []byte{frame[20], 0, 0, 0, 0, 0, 0, 0}
	offset <<= 3
	if more {
		offset |= 1
	}
	binary.BigEndian.PutUint16(header[2:], offset)
	binary.BigEndian.PutUint32(header[4:], id)
	out := append(append(append([]byte{}, frame[:54]...), header...), frame[54:]...)
	out[20] = 44 // the next header is a fragment header
	binary.BigEndian.PutUint16(out[18:], binary.BigEndian.Uint16(out[18:])+8)
	return out
}

// sendGarbage damages frames of an honest client behind their Ethernet header.
func sendGarbage(r *run, d *rand.Rand, a *attacker) (string, error) {
	v, ok := r.victim(d, stream)
	if !ok {
		return "no victim", nil
	}
	count := 5 + d.IntN(40)
	for range count {
		frame, err := a.frame(forgery{src: v.Local, dst: v.Remote, flags: ack, seq: d.Uint32(), ack: d.Uint32(),
			payload: make([]byte, d.IntN(40))})
		if err != nil {
			return "", err
		}
		frame = append([]byte{}, frame...)
		for range 1 + d.IntN(4) {
			frame[14+d.IntN(len(frame)-14)] = byte(d.Uint32())
		}
		if d.IntN(3) == 0 {
			frame = frame[:15+d.IntN(len(frame)-15)]
		}
		if err := a.send(frame); err != nil {
			return "", err
		}
	}
	return fmt.Sprintf("%d damaged frames of %s", count, v.Local), nil
}
