package iptables

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
)

const (
	restoreFailures = "kubeproxy_sync_proxy_rules_iptables_restore_failures_total"
	partialFailures = "kubeproxy_sync_proxy_rules_iptables_partial_restore_failures_total"
	differences     = "spillway_iptables_differences_total"
)

// service is a Service of one cluster IP and one endpoint.
func service(n int) *intent.ServicePort {
	return &intent.ServicePort{
		ID:        id(fmt.Sprintf("svc-%d", n), "http", 80, model.TCP, model.IPv4),
		Frontends: []intent.Frontend{clusterIP(fmt.Sprintf("10.96.0.%d", n), 80, intent.ToCluster)},
		Endpoints: []intent.Endpoint{far(fmt.Sprintf("10.244.2.%d:8080", n))},
	}
}

// chainOf is the chain of a service.
func (b *bench) chainOf(be *Backend, p *intent.ServicePort) string {
	chains, _, _ := be.families[0].serviceChains(p)
	return chains[0].name
}

func (b *bench) apply(be *Backend, c intent.Changes) {
	b.t.Helper()
	if err := be.Apply(context.Background(), c); err != nil {
		b.t.Fatal(err)
	}
}

func upserts(ports ...*intent.ServicePort) intent.Changes { return intent.Changes{Upserts: ports} }

func wantMetric(t *testing.T, be *Backend, name string, want float64) {
	t.Helper()
	if got := metric(t, be, name); got != want {
		t.Errorf("%s is %v, want %v", name, got, want)
	}
}

func TestAPartialRestoreThatFailsIsFollowedByAFullOneAtOnce(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be := b.open()
		b.replace(be, service(1), service(2))
		doomed := b.chainOf(be, service(1))
		b.mustRun("iptables -t nat -N THEIRS", "iptables -t nat -A THEIRS -j "+doomed)
		// No program can delete the chain while that rule exists.
		b.apply(be, intent.Changes{Deletes: []intent.PortID{service(1).ID}, Upserts: []*intent.ServicePort{service(3)}})
		wantMetric(t, be, partialFailures, 1)
		if !strings.Contains(b.log.String(), doomed) {
			t.Errorf("the log does not name %s: %s", doomed, b.log)
		}
		if dump := b.dump(); !strings.Contains(dump, "10.96.0.3/32") || strings.Contains(dump, "10.96.0.1/32") ||
			!strings.Contains(dump, ":"+doomed) {
			t.Errorf("the rest is not written:\n%s", dump)
		}
		b.apply(be, upserts(service(4)))
		wantMetric(t, be, partialFailures, 1)
		b.mustRun("iptables -t nat -F THEIRS")
		b.replace(be, service(2), service(3), service(4))
		b.asFromScratch(intent.State{Node: testNode(), Ports: []*intent.ServicePort{service(2), service(3), service(4)}})
	})
}

func TestAFullRestoreThatFailsInTheSecondTableIsFinished(t *testing.T) {
	eachVariant(t, func(b *bench) {
		// A foreign rule jumps to an unused chain in table filter.
		b.must("*filter\n:SPW-OLD - [0:0]\n:THEIRS - [0:0]\n-A SPW-OLD -j ACCEPT\n-A THEIRS -j SPW-OLD\nCOMMIT\n")
		be := b.open()
		b.replace(be, service(1))
		dump := b.dump()
		for _, want := range []string{":SPW-OLD\n", "10.96.0.1/32", "-j SPW-REFUSE"} {
			if !strings.Contains(dump, want) {
				t.Errorf("%q is not in\n%s", want, dump)
			}
		}
		b.mustRun("iptables -F THEIRS")
		b.replace(be, service(1))
		b.asFromScratch(intent.State{Node: testNode(), Ports: []*intent.ServicePort{service(1)}})
	})
}

func TestFlushedWaysInAreNoticedByTheNextChange(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be := b.open()
		b.replace(be, service(1))
		b.mustRun("iptables -t nat -F PREROUTING")
		b.apply(be, upserts(service(2)))
		wantMetric(t, be, partialFailures, 1)
		b.asFromScratch(intent.State{Node: testNode(), Ports: []*intent.ServicePort{service(1), service(2)}})
	})
}

func TestANodeThatChangedIsWrittenAndOneThatDidNotIsNot(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be := b.open()
		b.replace(be, service(1))
		node := testNode()
		node.MustTraverseNetfilter = []netip.Addr{addr("10.244.1.2")}
		b.apply(be, intent.Changes{Node: &node})
		if !be.known {
			t.Error("a policy is no reason to write")
		}
		node.NodePortAddrs = []netip.Addr{addr("192.0.2.9")}
		b.apply(be, intent.Changes{Node: &node})
		if dump := b.dump(); !strings.Contains(dump, "-A SPW-SERVICES -d 192.0.2.9/32 -j SPW-NODEPORTS") ||
			strings.Contains(dump, "192.0.2.1/32") {
			t.Errorf("NodePorts are served at other addresses:\n%s", dump)
		}
		b.inSync(be)
	})
}

