package masquerade

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/internal/node/ruleset"
	"spillway.dev/spillway/test/must"
)

const within = time.Minute

func shell(t *testing.T, script string) {
	t.Helper()
	if out, err := exec.Command("bash", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
}

// follow returns a function that waits until packets from one address to another are masqueraded or not.
func follow(t *testing.T) (want func(when, from, to string, masqueraded bool)) {
	t.Helper()
	here, err := netns.Get()
	must.Do(t, err)
	readings := make(chan Reading, 100)
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { // never unlocks: the thread ends in the namespace
		runtime.LockOSThread()
		if err := netns.Set(here); err != nil {
			done <- err
			return
		}
		done <- Follow(ctx, func(r Reading) { readings <- r })
	}()
	t.Cleanup(func() {
		stop()
		must.Do(t, <-done)
		here.Close()
	})
	last := <-readings
	return func(when, from, to string, masqueraded bool) {
		t.Helper()
		does := func() bool {
			return slices.ContainsFunc(last.Masqueraded, func(w ruleset.MasqueradeRange) bool {
				return w.Sources.Contains(netip.MustParseAddr(from)) && w.Outside.Contains(netip.MustParseAddr(to))
			})
		}
		for deadline := time.After(within); last.Err != nil || does() != masqueraded; {
			select {
			case last = <-readings:
			case <-deadline:
				t.Fatalf("%s: %s to %s is masqueraded: %t, %v; want %t", when, from, to, does(), last.Err, masqueraded)
			}
		}
	}
}

func TestRulesOfIptables(t *testing.T) {
	for _, program := range []string{"iptables-nft", "iptables-legacy", "ip6tables-nft", "ip6tables-legacy"} {
		t.Run(program, func(t *testing.T) {
			t.Parallel()
			netnstest.Enter(t)
			pods, from, to := "10.244.0.0/16", "10.244.1.5", "198.51.100.7"
			if strings.HasPrefix(program, "ip6") {
				pods, from, to = "fd00:244::/48", "fd00:244::5", "2001:db8::7"
			}
			run := func(script string) {
				shell(t, strings.NewReplacer("IPT", program+" -w -t nat", "PODS", pods).Replace(script))
			}
			want := follow(t)
			want("no rules", from, to, false)
			run("IPT -N FLANNEL-POSTRTG; IPT -A POSTROUTING -m comment --comment 'flanneld masq' -j FLANNEL-POSTRTG; " +
				"IPT -A FLANNEL-POSTRTG -s PODS -d PODS -m comment --comment 'flanneld masq' -j RETURN; " +
				"IPT -A FLANNEL-POSTRTG -s PODS -m comment --comment 'flanneld masq' -j MASQUERADE --random-fully")
			want("masquerade", from, to, true)
			run("IPT -F FLANNEL-POSTRTG")
			want("flushed", from, to, false)
		})
	}
}

func TestRulesOfNftables(t *testing.T) {
	t.Parallel()
	netnstest.Enter(t)
	shell(t, "ip link add eth0 type veth peer name peer; ip link set peer up; ip addr add 192.0.2.1/24 dev eth0; "+
		"ip link set eth0 up; ip route add default via 192.0.2.254")
	want := follow(t)
	const pod, near, far = "10.244.1.5", "192.168.1.1", "198.51.100.7"
	want("no rules", pod, far, false)
	shell(t, `nft 'table inet x { set keep { type ipv4_addr; flags interval; elements = { 10.0.0.0/8 }; }; `+
		`chain p { type nat hook postrouting priority srcnat; `+
		`oifname "eth0" ip saddr 10.244.0.0/16 ip daddr != @keep counter masquerade fully-random; }; }'`)
	want("a rule with a set", pod, far, true)
	shell(t, "nft add element inet x keep '{ 192.168.0.0/16 }'")
	want("an element added", pod, near, false)
	shell(t, "ip route del default")
	want("no uplink", pod, far, false)
	shell(t, "ip route add default via 192.0.2.254")
	want("the uplink again", pod, far, true)
	shell(t, "nft delete table inet x")
	want("deleted", pod, far, false)
}

// TestMain sets a lock of its own: other programs may hold the machine's.
func TestMain(m *testing.M) {
	lock := filepath.Join(os.TempDir(), fmt.Sprintf("spillway-masquerade-%d.lock", os.Getpid()))
	_ = os.Setenv("XTABLES_LOCKFILE", lock) // the name is valid
	code := m.Run()
	os.Remove(lock)
	os.Exit(code)
}
