package autopilot

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/node/capacity"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/node/kernel/netnstest"
	"spillway.dev/spillway/test/await"
)

// rig is a Pilot on the real kernel, and its log.
type rig struct {
	*Pilot
	log    bytes.Buffer
	events []string
}

func newRig(t *testing.T, c Config, names ...string) *rig {
	t.Helper()
	r := &rig{}
	c.Log = slog.New(slog.NewTextHandler(&r.log, nil))
	c.Event = func(note string) { r.events = append(r.events, note) }
	c.Namespaces = func() ([]conntrack.Namespace, error) {
		list, err := conntrack.Namespaces()
		return slices.DeleteFunc(list, func(n conntrack.Namespace) bool {
			return !n.Own && !slices.ContainsFunc(n.Names, func(name string) bool { return slices.Contains(names, name) })
		}), err
	}
	if c.State == "" {
		c.State = filepath.Join(t.TempDir(), "state")
	}
	p, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	r.Pilot = p
	return r
}

// podNamespace returns a namespace whose conntrack sees packets on lo.
func podNamespace(t *testing.T) conntrack.Namespace {
	t.Helper()
	name := fmt.Sprintf("spw-ap-%d", os.Getpid())
	run(t, "ip", "netns", "add", name)
	t.Cleanup(func() { exec.Command("ip", "netns", "del", name).Run() })
	run(t, "ip", "-n", name, "link", "set", "lo", "up")
	run(t, "ip", "netns", "exec", name, "nft", "add table ip t; add chain ip t c { type filter hook output priority 0; }; add rule ip t "+
		"c ct state new counter")
	list, _ := conntrack.Namespaces()
	i := slices.IndexFunc(list, func(n conntrack.Namespace) bool { return slices.Contains(n.Names, name) })
	if i < 0 {
		t.Fatalf("%s is not among %v", name, list)
	}
	return list[i]
}

func run(t *testing.T, program string, args ...string) {
	t.Helper()
	if out, err := exec.Command(program, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %s: %v: %s", program, strings.Join(args, " "), err, out)
	}
}

// value reads a sysctl of a namespace.
func value(t *testing.T, in conntrack.Namespace, sysctl string) (v int) {
	t.Helper()
	if err := in.Enter(func() (err error) { v, err = readSysctl("net.netfilter." + sysctl); return err }); err != nil {
		t.Fatal(err)
	}
	return v
}

