package hostile

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows"
)

// lostSYN is a SYN that the endpoint drops.
type lostSYN struct {
	spoil  bool // the checksum
	one    bool // from one address
	denied bool // from a port that the endpoint's rules drop
}

var lostSYNs = []lostSYN{{spoil: true}, {spoil: true, one: true}, {denied: true}, {denied: true, one: true}}

// deniedPort is the first of the ports that the endpoints' rules drop.
const deniedPort = 61000

// sendLost sends such SYNs, each twice as a client does.
func (s *sender) sendLost(t *testing.T, v variant, dst netip.AddrPort, l lostSYN) {
	t.Helper()
	for i := range 40 {
		src := stranger(v, i)
		if l.one {
			src = netip.AddrPortFrom(stranger(v, 0).Addr(), src.Port())
		}
		if l.denied {
			src = netip.AddrPortFrom(src.Addr(), uint16(deniedPort+i))
		}
		frame, err := s.frame(packet{src: src, dst: dst, proto: "tcp", flags: "S", seq: attackerISN})
		if l.spoil && err == nil {
			frame[len(frame)-4] ^= 0x55
		}
		for range 2 {
			if err == nil {
				err = s.sendFrame(frame)
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestForgedHandshakes sends SYNs that are lost to a Service of four endpoints with outlier ejection.
// Two of them drop the SYNs of all. They must be ejected, and the others must not.
func TestForgedHandshakes(t *testing.T) {
	e := start(t, "hostile-eject", "--outlier-ejection")
	if e.Mode == "iptables" {
		t.Skip("iptables does not count the handshakes of endpoints")
	}
	works, dead := []string{"a0", "b0"}, []string{"a2", "b1"}
	e.file = e.Load(t, flows.Service{Name: "watched", Type: corev1.ServiceTypeNodePort, Endpoints: flows.On("a0", "b0", "a2", "b1"),
		Annotations: map[string]string{intent.OutlierEjectionAnnotation: "true"}})
	attacker := e.sender(t, outsider)
	drop := func(match string, hosts ...string) {
		for _, host := range hosts {
			e.Output(t, host, "nft", fmt.Sprintf("add table inet silent; add chain inet silent input { type filter hook input priority 0; }; "+
				"add rule inet silent input %s drop", match))
		}
	}
	drop(fmt.Sprintf("tcp sport %d-%d", deniedPort, deniedPort+99), works...)
	drop(fmt.Sprintf("tcp dport %d", endpointUp), dead...)
	for _, v := range []variant{{v6: false}, {v6: true}} {
		dst := e.nodePort(t, "watched", "tcp", v)
		await.True(t, string(v.combo("tcp"))+": the endpoints that drop all SYNs are ejected", func() bool {
			for _, l := range lostSYNs {
				attacker.sendLost(t, v, dst, l)
			}
			status, ejected := e.status(t), 0
			for _, host := range works {
				if a := netip.AddrPortFrom(e.addr(host, v), endpointUp); strings.Contains(status, "endpoint "+a.String()) {
					t.Fatalf("%s works: %s", host, status)
				}
			}
			for _, host := range dead {
				if a := netip.AddrPortFrom(e.addr(host, v), endpointUp); strings.Contains(status, "endpoint "+a.String()+" gets no new connections") {
					ejected++
				}
			}
			return ejected == len(dead)
		})
	}
}

// status is what the receiving node reports, in one line.
func (e *env) status(t *testing.T) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), await.Limit)
	defer cancel()
	out, err := exec.CommandContext(ctx, e.Binary, "status", "-o", "wide", "--api-socket", e.Agent(receiver).Socket()).CombinedOutput()
	if err != nil {
		t.Fatalf("spillway status: %v: %s", err, out)
	}
	return strings.Join(strings.Fields(string(out)), " ")
}
