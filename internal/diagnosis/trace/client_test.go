package trace

import (
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// TestPortsOfSocketsAreNotChosen: a client with many connections has sockets without a flow. The connection
// that trace opens must not need the port of one.
func TestPortsOfSocketsAreNotChosen(t *testing.T) {
	_, own := netnstest.Enter(t)
	for _, command := range []string{"link set lo up", "addr add 192.0.2.1/32 dev lo"} {
		if out, err := exec.CommandContext(t.Context(), "ip", strings.Fields(command)...).CombinedOutput(); err != nil {
			t.Fatalf("ip %s: %v %s", command, err, out)
		}
	}
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "192.0.2.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	taken := netip.MustParseAddrPort(l.Addr().String()).Port()
	tr := tracer{Config: Config{Protocol: model.TCP, From: Peer{Addr: netip.MustParseAddr("192.0.2.1")},
		To: Peer{Addr: netip.MustParseAddr("192.0.2.9")}, Port: 80}, ns: own, client: client{kind: nodeClient}}
	if tr.canBind(taken) {
		t.Errorf("port %d of a socket may be chosen", taken)
	}
	l.Close()
	if !tr.canBind(taken) {
		t.Errorf("port %d may not be chosen, although no socket has it", taken)
	}
	tr.client.kind = outsideClient
	if !tr.canBind(taken) {
		t.Error("no port of a client on another machine may be chosen")
	}
}
