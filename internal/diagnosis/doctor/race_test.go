package doctor

import (
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
)

// Two sockets with one port and two addresses send to one destination at once, through a
// rule that masquerades. Both get that port, and one loses.
func TestTheSNATRaceIsFoundWithItsCauseAndEndsWithRandomPorts(t *testing.T) {
	ns := newNamespace(t, "race")
	// The rules between NAT (100) and the insertion of the entry prolong the race, as
	// those of a large cluster do.
	inside(t, ns, outward+`ip addr add 10.9.0.1/32 dev lo; ip addr add 10.9.0.2/32 dev lo
iptables-nft -t nat -A POSTROUTING -s 10.9.0.0/24 -j MASQUERADE
{ echo 'add chain inet track slow { type filter hook postrouting priority 200; }'; for i in $(seq 2000); do echo "add rule inet track slow udp sport 1 udp length $i"; done; } | nft -f -`)
	race(t, ns)
	_, findings := examine(t, ns)
	f := onlyFinding(t, findings, "insert-failed")
	if f.Severity != Warning || !strings.Contains(strings.Join(f.Evidence, "\n"),
		"the SNAT race: two connections get the same port at the same time from iptables-nft nat POSTROUTING 1") {
		t.Errorf("%+v", f)
	}
	if got := withID(findings, "snat-ports-exhausted"); len(got) > 0 {
		t.Errorf("there are free ports: %+v", got)
	}
	masquerade := onlyFinding(t, findings, "masquerade-not-random")
	if masquerade.Severity != Warning {
		t.Errorf("with failed inserts it is %s", masquerade.Severity)
	}
	shell(t, masquerade.Commands[0])
	_, findings = examine(t, ns)
	// The counter stays; its value is history now.
	if f := onlyFinding(t, findings, "insert-failed"); f.Severity != Info {
		t.Errorf("with random ports it is still %s: %q", f.Severity, f.Evidence)
	}
}

// race sends until the counter has counted. Many rounds may be in time.
func race(t *testing.T, ns conntrack.Namespace) {
	t.Helper()
	netnstest.Within(t, ns.Names[0], func() {
		c, err := conntrack.Open()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		deadline := time.Now().Add(time.Minute)
		for round := 0; ; round++ {
			if round%200 == 0 {
				now, err := c.Stats(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if now.InsertFailed > 0 {
					return
				}
				if time.Now().After(deadline) {
					t.Fatalf("no race was lost in %d rounds", round)
				}
			}
			// Fewer than the ports towards one destination: a lack of ports would fail too.
			atOnce(t, 1024+round%20000, byte(1+round/20000))
		}
	})
}

func atOnce(t *testing.T, port int, to byte) {
	var ready atomic.Int32
	var both sync.WaitGroup
	for a := range byte(2) {
		fd := socket(t, unix.SOCK_DGRAM) // in the namespace of this thread
		if err := unix.Bind(fd, &unix.SockaddrInet4{Port: port, Addr: [4]byte{10, 9, 0, 1 + a}}); err != nil {
			t.Fatal(err)
		}
		both.Go(func() {
			defer unix.Close(fd)
			ready.Add(1)
			for spins := 0; ready.Load() < 2 && spins < 1_000_000; spins++ {
			}
			_ = unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: 53, Addr: [4]byte{198, 51, 100, to}})
		})
	}
	both.Wait()
}