// shortFlows starts the given number of UDP flows a second in a namespace, until the
// caller calls the returned function. Each is one datagram from a port of its own.
func shortFlows(t *testing.T, in conntrack.Namespace, perSecond int) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		err := in.Enter(func() error {
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for ctx.Err() == nil {
				for range perSecond / 100 {
					fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
					if err != nil {
						return err
					}
					err = unix.Sendto(fd, []byte("?"), 0, &unix.SockaddrInet4{Port: 9, Addr: [4]byte{127, 0, 0, 1}})
					unix.Close(fd)
					if err != nil && err != unix.ECONNREFUSED {
						return err
					}
				}
				<-tick.C
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	return func() { cancel(); wg.Wait() }
}

func TestShortFlowsOfAPodShortenItsTimeoutsAndTheyRestore(t *testing.T) {
	netnstest.Enter(t)
	pod := podNamespace(t)
	const found = 14
	err := pod.Enter(func() error {
		return kernel.WriteSysctl("net.netfilter."+timeoutUDP, strconv.Itoa(found))
	})
	if err != nil {
		t.Fatal(err)
	}
	own := value(t, conntrackOwn(t), timeoutUDP)
	c := Config{Mode: On, Memory: capacity.Memory(3000, 3000, 50), State: filepath.Join(t.TempDir(), "state")}
	r := newRig(t, c, pod.Names[0])
	stop := shortFlows(t, pod, 400)
	defer stop()
	await.NoError(t, func() error {
		if r.round(t.Context(), time.Now()); value(t, pod, timeoutUDP) == found {
			return fmt.Errorf("not shortened:\n%s", r.log.String())
		}
		return nil
	})
	if v := value(t, pod, timeoutUDP); v != shortest[timeoutUDP] {
		t.Errorf("shortened to %d, want %d", v, shortest[timeoutUDP])
	}
	if v := value(t, conntrackOwn(t), timeoutUDP); v != own {
		t.Errorf("of the namespace without a load it is %d, was %d", v, own)
	}
	if len(r.events) != 1 || !strings.Contains(r.events[0], "set nf_conntrack_udp_timeout of "+pod.Names[0]+" 14 -> 10") {
		t.Errorf("events: %q", r.events)
	}
	stop()
	run(t, "ip", "netns", "exec", pod.Names[0], "conntrack", "-F")
	// Only the file of the first one is left.
	next := newRig(t, c, pod.Names[0])
	now := time.Now()
	for _, after := range []time.Duration{found * time.Second, found*time.Second + Calm/2} {
		next.round(t.Context(), now.Add(after+time.Second))
	}
	if v := value(t, pod, timeoutUDP); v != shortest[timeoutUDP] {
		t.Errorf("gone back to %d before it was calm for %v", v, Calm)
	}
	next.round(t.Context(), now.Add(found*time.Second+Calm+2*time.Second))
	if v := value(t, pod, timeoutUDP); v != found {
		t.Errorf("gone back to %d, want %d:\n%s", v, found, next.log.String())
	}
	if _, err := os.Stat(c.State); !os.IsNotExist(err) {
		t.Errorf("the state file is left: %v", err)
	}
}

// conntrackOwn is the namespace of the test's thread.
func conntrackOwn(t *testing.T) conntrack.Namespace {
	t.Helper()
	list, _ := conntrack.Namespaces()
	if len(list) == 0 || !list[0].Own {
		t.Fatal("the own namespace is not found")
	}
	return list[0]
}

func TestWhatCannotBeWrittenIsSaidOnceAndLeftAlone(t *testing.T) {
	netnstest.Enter(t) // whose sizes are read-only
	most := value(t, conntrackOwn(t), sizeMax)
	r := newRig(t, Config{Mode: On, Memory: 1 << 40, Entries: 2 * most})
	for range 3 {
		r.round(t.Context(), time.Now())
	}
	if n := strings.Count(r.log.String(), "cannot write"); n != 1 || len(r.events) != 1 ||
		!strings.Contains(r.events[0], "permission denied") {
		t.Errorf("said %d times, events %q:\n%s", n, r.events, r.log.String())
	}
	if _, err := os.Stat(r.State); !os.IsNotExist(err) {
		t.Errorf("something is kept of what was not changed: %v", err)
	}
}

func TestAdviceIsGivenOnceAndChangesNothing(t *testing.T) {
	netnstest.Enter(t)
	most := value(t, conntrackOwn(t), sizeMax)
	r := newRig(t, Config{Mode: Advise, Memory: 1 << 40, Entries: 2 * most})
	for range 3 {
		r.round(t.Context(), time.Now())
	}
	want := fmt.Sprintf("conntrack autopilot advises nf_conntrack_max %d -> %d", most, 2*most)
	if len(r.events) != 1 || !strings.HasPrefix(r.events[0], want) {
		t.Errorf("events %q, want one that begins with %q", r.events, want)
	}
}

// It raises the machine's sizes by a fourth for a moment, and restores them.
// excludeExperiments waits for the end of a lab experiment that changes these sizes, and
// blocks the next one. The test must not restore an experiment's values. The lock is that
// of test/testbed/sysctl.
func excludeExperiments(t *testing.T) {
	t.Helper()
	lock, err := os.OpenFile("/run/spillway-sysctl/lock", os.O_RDWR, 0)
	if os.IsNotExist(err) {
		return // there never was one
	}
	if err == nil {
		err = unix.Flock(int(lock.Fd()), unix.LOCK_SH)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close() })
}

func TestSizesOfTheMachineAreRaisedAndGoBackAfterASIGKILL(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	own := conntrackOwn(t)
	f, err := os.OpenFile("/proc/sys/net/netfilter/"+sizeMax, os.O_WRONLY, 0)
	if err != nil {
		t.Skipf("nf_conntrack_max cannot be written here: %v", err)
	}
	f.Close()
	excludeExperiments(t)
	found := map[string]int{}
	for _, sysctl := range []string{sizeMax, sizeBuckets, sizeExpectMax} {
		found[sysctl] = value(t, own, sysctl)
		t.Cleanup(func() { kernel.WriteSysctl("net.netfilter."+sysctl, strconv.Itoa(found[sysctl])) })
	}
	c := Config{Mode: On, Memory: 1 << 40, Entries: found[sizeMax] / 4 * 5, State: filepath.Join(t.TempDir(), "state")}
	first := newRig(t, c)
	first.round(t.Context(), time.Now())
	if v := value(t, own, sizeMax); v != c.Entries {
		t.Fatalf("nf_conntrack_max is %d, want %d:\n%s", v, c.Entries, first.log.String())
	}
	c.Entries = 0
	next := newRig(t, c)
	now := time.Now()
	next.round(t.Context(), now)
	next.round(t.Context(), now.Add(Calm))
	for sysctl, v := range found {
		if got := value(t, own, sysctl); got != v {
			t.Errorf("%s is %d, found %d:\n%s", sysctl, got, v, next.log.String())
		}
	}
}

func TestAnAgentKilledBetweenItsFileAndTheKernelHasChangedNothing(t *testing.T) {
	netnstest.Enter(t)
	own := conntrackOwn(t)
	var cookie uint64
	if err := own.Enter(func() (err error) { cookie, err = kernel.NetnsCookie(); return err }); err != nil {
		t.Fatal(err)
	}
	was := value(t, own, timeoutUDP)
	r := newRig(t, Config{Mode: On, Memory: 1 << 40})
	dead := setting{cookie, timeoutUDP}
	if err := writeState(r.State, map[setting]record{dead: {Found: was, Set: 10}, {1, timeoutUDP}: {Found: 30, Set: 10}}); err != nil {
		t.Fatal(err)
	}
	for name, end := range map[string]func(*rig){
		"it goes on": func(n *rig) { n.round(t.Context(), time.Now()) },
		"it is off":  func(n *rig) { Restore(n.State, n.Namespaces, n.Log) },
		"it advises": func(n *rig) { newRig(t, Config{Mode: Advise, Memory: 1, State: n.State}) },
		"it was rebooted": func(n *rig) {
			text, _ := os.ReadFile(n.State)
			os.WriteFile(n.State, bytes.Replace(text, []byte(bootID()), []byte("another"), 1), 0o644)
			n.Pilot = newRig(t, Config{Mode: On, Memory: 1 << 40, State: n.State}).Pilot
			n.save()
		},
	} {
		if err := writeState(r.State, map[setting]record{dead: {Found: was, Set: 10}, {1, timeoutUDP}: {Found: 30, Set: 10}}); err != nil {
			t.Fatal(err)
		}
		end(newRig(t, Config{Mode: On, Memory: 1 << 40, State: r.State}))
		if v := value(t, own, timeoutUDP); v != was {
			t.Errorf("%s: the timeout is %d, was %d", name, v, was)
		}
		if _, err := os.Stat(r.State); !os.IsNotExist(err) {
			t.Errorf("%s: the file is left: %v", name, err)
		}
	}
}

func TestOffTakesBackWhatWasChanged(t *testing.T) {
	netnstest.Enter(t)
	own := conntrackOwn(t)
	var cookie uint64
	err := own.Enter(func() (err error) {
		cookie, err = kernel.NetnsCookie()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	was := value(t, own, timeoutUDP)
	r := newRig(t, Config{Mode: On, Memory: 1 << 40})
	s := step{setting: setting{cookie, timeoutUDP}, From: was, To: 11}
	r.apply(own, s, time.Now())
	if v := value(t, own, timeoutUDP); v != 11 {
		t.Fatalf("the step was not done: %d", v)
	}
	if err := Restore(r.State, r.Namespaces, r.Log); err != nil || value(t, own, timeoutUDP) != was {
		t.Errorf("the timeout is %d, was %d: %v", value(t, own, timeoutUDP), was, err)
	}
}