func TestVerifyingFindsAndRepairsWhatSomebodyElseChanged(t *testing.T) {
	for _, how := range VerifyChoices {
		t.Run(how, func(t *testing.T) {
			eachVariant(t, func(b *bench) {
				b.cfg.VerifyPartialSync = how
				be := b.open()
				one, two, three := service(1), service(2), service(3)
				b.replace(be, one, two)
				be.verified = time.Now().Add(-time.Hour) // sampled: long ago
				b.mustRun("iptables -t nat -F "+b.chainOf(be, one), "iptables -F SPW-REFUSE")
				b.apply(be, upserts(three))
				if how == VerifyOff {
					wantMetric(t, be, differences, 0)
					b.replace(be, one, two, three)
				}
				want := "IPv4 table nat: chain " + b.chainOf(be, one) + " emptied; IPv4 table filter: chain SPW-REFUSE emptied"
				if got := be.Repaired(); got.Found != want || got.Missing != 2 || got.Foreign != 0 {
					t.Errorf("repaired is %+v, want %q", got, want)
				}
				if again := be.Repaired(); again.Any() {
					t.Errorf("it is told twice: %+v", again)
				}
				wantMetric(t, be, differences, 2)
				b.asFromScratch(intent.State{Node: testNode(), Ports: []*intent.ServicePort{service(1), service(2), service(3)}})
			})
		})
	}
}

// TestManyChangesAtOnceAreWrittenAndNotTakenForSomebodyElses crosses the number
// from which on the nft variant writes chains apart, for new ones and for old ones.
func TestManyChangesAtOnceAreWrittenAndNotTakenForSomebodyElses(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be, s := b.open(), manyServices(manyChains+50, 2)
		b.replace(be)
		b.apply(be, intent.Changes{Upserts: s.Ports})
		b.inSync(be)
		kept, gone := s.Ports[:20], intent.Changes{}
		for _, p := range s.Ports[20:] {
			gone.Deletes = append(gone.Deletes, p.ID)
		}
		b.apply(be, gone)
		if r := be.Repaired(); r.Any() {
			t.Errorf("it repaired %+v", r)
		}
		b.asFromScratch(intent.State{Node: testNode(), Ports: kept})
	})
}

func TestAppliedTellsWhatIsServedAndLeavesOutWhatWasChanged(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be := b.open()
		served := func() string {
			s, err := be.Applied(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, p := range s.Ports {
				names = append(names, p.ID.String())
			}
			return strings.Join(names, " ")
		}
		two := shapes()["sctp"][0]
		b.replace(be, service(1), two)
		both := two.ID.String() + " " + service(1).ID.String()
		if got := served(); got != both {
			t.Errorf("served are %q", got)
		}
		if again := b.open(); true {
			be, again = again, be
			if got := served(); got != both {
				t.Errorf("after a restart served are %q", got)
			}
			be = again
		}
		b.mustRun("iptables -t nat -F " + b.chainOf(be, two))
		if got := served(); got != service(1).ID.String() {
			t.Errorf("with a flushed chain served are %q", got)
		}
		b.mustRun("iptables -t nat -F SPW-ADDRESSES")
		if got := served(); got != "" {
			t.Errorf("with a flushed dispatch served are %q", got)
		}
		b.replace(be, service(1), two)
		b.mustRun("iptables -t nat -F OUTPUT")
		if got := served(); got != "" {
			t.Errorf("without a way in served are %q", got)
		}
	})
}

// TestRulesFlushedDuringSyncsAreRestored flushes all rules again and again, as another
// program, while changes are written.
func TestRulesFlushedDuringSyncsAreRestored(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be, w := b.open(), newRandomWorld(5)
		b.replace(be)
		stop, done := b.inBackground(func() {
			b.run("iptables -t nat -F")
			b.run("iptables -t nat -X")
			b.run("iptables -t nat -A PREROUTING -s 192.0.2.77 -j ACCEPT")
		})
		for range 60 {
			var c intent.Changes
			w.change(&c)
			if err := be.Apply(context.Background(), c); err != nil {
				// As reconcile does: the whole state, until it is written.
				for be.Replace(context.Background(), w.state()) != nil {
				}
			}
		}
		close(stop)
		<-done
		if err := be.Replace(context.Background(), w.state()); err != nil {
			t.Fatal(err)
		}
		b.inSync(be)
		b.asFromScratch(w.state())
	})
}

