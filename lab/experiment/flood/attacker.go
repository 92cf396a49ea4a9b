package flood

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"
	"unsafe"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/testbed/topology"
)

// batch is the number of frames of one system call.
const batch = 64

// attacker sends SYNs from forged sources: 198.18.0.0/15 (RFC 2544), ports 1024 to 65023.
type attacker struct {
	fd     int
	frames [batch][]byte
	msgs   [batch]mmsghdr
	iovecs [batch]unix.Iovec
	addr   unix.RawSockaddrLinklayer
	count  uint32
}

// mmsghdr is struct mmsghdr of sendmmsg(2).
type mmsghdr struct {
	hdr unix.Msghdr
	len uint32
	_   [4]byte
}

// newAttacker opens a packet socket on a host for frames to a node.
func newAttacker(host, node *topology.Host, target netip.AddrPort) (*attacker, error) {
	a := &attacker{}
	via, _, err := device(node)
	if err != nil {
		return nil, err
	}
	own, index, err := device(host)
	if err != nil {
		return nil, err
	}
	frame, err := synFrame(own, via, target)
	if err != nil {
		return nil, err
	}
	err = host.Do(func() error {
		a.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return os.NewSyscallError("socket", err)
	})
	if err != nil {
		return nil, fmt.Errorf("open packet socket on %s: %w", host.Name, err)
	}
	// The device's queue would only delay packets that the receiver drops.
	_ = unix.SetsockoptInt(a.fd, unix.SOL_PACKET, unix.PACKET_QDISC_BYPASS, 1)
	a.addr = unix.RawSockaddrLinklayer{Family: unix.AF_PACKET, Ifindex: int32(index)}
	for i := range a.frames {
		a.frames[i] = append([]byte(nil), frame...)
		a.iovecs[i] = unix.Iovec{Base: &a.frames[i][0], Len: uint64(len(frame))}
		a.msgs[i].hdr = unix.Msghdr{
			Name: (*byte)(unsafe.Pointer(&a.addr)), Namelen: unix.SizeofSockaddrLinklayer, Iov: &a.iovecs[i], Iovlen: 1,
		}
	}
	return a, nil
}

func (a *attacker) close() { unix.Close(a.fd) }

// device returns the MAC and the index of a host's eth0.
func device(h *topology.Host) (mac net.HardwareAddr, index int, err error) {
	err = h.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		if err == nil {
			mac, index = link.Attrs().HardwareAddr, link.Attrs().Index
		}
		return err
	})
	if err != nil {
		return nil, 0, fmt.Errorf("find eth0 of %s: %w", h.Name, err)
	}
	return mac, index, nil
}

// synFrame is a SYN as a Linux client sends it, from 198.18.0.0.
func synFrame(own, via net.HardwareAddr, target netip.AddrPort) ([]byte, error) {
	ip := &layers.IPv4{Version: 4, TTL: 64, Protocol: layers.IPProtocolTCP, SrcIP: net.IPv4(198, 18, 0, 0), DstIP: target.Addr().AsSlice(),
		Flags: layers.IPv4DontFragment}
	tcp := &layers.TCP{SrcPort: 0, DstPort: layers.TCPPort(target.Port()), SYN: true, Window: 64240, Options: []layers.TCPOption{
		{OptionType: layers.TCPOptionKindMSS, OptionLength: 4, OptionData: []byte{0x05, 0xb4}},
	}}
	if err := tcp.SetNetworkLayerForChecksum(ip); err != nil {
		return nil, fmt.Errorf("build SYN: %w", err)
	}
	buf := gopacket.NewSerializeBuffer()
	err := gopacket.SerializeLayers(buf, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true},
		&layers.Ethernet{SrcMAC: own, DstMAC: via, EthernetType: layers.EthernetTypeIPv4}, ip, tcp)
	if err != nil {
		return nil, fmt.Errorf("build SYN: %w", err)
	}
	return buf.Bytes(), nil
}

// flood sends until ctx ends, at most rate frames a second (0: no limit). It returns the
// rate achieved.
func (a *attacker) flood(ctx context.Context, rate int) (float64, error) {
	began, sent := time.Now(), 0
	for ctx.Err() == nil {
		if rate > 0 && float64(sent) > float64(rate)*time.Since(began).Seconds() {
			time.Sleep(100 * time.Microsecond)
			continue
		}
		for i := range a.frames {
			a.count++
			renew(a.frames[i], a.count)
		}
		n, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(a.fd), uintptr(unsafe.Pointer(&a.msgs[0])), batch, 0, 0, 0)
		switch errno {
		case 0:
			sent += int(n)
		case unix.ENOBUFS, unix.EINTR: // retry: the device's queue is full, or a signal came
		default:
			return 0, fmt.Errorf("send SYNs: %w", os.NewSyscallError("sendmmsg", errno))
		}
	}
	return float64(sent) / time.Since(began).Seconds(), nil
}

// Offsets of the fields in a frame.
const (
	ipSum   = 14 + 10
	srcAddr = 14 + 12
	srcPort = 14 + 20
	seq     = 14 + 24
	tcpSum  = 14 + 36
)

// renew sets the source and the sequence number of a SYN from n. It cycles through 64,000
// ports and all 2^17 addresses, not in order.
func renew(frame []byte, n uint32) {
	mixed := n * 2654435761 // Knuth: consecutive numbers are far apart
	set16(frame, srcAddr, 198<<8|18+uint16(mixed>>16&1), ipSum, tcpSum)
	set16(frame, srcAddr+2, uint16(mixed), ipSum, tcpSum)
	set16(frame, srcPort, 1024+uint16(n%64000), tcpSum)
	set16(frame, seq, uint16(mixed>>8), tcpSum)
}

// set16 changes 16 bits and the checksums over them (RFC 1624).
func set16(frame []byte, at int, value uint16, sums ...int) {
	old := binary.BigEndian.Uint16(frame[at:])
	binary.BigEndian.PutUint16(frame[at:], value)
	for _, sum := range sums {
		s := uint32(^binary.BigEndian.Uint16(frame[sum:])) + uint32(^old) + uint32(value)
		s = s&0xffff + s>>16
		s = s&0xffff + s>>16
		binary.BigEndian.PutUint16(frame[sum:], ^uint16(s))
	}
}
