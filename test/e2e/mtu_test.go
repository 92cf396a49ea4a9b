package e2e

import (
	"fmt"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/testbed/topology"
)

// TestPathMTU: the path to an endpoint on another node has a smaller MTU than the
// client's Ethernet (VXLAN takes 70 bytes of it), and the client gets an ICMP error.
// Its packets have CHECKSUM_PARTIAL, like all packets from the same machine; the
// answers must not.
func TestPathMTU(t *testing.T) {
	spec := topology.DefaultSpec("e2e-mtu")
	spec.PodNetwork, spec.Clients = topology.VXLAN, 2
	e := startSpec(t, spec)
	node, err := e.Host("a")
	if err != nil {
		t.Fatal(err)
	}
	if err := node.Do(func() error { return sumInSoftware("eth0") }); err != nil {
		t.Fatal(err)
	}
	s := e.Load(t, nodePort("b0"))
	for _, c := range []struct {
		// What a client has learned holds for all that it sends to the node.
		client string
		what   string
		size   int
	}{
		{"client0", "a whole datagram", 1450},
		{"client1", "a datagram in fragments", 3000},
	} {
		p := e.MustProbe(t, c.client)
		for _, combo := range flows.UDP {
			name := fmt.Sprintf("%s, %s", c.what, combo)
			dst := s.MustAddress(t, flows.NodePort("a"), combo)
			if a := ask(t, p, dst, combo, 1); len(a) == 0 || a[0].Server != "b0" {
				t.Fatalf("%s: a small one was answered with %+v", name, a)
			}
			// The first is lost, or refused with EMSGSIZE: so the sender learns.
			resp, err := p.Do(t.Context(), probe.Request{
				Op: probe.Try, Proto: combo.Protocol(), Dst: dst, Tries: 3, Size: c.size,
			})
			if err != nil {
				t.Fatal(err)
			}
			if last := resp.Answers[len(resp.Answers)-1]; last.Server != "b0" {
				t.Errorf("%s: the sender gets no ICMP error with the MTU: %+v", name, resp.Answers)
			}
		}
	}
}

// sumInSoftware turns a device's offload of checksums off: the kernel then fills
// in what a packet of CHECKSUM_PARTIAL lacks, where a veth would just say that
// all is well.
func sumInSoftware(device string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return os.NewSyscallError("socket", err)
	}
	defer unix.Close(fd)
	off := struct{ cmd, value uint32 }{cmd: unix.ETHTOOL_STXCSUM} // struct ethtool_value
	req := struct {                                               // struct ifreq
		name [unix.IFNAMSIZ]byte
		data unsafe.Pointer
		_    [16]byte
	}{data: unsafe.Pointer(&off)}
	copy(req.name[:], device)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&req))); errno != 0 {
		return os.NewSyscallError("ioctl SIOCETHTOOL", errno)
	}
	return nil
}