// inBackground repeats work in the test's namespace until stop is closed.
func (b *bench) inBackground(work func()) (stop chan struct{}, done chan struct{}) {
	ns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		b.t.Fatal(err)
	}
	stop, done = make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		defer ns.Close()
		runtime.LockOSThread()
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			b.t.Error(err)
			return
		}
		for {
			select {
			case <-stop:
				return
			default:
				work()
			}
		}
	}()
	return stop, done
}

// killedVariable makes the test binary a process that writes a large state, to
// be killed.
const killedVariable = "SPILLWAY_TEST_WRITE"

func TestMain(m *testing.M) {
	if lock := os.Getenv(killedVariable); lock != "" {
		os.Exit(writeToBeKilled(lock))
	}
	os.Exit(m.Run())
}

func writeToBeKilled(lock string) int {
	cfg := quiet()
	cfg.lockFile = lock
	be, err := New(context.Background(), cfg)
	if err == nil {
		err = be.Replace(context.Background(), bothFamilies(400))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// bothFamilies are Services with a port in each family.
func bothFamilies(n int) intent.State {
	w := newRandomWorld(3)
	s := manyServices(n, 3)
	for len(w.ports) < 60 {
		var c intent.Changes
		w.change(&c)
	}
	for _, p := range w.state().Ports {
		if p.ID.Family == model.IPv6 {
			s.Ports = append(s.Ports, p)
		}
	}
	sortPorts(s.Ports)
	return s
}

// TestAWriterThatIsKilledAnywhereIsMadeUpFor kills a process, and the programs
// that it runs, in the middle of a full sync: before, between and after tables
// and families.
func TestAWriterThatIsKilledAnywhereIsMadeUpFor(t *testing.T) {
	eachVariant(t, func(b *bench) {
		r := rand.New(rand.NewPCG(1, 1))
		killed := 0
		for round := range 12 {
			b.mustRun("iptables -t nat -F", "iptables -t nat -X", "ip6tables -t nat -F", "ip6tables -t nat -X")
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), killedVariable+"="+b.lock)
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			cmd.Stderr = os.Stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Duration(round*15+r.IntN(15)) * time.Millisecond)
			if err := unix.Kill(-cmd.Process.Pid, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			if cmd.Wait() != nil {
				killed++
			}
			be := b.open()
			if err := be.Replace(context.Background(), bothFamilies(400)); err != nil {
				t.Fatal(err)
			}
			b.inSync(be)
		}
		if killed == 0 {
			t.Error("no writer was killed before its end")
		}
		b.asFromScratch(bothFamilies(400))
	})
}

// TestAWriterThatIsKilledBetweenTheTablesIsMadeUpFor has iptables-restore commit the
// first table and die with its caller before the second.
func TestAWriterThatIsKilledBetweenTheTablesIsMadeUpFor(t *testing.T) {
	eachVariant(t, func(b *bench) {
		dir := b.t.(*testing.T).TempDir()
		for _, base := range []string{"iptables", "ip6tables"} {
			name := base + "-" + string(b.variant) + "-restore"
			program, err := exec.LookPath(name)
			if err != nil {
				t.Fatal(err)
			}
			script := "#!/bin/bash\n" +
				"[ \"$1\" = --version ] && exec " + program + " --version\n" +
				"all=$(cat); case $all in *" + chainTry + "*) exec " + program + " \"$@\" <<<\"$all\";; esac\n" +
				program + " \"$@\" <<<\"${all%%COMMIT*}COMMIT\"; kill -9 0\n"
			if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), killedVariable+"="+b.lock, "PATH="+dir+":"+os.Getenv("PATH"))
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		cmd.Stderr = os.Stderr
		if err := cmd.Run(); err == nil {
			t.Fatal("the writer was not killed")
		}
		if dump := b.dump(); !strings.Contains(dump, chainServices) || strings.Contains(dump, ":"+chainRefuse) ||
			strings.Contains(dump, "-A "+chainRefuse) {
			t.Fatalf("it was not killed between the tables:\n%s", dump)
		}
		be := b.open()
		if err := be.Replace(context.Background(), bothFamilies(50)); err != nil {
			t.Fatal(err)
		}
		b.inSync(be)
		b.asFromScratch(bothFamilies(50))
	})
}

