package harness

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"spillway.dev/spillway/test/testbed/topology"
)

func TestCounter(t *testing.T) {
	const text = `TcpExt: SyncookiesSent TCPSynRetrans TCPOrigDataSent
TcpExt: 1 27 3
IpExt: InNoRoutes TCPSynRetrans
IpExt: 4 5
`
	if n, err := counter(text, "TcpExt:", "TCPSynRetrans"); n != 27 || err != nil {
		t.Errorf("%d, %v, want 27", n, err)
	}
	for _, bad := range []string{"", "TcpExt: TCPSynRetrans\n", "TcpExt: A\nTcpExt: 1\n", "TcpExt: A TCPSynRetrans\nTcpExt: 1\n",
		"TcpExt: TCPSynRetrans\nTcpExt: x\n"} {
		if n, err := counter(bad, "TcpExt:", "TCPSynRetrans"); err == nil {
			t.Errorf("%d of %q", n, bad)
		}
	}
}

func TestReadTCPCountsConnections(t *testing.T) {
	if err := topology.RequireRoot(); err != nil {
		t.Skip(err)
	}
	spec := topology.DefaultSpec("looktcp")
	spec.Nodes, spec.PodsPerNode = 1, 1
	h, err := Up(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Down(); err != nil {
			t.Error(err)
		}
	})
	pod, node := h.Cluster.Pod(0, 0), h.Cluster.Node(0)
	before, err := ReadTCP(pod)
	if err != nil {
		t.Fatal(err)
	}
	err = pod.Do(func() error {
		_, err := net.DialTimeout("tcp", netip.AddrPortFrom(node.IPv4, 9).String(), time.Second)
		if err == nil {
			return errors.New("connected to a port without a listener")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	after, err := ReadTCP(pod)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := after.Minus(before), (TCPCounters{Opened: 1}); got != want {
		t.Errorf("counted %+v, want %+v", got, want)
	}
}

func TestEstablishedCountsConnectionsToOneAddress(t *testing.T) {
	if err := topology.RequireRoot(); err != nil {
		t.Skip(err)
	}
	spec := topology.DefaultSpec("looktest")
	spec.Nodes, spec.PodsPerNode = 1, 1
	h, err := Up(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Down(); err != nil {
			t.Error(err)
		}
	})
	pod, node := h.Cluster.Pod(0, 0), h.Cluster.Node(0)
	for _, address := range []string{node.IPv4.String(), "[" + node.IPv6.String() + "]"} {
		l, err := node.Listen(t.Context(), "tcp", address+":0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		to := netip.MustParseAddrPort(l.Addr().String())
		for want := range 3 {
			if n, err := Established(pod, to); n != want || err != nil {
				t.Errorf("%s: %d, %v, want %d", to, n, err, want)
			}
			conn, err := pod.Dial(t.Context(), "tcp", to.String())
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
		}
	}
}
