package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/cluster"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/flows/suite"
	"spillway.dev/spillway/test/harness"
	"spillway.dev/spillway/test/testbed/topology"
)

// layout2 has the programs of the release before, and the commit that they come from.
const layout2 = "../../internal/dataplane/ebpf/upgrade/layout2"

// buildPrevious builds spillway from the commit of the release before. The agent carries
// the eBPF programs of the same commit.
func buildPrevious(t *testing.T) (binary string) {
	t.Helper()
	commit, err := os.ReadFile(filepath.Join(layout2, "COMMIT"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	script := fmt.Sprintf("set -o pipefail; git -C ../.. archive %s | tar -x -C %s", bytes.TrimSpace(commit), dir)
	if out, err := exec.CommandContext(t.Context(), "bash", "-c", script).CombinedOutput(); err != nil {
		t.Fatalf("read the release before from git: %v: %s: fetch the whole history (git fetch --unshallow)", err, out)
	}
	for _, object := range []string{"tc", "sock"} {
		carried, err := os.ReadFile(filepath.Join(layout2, object+".o"))
		if err != nil {
			t.Fatal(err)
		}
		built, err := os.ReadFile(filepath.Join(dir, "internal/dataplane/ebpf", object+"_bpfel.o"))
		if err != nil || !bytes.Equal(carried, built) {
			t.Fatalf("layout2/%s.o is not the object of that commit (%v): copy it", object, err)
		}
	}
	binary = filepath.Join(t.TempDir(), "spillway")
	build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-buildvcs=false", "-o", binary, "./cmd/spillway")
	build.Dir, build.Env = dir, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the release before: %v: %s", err, out)
	}
	return binary
}

// upgrade is a cluster whose agents are replaced by those of another release.
type upgrade struct {
	*env
	previous, current string
	service           *suite.File
	meanwhile         []stream // connections that were opened while agents were replaced
	lost              []string // of these
}

func startUpgrade(t *testing.T, name string) *upgrade {
	t.Helper()
	t.Parallel()
	u := &upgrade{previous: buildPrevious(t)}
	u.env = &env{Harness: harness.Start(t, cluster.Config{Spec: topology.DefaultSpec(name), NoAgents: true})}
	u.current = u.Binary
	u.Binary = u.previous
	if err := u.StartAgents(t.Context()); err != nil {
		t.Fatal(err)
	}
	u.service = u.Load(t, nodePort("a0", "b0"))
	return u
}

// swap replaces the agents of all nodes, one after another. Connections are opened
// meanwhile, and stay.
func (u *upgrade) swap(t *testing.T, binary string, sig syscall.Signal, flags ...string) {
	t.Helper()
	u.Binary, u.Flags = binary, map[string][]string{"": flags}
	for _, node := range u.Nodes() {
		ctx, stop := context.WithCancel(t.Context())
		var opening sync.WaitGroup
		opening.Go(func() { u.open(ctx, t) })
		u.restartAfter(t, node, sig, func() { u.askMore(t, 5) })
		if err := u.Agent(node).WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
		u.service.MustWrite(t, nodePort("a0", "b0"))
		u.service.MustWait(t)
		stop()
		opening.Wait()
	}
}

// open opens connections of all kinds until ctx ends, some ten a second, and keeps them.
// A refused one counts as lost.
func (u *upgrade) open(ctx context.Context, t *testing.T) {
	for i := 0; ctx.Err() == nil; i++ {
		f, combo := askers[i%len(askers)], flows.AllCombos[i/len(askers)%len(flows.AllCombos)]
		st := stream{fmt.Sprintf("connection %d, from %s to %s, %s", len(u.meanwhile), f.From, f.To, combo), u.MustProbe(t, f.From)}
		_, err := st.probe.Do(t.Context(), probe.Request{
			Op: probe.Stream, Name: st.name, Proto: combo.Protocol(), Dst: u.service.MustAddress(t, f.To, combo), PauseMS: 500, TimeoutMS: 10_000,
		})
		if err != nil {
			u.lost = append(u.lost, fmt.Sprintf("%s: %v", st.name, err))
		} else {
			u.meanwhile = append(u.meanwhile, st)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// endMeanwhile ends the connections that were opened while agents were replaced. Those
// that were opened while the hooks switched, one after another, may be lost: the agents
// count them.
func (u *upgrade) endMeanwhile(t *testing.T) {
	t.Helper()
	for _, st := range u.meanwhile {
		resp, err := st.probe.Do(t.Context(), probe.Request{Op: probe.Stop, Name: st.name})
		if err != nil {
			t.Fatal(err)
		}
		if r := resp.Report; r.Sent > r.Answered {
			u.lost = append(u.lost, fmt.Sprintf("%s: %v", st.name, r.Lost))
		}
	}
	during, switches := 0, 0
	for _, node := range u.Nodes() {
		for _, line := range u.logOf(t, node) {
			if _, n, ok := strings.Cut(line, "openedMeanwhile="); ok {
				opened, err := strconv.Atoi(strings.TrimSpace(n))
				if err != nil {
					t.Fatal(err)
				}
				during, switches = during+opened, switches+1
			}
		}
	}
	t.Logf("of %d connections opened while agents were replaced, %d are lost; %d flows were opened in %d switches", len(u.meanwhile),
		len(u.lost), during, switches)
	if len(u.lost) > during {
		t.Errorf("lost: %s", strings.Join(u.lost, "\n"))
		u.showLosses(t)
	}
}

// showLosses logs where the kernel and the programs count lost datagrams, and when the agents
// did what.
func (u *upgrade) showLosses(t *testing.T) {
	t.Log(strings.Join(u.Losses(t.Context()), "\n"))
	for _, node := range u.Nodes() {
		t.Logf("the log of %s:\n%s", node, strings.Join(u.logOf(t, node), "\n"))
	}
}

func (u *upgrade) logOf(t *testing.T, node string) []string {
	t.Helper()
	log, err := os.ReadFile(u.Agent(node).Log)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(string(log), "\n")
}

// wantLayout checks which maps are pinned.
func (u *upgrade) wantLayout(t *testing.T, when string, version int) {
	t.Helper()
	for _, node := range u.Nodes() {
		dirs, err := filepath.Glob(filepath.Join(u.Agent(node).BPFFS, "maps-v*"))
		if err != nil {
			t.Fatal(err)
		}
		for i := range dirs {
			dirs[i] = filepath.Base(dirs[i])
		}
		if want := []string{fmt.Sprint("maps-v", version)}; !slices.Equal(dirs, want) {
			t.Errorf("%s: node %s has %v, want %v", when, node, dirs, want)
		}
	}
}

// TestConnectionsSurviveAnUpgrade upgrades from the release before, which has another
// layout of the maps, and rolls back to it, twice. Connections of all kinds are open all
// the time, and others are opened meanwhile.
func TestConnectionsSurviveAnUpgrade(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the release before, and takes a minute")
	}
	u := startUpgrade(t, "e2e-upgrade")
	u.startConnections(t, u.service, askers, 3)
	u.wantLayout(t, "before", 2)
	for range 2 {
		u.swap(t, u.current, syscall.SIGTERM, "--leave-previous-layout", "--drop-capabilities")
		u.wantLayout(t, "after the upgrade", 3)
		u.swap(t, u.previous, syscall.SIGTERM)
		u.wantLayout(t, "after the rollback", 2)
	}
	u.swap(t, u.current, syscall.SIGKILL)
	u.wantLayout(t, "after the upgrade of killed agents", 3)
	time.Sleep(15 * time.Second) // longer than closed connections are remembered
	u.endStreams(t)
	u.endMeanwhile(t)
	for _, node := range u.Nodes() {
		for _, line := range u.logOf(t, node) {
			if strings.Contains(line, "forgotten") || strings.Contains(line, "level=ERROR") {
				t.Errorf("node %s: %s", node, line)
			}
		}
	}
}