func TestALockHeldBySomebodyElseIsWaitedForAndThenReported(t *testing.T) {
	eachVariant(t, func(b *bench) {
		b.cfg.wait = time.Second
		be := b.open()
		b.replace(be, service(1))
		lock, err := os.OpenFile(b.lock, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer lock.Close()
		if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
			t.Fatal(err)
		}
		err = be.Apply(context.Background(), upserts(service(2)))
		if b.variant == NFT { // which has no lock
			if err != nil {
				t.Fatal(err)
			}
			return
		}
		if !errors.Is(err, errLocked) || strings.Contains(err.Error(), "\n") ||
			!strings.Contains(err.Error(), fmt.Sprintf("held by pid %d", os.Getpid())) {
			t.Errorf("the error is %v", err)
		}
		if strings.Contains(b.dump(), "10.96.0.2/32") {
			t.Error("it was written all the same")
		}
		wantMetric(t, be, restoreFailures, 1)
		wantMetric(t, be, partialFailures, 1)
		lock.Close()
		// Nothing is lost: the next sync writes it too.
		b.apply(be, upserts(service(3)))
		b.asFromScratch(intent.State{Node: testNode(), Ports: []*intent.ServicePort{service(1), service(2), service(3)}})
	})
}

func TestCleanupLeavesNothingAndMayBeRepeated(t *testing.T) {
	eachVariant(t, func(b *bench) {
		b.must("*nat\n:THEIRS - [0:0]\n-A PREROUTING -j THEIRS\n-A THEIRS -s 192.0.2.77/32 -j ACCEPT\nCOMMIT\n*filter\n-A FORWARD -s " +
			"192.0.2.77/32 -j DROP\nCOMMIT\n")
		all := func() string {
			var out strings.Builder
			for _, program := range []string{"iptables-save", "ip6tables-save"} {
				text, err := b.command(program).Output()
				if err != nil {
					t.Fatal(err)
				}
				for line := range strings.Lines(string(text)) {
					if strings.HasPrefix(line, "-A") || strings.HasPrefix(line, ":") && strings.Contains(line, " - ") {
						out.WriteString(line)
					}
				}
			}
			return out.String()
		}
		before := all()
		be := b.open()
		if got := all(); got != before {
			t.Errorf("opening it leaves\n%s", got)
		}
		if err := be.Replace(context.Background(), bothFamilies(50)); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if err := Cleanup(context.Background(), b.cfg); err != nil {
				t.Fatal(err)
			}
			if got := all(); got != before {
				t.Errorf("left are\n%s\nbefore there were\n%s", got, before)
			}
		}
	})
}

func TestCleanupNamesARuleThatIsInTheWay(t *testing.T) {
	eachVariant(t, func(b *bench) {
		be := b.open()
		b.replace(be, service(1), service(2))
		held := b.chainOf(be, service(1))
		b.mustRun("iptables -t nat -N THEIRS", "iptables -t nat -A THEIRS -j "+held)
		err := Cleanup(context.Background(), b.cfg)
		if err == nil || !strings.Contains(err.Error(), held) {
			t.Errorf("the error is %v", err)
		}
		if dump := b.dump(); strings.Count(dump, "SPW-") != 2 || !strings.Contains(dump, ":"+held) {
			t.Errorf("left is\n%s", dump)
		}
	})
}

func TestCleanupWithoutProgramsSaysWhatTheKernelHolds(t *testing.T) {
	eachVariant(t, func(b *bench) {
		path := os.Getenv("PATH")
		be := b.open()
		b.replace(be, service(1))
		fakePrograms(b.t.(*testing.T), "")
		err := Cleanup(context.Background(), b.cfg)
		want := "remove rules of iptables-" + string(b.variant) + ": the kernel holds chains SPW-*"
		if err == nil || !strings.HasPrefix(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			b.t.Errorf("the error is %v, want %q in one line", err, want)
		}
		os.Setenv("PATH", path)
		if err := Cleanup(context.Background(), b.cfg); err != nil {
			b.t.Fatal(err)
		}
		// Other programs' tables stay: they are no reason for a warning at every start.
		fakePrograms(b.t.(*testing.T), "")
		if err := Cleanup(context.Background(), b.cfg); err != nil {
			b.t.Errorf("there is nothing to clean up, but: %v", err)
		}
	})
}

func TestCleanupWithoutProgramsMakesNoTables(t *testing.T) {
	b := newBench(t)
	fakePrograms(t, "")
	if err := Cleanup(context.Background(), b.cfg); err != nil {
		t.Errorf("there is nothing to clean up, but: %v", err)
	}
	for _, name := range []string{"ip_tables_names", "ip6_tables_names"} {
		if made, _ := os.ReadFile("/proc/thread-self/net/" + name); len(made) > 0 {
			t.Errorf("%s holds %s", name, made)
		}
	}
}
