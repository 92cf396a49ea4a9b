// Package dsrprobe finds out how the packets of a connection can tell the node of its endpoint which
// Service they are for: by an IP option, or within datagrams where the network drops options. Its
// probes take the way of such packets. The programs of the endpoint's node answer them, not its
// agent (dsr_answer_probe of bpf/lib/dsr/receive.h): so an agent that restarts breaks no path.
package dsrprobe

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/wire"
)

// Prober sends probes.
type Prober struct {
	// Key is the cluster's secret: the present DSRKey.
	Key [16]byte
	// Port is the UDP port of datagrams between nodes, the same on all of them.
	Port uint16
}

// Result is what arrives at the node of an endpoint.
type Result struct {
	Option bool // a datagram with the option
	// MTU is the length of the longest packet, with all headers, that arrived within a datagram; 0:
	// none arrived, or the option did.
	MTU int
}

// A probe that gets no answer is sent again. An answer to an earlier one counts, too. When one of
// several was answered, the others have as long again as that took, and grace.
const (
	tries = 3
	wait  = 300 * time.Millisecond
	grace = 30 * time.Millisecond
)

// lengths are what networks forward: jumbo frames, Ethernet, and what tunnels leave of it.
var lengths = []int{8950, 8900, 4000, 1500, 1492, 1480, 1460, 1450, 1440, 1430, 1420, 1410, 1400, 1380, minIPv6 + 80,
	1300, minIPv6, 1000, 576}

// Probe sends probes to the address of an endpoint on another node. It takes up to a second, or two
// to find the length. The error is one of this node, and says nothing about the network: without a
// route, for example.
func (p *Prober) Probe(ctx context.Context, endpoint netip.Addr) (r Result, err error) {
	s, err := p.open(ctx, endpoint)
	if err != nil {
		return r, err
	}
	defer s.conn.Close()
	defer context.AfterFunc(ctx, func() { s.conn.Close() })()
	for try := range tries {
		if err := s.sendOption(); err != nil {
			return r, err
		}
		if try > 0 { // most networks forward options
			if err := s.sendEncapsulated([]int{s.shortest()}); err != nil {
				return r, err
			}
		}
		got, err := s.receive(min(try+1, 2))
		switch {
		case err != nil:
			return r, err
		case slices.Contains(got, byOption):
			return Result{Option: true}, nil
		}
		r.MTU = max(r.MTU, slices.Max(append(got, 0)))
	}
	if r.MTU == 0 {
		return r, nil
	}
	r.MTU, err = s.measure(r.MTU)
	return r, err
}

// byOption is the length in the data of a probe that has none.
const byOption = 1

// session is the probes to one endpoint.
type session struct {
	conn   *net.UDPConn
	path   path
	key    [16]byte
	nonce  [8]byte
	routed int // MTU of the route, in bytes
}

func (p *Prober) open(ctx context.Context, endpoint netip.Addr) (*session, error) {
	dialer := net.Dialer{Control: forbidFragments}
	c, err := dialer.DialContext(ctx, "udp", net.JoinHostPort(endpoint.String(), strconv.Itoa(int(p.Port))))
	if err != nil {
		return nil, fmt.Errorf("probe %s: %w", endpoint, err)
	}
	s := &session{conn: c.(*net.UDPConn), key: p.Key}
	_, _ = rand.Read(s.nonce[:]) // never fails
	from := s.conn.LocalAddr().(*net.UDPAddr).AddrPort()
	s.path = path{netip.AddrPortFrom(from.Addr().Unmap().WithZone(""), from.Port()), netip.AddrPortFrom(endpoint, p.Port)}
	if s.routed, err = routeMTU(s.conn, s.path.is4()); err != nil {
		s.conn.Close()
		return nil, fmt.Errorf("probe %s: read the route's MTU: %w", endpoint, err)
	}
	return s, nil
}

// forbidFragments has datagrams leave as they are, whatever the kernel thinks about the path.
func forbidFragments(network, _ string, c syscall.RawConn) (err error) {
	control := c.Control(func(fd uintptr) {
		if network == "udp6" {
			// Datagrams come back as they were sent: omitChecksum.
			err = errors.Join(unix.SetsockoptInt(int(fd), unix.SOL_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE),
				unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_NO_CHECK6_RX, 1))
		} else {
			err = unix.SetsockoptInt(int(fd), unix.SOL_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE)
		}
	})
	return errors.Join(control, err)
}

func routeMTU(c *net.UDPConn, is4 bool) (mtu int, err error) {
	err = onSocket(c, func(fd int) (err error) {
		if is4 {
			mtu, err = unix.GetsockoptInt(fd, unix.SOL_IP, unix.IP_MTU)
		} else {
			mtu, err = unix.GetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_MTU)
		}
		return err
	})
	return mtu, err
}

