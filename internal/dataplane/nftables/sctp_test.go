package nftables

import (
	"encoding/binary"
	"hash/crc32"
	"testing"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

// initChunk is a packet that opens an SCTP association (RFC 9260, 3.3.2).
func initChunk(from, to uint16) []byte {
	p := make([]byte, 12+20)
	binary.BigEndian.PutUint16(p[0:], from)
	binary.BigEndian.PutUint16(p[2:], to)
	p[12] = 1 // INIT
	binary.BigEndian.PutUint16(p[14:], 20)
	binary.BigEndian.PutUint32(p[16:], 0x5eed) // initiate tag
	binary.BigEndian.PutUint32(p[20:], 65536)  // window
	binary.BigEndian.PutUint16(p[24:], 1)      // streams out
	binary.BigEndian.PutUint16(p[26:], 1)      // streams in
	binary.LittleEndian.PutUint32(p[8:], crc32.Checksum(p, crc32.MakeTable(crc32.Castagnoli)))
	return p
}

// rawSCTP opens a socket for whole SCTP packets at an address. Kernels without
// SCTP have no other; what a Service does with the packets is the same.
func rawSCTP(t *testing.T, addr [4]byte) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: addr}); err != nil {
		t.Fatal(err)
	}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5}); err != nil {
		t.Fatal(err)
	}
	return fd
}

func TestAnSCTPPacketReachesTheEndpointAndIsWhole(t *testing.T) {
	enter(t)
	run(t, "ip", "link", "set", "lo", "up")
	run(t, "ip", "addr", "add", "172.30.0.10/32", "dev", "lo")
	run(t, "ip", "addr", "add", "172.30.0.11/32", "dev", "lo")
	run(t, "ip", "route", "add", "default", "dev", "lo")
	b := open(t)
	replace(t, b, intent.State{Node: node(), Ports: []*intent.ServicePort{
		port("sigtran", model.IPv4, protocol(model.SCTP), clusterIP("10.96.0.1", intent.ToCluster), endpoints("172.30.0.11:3868")),
	}})
	client, server := rawSCTP(t, [4]byte{172, 30, 0, 10}), rawSCTP(t, [4]byte{172, 30, 0, 11})
	if err := unix.Sendto(client, initChunk(5000, 80), 0, &unix.SockaddrInet4{Addr: [4]byte{10, 96, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 256)
	n, _, err := unix.Recvfrom(server, buf, 0)
	if err != nil {
		t.Fatalf("nothing arrives: %v", err)
	}
	p := buf[20:n] // behind the IP header
	sum := binary.LittleEndian.Uint32(p[8:])
	binary.LittleEndian.PutUint32(p[8:], 0)
	if port := binary.BigEndian.Uint16(p[2:]); port != 3868 || sum != crc32.Checksum(p, crc32.MakeTable(crc32.Castagnoli)) {
		t.Errorf("port %d, checksum %08x of %x", port, sum, p)
	}
}
