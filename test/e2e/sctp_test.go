package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/must"
	"spillway.dev/spillway/test/testbed/topology"
)

const sctpPort, sctpServerPort = 80, 8080

// TestSCTPIsServedBesideEBPF has a pod, a process of the node and a client outside exchange SCTP
// packets with endpoints of Services, on the node and elsewhere. eBPF serves TCP at the same
// addresses and ports. The sockets are raw ones, since not every kernel has SCTP.
func TestSCTPIsServedBesideEBPF(t *testing.T) {
	spec := topology.DefaultSpec("e2e-sctp")
	spec.Conntrack = true
	e := startSpec(t, spec)
	endpoints := []string{"a0", "b0"}
	var services []flows.Object
	for _, on := range endpoints {
		services = append(services, flows.Service{
			Name: on, Type: corev1.ServiceTypeNodePort, Endpoints: flows.On(on),
			Ports: []flows.Port{
				{Name: "sctp", Protocol: corev1.ProtocolSCTP, Port: sctpPort, Target: sctpServerPort},
				{Name: "tcp", Protocol: corev1.ProtocolTCP, Port: sctpPort, Target: sctpServerPort},
			},
		})
	}
	s := e.Load(t, services...)
	clientPort := uint16(40000)
	for _, v6 := range []bool{false, true} {
		for _, on := range endpoints {
			server := e.sctpSocket(t, on, v6)
			clusterIP := netip.AddrPortFrom(s.Scope.ClusterIP(on, v6), sctpPort)
			nodePort := netip.AddrPortFrom(e.Addr("a", v6), uint16(s.Scope.NodePort(on, "sctp")))
			for from, front := range map[string]netip.AddrPort{"a1": clusterIP, "a": clusterIP, "client0": nodePort} {
				clientPort++
				client := e.sctpSocket(t, from, v6)
				await.True(t, fmt.Sprintf("the answer of %s from %s at %s", on, front, from), func() bool {
					return exchangeSCTP(t, client, server, clientPort, front)
				})
			}
		}
	}
}

// exchangeSCTP sends the first packet of an association to an address of a Service. It reports whether
// the endpoint gets the packet, and the client the answer, from the Service's address.
func exchangeSCTP(t *testing.T, client, server int, port uint16, front netip.AddrPort) bool {
	t.Helper()
	clientTag, serverTag := uint32(port), uint32(port)<<16
	must.Do(t, unix.Sendto(client, sctpPacket(port, front.Port(), sctpINIT, 0, clientTag), 0, rawAddr(front.Addr())))
	seen, ok := receiveSCTP(server, sctpServerPort, clientTag)
	if !ok {
		return false
	}
	must.Do(t, unix.Sendto(server, sctpPacket(sctpServerPort, seen.Port(), sctpINITACK, clientTag, serverTag), 0, rawAddr(seen.Addr())))
	answered, ok := receiveSCTP(client, port, serverTag)
	return ok && answered == front
}

// Types of chunks (RFC 9260, 3.2).
const sctpINIT, sctpINITACK = 1, 2

// sctpPacket returns an INIT or an INIT ACK, whose verification tag is tag (RFC 9260, 3.3.2).
func sctpPacket(from, to uint16, kind byte, tag, initTag uint32) []byte {
	p := make([]byte, 32)
	binary.BigEndian.PutUint16(p[0:], from)
	binary.BigEndian.PutUint16(p[2:], to)
	binary.BigEndian.PutUint32(p[4:], tag)
	p[12] = kind
	binary.BigEndian.PutUint16(p[14:], 20)
	binary.BigEndian.PutUint32(p[16:], initTag)
	binary.BigEndian.PutUint32(p[20:], 65536) // window in bytes
	binary.BigEndian.PutUint16(p[24:], 1)     // streams out
	binary.BigEndian.PutUint16(p[26:], 1)     // streams in
	binary.LittleEndian.PutUint32(p[8:], crc32.Checksum(p, crc32.MakeTable(crc32.Castagnoli)))
	return p
}

// receiveSCTP reads packets until one to the port has the initiate tag, and returns its source. ok is
// false if none comes for a second.
func receiveSCTP(fd int, port uint16, initTag uint32) (from netip.AddrPort, ok bool) {
	for buf := make([]byte, 256); ; {
		n, source, err := unix.Recvfrom(fd, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return from, false
		}
		p, addr := buf[:n], netip.Addr{}
		switch a := source.(type) {
		case *unix.SockaddrInet4:
			addr, p = netip.AddrFrom4(a.Addr), p[int(p[0]&15)*4:] // the IP header comes first
		case *unix.SockaddrInet6:
			addr = netip.AddrFrom16(a.Addr)
		}
		if len(p) >= 20 && binary.BigEndian.Uint16(p[2:]) == port && binary.BigEndian.Uint32(p[16:]) == initTag {
			return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(p)), true
		}
	}
}

// sctpSocket opens a socket for whole SCTP packets at the address of a host.
func (e *env) sctpSocket(t *testing.T, host string, v6 bool) (fd int) {
	t.Helper()
	family := unix.AF_INET
	if v6 {
		family = unix.AF_INET6
	}
	e.Do(t, host, func() (err error) {
		fd, err = unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
		return err
	})
	t.Cleanup(func() { _ = unix.Close(fd) })
	must.Do(t, errors.Join(
		unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 1}),
		unix.Bind(fd, rawAddr(e.Addr(host, v6)))))
	return fd
}

func rawAddr(a netip.Addr) unix.Sockaddr {
	if a.Is4() {
		return &unix.SockaddrInet4{Addr: a.As4()}
	}
	return &unix.SockaddrInet6{Addr: a.As16()}
}
