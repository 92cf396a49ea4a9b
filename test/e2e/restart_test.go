package e2e

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"syscall"
	"testing"
	"time"

	"spillway.dev/spillway/test/flows"
	"spillway.dev/spillway/test/flows/probe"
	"spillway.dev/spillway/test/flows/suite"
)

// restart ends the agent of a node with a signal, and starts it again.
func (e *env) restart(t *testing.T, node string, sig syscall.Signal) {
	t.Helper()
	e.restartAfter(t, node, sig, func() {})
}

// restartAfter ends the agent of a node with a signal, and starts it again after meanwhile.
func (e *env) restartAfter(t *testing.T, node string, sig syscall.Signal, meanwhile func()) {
	t.Helper()
	a := e.Agent(node)
	if err := a.Signal(sig); err != nil {
		t.Fatal(err)
	}
	meanwhile()
	if err := a.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (e *env) waitReady(t *testing.T) {
	t.Helper()
	for _, node := range e.Nodes() {
		if err := e.Agent(node).WaitReady(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestNothingIsLostOverRestarts(t *testing.T) {
	e := start(t, "e2e-restart")
	s := e.Load(t, nodePort("a0", "b0"))
	e.startStreams(t, s)
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGKILL} {
		for _, node := range e.Nodes() {
			e.restartAfter(t, node, sig, func() { e.askMore(t, 5) })
			e.waitReady(t)
			// The new agent has taken over when it serves what is new.
			s.MustWrite(t, nodePort("a0", "b0"))
			s.MustWait(t)
		}
	}
	e.endStreams(t)
}

// TestConnectionsSurviveAnotherSizeOfTheFlowTable restarts agents with flags that
// make the table of flows larger and smaller, and kills some of them before they
// can have taken over.
func TestConnectionsSurviveAnotherSizeOfTheFlowTable(t *testing.T) {
	e := start(t, "e2e-resize")
	s := e.Load(t, nodePort("a0", "b0"))
	e.startConnections(t, s, askers, 1)
	for i, minimum := range []int{300_000, 4096, 50_000} {
		e.Flags = map[string][]string{"": {"--conntrack-max-per-core", "1", "--conntrack-min", strconv.Itoa(minimum)}}
		for _, node := range e.Nodes() {
			if i == 2 {
				for _, pause := range []time.Duration{200, 600, 1000} {
					e.restart(t, node, syscall.SIGKILL)
					time.Sleep(pause * time.Millisecond)
				}
			}
			e.restart(t, node, syscall.SIGKILL)
			e.waitReady(t)
			s.MustWrite(t, nodePort("a0", "b0"))
			s.MustWait(t)
		}
	}
	e.endStreams(t)
}

// startConnections starts streams that keep one socket each, several of a kind
// so that either endpoint has some. Their questions have patience for an
// emulated machine (hack/vm).
func (e *env) startConnections(t *testing.T, s *suite.File, from []flows.Flow, each int) {
	t.Helper()
	for _, f := range from {
		p := e.MustProbe(t, f.From)
		for i := range each * len(flows.AllCombos) {
			combo := flows.AllCombos[i/each]
			st := stream{fmt.Sprintf("%s %d from %s to %s, %s", combo.Protocol(), i%each, f.From, f.To, combo), p}
			_, err := p.Do(t.Context(), probe.Request{
				Op: probe.Stream, Name: st.name, Proto: combo.Protocol(), Dst: s.MustAddress(t, f.To, combo), PauseMS: 20, TimeoutMS: 10_000,
			})
			if err != nil {
				t.Fatalf("start %s: %v", st.name, err)
			}
			e.streams = append(e.streams, st)
		}
	}
}

func TestNothingIsLostWhileAgentsAreSuspended(t *testing.T) {
	e := start(t, "e2e-suspend")
	e.startStreams(t, e.Load(t, nodePort("a0", "b0")))
	for _, node := range e.Nodes() {
		if err := e.Agent(node).Suspend(); err != nil {
			t.Fatal(err)
		}
	}
	e.askMore(t, 20)
	for _, node := range e.Nodes() {
		if err := e.Agent(node).Resume(); err != nil {
			t.Fatal(err)
		}
	}
	e.endStreams(t)
}

// TestNothingIsLostWhenAgentsAreKilledAtWork kills agents while one Service
// changes all the time. The other one must not notice, and in the end the
// changing one must be served as it was last written.
func TestNothingIsLostWhenAgentsAreKilledAtWork(t *testing.T) {
	const rounds = 12
	e := start(t, "e2e-kill")
	e.startStreams(t, e.Load(t, nodePort("a0", "b0")))
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	changing := e.Load(t, nodePort("a2"))
	targets := []string{"a0", "a1", "a2", "b0", "b1", "b2"}
	last := ""
	for range rounds {
		random.Shuffle(len(targets), func(i, j int) { targets[i], targets[j] = targets[j], targets[i] })
		last = targets[0]
		changing.MustWrite(t, nodePort(targets[:1+random.IntN(3)]...))
		// From before the change is read to after it was applied.
		time.Sleep(time.Duration(random.IntN(200)) * time.Millisecond)
		changing.MustWrite(t, nodePort(last))
		time.Sleep(time.Duration(random.IntN(50)) * time.Millisecond)
		e.restart(t, e.Nodes()[random.IntN(2)], syscall.SIGKILL)
	}
	e.waitReady(t)
	changing.MustWait(t)
	e.expect(t, "after the last kill", changing, last)
	e.endStreams(t)
}

func TestWhatVanishedWhileTheAgentWasDownIsRemoved(t *testing.T) {
	e := start(t, "e2e-vanish")
	deleted, moved := e.Load(t, nodePort("a0")), e.Load(t, nodePort("a0"))
	e.expect(t, "before", deleted, "a0")
	e.expect(t, "before", moved, "a0")
	for _, node := range e.Nodes() {
		if err := e.Agent(node).Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	e.expect(t, "without agents", moved, "a0") // the kernel goes on
	if err := deleted.Remove(); err != nil {
		t.Fatal(err)
	}
	moved.MustWrite(t, nodePort("b0"))
	added := e.NewFile()
	added.MustWrite(t, nodePort("b1"))
	if err := e.StartAgents(t.Context()); err != nil {
		t.Fatal(err)
	}
	moved.MustWait(t)
	added.MustWait(t)
	e.expect(t, "after", deleted, "")
	e.expect(t, "after", moved, "b0")
	e.expect(t, "after", added, "b1")
	dst := deleted.MustAddress(t, flows.NodePort("a"), flows.TCP4)
	for _, a := range ask(t, e.MustProbe(t, "client0"), dst, flows.TCP4, 1) {
		if a.Err != probe.Refused {
			t.Errorf("the NodePort of the deleted Service answers %+v, want refused", a)
		}
	}
}
