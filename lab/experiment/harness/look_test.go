package harness

import (
	"os"
	"testing"
)

func TestNetstatCounter(t *testing.T) {
	const text = `TcpExt: SyncookiesSent TCPSynRetrans TCPOrigDataSent
TcpExt: 1 27 3
IpExt: InNoRoutes TCPSynRetrans
IpExt: 4 5
`
	if n, err := netstatCounter(text, "TcpExt", "TCPSynRetrans"); n != 27 || err != nil {
		t.Errorf("%d, %v, want 27", n, err)
	}
	for _, bad := range []string{"", "TcpExt: TCPSynRetrans\n", "TcpExt: A\nTcpExt: 1\n", "TcpExt: A TCPSynRetrans\nTcpExt: 1\n",
		"TcpExt: TCPSynRetrans\nTcpExt: x\n"} {
		if n, err := netstatCounter(bad, "TcpExt", "TCPSynRetrans"); err == nil {
			t.Errorf("%d of %q", n, bad)
		}
	}
}

func TestTheKernelCountsRepeatedSYNs(t *testing.T) {
	text, err := os.ReadFile("/proc/thread-self/net/netstat")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := netstatCounter(string(text), "TcpExt", "TCPSynRetrans"); err != nil {
		t.Error(err)
	}
}