// onSocket calls f with the descriptor of a connection.
func onSocket(c *net.UDPConn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	control := raw.Control(func(fd uintptr) { err = f(int(fd)) })
	return errors.Join(control, err)
}

// data says which probe it is: the session, and the length of the packet with all headers.
func (s *session) data(length int) []byte {
	return binary.BigEndian.AppendUint32(s.nonce[:], uint32(length))
}

const dataLen = 12

// shortest returns the length of a packet within a datagram that has no more than data.
func (s *session) shortest() int {
	if s.path.is4() {
		return Room(true) + wire.IPv4Len + wire.UDPLen + dataLen
	}
	return Room(false) + wire.IPv6Len + wire.UDPLen + dataLen
}

func (s *session) sendOption() error {
	if err := s.omitChecksum(false); err != nil {
		return err
	}
	_, _, err := s.conn.WriteMsgUDP(s.data(byOption), s.path.control(s.key), nil)
	return s.sendError(err)
}

func (s *session) sendEncapsulated(lengths []int) error {
	if err := s.omitChecksum(true); err != nil {
		return err
	}
	for _, length := range lengths {
		data := append(s.data(length), make([]byte, length-s.shortest())...)
		_, err := s.conn.Write(s.path.encapsulated(s.key, data))
		if err := s.sendError(err); err != nil {
			return err
		}
	}
	return nil
}

// omitChecksum has datagrams leave without a checksum, as the programs send them: a network may drop
// those.
func (s *session) omitChecksum(omit bool) error {
	level, option, value := unix.IPPROTO_UDP, unix.UDP_NO_CHECK6_TX, 0
	if s.path.is4() {
		level, option = unix.SOL_SOCKET, unix.SO_NO_CHECK
	}
	if omit {
		value = 1
	}
	err := onSocket(s.conn, func(fd int) error { return unix.SetsockoptInt(fd, level, option, value) })
	if err != nil {
		return fmt.Errorf("probe %s: omit checksums: %w", s.path.to.Addr(), err)
	}
	return nil
}

// ofNetwork are what the kernel makes of ICMP errors (icmp_err_convert of net/ipv4/icmp.c, icmpv6_err_convert
// of net/ipv6/icmp.c), and of a datagram that is too long for the device.
var ofNetwork = []error{
	unix.ECONNREFUSED, unix.EHOSTUNREACH, unix.ENETUNREACH, unix.EPROTO, unix.ENOPROTOOPT, unix.EACCES,
	unix.EHOSTDOWN, unix.ENONET, unix.EOPNOTSUPP, unix.EMSGSIZE,
}

// sendError returns an error of this node. One of the network says that a probe did not arrive.
func (s *session) sendError(err error) error {
	if err == nil || slices.ContainsFunc(ofNetwork, func(e error) bool { return errors.Is(err, e) }) {
		return nil
	}
	return fmt.Errorf("probe %s: %w", s.path.to.Addr(), err)
}

// receive returns the lengths of the probes that were answered. It waits for at most so many.
func (s *session) receive(most int) (got []int, err error) {
	began := time.Now()
	deadline := began.Add(wait)
	buf := make([]byte, 1<<16)
	for len(got) < most && !slices.Contains(got, byOption) {
		if err := s.conn.SetReadDeadline(deadline); err != nil {
			return nil, fmt.Errorf("probe %s: %w", s.path.to.Addr(), err)
		}
		n, err := s.conn.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err := s.sendError(err); err != nil {
			return nil, err
		}
		if length := s.lengthIn(buf[:n]); length > 0 {
			got = append(got, length)
			deadline = earlier(deadline, time.Now().Add(time.Since(began)+grace))
		}
	}
	return got, nil
}

// lengthIn returns the length that an answer names, or 0 if it is none of this session: a pod may
// answer probes of its own address, if no program does.
func (s *session) lengthIn(answer []byte) int {
	for _, data := range [][]byte{answer, s.path.inside(answer)} {
		if len(data) >= dataLen && [8]byte(data[:8]) == s.nonce {
			if length := int(binary.BigEndian.Uint32(data[8:dataLen])); length <= s.routed {
				return length
			}
		}
	}
	return 0
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// measure returns the length of the longest packet that arrives, at least known. The answers are as
// long as the probes, so the way back must forward them, too.
func (s *session) measure(known int) (int, error) {
	candidates := []int{s.routed}
	for _, length := range lengths {
		if length > known && length < s.routed {
			candidates = append(candidates, length)
		}
	}
	for range tries {
		if err := s.sendEncapsulated(candidates); err != nil {
			return 0, err
		}
		got, err := s.receive(len(candidates))
		if err != nil {
			return 0, err
		}
		known = max(known, slices.Max(append(got, 0)))
		if known >= s.routed {
			break
		}
	}
	return known, nil
}
