package e2e

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/capacity"
	"spillway.dev/spillway/test/await"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/harness"
	machine "spillway.dev/spillway/test/testbed/sysctl"
	"spillway.dev/spillway/test/testbed/topology"
)

// The autopilot of a running agent shortens the timeouts of a pod whose short flows
// fill its table. The agent is killed meanwhile. The next agent has the autopilot
// disabled and restores the original values.
func TestTimeoutsThatAKilledAgentShortenedGoBack(t *testing.T) {
	t.Parallel()
	spec := topology.DefaultSpec("e2e-autopilot")
	memory := strconv.FormatInt(int64(capacity.Memory(3000, 3000, 50)), 10)
	c := harness.Start(t, cluster.Config{Spec: spec, Flags: map[string][]string{
		"a": {"--conntrack-autopilot", "on", "--conntrack-autopilot-memory", memory},
	}})
	pod, node := c.MustHost(t, "a0"), c.MustHost(t, "a")
	trackLoopback(t, pod)
	const timeout = "nf_conntrack_udp_timeout"
	found, sizes := sysctl(t, pod, timeout), machineSizes(t)
	// Should anything of the machine's change all the same, it goes back.
	t.Cleanup(func() { restoreSizes(t, sizes) })

	stop := fill(t, pod, 400)
	defer stop()
	waitFor(t, c.Agent("a"), "a shorter timeout", func() bool { return sysctl(t, pod, timeout) < found })
	if got := sysctl(t, node, timeout); got != found {
		t.Errorf("the node's own is %d, found %d", got, found)
	}
	if err := c.Agent("a").Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	stop()
	if got := sysctl(t, pod, timeout); got >= found {
		t.Fatalf("a killed agent has given it back: %d", got)
	}
	c.Flags["a"] = []string{"--conntrack-autopilot", "off"}
	if err := c.Agent("a").Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	waitFor(t, c.Agent("a"), "the original timeout", func() bool { return sysctl(t, pod, timeout) == found })
	if got := machineSizes(t); got != sizes {
		t.Errorf("the machine's sizes are %v, found %v", got, sizes)
	}
}

// trackLoopback has conntrack see what goes over lo of a host.
func trackLoopback(t *testing.T, h *topology.Host) {
	t.Helper()
	cmd := h.Command(t.Context(), "nft", "add table ip track; add chain ip track out { type filter hook output priority 0; }; add rule "+
		"ip track out ct state new counter")
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Fatalf("track loopback: %v: %s", err, out.String())
	}
}

// sysctl reads a number of conntrack's in a host's namespace.
func sysctl(t *testing.T, h *topology.Host, name string) (v int) {
	t.Helper()
	if err := h.Do(func() (err error) { v, err = readNumber(name); return err }); err != nil {
		t.Fatal(err)
	}
	return v
}

func readNumber(name string) (int, error) {
	b, err := os.ReadFile("/proc/sys/net/netfilter/" + name)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(b)))
}

var sizeNames = [3]string{"nf_conntrack_max", "nf_conntrack_buckets", "nf_conntrack_expect_max"}

// machineSizes reads sizes that no experiment of the lab changes until the test ends.
func machineSizes(t *testing.T) (sizes [3]int) {
	t.Helper()
	release, err := machine.Exclude()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(release)
	for i, name := range sizeNames {
		var err error
		if sizes[i], err = readNumber(name); err != nil {
			t.Fatal(err)
		}
	}
	return sizes
}

func restoreSizes(t *testing.T, sizes [3]int) {
	for i, name := range sizeNames {
		if now, err := readNumber(name); err == nil && now != sizes[i] {
			if err := os.WriteFile("/proc/sys/net/netfilter/"+name, []byte(strconv.Itoa(sizes[i])), 0); err != nil {
				t.Error(err)
			}
		}
	}
}

// fill begins so many UDP flows a second over lo of a host until the function that
// it returns is called. Each is one datagram from a port of its own.
func fill(t *testing.T, h *topology.Host, perSecond int) (stop func()) {
	var ended atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := h.Do(func() error {
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for !ended.Load() {
				for range perSecond / 100 {
					if err := sendOnce(); err != nil {
						return err
					}
				}
				<-tick.C
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	})
	return func() { ended.Store(true); wg.Wait() }
}

func sendOnce() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, []byte("?"), 0, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}}); err != nil &&
		err != unix.ECONNREFUSED {
		return err
	}
	return nil
}

// waitFor waits for what an agent is to do, and shows its log if it does not.
func waitFor(t *testing.T, a *cluster.Agent, what string, done func() bool) {
	t.Helper()
	await.NoError(t, func() error {
		if !done() {
			return fmt.Errorf("waited in vain for %s; the agent's log ends with:\n%s", what, a.Tail())
		}
		return nil
	})
}
